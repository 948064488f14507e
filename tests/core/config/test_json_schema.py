"""The JSON schema agrees with the reader of configurations, wherever JSON schema can express it."""

from __future__ import annotations

import json
from typing import Annotated, Any

import jsonschema
import pytest
from hypothesis import event, given
from hypothesis import strategies as st
from pydantic import ConfigDict, Field, SecretStr

from offload_core.api.backend import BackendType
from offload_core.api.errors import ConfigError
from offload_core.api.options import BackendOptions, Bytes, Seconds
from offload_core.config.json_schema import config_schema
from offload_core.config.loading import load_config
from offload_core.config.model import BackendConfig, OffloadSettings
from offload_core.plugins.registry import PluginRegistry
from tests.support.memory_backend import MemoryBackend


class Shelf(BackendOptions):
    rows: Annotated[int, Field(strict=True, ge=1, description="rows")] = 1
    above: Shelf | None = Field(None, description="the next one")


class BoxOptions(BackendOptions):
    """A box."""

    capacity: Annotated[Bytes, Field(ge=1024, description="room")]
    pause: Annotated[Seconds, Field(description="rest")] = 0.5
    label: Annotated[str, Field(description="label of the box", alias="text")] = ""
    shelf: Shelf | None = Field(None, description="where it stands")
    key: SecretStr = Field(description="what opens it")


class Odd:
    """A type that pydantic has no JSON schema for."""


class OddOptions(BackendOptions):
    model_config = ConfigDict(arbitrary_types_allowed=True)
    odd: Odd | None = Field(None, description="odd")
    lock: SecretStr | None = Field(None, description="what opens it")


REGISTRY = PluginRegistry(
    [
        BackendType("box", MemoryBackend, BoxOptions),
        BackendType("shelf", MemoryBackend, Shelf),
        BackendType("odd", MemoryBackend, OddOptions),
    ],
    [],
)
SCHEMA = config_schema(REGISTRY)
VALIDATOR = jsonschema.Draft202012Validator(SCHEMA)
BOX = {"name": "a", "type": "box", "capacity": "1GiB"}


class EveryKey(dict[str, str]):
    """An environment in which every variable is set, but for keys that need ``encryption`` beside them."""

    def get(self, key: str, default: Any = None) -> Any:
        return "" if key.endswith("_ENCRYPTION_KEYS") else "secret"

    def __missing__(self, key: str) -> str:
        return "secret"


def problems(config: dict[str, Any]) -> list[str]:
    try:
        load_config(config, REGISTRY, EveryKey())
    except ConfigError as error:
        return [problem for problem in error.problems if "encryption: there is no key" not in problem]
    return []


def test_the_schema_is_a_valid_one_and_plain_json() -> None:
    jsonschema.Draft202012Validator.check_schema(SCHEMA)
    assert json.loads(json.dumps(SCHEMA)) == SCHEMA
    assert SCHEMA["$schema"] == "https://json-schema.org/draft/2020-12/schema"


def test_every_key_has_its_description_and_its_default() -> None:
    for name, field in OffloadSettings.model_fields.items():
        assert SCHEMA["properties"][name]["description"] == field.description
        assert name == "backends" or SCHEMA["properties"][name]["default"] == field.default
    box = SCHEMA["$defs"]["box"]
    assert set(box["properties"]) == {*BackendConfig.model_fields, "capacity", "pause", "text", "shelf"}
    for option in (box["properties"][name] for name in box["properties"]):
        assert option["description"]
    assert box["properties"]["type"]["const"] == "box"
    assert box["required"] == ["name", "type", "capacity"]
    assert box["additionalProperties"] is False


def test_every_example_in_the_schema_is_accepted() -> None:
    shown = [(name, example) for name, part in SCHEMA["properties"].items() for example in part.get("examples", [])]
    assert ("staging_bytes", "512MiB") in shown
    for name, example in shown:
        assert problems({"backends": [BOX], name: example}) == []


def test_secrets_are_named_in_the_description_only() -> None:
    assert "key (OFFLOAD_CORE_<TIER NAME>_KEY)" in SCHEMA["$defs"]["box"]["description"]
    assert not VALIDATOR.is_valid({"backends": [{**BOX, "key": "x"}]})
    assert not VALIDATOR.is_valid({"backends": [{"name": "a", "type": "odd", "lock": "x"}]})


def test_options_that_json_schema_cannot_describe_are_left_open() -> None:
    assert VALIDATOR.is_valid({"backends": [{"name": "a", "type": "odd", "odd": [1]}]})
    assert not VALIDATOR.is_valid({"backends": [{"name": "a", "type": "odd", "io_threads": 0}]})


def test_types_may_have_parts_of_the_same_name() -> None:
    other = type("Shelf", (BackendOptions,), {"__annotations__": {"depth": int}})
    options = type("CupboardOptions", (BackendOptions,), {"__annotations__": {"shelf": other}})
    types = [*REGISTRY.backend_types.values(), BackendType("cupboard", MemoryBackend, options)]
    validator = jsonschema.Draft202012Validator(config_schema(PluginRegistry(types, [])))
    cupboard = {"name": "b", "type": "cupboard", "shelf": {"depth": 3}}
    assert validator.is_valid({"backends": [{**BOX, "shelf": {"rows": 3}}, cupboard]})
    assert not validator.is_valid({"backends": [{**BOX, "shelf": {"depth": 3}}]})
    assert not validator.is_valid({"backends": [{**cupboard, "shelf": {"rows": 3}}]})


