"""The configuration of ``WeightedMultiConnector``: its connectors with their weights, and the limits of its waits."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

from offload_core.api.errors import ConfigError, did_you_mean
from offload_core.api.options import Seconds
from offload_core.config.limits import Limits
from offload_core.config.problems import validate

_DEFAULTS = Limits()


class ConnectorEntry(BaseModel):
    """The keys of an entry of ``connectors`` that vLLM does not have, and the class."""

    model_config = ConfigDict(extra="allow", frozen=True, allow_inf_nan=False)

    kv_connector: Annotated[
        str,
        Field(min_length=1, description="Class of the connector, as in vLLM.", examples=["HybridOffloadConnector"]),
    ]
    name: Annotated[
        str | None,
        Field(
            min_length=1,
            max_length=100,
            description="Unique name of the connector, used in logs and metrics. If unset, the name of its class.",
            examples=["nvme"],
        ),
    ] = None
    load_weight: Annotated[
        float,
        Field(
            gt=0,
            strict=True,
            description="Preference for loads: the connector with the most tokens times weight serves a load.",
            examples=[4],
        ),
    ] = 1.0


class ChoiceLimits(BaseModel):
    """The limits of the choice among connectors."""

    model_config = ConfigDict(frozen=True, allow_inf_nan=False)

    lookup_timeout_seconds: Annotated[
        Seconds,
        Field(gt=0, description="Longest wait of a request for undecided connectors. Then they count as misses."),
    ] = 2.0
    lookup_grace_seconds: Annotated[
        Seconds,
        Field(description="Wait for undecided connectors after another one has found something to load."),
    ] = _DEFAULTS.lookup_grace_seconds
    breaker_failures: Annotated[
        int,
        Field(
            ge=1,
            strict=True,
            description="Errors of a connector in a row, or missed deadlines, after which it gets a pause.",
        ),
    ] = _DEFAULTS.breaker_failures
    breaker_pause_seconds: Annotated[
        Seconds,
        Field(gt=0, description="First pause of a failing connector. Each further pause is twice as long."),
    ] = _DEFAULTS.breaker_pause_seconds
    breaker_max_pause_seconds: Annotated[
        Seconds,
        Field(gt=0, description="Longest pause of a failing connector."),
    ] = _DEFAULTS.breaker_max_pause_seconds


class MultiConnectorSettings(ChoiceLimits):
    """The keys of ``kv_connector_extra_config``."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    connectors: Annotated[
        list[ConnectorEntry],
        Field(min_length=1, description="Connectors, each as vLLM's MultiConnector has them, with the keys below."),
    ]


OWN_KEYS = frozenset({"name", "load_weight"})
"""The keys of an entry that vLLM does not know."""


@dataclass(frozen=True)
class MultiConnectorConfig:
    """A checked configuration.

    Args:
        names: the connectors' names in order, each unique.
        weights: their weights.
        entries: their entries without the keys that vLLM does not know.
    """

    names: tuple[str, ...]
    weights: tuple[float, ...]
    entries: tuple[dict[str, Any], ...]
    limits: ChoiceLimits


def load_connectors(extra_config: Mapping[str, Any], engine_keys: Collection[str]) -> MultiConnectorConfig:
    """Validate the ``kv_connector_extra_config`` of a ``WeightedMultiConnector``.

    Args:
        engine_keys: the keys that vLLM knows in an entry of ``connectors``.

    Raises:
        ConfigError: with every problem.
    """
    settings, problems = validate(MultiConnectorSettings, extra_config, prefix="")
    raw = extra_config.get("connectors")
    entries = [dict(entry) for entry in raw if isinstance(entry, Mapping)] if isinstance(raw, list) else []
    valid_keys = sorted({*engine_keys, *OWN_KEYS})
    for place, entry in enumerate(entries):
        problems += [
            f"connectors.{place}.{key}: unknown key{did_you_mean(str(key), valid_keys)}; "
            f"valid keys: {', '.join(valid_keys)}"
            for key in entry
            if key not in valid_keys
        ]
    given = Counter(entry.get("name") for entry in entries if isinstance(entry.get("name"), str))
    problems += [
        f"connectors.{place}.name: {name!r} is used by {given[name]} connectors; give each a name of its own"
        for place, entry in enumerate(entries)
        if given.get(name := entry.get("name"), 0) > 1
    ]
    stock = [{key: value for key, value in entry.items() if key not in OWN_KEYS} for entry in entries]
    problems += [
        f"connectors.{place}: the same as connectors.{stock.index(entry)}, but for its name and weight; "
        "remove one of the two"
        for place, entry in enumerate(stock)
        if stock.index(entry) < place
    ]
    if problems or settings is None:
        raise ConfigError(problems)
    return MultiConnectorConfig(
        names=_names(settings.connectors),
        weights=tuple(entry.load_weight for entry in settings.connectors),
        entries=tuple(stock),
        limits=settings,
    )


def _names(entries: Collection[ConnectorEntry]) -> tuple[str, ...]:
    """Return each connector's own name, or its class with a number behind the second one of it."""
    taken = {entry.name for entry in entries if entry.name is not None}
    names: list[str] = []
    for entry in entries:
        name, number = entry.name, 1
        while name is None or (entry.name is None and name in taken):
            name = entry.kv_connector if number == 1 else f"{entry.kv_connector}-{number}"
            number += 1
        taken.add(name)
        names.append(name)
    return tuple(names)
