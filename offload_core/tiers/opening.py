"""Opens and closes all tiers of a configuration at once, so that one which hangs costs no more than its deadline."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from concurrent.futures import Future, wait

from offload_core.api.errors import ConfigError, PluginError
from offload_core.config.model import OffloadConfig
from offload_core.plugins.loading import PLUGIN_ERRORS
from offload_core.plugins.observers import EventDelivery
from offload_core.runtime.io_loop import IoLoop
from offload_core.runtime.metrics import Counters
from offload_core.tiers.tier import Tier

logger = logging.getLogger(__name__)


def open_tiers(config: OffloadConfig, io: IoLoop, counters: Counters, *, only_shared: bool = False) -> list[Tier]:
    """Construct every tier of ``config``, wrapped by its plugins and with their observers, and open them all.

    One that does not come back from opening by its deadline is not used until it does.

    Args:
        only_shared: leave tiers closed whose medium this process could not see anyway.

    Raises:
        ConfigError: one or more tiers could not be opened, each with its reason.
    """
    for report in config.plugins.reports:
        if report.error:
            logger.warning("%s failed, and nothing of it is used: %s", report, report.error)
    observers = config.plugins.observers
    delivery = EventDelivery(observers, counters) if observers else None
    tiers: list[Tier] = []
    opening: list[tuple[Tier, Future[None]]] = []
    problems: list[str] = []
    started = time.monotonic()
    for tier_config in config.tiers:
        try:
            tier = Tier(tier_config, config.settings.limits, counters, config.plugins, delivery)
        except PLUGIN_ERRORS as error:  # a plugin may raise anything; the other tiers' problems are to be told too
            problems.append(_cannot_be_opened(tier_config.common.name, error))
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
            problems.append(_cannot_be_opened(tier.name, error))
    if problems:
        for tier in tiers:
            io.submit(tier.close())
        raise ConfigError(problems, "backends")
    for tier, future in opening:
        if not future.done():
            tier.health.opening_hangs()
    return tiers


def _cannot_be_opened(name: str, error: BaseException) -> str:
    if isinstance(error, ConfigError):
        return f"backend {name!r} cannot be opened: {'; '.join(error.problems)}"
    reason = error if isinstance(error, OSError | PluginError) else f"{type(error).__name__}: {error}"
    return f"backend {name!r} cannot be opened: {reason}"


def close_tiers(tiers: Sequence[Tier], io: IoLoop, seconds: float | None = None) -> None:
    """Close all tiers at once; a hung medium must not hold up the process's end.

    Observers have as long again, for the events that still wait.

    Args:
        seconds: how long to wait for each, from now on; by default its own ``close_timeout_seconds``.
    """
    started = time.monotonic()
    limits = [tier.limits.close_timeout_seconds if seconds is None else seconds for tier in tiers]
    for future, limit in zip([io.submit(tier.close()) for tier in tiers], limits, strict=True):
        wait([future], timeout=max(0.0, started + limit - time.monotonic()))
    for delivery in {tier.observers for tier in tiers if tier.observers}:
        delivery.close(max(limits))