def test_without_plugins_no_backend_is_valid() -> None:
    schema = config_schema(PluginRegistry([], []))
    jsonschema.Draft202012Validator.check_schema(schema)
    assert not jsonschema.Draft202012Validator(schema).is_valid({"backends": [BOX]})


WRONG = [
    {},
    {"backends": []},
    {"backends": BOX},
    {"backends": [[BOX]]},
    {"backends": [BOX], "backend": []},
    {"backends": [BOX], "staging_bytes": "1,5GiB"},
    {"backends": [BOX], "staging_bytes": 1000},
    {"backends": [BOX], "staging_bytes": True},
    {"backends": [BOX], "load_timeout_seconds": 0},
    {"backends": [BOX], "load_timeout_seconds": -1},
    {"backends": [BOX], "load_timeout_seconds": "5"},
    {"backends": [BOX], "hybrid_chunk_size": "256"},
    {"backends": [BOX], "offload_prompt_only": "yes"},
    {"backends": [{"name": "a", "type": "box"}]},
    {"backends": [{**BOX, "type": "bux"}]},
    {"backends": [{**BOX, "name": ""}]},
    {"backends": [{**BOX, "colour": "red"}]},
    {"backends": [{**BOX, "label": "by its field's name"}]},
    {"backends": [{**BOX, "rows": 2}]},
    {"backends": [{**BOX, "capacity": 1023}]},
    {"backends": [{**BOX, "pause": -1}]},
    {"backends": [{**BOX, "load_timeout_seconds": 0}]},
    {"backends": [{**BOX, "load_weight": True}]},
    {"backends": [{**BOX, "io_threads": 257}]},
    {"backends": [{**BOX, "shelf": {"rows": 0}}]},
    {"backends": [{**BOX, "shelf": {"above": {"rows": 2, "below": 1}}}]},
    {"backends": [{"name": "a", "type": "shelf", "above": {"rows": "2"}}]},
]


@pytest.mark.parametrize("config", WRONG, ids=str)
def test_what_is_refused_is_refused_by_the_schema(config: dict[str, Any]) -> None:
    assert problems(config)
    assert not VALIDATOR.is_valid(config)


SCALARS: list[object] = [None, True, 0, 1, 4, 2048, 2**21, -1, 0.5, 3.0, 300]
WORDS: list[object] = ["", "1", "4KiB", "1 GiB", "5 parsecs", "30s", "0s", "1h 2m", "a"]
VALUES: st.SearchStrategy[object] = st.sampled_from([*SCALARS, *WORDS, [], {}])


DURATIONS = st.sampled_from([4, 0.5, "30s"])
SHELVES = st.recursive(
    st.fixed_dictionaries({}, optional={"rows": st.just(4)}),
    lambda inner: st.fixed_dictionaries({}, optional={"rows": st.just(1), "above": inner | st.none()}),
    max_leaves=3,
)
COMMON = {"load_weight": st.just(0.5), "load_timeout_seconds": DURATIONS | st.none(), "io_threads": st.just(256)}
BOXES = st.fixed_dictionaries(
    {"name": st.sampled_from(["a", "b"]), "type": st.just("box"), "capacity": st.sampled_from([1024, "4KiB"])},
    optional={**COMMON, "pause": st.sampled_from([0, "0s"]), "text": st.just(""), "shelf": SHELVES | st.none()},
)
LOOSE = st.fixed_dictionaries(
    {"name": st.sampled_from(["c", "d"]), "type": st.just("shelf")}, optional={**COMMON, "rows": st.just(1)}
)
GOOD: st.SearchStrategy[dict[str, Any]] = st.fixed_dictionaries(
    {"backends": st.lists(BOXES | LOOSE, min_size=1, max_size=2, unique_by=lambda entry: entry["name"])},
    optional={
        "hybrid_chunk_size": st.sampled_from([None, 2048]),
        "offload_prompt_only": st.booleans(),
        "staging_bytes": st.sampled_from([2**21, "1 GiB"]),
        **{name: DURATIONS for name in OffloadSettings.model_fields if "_timeout_" in name},
    },
)


@st.composite
def configs(draw: st.DrawFn) -> dict[str, Any]:
    """A good configuration with up to two values in wrong places."""
    config: dict[str, Any] = draw(GOOD)
    places: list[dict[str, Any]] = [config, *config["backends"]]
    places += [entry["shelf"] for entry in config["backends"] if entry.get("shelf")]
    for _ in range(draw(st.integers(0, 2))):
        place = draw(st.sampled_from(places))
        keys = [*place, "unknown", "above", "io_threads", "backends"]
        place[draw(st.sampled_from(keys))] = draw(VALUES | st.just([BOX]))
    return config


@given(config=configs())
def test_the_schema_says_what_reading_says(config: dict[str, Any]) -> None:
    found = [
        problem
        for problem in problems(config)
        # A limit on what a string stands for, and names that must differ, are beyond JSON schema.
        if "' is not valid: Input should be greater than" not in problem and " is used by 2 backends" not in problem
    ]
    event("accepted" if not found else "refused")
    # JSON has one kind of number: 3.0 is an integer to the schema, and none to a strict field.
    if not any("Input should be a valid integer" in problem and ": 3.0 is" in problem for problem in found):
        assert VALIDATOR.is_valid(config) == (not found), found
