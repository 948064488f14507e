"""Loads and stores in a tier's own memory: the call, its health, and the count of its outcomes."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol

from offload_core.api.backend import LoadOutcome, StoreOutcome
from offload_core.api.events import Operation
from offload_core.api.keys import ObjectKey
from offload_core.api.memory.pinned_memory import HostPinning
from offload_core.tiers.calls.lent_objects import LendingEnd, OutcomeT, WantedObject
from offload_core.tiers.circuit_breaker import Call
from offload_core.tiers.health import TierHealth
from offload_core.tiers.object_io import LoadEnd
from offload_core.tiers.storage import StoreEnd, TierStorage


class _LoadEnded(Protocol):
    def __call__(
        self, call: Call, objects: Sequence[WantedObject], started: float, end: LoadEnd | Exception
    ) -> object: ...


class _StoreEnded(Protocol):
    def __call__(
        self, call: Call, objects: Sequence[WantedObject], started: float, ends: list[StoreEnd] | Exception
    ) -> object: ...


class TierLending:
    """The calls by which one tier lends its memory. Any thread may use it after the tier's ``open`` has begun.

    Args:
        load_ended: records the end of a load.
        store_ended: records final outcomes of stores.
        failed: records the error of a call.
        delete: deletes damaged objects, and calls a function afterwards.
    """

    def __init__(
        self,
        storage: TierStorage,
        health: TierHealth,
        load_ended: _LoadEnded,
        store_ended: _StoreEnded,
        failed: Callable[[Call, Sequence[ObjectKey], Exception], None],
        delete: Callable[[Sequence[ObjectKey], Callable[[], None]], None],
    ) -> None:
        self._storage = storage
        self._health = health
        self._load_ended = load_ended
        self._store_ended = store_ended
        self._failed = failed
        self._delete = delete

    @property
    def is_possible(self) -> bool:
        """True if the tier lends memory now."""
        return self._storage.lends

    def lend_pinned_only(self, pinning: HostPinning | None) -> None:
        """Lend memory only while it is pinned; see :class:`TierStorage`."""
        self._storage.lend_pinned_only(pinning)

    def start_borrow(
        self,
        wanted: Sequence[WantedObject],
        on_end: Callable[[LendingEnd[LoadOutcome] | None], None],
        *,
        verify: bool = True,
    ) -> bool:
        """Start a load of objects that stay in the tier's memory.

        Args:
            verify: whether the tier verifies them where they are. Otherwise the caller does, and tells the tier of
                damage by :meth:`Tier.found_damaged`; until then the objects count as hits.
            on_end: gets the outcomes, or ``None`` after an error. It is called once, on any thread, and not by this
                call itself.

        Returns:
            ``False`` if nothing is loaded, and ``on_end`` will not be called.
        """

        def ended(call: Call, started: float, end: LendingEnd[LoadOutcome] | Exception) -> None:
            if isinstance(end, Exception):
                self._load_ended(call, wanted, started, end)
                return
            answers = [(one, got) for one, got in zip(wanted, end.outcomes, strict=True) if got is not None]
            nbytes = sum(one.nbytes for one, got in answers if got is LoadOutcome.HIT)
            found = LoadEnd([got for _, got in answers], nbytes)
            self._load_ended(call, [one for one, _ in answers], started, found)

        def hand_over(end: LendingEnd[LoadOutcome] | None) -> None:
            outcomes = [] if end is None else end.outcomes
            pairs = zip(wanted, outcomes, strict=False)  # there may be no outcomes
            if corrupt := [one.key for one, outcome in pairs if outcome is LoadOutcome.CORRUPT]:
                self._delete(corrupt, lambda: on_end(end))
            else:
                on_end(end)

        start = partial(self._storage.start_borrow, wanted, verify=verify)
        return self._start("load", start, ended, hand_over)

    def start_reserve(
        self, wanted: Sequence[WantedObject], on_end: Callable[[LendingEnd[StoreOutcome] | None], None]
    ) -> bool:
        """Start a reservation of the tier's memory, which is filled and then stored as staging memory is.

        A reservation that works says nothing about stores, so that only their ends count for the health.

        Args:
            on_end: as for :meth:`start_borrow`.

        Returns:
            ``False`` if nothing is reserved, and ``on_end`` will not be called.
        """

        def ended(call: Call, started: float, end: LendingEnd[StoreOutcome] | Exception) -> None:
            if isinstance(end, Exception):
                self._failed(call, [one.key for one in wanted], end)
                return
            answers = zip(wanted, end.outcomes, strict=True)
            final = [(one, StoreEnd(got, one.nbytes)) for one, got in answers if got is not None]
            if final:
                self._store_ended(call, [one for one, _ in final], started, [got for _, got in final])

        return self._start("store", partial(self._storage.start_reserve, wanted), ended, on_end)

    def _start(
        self,
        operation: Operation,
        start: Callable[[Callable[[LendingEnd[OutcomeT] | Exception], None]], None],
        ended: Callable[[Call, float, LendingEnd[OutcomeT] | Exception], None],
        hand_over: Callable[[LendingEnd[OutcomeT] | None], None],
    ) -> bool:
        """Start a call if the health admits it.

        Args:
            ended: records the end.
            hand_over: gets the end afterwards, or ``None`` after an error.
        """
        started = time.monotonic()
        call = self._health.begin(operation)
        if call is None:
            return False

        def on_end(end: LendingEnd[OutcomeT] | Exception) -> None:
            self._health.ended(call)
            try:
                ended(call, started, end)
            finally:  # lent memory must reach its borrower
                hand_over(None if isinstance(end, Exception) else end)

        try:
            start(on_end)
        except Exception as error:
            self._health.ended(call)
            ended(call, started, error)
            return False
        return True
