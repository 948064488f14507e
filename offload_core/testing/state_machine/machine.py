"""A hypothesis state machine: random operations on a real backend, with every answer checked against an oracle.

Clients of one medium store, load, look up, delete, touch, list and hold reservations. They are also closed and opened
again. Operations run alone or together, and some are cancelled half-way.

:func:`check_with_state_machine` runs the machine. A failure names the clause and lists the
steps that led to it, as few as hypothesis can find.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import hypothesis
from hypothesis import strategies as st
from hypothesis.errors import FlakyFailure
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from offload_core.api.backend import Backend, BackendType, LoadReservation, StoredObject
from offload_core.api.keys import ObjectKey
from offload_core.testing import strategies
from offload_core.testing.state_machine.calls import (
    MAX_KEYS,
    SIZES_BYTES,
    Operation,
    check_parallel,
    operations,
    without_spares,
)
from offload_core.testing.state_machine.example import Example, HeldReservation
from offload_core.testing.state_machine.medium import Medium
from offload_core.testing.state_machine.oracle import ContractError, LookupEvent, StoreEvent
from offload_core.testing.strategies import Content

EXAMPLES = 200
STEPS = 20
CAPACITY_BYTES = 16 * 1024
MAX_CLIENTS = 3
MAX_RESERVATIONS = 3

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

    Every example has its own clients and its own event loop, and deletes its objects in the end.

    Args:
        backend_type: the backend type under test.
        options: the tier's own keys; they name a fresh medium.
        capacity_bytes: the limit that ``options`` set on the medium, for a backend that declares ``bounded``. With
            about 16 KiB the medium evicts often.
        settings: the number of examples, and whether they are random or always the same (``derandomize``).

    Raises:
        ContractError: the backend broke a clause; the message lists the steps that show it. With a backend on threads
            the same steps need not show it again; a note on the error tells.
    """
    medium = Medium(backend_type, options, capacity_bytes)

    class Machine(BackendMachine):
        def __init__(self) -> None:
            super().__init__(medium)

    try:
        run_state_machine_as_test(Machine, settings=settings)
    except Exception as error:
        if medium.leak is not None:  # the leaked capacity is missing when hypothesis tries the example again
            raise medium.leak from None
        if isinstance(error, FlakyFailure):
            for broken in error.exceptions:
                if isinstance(broken, ContractError):
                    broken.add_note("The same steps did not show it again: it depends on the order of threads.")
                    raise broken from None
        raise
    if medium.reads is not None:
        medium.reads.check()


_KEY = strategies.keys(packs=strategies.PACKS[:2], chunk_hashes=strategies.near_hashes())
"""Few keys, so that media with folders keep few folders."""
_SLOT = st.integers(0, MAX_KEYS - 1)
_CLIENT = st.integers(0, MAX_CLIENTS - 1)
_RESERVATION = st.integers(0, MAX_RESERVATIONS - 1)
_SPARE = st.sampled_from([False, False, True])


