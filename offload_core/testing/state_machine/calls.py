"""The operations of the state machine: how each calls a backend, in the core's way, and what came of it."""

from __future__ import annotations

from collections.abc import Sequence, Sized
from typing import Any, Literal, NamedTuple

from hypothesis import strategies as st

from offload_core.api.backend import Backend
from offload_core.api.keys import ObjectKey
from offload_core.testing import strategies
from offload_core.testing.state_machine.oracle import ContractError, Deleted, Read, Seen, Written
from offload_core.testing.strategies import Content

SIZES_BYTES = (*strategies.SIZES_BYTES, 9_000, 9_001)
"""Among them two of which a small medium takes only one at a time."""
SLOTS = 5
"""How many keys an example has at most; an operation names them by number."""

_CANARY = 0xC5
_FILL = 0x3A
_BETWEEN_BYTES = 61
"""Canaries between two buffers; odd, so that buffers start at all alignments."""


class Arena:
    """The buffers of one call, side by side in one piece of memory with canaries between them (C17)."""

    def __init__(self, contents: Sequence[bytes]) -> None:
        self._memory = bytearray([_CANARY]) * (sum(map(len, contents)) + _BETWEEN_BYTES * (len(contents) + 1))
        self._pieces: list[tuple[int, int]] = []
        start = _BETWEEN_BYTES
        for content in contents:
            self._pieces.append((start, start + len(content)))
            self._memory[start : start + len(content)] = content
            start += len(content) + _BETWEEN_BYTES
        self._left: bytes | None = None

    def views(self) -> list[memoryview]:
        """Return one writable view per buffer."""
        return [memoryview(self._memory)[start:end] for start, end in self._pieces]

    def retire(self) -> None:
        """Check the canaries and overwrite the buffers: the call has ended, and they are another's now.

        Raises:
            ContractError: something beside the buffers was written to.
        """
        ends = [0, *(end for _, end in self._pieces)]
        starts = [*(start for start, _ in self._pieces), len(self._memory)]
        for end, start in zip(ends, starts, strict=True):
            if self._memory[end:start] != bytes([_CANARY]) * (start - end):
                raise ContractError(f"C17: bytes beside the given buffers were written to, within {end} to {start}")
        for start, end in self._pieces:
            self._memory[start:end] = bytes([_CANARY ^ 0xFF]) * (end - start)
        self._left = bytes(self._memory)

    def check_untouched(self) -> None:
        """Check that nothing was written since :meth:`retire`; a call that never began was given nothing.

        Raises:
            ContractError: something was.
        """
        if self._left is not None and self._memory != self._left:
            raise ContractError("C7: a buffer was written to after the call that it was given to had ended")


class Operation(NamedTuple):
    """One operation, as hypothesis draws and prints it."""

    kind: Literal["store", "load", "contains", "delete"]
    slots: tuple[int, ...]
    contents: tuple[Content, ...] = ()
    """Of a store, parallel to ``slots``."""
    sizes_bytes: tuple[int | None, ...] = ()
    """Of a load, parallel to ``slots``; ``None`` for the size that the object should have."""
    client: int = 0
    cancel_after_turns: int | None = None
    """Of the event loop; ``None`` to let it end."""


@st.composite
def operations(draw: st.DrawFn, max_client: int = 2) -> Operation:
    """Operations on batches with repeats, empty ones too; many are cancelled."""
    kind = draw(st.sampled_from(["store", "store", "store", "load", "load", "load", "contains", "delete"]))
    slots = tuple(draw(strategies.batches(st.integers(0, SLOTS - 1), 4)))
    client = draw(st.integers(0, max_client))
    cancel = draw(st.sampled_from([None, None, None, 0, 1, 2, 3, 5, 8, 13, 16, 20, 24]))
    if kind == "store":
        contents = tuple(draw(strategies.contents(SIZES_BYTES)) for _ in slots)
        return Operation("store", slots, contents, (), client, cancel)
    if kind == "load":
        wrong = draw(st.sampled_from([False, False, False, True]))
        sizes = tuple(draw(st.sampled_from(SIZES_BYTES)) if wrong else None for _ in slots)
        return Operation("load", slots, (), sizes, client, cancel)
    return Operation("contains" if kind == "contains" else "delete", slots, (), (), client, cancel)


