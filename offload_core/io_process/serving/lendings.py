"""The memory that tiers in the I/O process have lent to one process of the engine, until it gives the memory back."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Collection, Coroutine, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from offload_core.api.errors import BackendError
from offload_core.api.memory.addresses import address_of
from offload_core.api.memory.shared_memory import SharedMemory
from offload_core.io_process.protocol import NO_PIECE, ProtocolError
from offload_core.runtime.io_loop import run_all
from offload_core.tiers.calls.answer import answer
from offload_core.tiers.calls.lent_objects import Lent, OutcomeT
from offload_core.tiers.storage import LocalStorage

logger = logging.getLogger(__name__)


class _Kept(NamedTuple):
    storage: LocalStorage
    lent: Sequence[Lent[Any]]
    views: Mapping[int, memoryview]
    """By their position in the lent memory."""


class Lendings:
    """Loans and reservations, each with its tier's number and the number that the process of the engine gave it.

    All methods run on the event loop.
    """

    def __init__(self) -> None:
        self._kept: dict[tuple[int, int], _Kept] = {}

    async def keep(
        self, tier: int, number: int, storage: LocalStorage, calls: Iterable[Coroutine[Any, Any, Lent[OutcomeT]]]
    ) -> tuple[list[Lent[OutcomeT]], list[int]]:
        """Make calls that lend, and keep their memory until :meth:`give_back`.

        Returns:
            The results of the calls, and the position of each of their objects in the lent memory, in bytes;
            :data:`NO_PIECE` for an object that is not lent.

        Raises:
            BackendError: lent memory is no part of the memory that the tier shares. Nothing is kept then.
            Exception: the error of a call. Nothing is kept then.
        """
        lent: list[Lent[OutcomeT]] = []

        async def one(call: Coroutine[Any, Any, Lent[OutcomeT]]) -> Lent[OutcomeT]:
            result = await answer(call)  # in a task of its own, which a SystemExit would not leave
            lent.append(result)
            return result

        try:
            ordered = await run_all(map(one, calls))
            views = [view for result in ordered for view in result.views]
            offsets = _offsets(self.memory_of(storage), views)
        except BaseException:
            await _release(storage, lent)
            raise
        by_offset = {offset: view for offset, view in zip(offsets, views, strict=True) if view is not None}
        self._kept[tier, number] = _Kept(storage, ordered, by_offset)
        return ordered, offsets

    @staticmethod
    def memory_of(storage: LocalStorage) -> SharedMemory | None:
        """Return the memory that a tier lends to other processes; ``None`` if there is none."""
        return storage.backend.lent_memory if storage.lends else None

    def view(self, tier: int, number: int, offset: int, nbytes: int) -> memoryview:
        """Return the memory that was lent for a store.

        Raises:
            ProtocolError: no such memory is lent.
        """
        kept = self._kept.get((tier, number))
        view = None if kept is None else kept.views.get(offset)
        if view is None or len(view) != nbytes:
            raise ProtocolError(f"{nbytes} bytes at {offset} are stored, which reservation {number} has not lent")
        return view

    async def give_back(self, tier: int, number: int) -> None:
        """Release the memory that a request has lent. An unknown number is one of a process before this one."""
        kept = self._kept.pop((tier, number), None)
        if kept is not None:
            await _release(kept.storage, kept.lent)

    async def give_all_back(self, running: Collection[asyncio.Task[None]]) -> None:
        """Release all that the process of the engine had, once the calls that use it have ended."""
        if running:
            await asyncio.wait(running)
        for tier, number in list(self._kept):
            await self.give_back(tier, number)


async def _release(storage: LocalStorage, lent: Iterable[Lent[Any]]) -> None:
    for one in lent:
        try:
            await answer(one.release())
        except Exception as error:  # the backend may raise anything
            logger.warning("%s: lent memory could not be given back: %s", storage.label, error)


def _offsets(memory: SharedMemory | None, views: Sequence[memoryview | None]) -> list[int]:
    if memory is None:
        return [NO_PIECE] * len(views)
    start, nbytes = address_of(memory.view), len(memory.view)
    offsets = [NO_PIECE if view is None else address_of(view) - start for view in views]
    for view, offset in zip(views, offsets, strict=True):
        if view is not None and not 0 <= offset <= nbytes - len(view):
            raise BackendError("the backend has lent memory that is no part of its lent_memory")
    return offsets
