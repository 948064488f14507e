"""The background work of a disk tier: it scans its folder and keeps its account current."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Generator
from typing import Any

from offload_backend_disk.capacity.account import Account
from offload_backend_disk.scan import Scan
from offload_core.api import TierLogger

_FLUSH_SECONDS = 1.0
_CHECK_SECONDS = 10.0
_RETRY_SECONDS = 60.0


class Housekeeping:
    """Background work on one folder, in short calls on the tier's own threads so that other calls run in between.

    Args:
        run_blocking: runs a blocking function on these threads; waits for its end even when it is cancelled.
        scan: the scan of the folder.
        account: the folder's account, if the tier has a capacity.
        is_usable: returns whether the account can be used; blocks. It opens an account that could not be opened before.
    """

    def __init__(
        self,
        run_blocking: Callable[..., Awaitable[Any]],
        scan: Scan,
        account: Account | None,
        is_usable: Callable[[], bool],
        log: TierLogger,
    ) -> None:
        self._run_blocking = run_blocking
        self._scan = scan
        self._account = account
        self._is_usable = is_usable
        self._log = log
        self._task: asyncio.Task[None] | None = None
        self._has_warned = False

    def start(self) -> None:
        """Start the work. Call it on the event loop."""
        self._task = asyncio.create_task(self._run())

    async def stop(self) -> None:
        """Stop the work, and wait for the call in progress. Idempotent. When it is cancelled, it stops waiting."""
        if self._task is not None and not self._task.done():
            self._task.cancel()
            await asyncio.wait([self._task])

    async def _run(self) -> None:
        """Work until cancelled; without a capacity, until nothing is left to do."""
        while True:
            done = await self._run_once()
            if done and self._account is None:
                return
            wake = time.monotonic() + (_CHECK_SECONDS if done else _RETRY_SECONDS)
            while time.monotonic() < wake:
                await asyncio.sleep(_FLUSH_SECONDS)
                if self._account is not None:
                    if self._account.needs_flush:
                        await self._run_blocking(self._account.flush)
                    if self._account.take_reopened_flag():
                        break

    async def _run_once(self) -> bool:
        """Release the reservations of dead processes, and scan if needed; return whether nothing is left to do."""
        try:
            if self._account is not None:
                if not await self._run_blocking(self._is_usable):
                    return True  # stores report the reason
                await self._run_blocking(self._account.release_dead_reservations)
            if await self._run_blocking(self._scan.is_needed):
                steps = self._scan.steps()
                try:
                    while (complete := await self._run_blocking(_step, steps)) is None:
                        pass
                finally:
                    steps.close()
                return bool(complete)
        except OSError as error:
            if not self._has_warned:
                self._has_warned = True
                self._log.warning("housekeeping failed, and is retried in %d s: %s", _RETRY_SECONDS, error)
            return False
        self._has_warned = False
        return True


def _step(steps: Generator[None, None, bool]) -> bool | None:
    """Run one step; return ``None`` while more remain, else their result."""
    try:
        next(steps)
    except StopIteration as end:
        return bool(end.value)
    return None
