"""Loads and stores in a tier's own memory: the call, its health, and the count of its outcomes."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Protocol

from offload_core.api.backend import LoadOutcome
from offload_core.api.keys import ObjectKey
from offload_core.tiers.calls.lent_objects import BorrowEnd, ReserveEnd, WantedObject
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

    def start_borrow(self, wanted: Sequence[WantedObject], on_end: Callable[[BorrowEnd | None], None]) -> bool:
        """Start a load of objects that stay in the tier's memory, where they are verified.

        Args:
            on_end: gets the outcomes, or ``None`` after an error. It is called once, on any thread, and not by this
                call itself.

        Returns:
            ``False`` if nothing is loaded, and ``on_end`` will not be called.
        """
        started = time.monotonic()
        call = self._health.begin("load")
        if call is None:
            return False

        def ended(end: BorrowEnd | Exception) -> None:
            self._health.ended(call)
            if isinstance(end, Exception):
                self._load_ended(call, wanted, started, end)
                on_end(None)
                return
            answers = [(one, got) for one, got in zip(wanted, end.outcomes, strict=True) if got is not None]
            nbytes = sum(one.nbytes for one, got in answers if got is LoadOutcome.HIT)
            found = LoadEnd([got for _, got in answers], nbytes)
            self._load_ended(call, [one for one, _ in answers], started, found)
            if corrupt := [one.key for one, got in answers if got is LoadOutcome.CORRUPT]:
                self._delete(corrupt, lambda: on_end(end))
            else:
                on_end(end)

        try:
            self._storage.start_borrow(wanted, ended)
        except Exception as error:
            self._health.ended(call)
            self._load_ended(call, wanted, started, error)
            return False
        return True

    def start_reserve(self, wanted: Sequence[WantedObject], on_end: Callable[[ReserveEnd | None], None]) -> bool:
        """Start a reservation of the tier's memory, which is filled and then stored as staging memory is.

        Args:
            on_end: as for :meth:`start_borrow`.

        Returns:
            ``False`` if nothing is reserved, and ``on_end`` will not be called.
        """
        started = time.monotonic()
        call = self._health.begin("store")
        if call is None:
            return False

        def ended(end: ReserveEnd | Exception) -> None:
            self._health.ended(call)
            if isinstance(end, Exception):
                self._failed(call, [one.key for one in wanted], end)
                on_end(None)
                return
            answers = zip(wanted, end.outcomes, strict=True)
            final = [(one, StoreEnd(got, one.nbytes)) for one, got in answers if got is not None]
            if final:
                self._store_ended(call, [one for one, _ in final], started, [got for _, got in final])
            else:
                self._health.succeeded(call)
            on_end(end)

        try:
            self._storage.start_reserve(wanted, ended)
        except Exception as error:
            self._health.ended(call)
            self._failed(call, [one.key for one in wanted], error)
            return False
        return True
