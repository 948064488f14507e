"""Opening and closing of all tiers at once, so that a hung tier costs no more than its deadline."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from typing import Protocol

from offload_core.api.errors import ConfigError, PluginError
from offload_core.config.limits import Limits
from offload_core.config.model import OffloadConfig, TierConfig
from offload_core.plugins.loading import PLUGIN_ERRORS
from offload_core.plugins.observers import EventDelivery, EventSink
from offload_core.plugins.registry import PluginRegistry
from offload_core.runtime.io_loop import IoLoop
from offload_core.runtime.metrics import Counters
from offload_core.tiers.staged_object import StagedObject
from offload_core.tiers.storage import LocalStorage, StorageEvents, TierStorage
from offload_core.tiers.tier import Tier

logger = logging.getLogger(__name__)


class TierHost(Protocol):
    """The place where the storages of tiers, and the observers of their events, run."""

    def make_storage(
        self, config: TierConfig, limits: Limits, plugins: PluginRegistry | None, changes: StorageEvents, half: str
    ) -> TierStorage:
        """Make a tier's storage; see :class:`~offload_core.tiers.storage.StorageFactory`."""
        ...

    def event_sink(self, config: OffloadConfig, counters: Counters) -> EventSink | None:
        """Return the way to the observers; ``None`` if there are none.

        Args:
            counters: the place to count dropped events.
        """
        ...


class TierProcesses(TierHost, Protocol):
    """Other processes in which the storages run."""

    def when_killed_and_not_gone(self, replace_memory: Callable[[], None]) -> None:
        """Call a function if a process outlives its SIGKILL, so that its calls may keep their memory for long."""
        ...

    async def seal(self, objects: Sequence[StagedObject]) -> None:
        """Write the headers and checksums of objects in staging memory.

        Raises:
            StorageAwayError: the process has ended. Nobody writes to the objects any more.
        """
        ...

    def receive(self) -> None:
        """Take the ends of loads and stores that are there. May be called on any thread; never waits."""
        ...

    def wait(self, seconds: float) -> None:
        """Wait until :meth:`receive` may find something, at most ``seconds``."""
        ...


class ThisProcess:
    """Storages and observers on threads of this process; a :class:`TierHost`."""

    def make_storage(
        self, config: TierConfig, limits: Limits, plugins: PluginRegistry | None, changes: StorageEvents, half: str
    ) -> TierStorage:
        """Make a tier's storage."""
        return LocalStorage(config, limits, plugins, changes, half)

    def event_sink(self, config: OffloadConfig, counters: Counters) -> EventSink | None:
        """Return the delivery to the observers; ``None`` if there are none."""
        observers = config.plugins.observers
        return EventDelivery(observers, counters) if observers else None


def open_tiers(
    config: OffloadConfig,
    io: IoLoop,
    counters: Counters,
    *,
    half: str = "",
    only_shared: bool = False,
    host: TierHost | None = None,
) -> list[Tier]:
    """Construct every tier of ``config``, with its plugins' wrappers and observers, and open all tiers.

    A tier that does not open before its deadline is not used until it is open.

    Args:
        half: the half of the engine that uses the tiers, for their log lines; empty outside an engine.
        only_shared: open only tiers with a shared medium; this process could not see the others' objects.
        host: the place where the storages and the observers run; by default this process.

    Raises:
        ConfigError: one or more tiers could not be opened; each problem has its reason.
    """
    for report in config.plugins.reports:
        if report.error:
            logger.warning("%s failed and is not used: %s", report, report.error)
    host = host or ThisProcess()
    event_sink = host.event_sink(config, counters)
    tiers: list[Tier] = []
    opening: list[tuple[Tier, Future[None]]] = []
    problems: list[str] = []
    started = time.monotonic()
    for tier_config in config.tiers:
        try:
            limits, plugins = config.settings.limits, config.plugins
            tier = Tier(tier_config, limits, counters, plugins, event_sink, half=half, make_storage=host.make_storage)
        except PLUGIN_ERRORS as error:  # a plugin may raise anything; the other tiers' problems are reported too
            problems.append(_open_problem(tier_config.common.name, error))
            continue
        tiers.append(tier)
        if tier.capabilities.shared or not only_shared:
            opening.append((tier, io.submit(tier.open())))
    for tier, future in opening:
        wait([future], timeout=max(0.0, started + tier.limits.open_timeout_seconds - time.monotonic()))
        if not future.done():
            continue
        try:
            future.result()
        except Exception as error:
            problems.append(_open_problem(tier.name, error))
    if problems:
        for tier in tiers:
            io.submit(tier.close())
        raise ConfigError(problems, "backends")
    for tier, future in opening:
        if not future.done():
            tier.health.open_timed_out()
    return tiers


def _open_problem(name: str, error: BaseException) -> str:
    if isinstance(error, ConfigError):
        return f"backend {name!r} cannot be opened: {'; '.join(error.problems)}"
    reason = error if isinstance(error, OSError | PluginError) else f"{type(error).__name__}: {error}"
    return f"backend {name!r} cannot be opened: {reason}"


def close_tiers(tiers: Sequence[Tier], io: IoLoop, seconds: float | None = None) -> None:
    """Close all tiers at once; a hung medium must not delay the end of the process.

    Afterwards observers have the same time for the events in their queue.

    Args:
        seconds: longest wait for each tier, from now on; by default its own ``close_timeout_seconds``.
    """
    started = time.monotonic()
    limits = [tier.limits.close_timeout_seconds if seconds is None else seconds for tier in tiers]
    for future, limit in zip([io.submit(tier.close()) for tier in tiers], limits, strict=True):
        wait([future], timeout=max(0.0, started + limit - time.monotonic()))
    for delivery in {tier.observers for tier in tiers if tier.observers}:
        delivery.close(max(limits))
