"""Opens and closes all tiers of a configuration at once, so that one which hangs costs only its deadline."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from concurrent.futures import Future, wait

from offload_core.config import OffloadConfig
from offload_core.errors import ConfigError, PluginError
from offload_core.event_delivery import EventDelivery
from offload_core.plugin_loading import FOREIGN_ERRORS
from offload_core.runtime import IoLoop
from offload_core.stats import Counters
from offload_core.tier import Tier

logger = logging.getLogger(__name__)


def open_tiers(config: OffloadConfig, io: IoLoop, counters: Counters, *, only_shared: bool = False) -> list[Tier]:
    """Construct every tier of ``config``, wrapped by its plugins and with their observers, and open them all.

    Args:
        only_shared: leave tiers closed whose medium this process could not see anyway.

    Raises:
        ConfigError: one or more tiers could not be opened, each with its reason.
    """
    settings = config.settings
    for report in config.plugins.reports:
        if report.error:
            logger.warning("%s failed, and nothing of it is used: %s", report, report.error)
    observers = config.plugins.observers
    delivery = EventDelivery(observers, counters) if observers else None
    tiers: list[Tier] = []
    opening: list[tuple[Tier, Future[None]]] = []
    problems: list[str] = []
    for tier_config in config.tiers:
        try:
            tier = Tier(
                tier_config,
                settings.load_timeout_seconds,
                counters,
                config.plugins,
                delivery,
                store_timeout_seconds=settings.store_timeout_seconds,
            )
        except FOREIGN_ERRORS as error:  # a plugin may raise anything; the other tiers' problems are to be told too
            problems.append(_cannot_be_opened(tier_config.common.name, error))
            continue
        tiers.append(tier)
        if tier.capabilities.shared or not only_shared:
            opening.append((tier, io.submit(tier.open())))
    wait([future for _, future in opening], timeout=settings.open_timeout_seconds)
    for tier, future in opening:
        if not future.done():
            problems.append(
                f"backend {tier.name!r} did not open within open_timeout_seconds = {settings.open_timeout_seconds}; "
                "check that its medium answers, or raise the limit"
            )
            continue
        try:
            future.result()
        except Exception as error:
            problems.append(_cannot_be_opened(tier.name, error))
    if problems:
        for tier in tiers:
            io.submit(tier.close())
        raise ConfigError(problems, "backends")
    return tiers


def _cannot_be_opened(name: str, error: BaseException) -> str:
    if isinstance(error, ConfigError):
        return f"backend {name!r} cannot be opened: {'; '.join(error.problems)}"
    reason = error if isinstance(error, OSError | PluginError) else f"{type(error).__name__}: {error}"
    return f"backend {name!r} cannot be opened: {reason}"


def close_tiers(tiers: Sequence[Tier], io: IoLoop, seconds: float = 1.0) -> None:
    """Close every tier, waiting at most ``seconds`` in all: a hung medium must not hold up the process's end.

    Observers have as long again for the events that still wait.
    """
    wait([io.submit(tier.close()) for tier in tiers], timeout=seconds)
    for delivery in {tier.observers for tier in tiers if tier.observers}:
        delivery.close(seconds)
