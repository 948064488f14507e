"""The setup of a ``cpu`` tier's memory: it is pinned, or taken from the system, and released at the end.

Both take a second for a few GiB. So they run piece by piece, in the background and between the tier's own calls. With
``pin: on`` the tier opens only after all is pinned, so that a failure is known at once.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from offload_backend_cpu.arena import PAGE_BYTES, Arena
from offload_backend_cpu.options import CpuOptions
from offload_core.api import HostPinning, TierLogger, demand_pinning, pinning_in_use

PIECE_BYTES = 64 * 1024 * 1024
"""Size of a piece, small enough that a tier's thread is free again within about a tenth of a second."""


class MemorySetup:
    """Pins or populates an arena. For the event loop; construct it on the thread that has chosen the GPU.

    Memory for other processes is not pinned here, since each process with a GPU pins it for itself.

    Args:
        options: the tier's options.
        log: the tier's logger.
        run_blocking: the backend's method.
        pinning: the means of pinning; by default CUDA, if this process uses a GPU.
    """

    def __init__(
        self,
        options: CpuOptions,
        log: TierLogger,
        run_blocking: Callable[..., Awaitable[Any]],
        pinning: HostPinning | None,
    ) -> None:
        self._options = options
        self._log = log
        self._run_blocking = run_blocking
        self._pinning = None if options.pin == "off" else pinning or pinning_in_use()
        self._arena: Arena | None = None  # kept alive while a piece of it is pinned
        self._pinned: list[int] = []
        self._task: asyncio.Task[None] | None = None

    async def start(self, arena: Arena) -> None:
        """Pin the memory if ``pin`` is ``on``; otherwise begin the background work.

        A cancelled call ends after the current piece.

        Raises:
            OSError: ``pin`` is ``on`` and the memory cannot be pinned. No piece stays pinned then.
        """
        self._arena = arena
        if self._options.pin == "on" and arena.shared_memory is None:
            try:
                if self._pinning is None:
                    self._pinning = await self._run_blocking(demand_pinning)
                await self._each_piece(arena, self._pin)
            except OSError as error:
                await self.undo()
                raise OSError(f"{error}; pin: on needs that; set pin to auto or off to go without") from error
        elif self._pinning is not None and arena.shared_memory is None:
            self._task = asyncio.create_task(self._in_background(arena, self._pin))
        elif self._options.prefault:
            self._task = asyncio.create_task(self._in_background(arena, _populate))

    def stop(self) -> None:
        """Start no further piece."""
        if self._task is not None:
            self._task.cancel()

    async def undo(self) -> None:
        """Wait for the current piece and unpin all. A cancelled call leaves the rest pinned; another call continues."""
        if self._task is not None:
            await asyncio.wait([self._task])
            self._task = None
        while self._pinned and self._pinning is not None:
            try:
                await self._run_blocking(self._pinning.unregister, self._pinned[-1])
            except OSError as error:
                self._log.warning("%s; this memory stays pinned until the process ends", error)
            self._pinned.pop()
        self._arena = None

    async def _in_background(self, arena: Arena, prepare: Callable[[Arena, int, int], bool]) -> None:
        try:
            await self._each_piece(arena, prepare)
        except OSError as error:
            self._log.warning(
                "%s. The tier works without that, more slowly while its memory fills; lower its capacity of "
                "%d bytes if the machine has not so much memory.",
                error, self._options.capacity,
            )  # fmt: skip

    async def _each_piece(self, arena: Arena, prepare: Callable[[Arena, int, int], bool]) -> None:
        step = PIECE_BYTES // PAGE_BYTES
        for start in range(0, arena.pages.num_pages, step):
            if not await self._run_blocking(prepare, arena, start, min(step, arena.pages.num_pages - start)):
                self._log.info("prefault has no effect: this kernel cannot populate memory, Linux 5.14 can")
                return

    def _pin(self, arena: Arena, start_page: int, num_pages: int) -> bool:
        """Pin one piece. Runs on one of the tier's threads."""
        assert self._pinning is not None
        address = arena.address + start_page * PAGE_BYTES
        self._pinning.register(address, num_pages * PAGE_BYTES)
        self._pinned.append(address)
        arena.mark_resident(start_page + num_pages)
        return True


def _populate(arena: Arena, start_page: int, num_pages: int) -> bool:
    return arena.populate(start_page, num_pages)
