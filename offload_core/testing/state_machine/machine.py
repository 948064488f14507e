"""A hypothesis state machine: random operations on a real backend, each answer checked against a brute-force oracle.

Clients of one medium store, load, look, delete, hold reservations, list, are closed and opened again; operations run
alone, together, and are cancelled half-way. :func:`check_with_state_machine` runs it. A failure names the
clause and lists the steps that led to it, made as few as hypothesis can.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, TypeVar

import hypothesis
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from offload_core.api.backend import (
    Backend,
    BackendType,
    LoadReservation,
    StoredObject,
    StoreReservation,
)
from offload_core.api.keys import ObjectKey
from offload_core.testing import strategies
from offload_core.testing.state_machine.calls import (
    SIZES_BYTES,
    SLOTS,
    Arena,
    Attempt,
    Operation,
    check_parallel,
    operations,
)
from offload_core.testing.state_machine.medium import Medium
from offload_core.testing.state_machine.oracle import ContractError, Oracle, Seen, Written
from offload_core.testing.strategies import Content

T = TypeVar("T")

EXAMPLES = 200
STEPS = 20
CAPACITY_BYTES = 16 * 1024
CALL_LIMIT_SECONDS = 60
MAX_CLIENTS = 3

STATE_MACHINE_SETTINGS = hypothesis.settings(
    max_examples=EXAMPLES,
    stateful_step_count=STEPS,
    deadline=None,
    suppress_health_check=list(hypothesis.HealthCheck),
    report_multiple_bugs=False,
    phases=[phase for phase in hypothesis.Phase if phase is not hypothesis.Phase.explain],  # the steps explain it
)


def check_with_state_machine(
    backend_type: BackendType,
    options: Mapping[str, Any],
    *,
    capacity_bytes: int | None = None,
    settings: hypothesis.settings = STATE_MACHINE_SETTINGS,
) -> None:
    """Run :class:`BackendMachine` on one medium.

    Every example has clients and an event loop of its own and deletes its objects in the end.

    Args:
        backend_type: what is tested.
        options: the tier's own keys; they name a fresh medium.
        capacity_bytes: the limit that ``options`` set on the medium, for a backend that declares ``bounded``; some
            16 KiB make it evict often.
        settings: how many examples, and whether at random or always the same (``derandomize``).

    Raises:
        ContractError: the backend broke a clause; with the steps that show it.
    """
    medium = Medium(backend_type, options, capacity_bytes)

    class Machine(BackendMachine):
        def __init__(self) -> None:
            super().__init__(medium)

    run_state_machine_as_test(Machine, settings=settings)


@dataclass
class Hold:
    """A reservation that is held over several steps."""

    backend: Backend[Any]
    keys: list[ObjectKey]
    reservation: LoadReservation | StoreReservation
    contents: list[Content] = field(default_factory=list)
    """Of a store, what is to be stored, until it has been."""
    pinned: list[ObjectKey] = field(default_factory=list)
    granted: dict[ObjectKey, int] = field(default_factory=dict)
    """Of a store, as the oracle holds it."""


_KEY = strategies.keys(packs=strategies.PACKS[:2], chunk_hashes=strategies.near_hashes())
"""Few enough to leave few folders behind on media that have folders."""
_SLOT = st.integers(0, SLOTS - 1)
_CLIENT = st.integers(0, MAX_CLIENTS - 1)


class BackendMachine(RuleBasedStateMachine):
    """Random operations on the clients of one medium; see the module.

    Args:
        medium: what is tested.
    """

    def __init__(self, medium: Medium) -> None:
        super().__init__()
        self._medium = medium
        self._capabilities = medium.capabilities
        self._oracle = Oracle(medium.capacity_bytes)
        self._runner = asyncio.Runner()
        self._clients: list[Backend[Any]] = []
        self._holds: list[Hold] = []
        self._arenas: list[Arena] = []
        self._steps: list[str] = []
        self._failed = False
        self._keys: list[ObjectKey] = []
        self._seed = 0

    @initialize(
        names=st.lists(_KEY, min_size=1, max_size=SLOTS, unique=True),
        stored=st.lists(strategies.contents(SIZES_BYTES), max_size=SLOTS),
        order=st.integers(0, 999),
    )
    def start(self, names: list[ObjectKey], stored: list[Content], order: int) -> None:
        """Choose the keys, and the order in which threads take turns; open the first client, and store something."""
        own = dict(zip(strategies.NAMESPACES, self._medium.namespaces(), strict=True))
        self._keys = [key._replace(namespace=own[key.namespace]) for key in names]
        self._seed = order
        self._open()
        if stored := stored[: len(names)]:
            self._do([Operation("store", tuple(range(len(stored))), tuple(stored))])

    @rule(operation=operations())
    def one(self, operation: Operation) -> None:
        """Do one operation."""
        self._do([operation])

    @rule(several=st.lists(operations(), min_size=2, max_size=4))
    def at_once(self, several: list[Operation]) -> None:
        """Do several operations at once."""
        self._do(several)

    @precondition(lambda self: len(self._holds) < 3)
    @rule(slots=strategies.batches(_SLOT, 4), client=_CLIENT)
    def prepare_load(self, slots: list[int], client: int) -> None:
        """Prepare a load and keep the reservation."""
        backend, keys = self._client(client), [self._key(slot) for slot in slots]
        reservation = self._run(f"prepare_load({self._names(keys)})", backend.prepare_load(keys))
        self._steps[-1] += f" -> {reservation.present}"
        hold = Hold(backend, keys, reservation)
        self._holds.append(hold)
        with self._explained():
            check_parallel("prepare_load", keys, reservation.present)
            sizes = check_parallel("prepare_load (nbytes)", keys, reservation.nbytes)
            for key, present, nbytes in zip(keys, reservation.present, sizes, strict=True):
                self._oracle.prepared(key, present, pins=self._capabilities.bounded, nbytes=nbytes)
                if present and self._capabilities.bounded:
                    hold.pinned.append(key)

    @precondition(lambda self: len(self._holds) < 3)
    @rule(objects=strategies.batches(st.tuples(_SLOT, strategies.contents(SIZES_BYTES)), 4), client=_CLIENT)
    def prepare_store(self, objects: list[tuple[int, Content]], client: int) -> None:
        """Prepare a store and keep the reservation."""
        backend, keys = self._client(client), [self._key(slot) for slot, _ in objects]
        contents = [content for _, content in objects]
        sizes = [content.size_bytes for content in contents]
        self._oracle.offer(sizes)
        reservation = self._run(f"prepare_store({self._names(keys)}, {sizes})", backend.prepare_store(keys, sizes))
        self._steps[-1] += f" -> {[outcome.name if outcome else 'wanted' for outcome in reservation.outcomes]}"
        hold = Hold(backend, keys, reservation, contents)
        self._holds.append(hold)
        with self._explained():
            check_parallel("prepare_store", keys, reservation.outcomes)
            self._oracle.granted.append(hold.granted)
            answered: list[Written] = []
            for key, content, outcome in zip(keys, contents, reservation.outcomes, strict=True):
                if outcome is None:
                    hold.granted[key] = max(content.size_bytes, hold.granted.get(key, 0))
                else:
                    answered.append(Written(key, content, outcome))
            self._oracle.settle(answered)

    @precondition(lambda self: self._holds)
    @rule(which=st.integers(0, 2))
    def use_reservation(self, which: int) -> None:
        """Load or store under a reservation that is held; a store once."""
        hold = self._holds[which % len(self._holds)]
        slots = [self._keys.index(key) for key in hold.keys]
        if isinstance(hold.reservation, LoadReservation):
            there = tuple(slot for slot, there in zip(slots, hold.reservation.present, strict=True) if there)
            operation = Operation("load", there, (), (None,) * len(there))
        else:
            outcomes, hold.contents, contents = hold.reservation.outcomes, [], hold.contents
            hold.granted.clear()  # the room turns into objects
            wanted = [(slot, c) for slot, c, out in zip(slots, contents, outcomes, strict=False) if out is None]
            operation = Operation("store", tuple(slot for slot, _ in wanted), tuple(content for _, content in wanted))
        self._attempt([self._prepare(operation, hold.backend, prepared=True)])

    @precondition(lambda self: self._holds)
    @rule(which=st.integers(0, 2))
    def release_reservation(self, which: int) -> None:
        """Release a reservation that is held."""
        self._release(self._holds[which % len(self._holds)])

    @precondition(lambda self: self._capabilities.shared and len(self._clients) < MAX_CLIENTS)
    @rule()
    def open_another_client(self) -> None:
        """Open one more client (C5)."""
        self._open()

    @precondition(lambda self: self._capabilities.persistent or len(self._clients) > 1)
    @rule(client=_CLIENT)
    def close_client(self, client: int) -> None:
        """Close a client, twice (C13); when it was the last, open another one (C5)."""
        backend = self._client(client)
        for hold in [hold for hold in self._holds if hold.backend is backend]:
            self._release(hold)
        self._close(backend)
        if not self._clients:
            self._open()

    @precondition(lambda self: self._capabilities.lists)
    @rule(client=_CLIENT)
    def list_objects(self, client: int) -> None:
        """List the medium (C18)."""
        listed = self._run("list_objects()", _listed(self._client(client)))
        self._steps[-1] += f" -> {len(listed)} objects"
        with self._explained():
            self._oracle.check_listing(listed, self._keys)

    @invariant()
    def buffers_are_left_alone(self) -> None:
        """Nothing writes into a buffer once its call has ended (C7)."""
        with self._explained():
            for arena in self._arenas:
                arena.check_untouched()

    @invariant()
    def room_is_kept(self) -> None:
        """A bounded medium never holds and promises more than its limit (C11)."""
        if self._capabilities.bounded and self._clients:
            answers = self._run("look at everything", self._clients[0].contains(self._keys))
            self._steps.pop()
            with self._explained():
                check_parallel("contains", self._keys, answers)
                self._oracle.settle([Seen(key, bool(there)) for key, there in zip(self._keys, answers, strict=True)])
                self._oracle.check_room([key for key, there in zip(self._keys, answers, strict=True) if there])

    def teardown(self) -> None:
        """Look at everything once more, take it away and close."""
        try:
            if not self._failed and self._clients:
                self._look_and_leave()
        finally:
            self._runner.run(self._sweep())
            self._runner.close()

    def _look_and_leave(self) -> None:
        everything = tuple(range(len(self._keys)))
        for number in range(len(self._clients)):
            self._do([Operation("contains", everything, client=number)])
            self._do([Operation("load", everything, (), (None,) * len(everything), number)])
        if self._capabilities.lists:
            self.list_objects(0)
        for hold in list(self._holds):
            self._release(hold)
        if self._medium.evicts:
            self._check_room_for_others("with nothing pinned or reserved any more")
        self._do([Operation("delete", everything)])
        for number in range(len(self._clients)):
            self._do([Operation("contains", everything, client=number)])
        if self._medium.room:
            self._check_room_for_others("with everything deleted and nothing reserved any more")
        while self._clients:
            self._close(self._clients[0])
        self.buffers_are_left_alone()

    def _check_room_for_others(self, when: str) -> None:
        room = self._run("prepare_store of other objects, and release", self._medium.probe(self._clients[0]))
        self._steps[-1] += f" -> {room} wanted"
        with self._explained():
            if room != self._medium.room:
                raise ContractError(
                    f"C10: {when}, {room} objects of a sixth of the capacity are taken; "
                    f"when the medium was fresh it were {self._medium.room}"
                )

    async def _sweep(self) -> None:
        """After an example that has failed: leave as little as possible to the next one."""
        with suppress(Exception):
            for hold in self._holds:
                await hold.reservation.release()
        for backend in self._clients:
            with suppress(Exception):
                await backend.delete(self._keys)
                await backend.close()

    def _do(self, several: Sequence[Operation]) -> None:
        self._attempt([self._prepare(operation, self._client(operation.client)) for operation in several])

    def _prepare(self, operation: Operation, backend: Backend[Any], *, prepared: bool = False) -> Attempt:
        keys = [self._key(slot) for slot in operation.slots]
        sizes = [
            self._oracle.likely_size(key) if size is None else size
            for key, size in zip(keys, operation.sizes_bytes, strict=False)
        ]
        if not prepared:
            self._oracle.offer(content.size_bytes for content in operation.contents)
        return Attempt(operation, backend, keys, sizes, prepared=prepared)

    def _attempt(self, attempts: Sequence[Attempt]) -> None:
        """Run operations at once and check their answers."""
        words = "; at once ".join(self._words(attempt.operation) for attempt in attempts)
        self._run(words, _at_once(attempts))
        self._steps[-1] += " -> " + "; ".join(attempt.answers() for attempt in attempts)
        with self._explained():
            self._arenas = [*self._arenas[-8:], *(attempt.arena for attempt in attempts)]
            self._oracle.settle([event for attempt in attempts for event in attempt.events])

    def _open(self) -> None:
        backend = self._run(f"open client {len(self._clients)}", self._opened())
        self._clients.append(backend)

    async def _opened(self) -> Backend[Any]:
        backend = self._medium.construct(self._seed)
        await backend.open()
        return backend

    def _close(self, backend: Backend[Any]) -> None:
        number = self._clients.index(backend)
        self._clients.remove(backend)
        self._run(f"close client {number}, twice", _close_twice(backend), "C13")

    def _release(self, hold: Hold) -> None:
        self._holds.remove(hold)
        self._run(f"release the reservation of {self._names(hold.keys)}", hold.reservation.release(), "C10")
        self._oracle.pins.subtract(hold.pinned)
        self._oracle.granted = [granted for granted in self._oracle.granted if granted is not hold.granted]

    def _run(self, words: str, coroutine: Coroutine[Any, Any, T], clause: str = "C2") -> T:
        """Add a step to the list and do it; what it raises breaks ``clause``, for the medium works."""
        self._steps.append(words)

        async def limited() -> T:
            async with asyncio.timeout(CALL_LIMIT_SECONDS):
                return await coroutine

        with self._explained():
            try:
                return self._runner.run(limited())
            except ContractError:
                raise
            except Exception as error:
                raise _raised(clause, words, error) from error

    @contextmanager
    def _explained(self) -> Iterator[None]:
        """Add the steps and the keys to a violation."""
        try:
            yield
        except ContractError as violation:
            if not self._failed:
                self._failed = True
                self._medium.soiled()
                steps = [f"  {number}. {step}" for number, step in enumerate(self._steps, 1)]
                keys = [f"  k{number} = {key}" for number, key in enumerate(self._keys)]
                violation.args = ("\n".join([str(violation), "steps:", *steps, "keys:", *keys]),)
            raise

    def _client(self, number: int) -> Backend[Any]:
        return self._clients[number % len(self._clients)]

    def _key(self, slot: int) -> ObjectKey:
        return self._keys[slot % len(self._keys)]

    def _names(self, keys: Sequence[ObjectKey]) -> str:
        return ", ".join(f"k{self._keys.index(key)}" for key in keys) or "nothing"

    def _words(self, operation: Operation) -> str:
        names = [f"k{slot % len(self._keys)}" for slot in operation.slots]
        if operation.contents:
            names = [f"{name}={content}" for name, content in zip(names, operation.contents, strict=True)]
        if operation.sizes_bytes:
            sizes = [f" into {size} bytes" if size is not None else "" for size in operation.sizes_bytes]
            names = [f"{name}{size}" for name, size in zip(names, sizes, strict=True)]
        cancelled = operation.cancel_after_turns
        suffix = "" if cancelled is None else f", cancelled after {cancelled} turns"
        client = f"client {operation.client % len(self._clients)}: " if len(self._clients) > 1 else ""
        return f"{client}{operation.kind} {', '.join(names) or 'nothing'}{suffix}"


async def _at_once(attempts: Sequence[Attempt]) -> None:
    """Run the attempts and cancel those that are to be, each after its turns."""
    tasks = [asyncio.ensure_future(attempt.run()) for attempt in attempts]
    due = [attempt.operation.cancel_after_turns for attempt in attempts]
    for turn in range(max((turns for turns in due if turns is not None), default=-1) + 1):
        for task, turns in zip(tasks, due, strict=True):
            if turns == turn:
                task.cancel()
        await asyncio.sleep(0)
    await asyncio.wait(tasks)
    for task, attempt in zip(tasks, attempts, strict=True):
        error = None if task.cancelled() else task.exception()
        if isinstance(error, ContractError):
            raise error
        if error is not None:
            kind = attempt.operation.kind
            raise _raised("C12" if kind == "delete" else "C2", kind, error) from error


def _raised(clause: str, words: str, error: BaseException) -> ContractError:
    return ContractError(f"{clause}: {words} raised {type(error).__name__}: {error}, on a medium that works")


async def _listed(backend: Backend[Any]) -> list[StoredObject]:
    return [entry async for batch in backend.list_objects() for entry in batch]


async def _close_twice(backend: Backend[Any]) -> None:
    await backend.close()
    await backend.close()
