"""The contract's coroutines for a tier with a capacity: what they hold, and the housekeeping in the background."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from offload_backend_nfs.capacity.bounded_store import BoundedPlace, Rooms
from offload_backend_nfs.capacity.lease import Room
from offload_core.api import LoadReservation, ObjectKey, StoreOutcome, StoreReservation

logger = logging.getLogger(__name__)

_KEEPER_STEP_SECONDS = 2.0
_LEAST_STEP_SECONDS = 0.1

Sizes = Callable[[Sequence[ObjectKey]], Awaitable[Sequence[int | None]]]


class BoundedTier:
    """Reservations on a bounded place, on the event loop.

    Args:
        run_blocking: runs blocking calls on the tier's threads.
    """

    def __init__(self, place: BoundedPlace, run_blocking: Callable[..., Awaitable[Any]]) -> None:
        self.place = place
        self._run_blocking = run_blocking
        self._rooms: dict[ObjectKey, list[Room]] = {}  # those that no store has taken yet
        self._held: list[list[tuple[ObjectKey, Room]]] = []  # by reservation, until its release
        self._wake = asyncio.Event()
        self._housekeeping = asyncio.get_running_loop().create_task(self._keep_house())

    async def close(self) -> None:
        """End the housekeeping, when its step has ended. Cancelled, it stops waiting."""
        self._housekeeping.cancel()
        await asyncio.wait([self._housekeeping])

    async def prepare_load(self, keys: Sequence[ObjectKey], sizes_of: Sizes) -> LoadReservation:
        """Pin what is there and is not about to go. Cancelled, nothing stays pinned.

        Args:
            sizes_of: returns, per key, its object's bytes, ``None`` where none is there.
        """
        self.place.pin(keys)  # before the look, so that nothing of this process takes it away in between
        try:
            found = await sizes_of(keys)
        except BaseException:
            self.place.unpin(keys)
            raise
        leaving = self.place.hidden(keys)
        sizes = [None if hidden else size for size, hidden in zip(found, leaving, strict=True)]
        self.place.unpin([key for key, size in zip(keys, sizes, strict=True) if size is None])
        held = [key for key, size in zip(keys, sizes, strict=True) if size is not None]
        self.place.note_use(held)

        async def release() -> None:
            self.place.unpin(held)

        return LoadReservation([size is not None for size in sizes], release, sizes)

    async def prepare_store(self, keys: Sequence[ObjectKey], nbytes: Sequence[int]) -> StoreReservation:
        """Take room. Cancelled, it is given back once the thread has ended."""
        taken: list[Rooms] = []
        try:
            await self._run_blocking(lambda: taken.append(self.place.reserve(keys, nbytes)))
        except asyncio.CancelledError:
            for rooms in taken:
                await self._run_blocking(self.place.give_back, rooms.rooms)
            raise
        (answer,) = taken
        held = [(key, room) for key, room in zip(keys, answer.rooms, strict=True) if room is not None]
        self._held.append(held)
        for key, room in held:
            self._rooms.setdefault(key, []).append(room)
        if self.place.pressed or StoreOutcome.REJECTED in answer.outcomes:
            self._wake.set()

        async def release() -> None:
            self._held = [other for other in self._held if other is not held]
            unused: list[Room] = []
            for key, room in held:
                if not self._take(key, room):
                    room.released = True  # used, or about to be by another store of the key, which then ends it
                elif not self._pass_on(key, room):
                    unused.append(room)
            if held:
                await self._run_blocking(self.place.give_back, unused)

        return StoreReservation(answer.outcomes, answer.evicted, release)

    async def store(
        self,
        keys: Sequence[ObjectKey],
        buffers: Sequence[memoryview],
        each: Callable[..., Awaitable[list[StoreOutcome]]],
    ) -> list[StoreOutcome]:
        """Write objects into their rooms. Cancelled, it waits for the writes that have begun.

        Args:
            each: calls a blocking function for every object, given parallel sequences.
        """
        rooms = [self._take_fitting(key, len(buffer)) for key, buffer in zip(keys, buffers, strict=True)]
        try:
            return await each(self.place.store, keys, buffers, rooms)
        finally:
            for key, room in zip(keys, rooms, strict=True):
                if room is not None and not room.ended:  # its write never began
                    if room.released:
                        self.place.give_back_later(room)
                    else:
                        self._rooms.setdefault(key, []).append(room)

    def _take_fitting(self, key: ObjectKey, nbytes: int) -> Room | None:
        """Take the room of an object of ``nbytes``: another reservation may wait to store another content."""
        for room in self._rooms.get(key, []):
            if room.nbytes == nbytes:
                self._take(key, room)
                return room
        return None

    def _pass_on(self, key: ObjectKey, room: Room) -> bool:
        """Give a room to a reservation that still waits to store its object, and whose room another store has used."""
        for held in self._held:
            for index, (other_key, other) in enumerate(held):
                if other_key == key and other.nbytes == room.nbytes and other.ended:
                    held[index] = (key, room)
                    self._rooms.setdefault(key, []).append(room)
                    return True
        return False

    def _take(self, key: ObjectKey, room: Room) -> bool:
        """Take a room out of those that wait for their object; returns whether it was there."""
        waiting = self._rooms.get(key, [])
        if room not in waiting:
            return False
        waiting.remove(room)
        if not waiting:
            del self._rooms[key]
        return True

    async def _keep_house(self) -> None:
        """Keep house now and then, and soon when room is short. Ends when it is cancelled, after a step's end."""
        while True:
            seconds = self.place.step_seconds
            if self.place.is_keeper:
                seconds = min(seconds, _KEEPER_STEP_SECONDS)
            try:
                async with asyncio.timeout(seconds):
                    await self._wake.wait()
            except TimeoutError:
                pass
            self._wake.clear()
            try:
                await self._run_blocking(self.place.step)
            except Exception:
                logger.exception("the housekeeping of a shared prefix failed; it goes on")
            await asyncio.sleep(min(seconds, _LEAST_STEP_SECONDS))
