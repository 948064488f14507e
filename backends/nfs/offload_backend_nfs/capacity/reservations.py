"""The contract's load and store reservations for a tier with a capacity, on the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from offload_backend_nfs.capacity.bounded_store import BoundedStore, ReserveResult
from offload_backend_nfs.capacity.quota import ObjectReservation
from offload_core.api import (
    LoadOutcome,
    LoadReservation,
    ObjectKey,
    StoreOutcome,
    StoreReservation,
    StoreSeal,
    TierLogger,
)

_HOUSEKEEPER_STEP_SECONDS = 2.0
_SHORTEST_STEP_SECONDS = 0.1

SizeLookup = Callable[[Sequence[ObjectKey]], Awaitable[Sequence[int | None]]]
"""Returns the bytes of objects, ``None`` for an object that does not exist."""


class ReservationManager:
    """Reservations on a bounded store, and its housekeeping in the background.

    Args:
        run_blocking: runs blocking calls on the tier's threads.
    """

    def __init__(
        self, bounded_store: BoundedStore, run_blocking: Callable[..., Awaitable[Any]], log: TierLogger
    ) -> None:
        self.bounded_store = bounded_store
        self._log = log
        self._run_blocking = run_blocking
        self._waiting: dict[ObjectKey, list[ObjectReservation]] = {}  # reservations that no store uses yet
        self._unreleased: list[list[tuple[ObjectKey, ObjectReservation]]] = []  # one list per store reservation
        self._wake = asyncio.Event()
        self._housekeeping = asyncio.get_running_loop().create_task(self._run_housekeeping())

    async def close(self) -> None:
        """End the housekeeping after its current step. Cancelled, it stops waiting."""
        self._housekeeping.cancel()
        await asyncio.wait([self._housekeeping])

    async def prepare_load(self, keys: Sequence[ObjectKey], sizes_of: SizeLookup) -> LoadReservation:
        """Pin the objects that exist and are not hidden. Cancelled, nothing stays pinned."""
        self.bounded_store.pin(keys)  # before the lookup, so that this process evicts nothing in between
        try:
            found = await sizes_of(keys)
        except BaseException:
            self.bounded_store.unpin(keys)
            raise
        hidden = self.bounded_store.hidden(keys)
        sizes = [None if is_hidden else size for size, is_hidden in zip(found, hidden, strict=True)]
        self.bounded_store.unpin([key for key, size in zip(keys, sizes, strict=True) if size is None])
        pinned = [key for key, size in zip(keys, sizes, strict=True) if size is not None]
        self.bounded_store.mark_used(pinned)

        async def release() -> None:
            self.bounded_store.unpin(pinned)

        return LoadReservation([size is not None for size in sizes], release, sizes)

    async def load(
        self,
        load_shown: Callable[..., Awaitable[list[LoadOutcome]]],
        keys: Sequence[ObjectKey],
        *objects: Sequence[Any],
    ) -> list[LoadOutcome]:
        """Load objects that are pinned meanwhile. A hidden object is a miss. Cancelled, nothing stays pinned.

        Args:
            load_shown: gets the keys that are not hidden, and the same places of ``objects``.
            objects: sequences that are parallel to ``keys``.
        """
        self.bounded_store.pin(keys)
        try:
            shown = [index for index, is_hidden in enumerate(self.bounded_store.hidden(keys)) if not is_hidden]
            found = await load_shown(*([column[index] for index in shown] for column in (keys, *objects)))
            outcomes = dict(zip(shown, found, strict=True))
            self.bounded_store.mark_used([keys[at] for at, got in outcomes.items() if got is not LoadOutcome.MISS])
            return [outcomes.get(index, LoadOutcome.MISS) for index in range(len(keys))]
        finally:
            self.bounded_store.unpin(keys)

    async def prepare_store(
        self, keys: Sequence[ObjectKey], nbytes: Sequence[int], spare: Sequence[bool] = ()
    ) -> StoreReservation:
        """Reserve capacity. Cancelled, the capacity is released after the thread has ended.

        A kept object without capacity wakes the housekeeping, which evicts others. A spare one does not.
        """
        results: list[ReserveResult] = []
        try:
            await self._run_blocking(lambda: results.append(self.bounded_store.reserve(keys, nbytes, spare)))
        except asyncio.CancelledError:
            for result in results:
                await self._run_blocking(self.bounded_store.release, result.reservations)
            raise
        (result,) = results
        held = [(key, one) for key, one in zip(keys, result.reservations, strict=True) if one is not None]
        self._unreleased.append(held)
        for key, reservation in held:
            self._waiting.setdefault(key, []).append(reservation)
        flags = spare or [False] * len(keys)
        kept = [outcome for outcome, is_spare in zip(result.outcomes, flags, strict=True) if not is_spare]
        if self.bounded_store.step_is_urgent or StoreOutcome.REJECTED in kept:
            self._wake.set()

        async def release() -> None:
            self._unreleased = [other for other in self._unreleased if other is not held]
            unused: list[ObjectReservation] = []
            for key, reservation in held:
                if not self._take(key, reservation):
                    reservation.released = True  # used, or another store of the key will use it and then end it
                elif not self._hand_over(key, reservation):
                    unused.append(reservation)
            if held:
                await self._run_blocking(self.bounded_store.release, unused)

        return StoreReservation(result.outcomes, result.evicted, release)

    async def store(
        self,
        keys: Sequence[ObjectKey],
        buffers: Sequence[memoryview],
        for_each_object: Callable[..., Awaitable[list[StoreOutcome]]],
        *seals: Sequence[StoreSeal],
    ) -> list[StoreOutcome]:
        """Write objects into their reservations. Cancelled, it waits for the writes that have begun.

        Args:
            seals: a seal for each object, or nothing if all are sealed.
            for_each_object: calls a blocking function for every object, given parallel sequences.
        """
        reservations = [self._take_fitting(key, len(buffer)) for key, buffer in zip(keys, buffers, strict=True)]
        try:
            return await for_each_object(self.bounded_store.store, keys, buffers, reservations, *seals)
        finally:
            for key, reservation in zip(keys, reservations, strict=True):
                if reservation is not None and not reservation.ended:  # its write never began
                    if reservation.released:
                        self.bounded_store.release_without_settling(reservation)
                    else:
                        self._waiting.setdefault(key, []).append(reservation)

    def _take_fitting(self, key: ObjectKey, nbytes: int) -> ObjectReservation | None:
        """Take a reservation of ``nbytes`` for an object. Others may wait for an object of another size."""
        for reservation in self._waiting.get(key, []):
            if reservation.nbytes == nbytes:
                self._take(key, reservation)
                return reservation
        return None

    def _hand_over(self, key: ObjectKey, reservation: ObjectReservation) -> bool:
        """Give an unused reservation to a store reservation whose own was used by another store of the same key."""
        for held in self._unreleased:
            for index, (other_key, other) in enumerate(held):
                if other_key == key and other.nbytes == reservation.nbytes and other.ended:
                    held[index] = (key, reservation)
                    self._waiting.setdefault(key, []).append(reservation)
                    return True
        return False

    def _take(self, key: ObjectKey, reservation: ObjectReservation) -> bool:
        """Remove a reservation from those that wait for their object. Return whether it was there."""
        waiting = self._waiting.get(key, [])
        if reservation not in waiting:
            return False
        waiting.remove(reservation)
        if not waiting:
            del self._waiting[key]
        return True

    async def _run_housekeeping(self) -> None:
        """Do the housekeeping regularly, and soon if capacity is short. Cancelled, it ends after the current step."""
        while True:
            seconds = self.bounded_store.step_seconds
            if self.bounded_store.is_housekeeper:
                seconds = min(seconds, _HOUSEKEEPER_STEP_SECONDS)
            try:
                async with asyncio.timeout(seconds):
                    await self._wake.wait()
            except TimeoutError:
                pass
            self._wake.clear()
            try:
                await self._run_blocking(self.bounded_store.step)
            except Exception:
                self._log.exception("the housekeeping of the shared objects failed; it continues with the next step")
            await asyncio.sleep(min(seconds, _SHORTEST_STEP_SECONDS))
