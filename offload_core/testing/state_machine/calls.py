"""Random operations of the state machine and the calls to a backend that they make."""

from __future__ import annotations

from collections.abc import Sequence, Sized
from typing import Any, Literal, NamedTuple

from hypothesis import strategies as st

from offload_core.api.backend import Backend, LoadOutcome
from offload_core.api.keys import ObjectKey
from offload_core.testing import strategies
from offload_core.testing.rig.recording_check import RecordingCheck
from offload_core.testing.rig.recording_seal import RecordingSeal
from offload_core.testing.state_machine.guarded_buffers import GuardedBuffers
from offload_core.testing.state_machine.oracle import ContractError, DeleteEvent, LoadEvent, LookupEvent, StoreEvent
from offload_core.testing.strategies import Content

SIZES_BYTES = (*strategies.SIZES_BYTES, 9_000, 9_001)
"""Sizes of objects. A small medium holds only one object of the last two sizes at a time."""
MAX_KEYS = 5
"""Most keys of an example; an operation names them by number, its slots."""

_FILL = 0x3A
Kind = Literal["store", "sealing store", "load", "load in one call", "contains", "delete", "touch"]
_KINDS: tuple[Kind, ...] = (
    *("store", "store", "sealing store", "load", "load", "load in one call", "contains", "delete", "touch"),
)


class Operation(NamedTuple):
    """One operation, as hypothesis draws and prints it."""

    kind: Kind
    slots: tuple[int, ...]
    contents: tuple[Content, ...] = ()
    """Contents of a store, parallel to ``slots``."""
    sizes_bytes: tuple[int | None, ...] = ()
    """Buffer sizes of a load, parallel to ``slots``; ``None`` stands for the size that the object should have."""
    client: int = 0
    cancel_after_turns: int | None = None
    """Turns of the event loop before the operation is cancelled; ``None`` lets it end."""
    spare: tuple[bool, ...] = ()
    """Flags of a store or a touch, parallel to ``slots``; empty if no object is spare."""


def without_spares(operation: Operation) -> Operation:
    """Return an operation for a backend that does not know spare objects."""
    return operation._replace(kind="contains" if operation.kind == "touch" else operation.kind, spare=())


def with_own_calls(operation: Operation, backend: Backend[Any]) -> Operation:
    """Return an operation that makes only calls that the backend has."""
    if operation.kind == "sealing store" and not backend.seals_stores:
        return operation._replace(kind="store")
    if operation.kind == "load in one call" and not backend.loads_in_one_call:
        return operation._replace(kind="load")
    return operation


@st.composite
def operations(draw: st.DrawFn, max_client: int = 2) -> Operation:
    """Operations on batches with repeats, empty ones too; many are cancelled."""
    kind = draw(st.sampled_from(_KINDS))
    slots = tuple(draw(strategies.batches(st.integers(0, MAX_KEYS - 1), 4)))
    client = draw(st.integers(0, max_client))
    cancel = draw(st.sampled_from([None, None, None, 0, 1, 2, 3, 5, 8, 13, 16, 20, 24]))
    if kind in ("store", "sealing store"):
        contents = tuple(draw(strategies.contents(SIZES_BYTES)) for _ in slots)
        return Operation(kind, slots, contents, (), client, cancel, draw(_flags(len(slots))))
    if kind in ("load", "load in one call"):
        wrong = draw(st.sampled_from([False, False, False, True]))
        sizes = tuple(draw(st.sampled_from(SIZES_BYTES)) if wrong else None for _ in slots)
        return Operation(kind, slots, (), sizes, client, cancel)
    if kind == "touch":
        slots = tuple(dict.fromkeys(slots))
        spare = tuple(draw(st.booleans()) for _ in slots)
        return Operation("touch", slots, (), (), client, cancel, spare)
    return Operation(kind, slots, (), (), client, cancel)


def _flags(count: int) -> st.SearchStrategy[tuple[bool, ...]]:
    """Flags of a store: none, all, or some of the objects are spare."""
    some = st.lists(st.booleans(), min_size=count, max_size=count).map(tuple)
    return st.one_of(st.just(()), st.just((True,) * count), some)


