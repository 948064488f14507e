"""The I/O processes of one half of a connector: one, or one per tier."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from offload_core.api.events import Event
from offload_core.api.memory.shared_memory import SharedMemory
from offload_core.config.limits import Limits
from offload_core.config.model import OffloadConfig, TierConfig
from offload_core.io_process.process import IoProcess
from offload_core.io_process.remote_storage import RemoteStorage
from offload_core.plugins.observers import EventSink
from offload_core.plugins.registry import PluginRegistry
from offload_core.runtime.doorbell import wait_for_any
from offload_core.runtime.io_loop import IoLoop
from offload_core.runtime.metrics import Counters
from offload_core.tiers.staged_object import StagedObject
from offload_core.tiers.storage import StorageEvents


class _RemoteObservers:
    """Sends each tier's events to the tier's process; an :class:`EventSink`.

    Args:
        processes: the process of each tier, by the tier's name.
        counters: the place to count dropped events.
    """

    def __init__(self, processes: Mapping[str, IoProcess], counters: Counters) -> None:
        self._processes = processes
        self._counters = counters

    def emit(self, event: Event) -> None:
        """Send an event. Thread-safe; never waits."""
        self._processes[event.tier].observe(event, self._counters)

    def close(self, seconds: float) -> None:
        """Do nothing: a process delivers its events before its end."""


class IoProcesses:
    """Uses the processes that the configuration key ``io_process`` asks for. Both halves in a process share them.

    The first user begins their start. The first call that needs them waits for it.

    Args:
        engine: a name that is unique for the engine.
    """

    def __init__(self, engine: str, io: IoLoop, config: OffloadConfig) -> None:
        self._io = io
        self._config = config
        self._engine = engine
        self._per_tier = config.settings.io_process == "tier"
        self._has_shared_staging = False
        self._processes: dict[str, IoProcess] = {}
        for tier in config.tiers:
            name = self._name(tier)
            if name not in self._processes:
                self._processes[name] = IoProcess.acquire(name, io, config)

    @property
    def all(self) -> Sequence[IoProcess]:
        """The processes."""
        return tuple(self._processes.values())

    def make_storage(
        self, config: TierConfig, limits: Limits, plugins: PluginRegistry | None, changes: StorageEvents, half: str
    ) -> RemoteStorage:
        """Make a tier's storage; a :class:`~offload_core.tiers.storage.StorageFactory`.

        Raises:
            ConfigError: the process did not start.
        """
        return self._processes[self._name(config)].make_storage(config, limits, plugins, changes, half)

    def event_sink(self, config: OffloadConfig, counters: Counters) -> EventSink | None:
        """Return the way to the observers, which run where their tier runs; ``None`` if there are none."""
        if not config.plugins.observers:
            return None
        return _RemoteObservers(
            {tier.common.name: self._processes[self._name(tier)] for tier in config.tiers}, counters
        )

    def share_staging(self, memory: SharedMemory) -> None:
        """Let every process map the staging memory, which stays open until :meth:`release`.

        Raises:
            ConfigError: a process did not start.
            OSError: a process cannot map it.
        """
        self._has_shared_staging = True
        for process in self._processes.values():
            process.share_staging(memory)

    def when_killed_and_not_gone(self, replace_memory: Callable[[], None]) -> None:
        """Call a function, on the I/O loop, if a process outlives its SIGKILL."""
        for process in self._processes.values():
            process.replace_memory = replace_memory

    def receive(self) -> None:
        """Take the ends of loads and stores that are there. May be called on any thread; never waits."""
        for process in self._processes.values():
            if (direct := process.direct) is not None:
                direct.receive()

    def wait(self, seconds: float) -> None:
        """Wait until :meth:`receive` may find something, at most ``seconds``."""
        calls = [direct for process in self._processes.values() if (direct := process.direct) is not None]
        wait_for_any([direct.bell for direct in calls], seconds)
        for direct in calls:
            direct.clear_bell()

    async def seal(self, objects: Sequence[StagedObject]) -> None:
        """Write the headers and checksums of objects in staging memory; see :meth:`IoProcess.seal`."""
        await self.all[0].seal(objects)

    def release(self, seconds: float) -> None:
        """Give the processes up. The last user's call ends them tidily, or kills them after ``seconds``."""
        for process in self._processes.values():
            if self._has_shared_staging:
                process.forget_staging()
            process.release(seconds)
        self._processes.clear()

    def _name(self, tier: TierConfig) -> str:
        return f"{self._engine}/{tier.common.name}" if self._per_tier else self._engine
