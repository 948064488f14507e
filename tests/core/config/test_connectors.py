"""The configuration of several connectors: names, weights, and every problem at once."""

from __future__ import annotations

from typing import Any

import pytest

from offload_core.api.errors import ConfigError
from offload_core.config.connectors import load_connectors

ENGINE_KEYS = ("kv_connector", "kv_connector_module_path", "kv_role", "kv_connector_extra_config")


def test_a_connector_without_a_name_has_that_of_its_class() -> None:
    entries: list[dict[str, Any]] = [
        {"kv_connector": "A", "load_weight": 4, "kv_role": "kv_both"},
        {"kv_connector": "A", "kv_connector_module_path": "one"},
        {"kv_connector": "A", "kv_connector_module_path": "two", "name": "A-3"},
        {"kv_connector": "A", "kv_connector_module_path": "three"},
        {"kv_connector": "B", "name": "A"},
    ]
    config = load_connectors({"connectors": entries, "lookup_timeout_seconds": "500ms"}, ENGINE_KEYS)
    assert list(config.names) == ["A-2", "A-4", "A-3", "A-5", "A"]
    assert list(config.weights) == [4, 1, 1, 1, 1]
    assert config.entries[0] == {"kv_connector": "A", "kv_role": "kv_both"}
    assert config.limits.lookup_timeout_seconds == 0.5


def test_every_problem_is_named_with_its_cure() -> None:
    entries: list[Any] = [
        {"kv_connector": "A", "name": "one", "lod_weight": 3},
        {"kv_connector": "B", "name": "one", "load_weight": 0},
        {"kv_rol": "kv_both"},
        {"kv_connector": "B", "name": "two"},
    ]
    with pytest.raises(ConfigError) as failure:
        load_connectors({"connectors": entries, "lookup_timeout": 3}, ENGINE_KEYS)
    for part in (
        "connectors.0.lod_weight: unknown key (did you mean 'load_weight'?); valid keys: kv_connector, ",
        "connectors.1.load_weight: 0 is not valid",
        "connectors.2.kv_connector: missing; add it",
        "connectors.2.kv_rol: unknown key (did you mean 'kv_role'?)",
        "connectors.3: the same as connectors.1, but for its name and weight; remove one of the two",
        "connectors.0.name: 'one' is used by 2 connectors; give each a name of its own",
        "lookup_timeout: unknown key (did you mean 'lookup_timeout_seconds'?)",
    ):
        assert part in str(failure.value), part


@pytest.mark.parametrize("connectors", [None, [], "A", [3]])
def test_there_must_be_connectors(connectors: object) -> None:
    with pytest.raises(ConfigError, match="connectors"):
        load_connectors({"connectors": connectors}, ENGINE_KEYS)
