"""A tier in the I/O process. All processes of an engine use the same backend."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from offload_core.api.keys import ObjectKey
from offload_core.config.model import OffloadConfig, TierConfig
from offload_core.tiers.call_slots import CallSlots
from offload_core.tiers.storage import LocalStorage, StorageEvents, TierBackend

OnStuckThreads = Callable[[int], None]


class ServedTier:
    """A tier's backend, and the slots for its concurrent batches, as many as on threads of the engine's process.

    All methods run on the event loop.

    Raises:
        PluginError: a plugin failed to wrap the backend.
    """

    def __init__(self, tier: TierConfig, config: OffloadConfig) -> None:
        self._config = tier
        self._plugins = config.plugins
        self._limits = limits = config.settings.limits.overridden_by(tier.common)
        self.io_threads = tier.common.io_threads
        self.longest_call_seconds = limits.longest_call_seconds
        self.load_slots = CallSlots(2 * self.io_threads, spare_slots=self.io_threads)
        self.store_slots = CallSlots(self.io_threads + 1, spare_slots=self.io_threads)
        self._loop = asyncio.get_running_loop()
        self._backend = TierBackend(tier, limits, config.plugins, self._stuck_on_any_thread)
        self._watchers: list[OnStuckThreads] = []
        self._told = 0

    @property
    def is_closed(self) -> bool:
        """True once the last storage was closed: another tier object takes this one's place."""
        return self._backend.users <= 0

    def make_storage(
        self, evicted: Callable[[Sequence[ObjectKey]], None], on_stuck_threads: OnStuckThreads
    ) -> LocalStorage:
        """Return a storage for one process of the engine.

        Args:
            evicted: gets the objects that this storage's stores have evicted.
            on_stuck_threads: gets changes of the number of stuck threads, if it is the oldest such function: the
                number is the tier's, and is told once. Call :meth:`forget` when it can take no more.
        """
        storage = LocalStorage(
            self._config,
            self._limits,
            self._plugins,
            StorageEvents(evicted, stuck_threads_changed=lambda change: None),
            self._backend,
        )
        self._watchers.append(on_stuck_threads)
        self._tell_stuck_threads()
        return storage

    def forget(self, on_stuck_threads: OnStuckThreads) -> None:
        """Tell this function no more; if it was the oldest, the next one gets the whole number."""
        if self._watchers and self._watchers[0] == on_stuck_threads:
            self._told = 0
        self._watchers.remove(on_stuck_threads)
        self._tell_stuck_threads()

    def _stuck_on_any_thread(self, change: int) -> None:
        self._loop.call_soon_threadsafe(self._tell_stuck_threads)

    def _tell_stuck_threads(self) -> None:
        change = self._backend.stuck_threads - self._told
        if change and self._watchers:
            self._told += change
            self._watchers[0](change)
