"""The backend of one tier with its threads, for one or more storages."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from offload_core.api.backend import Backend, BackendContext
from offload_core.api.hooks import TierInfo
from offload_core.config.limits import Limits
from offload_core.config.model import TierConfig
from offload_core.plugins.registry import PluginRegistry
from offload_core.runtime.threads import DaemonExecutor, StuckThreadTimer, executors_of_tier
from offload_core.tiers.calls.answer import awaitable


class TierBackend:
    """A backend, wrapped by the plugins. It closes with its last user. All methods but the constructor need the loop.

    Args:
        limits: the limits in force for this tier.
        plugins: the plugins that may wrap the backend.
        on_stuck_threads: gets each change of the number of stuck threads, on any thread.
        lends_to_processes: whether other processes map the memory that the backend lends.

    Raises:
        PluginError: a plugin failed to wrap the backend.
    """

    def __init__(
        self,
        config: TierConfig,
        limits: Limits,
        plugins: PluginRegistry | None,
        on_stuck_threads: Callable[[int], None],
        *,
        lends_to_processes: bool = False,
    ) -> None:
        name, stuck_after = config.common.name, limits.longest_call_seconds
        self._halves: list[str] = []  # of those who have opened it; the log lines of the backend name them
        threads = config.common.io_threads
        self._executors = executors_of_tier(
            f"offload-{name}", lambda begin: DaemonExecutor(threads, begin, stuck_after, on_stuck_threads)
        )
        executor, load_executor, lookup_executor = self._executors
        self._stuck_thread_timer = StuckThreadTimer(self._executors, stuck_after / 2)
        context = BackendContext(
            name,
            executor,
            threads,
            open_timeout_seconds=limits.open_timeout_seconds,
            lookup_timeout_seconds=limits.lookup_timeout_seconds,
            load_timeout_seconds=limits.load_timeout_seconds,
            load_timeout_seconds_per_mib=limits.load_timeout_seconds_per_mib,
            store_timeout_seconds=limits.store_timeout_seconds,
            close_timeout_seconds=limits.close_timeout_seconds,
            halves=self._halves,
            lends_to_processes=lends_to_processes,
            load_executor=load_executor,
            lookup_executor=lookup_executor,
        )
        backend = config.backend_type.backend(config.options, context)
        info = TierInfo(name, config.backend_type.name, config.common.load_weight)
        self.backend: Backend[Any] = backend if plugins is None else plugins.wrap(backend, info)
        self._users = 0
        self._is_open = False
        self._opening = asyncio.Lock()

    @property
    def stuck_threads(self) -> int:
        """Number of threads that are stuck now."""
        return sum(executor.stuck for executor in self._executors)

    @property
    def users(self) -> int:
        """Number of users that have not closed it."""
        return self._users

    def add_user(self) -> None:
        """Count a user. It calls :meth:`close` once."""
        self._users += 1

    def call_begins(self) -> None:
        """Watch for stuck threads while there are calls."""
        self._stuck_thread_timer.start()

    async def open(self, half: str) -> None:
        """Open the backend for the first user. Further users wait until it is open; after an error each tries again.

        Args:
            half: the half of the engine that opens it, for log lines; may be empty.
        """
        if half and half not in self._halves:
            self._halves.append(half)
        async with self._opening:
            if not self._is_open:
                self.call_begins()
                await awaitable("open", self.backend.open())
                self._is_open = True

    async def close(self, half: str) -> None:
        """Give up one use. The last one closes the backend, and ends its threads once they are idle.

        Args:
            half: the half of the engine that closes it.
        """
        self._users -= 1
        if self._users:
            if half in self._halves:
                self._halves.remove(half)
            return
        self._stuck_thread_timer.close()
        try:
            await awaitable("close", self.backend.close())
        finally:
            for executor in self._executors:
                executor.shutdown()
