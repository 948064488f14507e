"""What a disk tier does in the background: it goes through its folder, and keeps its account current."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Generator
from typing import Any

from offload_backend_disk.capacity.account import Account
from offload_backend_disk.scan import Sweep

logger = logging.getLogger(__name__)

_WRITE_DOWN_SECONDS = 1.0
_LOOK_AGAIN_SECONDS = 10.0
_TRY_AGAIN_SECONDS = 60.0


class Keeper:
    """Looks after one folder, on the tier's own threads and in short calls, so that others get their turn.

    Args:
        call: runs a blocking function on these threads, and waits for its end even when it is cancelled.
        sweep: what is to be gone through.
        account: the folder's account, if it has a capacity.
        is_usable: says whether the account can be used; opens it, where it could not be opened before. Blocks.
    """

    def __init__(
        self,
        call: Callable[..., Awaitable[Any]],
        sweep: Sweep,
        account: Account | None,
        is_usable: Callable[[], bool],
    ) -> None:
        self._call = call
        self._sweep = sweep
        self._account = account
        self._is_usable = is_usable
        self._task: asyncio.Task[None] | None = None
        self._complained = False

    def start(self) -> None:
        """Begin. Call it on the event loop."""
        self._task = asyncio.create_task(self._run())

    async def stop(self) -> None:
        """Stop, and wait for the call that is on its way. Idempotent. Cancelled, it stops waiting."""
        if self._task is not None and not self._task.done():
            self._task.cancel()
            await asyncio.wait([self._task])

    async def _run(self) -> None:
        """Runs until it is cancelled; without a capacity, until nothing is left to do."""
        while True:
            done = await self._look()
            if done and self._account is None:
                return
            wake = time.monotonic() + (_LOOK_AGAIN_SECONDS if done else _TRY_AGAIN_SECONDS)
            while time.monotonic() < wake:
                await asyncio.sleep(_WRITE_DOWN_SECONDS)
                if self._account is not None:
                    if self._account.has_notes:
                        await self._call(self._account.write_down)
                    if self._account.take_reopened():
                        break

    async def _look(self) -> bool:
        """Settle what the dead have left, and sweep where that is needed; returns whether nothing is left to do."""
        try:
            if self._account is not None:
                if not await self._call(self._is_usable):
                    return True  # stores say why
                await self._call(self._account.settle_the_dead)
            if await self._call(self._sweep.is_needed):
                steps = self._sweep.steps()
                try:
                    while (complete := await self._call(_step, steps)) is None:
                        pass
                finally:
                    steps.close()
                return bool(complete)
        except OSError as error:
            if not self._complained:
                self._complained = True
                logger.warning("the folder cannot be looked after, which is tried again later: %s", error)
            return False
        self._complained = False
        return True


def _step(steps: Generator[None, None, bool]) -> bool | None:
    """Do a step; returns ``None`` while there are more, else their result."""
    try:
        next(steps)
    except StopIteration as end:
        return bool(end.value)
    return None