class OperationRun:
    """One run of an operation: its calls to the backend, as the core makes them, and its events for the oracle.

    Args:
        operation: the operation to run.
        backend: the client.
        keys: the keys of the operation's slots.
        sizes_bytes: the buffer sizes of a load.
        reserved: whether the caller holds a reservation; a store's reservation covers all of its objects.
    """

    def __init__(
        self,
        operation: Operation,
        backend: Backend[Any],
        keys: Sequence[ObjectKey],
        sizes_bytes: Sequence[int] = (),
        *,
        reserved: bool = False,
    ) -> None:
        self.operation = operation
        self._backend = backend
        self._keys = list(keys)
        self._reserved = reserved
        data = [content.data() for content in operation.contents] or [bytes([_FILL]) * size for size in sizes_bytes]
        self.buffers = GuardedBuffers(data)
        pairs = zip(keys, operation.contents, strict=False)
        spare = operation.spare or (False,) * len(operation.contents)
        self._stores = [
            StoreEvent(key, content, reserved=reserved, spare=is_spare)
            for (key, content), is_spare in zip(pairs, spare, strict=False)
        ]
        self._loads = [LoadEvent(key, before) for key, before in zip(keys, data, strict=True)] if sizes_bytes else []
        self._lookups: list[LookupEvent] = []
        self._deletes = [DeleteEvent(key, cancelled=True) for key in keys] if operation.kind == "delete" else []

    @property
    def events(self) -> list[StoreEvent | LoadEvent | LookupEvent | DeleteEvent]:
        """Events for the oracle, with the answers that the backend has given so far."""
        return [*self._stores, *self._loads, *self._lookups, *self._deletes]

    async def run(self) -> None:
        """Run the operation, and reuse its buffers as soon as it has ended.

        Cancellation goes through to the backend; reservations are released all the same.
        """
        try:
            await self._run()
        finally:
            self.buffers.end_call()

    async def _run(self) -> None:
        kind = self.operation.kind
        if kind in ("store", "sealing store"):
            await (self._store(range(len(self._keys))) if self._reserved else self._reserve_and_store())
        elif kind == "load in one call":
            await self._load_in_one_call()
        elif kind == "load":
            await (self._load() if self._reserved else self._reserve_and_load())
        elif kind == "contains":
            answers = check_parallel("contains", self._keys, await self._backend.contains(self._keys))
            self._lookups = [LookupEvent(key, bool(answer)) for key, answer in zip(self._keys, answers, strict=True)]
        elif kind == "touch":
            await self._backend.touch(self._keys, self.operation.spare)
        else:
            await self._backend.delete(self._keys)
            for event in self._deletes:
                event.cancelled = False

    def answers(self) -> str:
        """Return the answers in words, for the list of steps."""
        outcomes = [*(event.outcome for event in self._stores), *(event.outcome for event in self._loads)]
        answers = [outcome.name if outcome else "-" for outcome in outcomes]
        return ", ".join([*answers, *(str(event.present) for event in self._lookups)]) or "done"

    async def _reserve_and_store(self) -> None:
        sizes = [content.size_bytes for content in self.operation.contents]
        spare = [self.operation.spare] if self.operation.spare else []
        reservation = await self._backend.prepare_store(self._keys, sizes, *spare)
        try:
            outcomes = check_parallel("prepare_store", self._keys, reservation.outcomes)
            for event, outcome in zip(self._stores, outcomes, strict=True):
                event.outcome, event.reserved = outcome, outcome is None
            await self._store([index for index, outcome in enumerate(outcomes) if outcome is None])
        finally:
            await reservation.release()

    async def _store(self, wanted: Sequence[int]) -> None:
        views = self.buffers.views()
        keys = [self._keys[index] for index in wanted]
        readonly = [views[index].toreadonly() for index in wanted]
        if self.operation.kind == "sealing store":
            seals = [RecordingSeal(views[index]) for index in wanted]
            stored = await self._backend.store_and_seal(keys, readonly, seals)
        else:
            stored = await self._backend.store(keys, readonly)
        for index, outcome in zip(wanted, check_parallel("store", keys, stored), strict=True):
            self._stores[index].outcome = outcome

    async def _reserve_and_load(self) -> None:
        reservation = await self._backend.prepare_load(self._keys)
        try:
            present = check_parallel("prepare_load", self._keys, reservation.present)
            for event, there in zip(self._loads, present, strict=True):
                event.prepared = there
            await self._load()
        finally:
            await reservation.release()

    async def _load(self) -> None:
        views = self.buffers.views()
        self._loaded(check_parallel("load_into", self._keys, await self._backend.load_into(self._keys, views)), views)

    async def _load_in_one_call(self) -> None:
        views = self.buffers.views()
        checks = [RecordingCheck(view) for view in views]
        outcomes = await self._backend.load_and_check(self._keys, views, checks)
        self._loaded(check_parallel("load_and_check", self._keys, outcomes), views)

    def _loaded(self, outcomes: Sequence[LoadOutcome], views: Sequence[memoryview]) -> None:
        for event, outcome, view in zip(self._loads, outcomes, views, strict=True):
            event.outcome, event.after = outcome, bytes(view)


def check_parallel(call: str, keys: Sized, answers: Sequence[Any]) -> Sequence[Any]:
    """Return ``answers`` if there is one per key (C2).

    Raises:
        ContractError: the numbers of answers and keys differ.
    """
    if len(answers) != len(keys):
        raise ContractError(f"C2: {call} gave {len(answers)} answers for {len(keys)} keys")
    return answers
