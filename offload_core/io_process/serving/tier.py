"""A tier in the I/O process. If its medium is this process's memory, all processes of an engine use one backend."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Protocol, TypeVar

from offload_core.api.keys import ObjectKey
from offload_core.config.model import OffloadConfig, TierConfig
from offload_core.memory.staging_size import in_batches
from offload_core.tiers.calls.call_slots import CallSlots
from offload_core.tiers.calls.division import divides_calls, threads_of_call
from offload_core.tiers.storage import LocalStorage, StorageEvents
from offload_core.tiers.tier_backend import TierBackend


class TierUser(Protocol):
    """A process of the engine, as a tier sees it. All methods run on the event loop."""

    def evicted(self, keys: Sequence[ObjectKey]) -> None:
        """Take the objects that a store of this process has evicted."""
        ...

    def evicted_by_others(self, keys: Sequence[ObjectKey]) -> None:
        """Take the objects that a store of another process has evicted."""
        ...

    def stuck_threads_changed(self, change: int) -> None:
        """Take a change of the number of stuck threads."""
        ...


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
        self._backend = TierBackend(tier, limits, config.plugins, self._stuck_on_any_thread, lends_to_processes=True)
        capabilities = self._backend.backend.capabilities
        self._divides_calls = divides_calls(capabilities, encodes=tier.common.encodes)
        self._users: dict[TierUser, int] = {}  # with the number of stuck threads that each of them knows

    @property
    def can_be_shared(self) -> bool:
        """True if the objects are in this process. Otherwise each user has threads of its own for the medium."""
        return not self._backend.backend.capabilities.shared

    @property
    def load_parts(self) -> int:
        """Number of parts into which to divide a load: one per free thread, but not more than it may occupy."""
        return self._parts(self.load_slots.free - self.io_threads)

    @property
    def store_parts(self) -> int:
        """Number of parts into which to divide a store. See :attr:`load_parts`."""
        return self._parts(self.store_slots.free - 1)

    def _parts(self, free_threads: int) -> int:
        return max(1, min(free_threads, threads_of_call(self.io_threads))) if self._divides_calls else 1

    @property
    def is_closed(self) -> bool:
        """True once the last storage was closed: another tier object takes this one's place."""
        return self._backend.users <= 0

    def make_storage(self, user: TierUser, half: str) -> LocalStorage:
        """Return a storage for a half in a process of the engine. Call :meth:`forget` when that is gone."""

        def evicted(keys: Sequence[ObjectKey]) -> None:
            user.evicted(keys)
            for other in self._users:
                if other is not user:
                    other.evicted_by_others(keys)

        changes = StorageEvents(evicted, stuck_threads_changed=lambda change: None)
        storage = LocalStorage(self._config, self._limits, self._plugins, changes, half, self._backend)
        self._users[user] = 0
        self._tell_stuck_threads()
        return storage

    def forget(self, user: TierUser) -> None:
        """Tell this process nothing more."""
        self._users.pop(user, None)

    def _stuck_on_any_thread(self, change: int) -> None:
        self._loop.call_soon_threadsafe(self._tell_stuck_threads)

    def _tell_stuck_threads(self) -> None:
        stuck = self._backend.stuck_threads
        for user, known in self._users.items():
            if stuck != known:
                self._users[user] = stuck
                user.stuck_threads_changed(stuck - known)


class _Sized(Protocol):
    @property
    def nbytes(self) -> int: ...


Sized = TypeVar("Sized", bound=_Sized)


def in_parts(staged: Sequence[Sized], most: int) -> Iterator[list[Sized]]:
    """Divide the objects of a call into parts of whole batches, each of them the work of one thread.

    Args:
        most: maximum number of parts, at least 1.
    """
    batches = list(in_batches(staged, lambda one: one.nbytes))
    size = -(-len(batches) // most)
    return (list(chain.from_iterable(batches[start : start + size])) for start in range(0, len(batches), size))
