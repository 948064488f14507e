"""Odd values of every numeric option: each is refused by the option's name, or works."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
from pydantic import BaseModel

from offload_core.api.errors import ConfigError
from offload_core.config.loading import load_config
from offload_core.config.model import BackendConfig, OffloadSettings
from offload_core.plugins.registry import load_plugins
from tests.core.cli.conftest import Site

ODD_VALUES: Mapping[str, Any] = {
    "huge": 10**400, "negative": -1, "1e308": 1e308, "nan": math.nan, "inf": math.inf, "zero": 0,
    "digits": "1" * 400 + "GiB", "9e18": 9 * 10**18, "true": True, "list": [1], "years": "520w",
}  # fmt: skip
TIERS: Mapping[str, Mapping[str, Any]] = {
    "disk": {},
    "nfs": {"url": "memory://hostile-numbers"},
    "cpu": {"capacity": "1MiB"},
    "lmcache": {"address": "127.0.0.1:1"},
    "mooncake": {"master": "127.0.0.1:1"},
    "nixl": {"plugin": "POSIX"},
}
OPENED = ("disk", "nfs", "cpu")
"""Types whose tiers need no server."""


def numeric_options(model: type[BaseModel]) -> Iterator[str]:
    for name, field in model.model_fields.items():
        if field.annotation is not bool and ("int" in str(field.annotation) or "float" in str(field.annotation)):
            yield name


def options() -> Iterator[tuple[str, str, str]]:
    """Yield each numeric option: a type of tier, the place of the option, and its name."""
    yield from (("disk", "top", name) for name in numeric_options(OffloadSettings) if name != "backends")
    yield from (("disk", "tier", name) for name in numeric_options(BackendConfig))
    for type_name in TIERS:
        own = load_plugins().backend_type(type_name).options
        yield from ((type_name, "tier", name) for name in numeric_options(own))


def test_every_bundled_type_has_a_tier_here() -> None:
    assert set(load_plugins().backend_types) == set(TIERS)


@pytest.mark.parametrize(("type_name", "place", "option"), list(options()))
def test_an_odd_value_is_refused_by_name_or_works(site: Site, type_name: str, place: str, option: str) -> None:
    for value in ODD_VALUES.values():
        tier: dict[str, Any] = {"name": "kv", "type": type_name, **TIERS[type_name]}
        if type_name in ("disk", "nixl"):
            tier["path"] = str(site.path("kv"))
        settings = {option: value} if place == "top" else {}
        if place == "tier":
            tier[option] = value
        try:
            load_config({"backends": [tier], **settings})
        except ConfigError as error:
            path = option if place == "top" else f"backends.0.{option}"
            if not any(problem.startswith(path) or option in problem for problem in error.problems):
                pytest.fail(f"{value!r}: no problem names the option: {error.problems}")
            continue
        if type_name in OPENED:
            config = site.folder / "offload.json"
            config.write_text(json.dumps({"shutdown_timeout_seconds": 1, **settings, "backends": [tier]}))
            done = site.invoke("check", str(config))  # an exception would pass through
            assert done.code in (0, 1), done.err
