"""A tier's backend with its threads, which several storages may share."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from offload_core.api.backend import Backend, BackendContext
from offload_core.api.hooks import TierInfo
from offload_core.config.limits import Limits
from offload_core.config.model import TierConfig
from offload_core.plugins.registry import PluginRegistry
from offload_core.runtime.threads import DaemonExecutor, StuckThreadTimer


class TierBackend:
    """A backend, wrapped by the plugins. It closes with its last user. All methods but the constructor need the loop.

    Args:
        limits: the limits in force for this tier.
        plugins: the plugins that may wrap the backend.
        on_stuck_threads: gets each change of the number of stuck threads, on any thread.

    Raises:
        PluginError: a plugin failed to wrap the backend.
    """

    def __init__(
        self,
        config: TierConfig,
        limits: Limits,
        plugins: PluginRegistry | None,
        on_stuck_threads: Callable[[int], None],
    ) -> None:
        name, stuck_after = config.common.name, limits.longest_call_seconds
        self._executor = DaemonExecutor(config.common.io_threads, f"offload-{name}", stuck_after, on_stuck_threads)
        self._stuck_thread_timer = StuckThreadTimer(self._executor, stuck_after / 2)
        context = BackendContext(name, self._executor, config.common.io_threads)
        backend = config.backend_type.backend(config.options, context)
        info = TierInfo(name, config.backend_type.name, config.common.load_weight)
        self.backend: Backend[Any] = backend if plugins is None else plugins.wrap(backend, info)
        self._users = 0
        self._is_open = False
        self._opening = asyncio.Lock()

    @property
    def stuck_threads(self) -> int:
        """Number of threads that are stuck now."""
        return self._executor.stuck

    @property
    def users(self) -> int:
        """Number of users that have not closed it."""
        return self._users

    def add_user(self) -> None:
        """Count a user, who calls :meth:`close` once."""
        self._users += 1

    def call_begins(self) -> None:
        """Watch for stuck threads while there are calls."""
        self._stuck_thread_timer.start()

    async def open(self) -> None:
        """Open the backend for the first user. Further users wait until it is open; after an error each tries again."""
        async with self._opening:
            if not self._is_open:
                self.call_begins()
                await self.backend.open()
                self._is_open = True

    async def close(self) -> None:
        """Give up one use. The last one closes the backend, and ends its threads once they are idle."""
        self._users -= 1
        if self._users:
            return
        self._stuck_thread_timer.close()
        try:
            await self.backend.close()
        finally:
            self._executor.shutdown()