class BackendMachine(RuleBasedStateMachine):
    """Rules and invariants: random operations on the clients of one medium.

    Args:
        medium: the medium under test.
    """

    def __init__(self, medium: Medium) -> None:
        super().__init__()
        self._medium = medium
        self._capabilities = medium.capabilities
        self._example = Example(medium)
        self._oracle = self._example.oracle
        self._checks_capacity = medium.begin_example()
        self._reports_evictions = self._capabilities.bounded and not self._capabilities.shared
        self._steps_checked = 0

    @initialize(
        names=st.lists(_KEY, min_size=1, max_size=MAX_KEYS, unique=True),
        stored=st.lists(strategies.contents(SIZES_BYTES), max_size=MAX_KEYS),
        order=st.integers(0, 999),
    )
    def start(self, names: list[ObjectKey], stored: list[Content], order: int) -> None:
        """Choose the keys and the order in which threads take turns; open the first client and store objects."""
        own = dict(zip(strategies.NAMESPACES, self._medium.namespaces(), strict=True))
        self._example.keys = [key._replace(namespace=own[key.namespace]) for key in names]
        self._example.thread_order_seed = order
        self._example.open_client()
        if stored := stored[: len(names)]:
            self._example.run_operations([Operation("store", tuple(range(len(stored))), tuple(stored))])

    @rule(operation=operations())
    def one(self, operation: Operation) -> None:
        """Run one operation."""
        self._run([operation])

    @rule(several=st.lists(operations(), min_size=2, max_size=4))
    def at_once(self, several: list[Operation]) -> None:
        """Run several operations at once."""
        self._run(several)

    @precondition(lambda self: len(self._example.reservations) < MAX_RESERVATIONS)
    @rule(slots=strategies.batches(_SLOT, 4), client=_CLIENT)
    def prepare_load(self, slots: list[int], client: int) -> None:
        """Prepare a load and hold the reservation."""
        example, oracle = self._example, self._oracle
        backend, keys = example.client(client), [example.key(slot) for slot in slots]
        reservation = example.run_step(f"prepare_load({example.key_names(keys)})", backend.prepare_load(keys))
        example.add_answer(str(reservation.present))
        held = HeldReservation(backend, keys, reservation)
        example.reservations.append(held)
        with example.explained():
            check_parallel("prepare_load", keys, reservation.present)
            sizes = check_parallel("prepare_load (nbytes)", keys, reservation.nbytes)
            for key, present, nbytes in zip(keys, reservation.present, sizes, strict=True):
                oracle.check_prepared_load(key, present, pins=self._capabilities.bounded, nbytes=nbytes)
                if present and self._capabilities.bounded:
                    held.pinned.append(key)

    @precondition(lambda self: len(self._example.reservations) < MAX_RESERVATIONS)
    @rule(objects=strategies.batches(st.tuples(_SLOT, strategies.contents(SIZES_BYTES), _SPARE), 4), client=_CLIENT)
    def prepare_store(self, objects: list[tuple[int, Content, bool]], client: int) -> None:
        """Prepare a store and hold the reservation."""
        example, oracle = self._example, self._oracle
        backend, keys = example.client(client), [example.key(slot) for slot, _, _ in objects]
        contents = [content for _, content, _ in objects]
        sizes = [content.size_bytes for content in contents]
        spare = [is_spare and self._capabilities.spares for _, _, is_spare in objects]
        oracle.request_capacity(sizes, spare)
        flags = [spare] if any(spare) else []
        before = self._present(backend) if self._reports_evictions else []
        words = f"prepare_store({', '.join(map(str, [example.key_names(keys), sizes, *flags]))})"
        reservation = example.run_step(words, backend.prepare_store(keys, sizes, *flags))
        example.add_answer(str([outcome.name if outcome else "wanted" for outcome in reservation.outcomes]))
        held = HeldReservation(backend, keys, reservation, contents, spare)
        example.reservations.append(held)
        with example.explained():
            check_parallel("prepare_store", keys, reservation.outcomes)
            oracle.reserved.append(held.reserved)
            answered: list[StoreEvent] = []
            for key, content, is_spare, outcome in zip(keys, contents, spare, reservation.outcomes, strict=True):
                if outcome is None:
                    held.reserved[key] = max(content.size_bytes, held.reserved.get(key, 0))
                else:
                    answered.append(StoreEvent(key, content, outcome, spare=is_spare))
            oracle.check_events(answered, with_kept_stores=not all(spare))
        if self._reports_evictions:
            after = self._present(backend)
            with example.explained():
                oracle.check_evicted(before, after, reservation.evicted)

    @precondition(lambda self: self._example.reservations)
    @rule(which=_RESERVATION)
    def use_reservation(self, which: int) -> None:
        """Load or store under a held reservation; a store happens only once."""
        held = self._held(which)
        slots = [self._example.keys.index(key) for key in held.keys]
        if isinstance(held.reservation, LoadReservation):
            there = tuple(slot for slot, there in zip(slots, held.reservation.present, strict=True) if there)
            operation = Operation("load", there, (), (None,) * len(there))
        else:
            outcomes, held.contents, contents = held.reservation.outcomes, [], held.contents
            held.reserved.clear()  # the reserved capacity turns into objects
            offered = zip(slots, contents, held.spare, outcomes, strict=False)
            wanted = [(slot, content, is_spare) for slot, content, is_spare, outcome in offered if outcome is None]
            operation = Operation(
                "sealing store" if self._example.step_count % 2 else "store",
                tuple(slot for slot, _, _ in wanted),
                tuple(content for _, content, _ in wanted),
                spare=tuple(is_spare for _, _, is_spare in wanted),
            )
        self._example.run_reserved(operation, held.backend)

    @precondition(lambda self: self._example.reservations)
    @rule(which=_RESERVATION)
    def release_reservation(self, which: int) -> None:
        """Release a held reservation."""
        self._example.release(self._held(which))

    @precondition(lambda self: self._capabilities.shared and len(self._example.clients) < MAX_CLIENTS)
    @rule()
    def open_another_client(self) -> None:
        """Open one more client (C5)."""
        self._example.open_client()

    @precondition(lambda self: self._capabilities.persistent or len(self._example.clients) > 1)
    @rule(client=_CLIENT)
    def close_client(self, client: int) -> None:
        """Close a client, twice (C13); open another one if none is left (C5)."""
        backend = self._example.client(client)
        for held in [held for held in self._example.reservations if held.backend is backend]:
            self._example.release(held)
        self._example.close_client(backend)
        if not self._example.clients:
            self._example.open_client()

    @precondition(lambda self: self._capabilities.lists)
    @rule(client=_CLIENT)
    def list_objects(self, client: int) -> None:
        """List the medium (C18)."""
        listed = self._example.run_step("list_objects()", _listed(self._example.client(client)))
        self._example.add_answer(f"{len(listed)} objects")
        with self._example.explained():
            self._oracle.check_listing(listed, self._example.keys)

    @invariant()
    def buffers_are_left_alone(self) -> None:
        """No call writes into its buffers after its end (C7)."""
        self._example.check_ended_buffers()

    @invariant()
    def capacity_is_kept(self) -> None:
        """A bounded medium never stores and reserves more than its limit (C11)."""
        if self._capabilities.bounded and self._example.clients:
            present = self._present(self._example.clients[0])
            with self._example.explained():
                self._oracle.check_events([LookupEvent(key, key in present) for key in self._example.keys])
                self._oracle.check_capacity(present)

    @invariant()
    def capacity_is_released(self) -> None:
        """With nothing pinned or reserved, all capacity can be reserved again (C10).

        That evicts every object, so it is checked in some examples only.
        """
        example = self._example
        if not (self._checks_capacity and example.clients) or example.reservations or example.failed:
            return
        first, last = self._steps_checked + 1, example.step_count
        self._oracle.everything_may_be_evicted()
        words = "prepare_store of one object as large as all capacity, and release"
        fits = example.run_step(words, self._medium.fits(example.clients[0], self._medium.free_bytes))
        example.forget_step()
        self._steps_checked = last
        if fits:
            return
        steps = example.last_step if first >= last else f"one of the steps {first} to {last}"
        with example.explained():
            leak = ContractError(
                f"C10: {steps} has leaked capacity: nothing is pinned or reserved any more, but an object of "
                f"{self._medium.free_bytes} bytes is rejected, which the empty medium took"
            )
            self._medium.leak = self._medium.leak or leak
            raise leak

    def teardown(self) -> None:
        """Check everything once more, delete it and close the clients."""
        try:
            if not self._example.failed and self._example.clients:
                self._check_and_delete_everything()
        finally:
            self._example.shut_down()
        if not self._example.failed:
            self._example.check_left_open()

    def _run(self, operations: list[Operation]) -> None:
        known = operations if self._capabilities.spares else [without_spares(operation) for operation in operations]
        self._example.run_operations(known)

    def _present(self, backend: Backend[Any]) -> list[ObjectKey]:
        """Return the keys whose objects are present; the question is no step."""
        keys = self._example.keys
        answers = self._example.run_step("look up everything", backend.contains(keys))
        self._example.forget_step()
        with self._example.explained():
            check_parallel("contains", keys, answers)
        return [key for key, present in zip(keys, answers, strict=True) if present]

    def _held(self, which: int) -> HeldReservation:
        return self._example.reservations[which % len(self._example.reservations)]

    def _check_and_delete_everything(self) -> None:
        example = self._example
        everything = tuple(range(len(example.keys)))
        for number in range(len(example.clients)):
            example.run_operations([Operation("contains", everything, client=number)])
            example.run_operations([Operation("load", everything, (), (None,) * len(everything), number)])
        if self._capabilities.lists:
            self.list_objects(0)
        for held in list(example.reservations):
            example.release(held)
        if self._medium.evicts_for_stores:
            self._check_free_capacity("with nothing pinned or reserved any more")
        example.run_operations([Operation("delete", everything)])
        for number in range(len(example.clients)):
            example.run_operations([Operation("contains", everything, client=number)])
        if self._medium.fitting_probes:
            self._check_free_capacity("with everything deleted and nothing reserved any more")
        while example.clients:
            example.close_client(example.clients[0])
        self.buffers_are_left_alone()

    def _check_free_capacity(self, when: str) -> None:
        words = "prepare_store of other objects, and release"
        count = self._example.run_step(words, self._medium.count_fitting_probes(self._example.clients[0]))
        self._example.add_answer(f"{count} wanted")
        if count != self._medium.fitting_probes:
            with self._example.explained():
                raise ContractError(
                    f"C10: {when}, the medium stores {count} objects of a sixth of its capacity; "
                    f"when it was fresh, it stored {self._medium.fitting_probes}"
                )


async def _listed(backend: Backend[Any]) -> list[StoredObject]:
    return [entry async for batch in backend.list_objects() for entry in batch]