class Attempt:
    """An operation that runs: its events for the oracle have answers as far as the backend has given them.

    Args:
        backend: the client.
        keys: those of the operation's slots.
        sizes_bytes: of a load, the sizes of its buffers.
        prepared: the caller holds a reservation, which a store is granted in whole.
    """

    def __init__(
        self,
        operation: Operation,
        backend: Backend[Any],
        keys: Sequence[ObjectKey],
        sizes_bytes: Sequence[int] = (),
        *,
        prepared: bool = False,
    ) -> None:
        self.operation = operation
        self._backend = backend
        self._keys = list(keys)
        self._prepared = prepared
        data = [content.data() for content in operation.contents] or [bytes([_FILL]) * size for size in sizes_bytes]
        self.arena = Arena(data)
        pairs = zip(keys, operation.contents, strict=False)
        self.writes = [Written(key, content, granted=prepared) for key, content in pairs]
        self.reads = [Read(key, before) for key, before in zip(keys, data, strict=True)] if sizes_bytes else []
        self.seen: list[Seen] = []
        self.deletes = [Deleted(key, cancelled=True) for key in keys] if operation.kind == "delete" else []

    @property
    def events(self) -> list[Written | Read | Seen | Deleted]:
        """What the oracle is to settle."""
        return [*self.writes, *self.reads, *self.seen, *self.deletes]

    async def run(self) -> None:
        """Do it, and use the buffers for something else as soon as it has ended.

        Cancellation goes through to the backend; reservations are released all the same.
        """
        try:
            await self._run()
        finally:
            self.arena.retire()

    async def _run(self) -> None:
        kind = self.operation.kind
        if kind == "store":
            await (self._store(range(len(self._keys))) if self._prepared else self._reserve_and_store())
        elif kind == "load":
            await (self._load() if self._prepared else self._reserve_and_load())
        elif kind == "contains":
            answers = check_parallel("contains", self._keys, await self._backend.contains(self._keys))
            self.seen = [Seen(key, bool(answer)) for key, answer in zip(self._keys, answers, strict=True)]
        else:
            await self._backend.delete(self._keys)
            for deleted in self.deletes:
                deleted.cancelled = False

    def answers(self) -> str:
        """Return the answers in words, for the list of steps."""
        outcomes = [*(written.outcome for written in self.writes), *(read.outcome for read in self.reads)]
        answers = [outcome.name if outcome else "-" for outcome in outcomes]
        return ", ".join([*answers, *(str(seen.answer) for seen in self.seen)]) or "done"

    async def _reserve_and_store(self) -> None:
        sizes = [content.size_bytes for content in self.operation.contents]
        reservation = await self._backend.prepare_store(self._keys, sizes)
        try:
            outcomes = check_parallel("prepare_store", self._keys, reservation.outcomes)
            for written, outcome in zip(self.writes, outcomes, strict=True):
                written.outcome, written.granted = outcome, outcome is None
            await self._store([index for index, outcome in enumerate(outcomes) if outcome is None])
        finally:
            await reservation.release()

    async def _store(self, wanted: Sequence[int]) -> None:
        views = self.arena.views()
        keys = [self._keys[index] for index in wanted]
        stored = await self._backend.store(keys, [views[index].toreadonly() for index in wanted])
        for index, outcome in zip(wanted, check_parallel("store", keys, stored), strict=True):
            self.writes[index].outcome = outcome

    async def _reserve_and_load(self) -> None:
        reservation = await self._backend.prepare_load(self._keys)
        try:
            present = check_parallel("prepare_load", self._keys, reservation.present)
            for read, there in zip(self.reads, present, strict=True):
                read.prepared = there
            await self._load()
        finally:
            await reservation.release()

    async def _load(self) -> None:
        views = self.arena.views()
        outcomes = check_parallel("load_into", self._keys, await self._backend.load_into(self._keys, views))
        for read, outcome, view in zip(self.reads, outcomes, views, strict=True):
            read.outcome, read.after = outcome, bytes(view)


def check_parallel(call: str, keys: Sized, answers: Sequence[Any]) -> Sequence[Any]:
    """Return ``answers`` if there is one per key (C2).

    Raises:
        ContractError: there is another number.
    """
    if len(answers) != len(keys):
        raise ContractError(f"C2: {call} gave {len(answers)} answers for {len(keys)} keys")
    return answers
