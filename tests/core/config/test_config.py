"""The configuration: three notations with one meaning, and every problem in one error."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from pydantic import Field

from offload_core.api.backend import BackendType
from offload_core.api.errors import ConfigError
from offload_core.api.options import BackendOptions
from offload_core.config.limits import Limits
from offload_core.config.loading import load_config
from offload_core.config.model import BackendConfig, OffloadConfig
from offload_core.plugins.registry import PluginRegistry, PluginReport
from tests.support.memory_backend import MemoryBackend

MIB = 1024 * 1024


class BoxOptions(BackendOptions):
    size: int = Field(ge=1, description="boxes")
    label: str = Field(default="none", description="label of each box")
    cls: int = Field(default=0, description="how good they are", alias="class")


REGISTRY = PluginRegistry(
    [BackendType("box", MemoryBackend, BoxOptions)],
    [PluginReport("shelf", "shelf-plugin", "2.0", error="ImportError: no wood")],
)
BOX = {"name": "first", "type": "box", "size": 3}


def load(**keys: object) -> OffloadConfig:
    return load_config({"backends": [BOX], **keys}, REGISTRY)


def problems(keys: dict[str, Any]) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        load_config(keys, REGISTRY)
    error = caught.value
    assert all(problem in str(error) for problem in error.problems)
    return list(error.problems)


def test_defaults_and_given_values() -> None:
    config = load()
    assert config.settings.staging_bytes == 512 * MIB
    assert config.settings.hybrid_chunk_size is None
    (tier,) = config.tiers
    assert (tier.common.name, tier.common.load_weight) == ("first", 1.0)
    assert config.settings.limits.overridden_by(tier.common) == Limits()
    assert tier.backend_type.backend is MemoryBackend
    assert tier.options == BoxOptions(size=3)

    config = load(hybrid_chunk_size=1024, backends=[{**BOX, "load_weight": 4, "io_threads": 7, "label": "blue"}])
    assert config.settings.hybrid_chunk_size == 1024
    (tier,) = config.tiers
    assert (tier.common.load_weight, tier.common.io_threads) == (4.0, 7)
    assert tier.options == BoxOptions(size=3, label="blue")


@pytest.mark.parametrize(
    ("written", "size_bytes"),
    [("512MiB", 512 * MIB), ("1GiB", 1024 * MIB), ("2 MiB", 2 * MIB), ("3MB", 3_000_000), (5 * MIB, 5 * MIB)],
)
def test_sizes(written: str | int, size_bytes: int) -> None:
    assert load(staging_bytes=written).settings.staging_bytes == size_bytes


def test_durations_have_units_or_are_seconds() -> None:
    config = load(
        load_timeout_seconds="1m30s",
        load_timeout_seconds_per_mib="50ms",
        lookup_timeout_seconds=2,
        backends=[{**BOX, "load_timeout_seconds": "2h"}],
    )
    settings = config.settings
    assert (settings.load_timeout_seconds, settings.load_timeout_seconds_per_mib) == (90.0, 0.05)
    assert settings.lookup_timeout_seconds == 2.0
    assert settings.limits.overridden_by(config.tiers[0].common).load_timeout_seconds == 7200.0


YAML = """
hybrid_chunk_size: 256
load_timeout_seconds: 7.5
staging_bytes: 64MiB
backends:
  - {name: fast, type: box, size: 2, load_weight: 10}
  - name: slow
    type: box
    size: 9
    label: red
    load_timeout_seconds: 60
"""
TOML = """
hybrid_chunk_size = 256
load_timeout_seconds = 7.5
staging_bytes = "64MiB"
[[backends]]
name = "fast"
type = "box"
size = 2
load_weight = 10
[[backends]]
name = "slow"
type = "box"
size = 9
label = "red"
load_timeout_seconds = 60
"""
INLINE = {
    "hybrid_chunk_size": 256,
    "load_timeout_seconds": 7.5,
    "staging_bytes": "64MiB",
    "backends": [
        {"name": "fast", "type": "box", "size": 2, "load_weight": 10},
        {"name": "slow", "type": "box", "size": 9, "label": "red", "load_timeout_seconds": 60},
    ],
}


@pytest.mark.parametrize(
    ("name", "text"),
    [("c.yaml", YAML), ("c.yml", YAML), ("c.YAML", YAML), ("c.toml", TOML), ("c.json", json.dumps(INLINE))],
)
def test_a_file_means_what_the_same_keys_mean_inline(tmp_path: Path, name: str, text: str) -> None:
    (tmp_path / name).write_text(text)
    inline = load_config(INLINE, REGISTRY)
    assert load_config({"config_file": str(tmp_path / name)}, REGISTRY) == inline
    assert inline.settings.load_timeout_seconds == 7.5
    assert [tier.common.name for tier in inline.tiers] == ["fast", "slow"]


@pytest.mark.parametrize("written", ["off", '"off"', "false"])
def test_off_may_be_written_without_quotes_in_yaml(tmp_path: Path, written: str) -> None:
    path = tmp_path / "offload.yaml"
    path.write_text(f"io_process: {written}\nbackends: [{{name: ram, type: cpu, capacity: 1GiB}}]\n")
    config = load_config({"config_file": str(path)})
    assert config.settings.io_process == "off"
    assert config.keys["backends"] == [{"name": "ram", "type": "cpu", "capacity": "1GiB"}], "for the I/O process"


def test_the_given_keys_are_left_as_they_are(tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text(YAML)
    given = {"config_file": str(tmp_path / "c.yaml"), "lookup_timeout_seconds": 2}
    assert load_config(given, REGISTRY).settings.lookup_timeout_seconds == 2
    assert given == {"config_file": str(tmp_path / "c.yaml"), "lookup_timeout_seconds": 2}


def test_a_key_in_both_places_is_refused_and_the_file_is_named(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text(YAML)
    with pytest.raises(ConfigError) as caught:
        load_config({"config_file": str(path), "staging_bytes": "1GiB", "hybrid_chunk_size": 16}, REGISTRY)
    assert caught.value.problems == (
        "hybrid_chunk_size: set in the file and inline as well (16); remove one of the two",
        "staging_bytes: set in the file and inline as well ('1GiB'); remove one of the two",
    )
    assert str(caught.value).startswith(f"2 problems in {path} (config_file):\n  - hybrid_chunk_size: ")


ONE_PROBLEM = [
    (
        {"hybrid_chunksize": 16},
        "hybrid_chunksize: unknown key (did you mean 'hybrid_chunk_size'?); valid keys: backends,",
    ),
    ({"xyzzy": 1}, "xyzzy: unknown key; valid keys: backends, breaker_failures,"),
    ({"hybrid_chunk_size": 0}, "hybrid_chunk_size: 0 is not valid: Input should be greater than 0"),
    ({"hybrid_chunk_size": True}, "hybrid_chunk_size: True is not valid: Input should be a valid integer"),
    ({"hybrid_chunk_size": "many"}, "hybrid_chunk_size: 'many' is not valid: Input should be a valid integer"),
    (
        {"staging_bytes": "a lot"},
        "staging_bytes: 'a lot' is not a size; write a number of bytes or a size such as",
    ),
    ({"staging_bytes": "5 parsecs"}, "staging_bytes: '5 parsecs' is not a size; write a number of bytes"),
    ({"staging_bytes": "4KiB"}, "staging_bytes: '4KiB' is not valid: Input should be greater than or equal to 1048576"),
    ({"staging_bytes": "1,5GiB"}, "staging_bytes: '1,5GiB' is not a size; write a number of bytes"),
    ({"staging_bytes": [1]}, "staging_bytes: a list is not a size; write a number of bytes"),
    (
        {"load_timeout_seconds": -1},
        "load_timeout_seconds: -1 is not a duration; write a number of seconds, 0 or more, or a duration such as",
    ),
    ({"load_timeout_seconds": "5"}, "load_timeout_seconds: '5' is not a duration; write a number of seconds"),
    ({"load_timeout_seconds": "0s"}, "load_timeout_seconds: '0s' is not valid: Input should be greater than 0"),
    ({"load_timeout_seconds": math.nan}, "load_timeout_seconds: nan is not a duration; write"),
    ({"shutdown_timeout_seconds": math.inf}, "shutdown_timeout_seconds: inf is not a duration; write"),
    ({"backends": []}, "backends: a list is not valid: List should have at least 1 item"),
    ({"backends": {"name": "first"}}, "backends: a mapping is not valid: Input should be a valid list"),
    ({"backends": ["box"]}, "backends.0: text is not valid: it must hold keys and values"),
    ({"backends": [[BOX]]}, "backends.0: a list is not valid: it must hold keys and values"),
    ({"backends": [{**BOX, "name": ""}]}, "backends.0.name: '' is not valid: String should have at least 1 character"),
    (
        {"backends": [{**BOX, "name": "all"}]},
        "backends.0.name: 'all' is not valid: metrics use this name for all",
    ),
    ({"backends": [{**BOX, "name": "a\nb"}]}, "backends.0.name: 'a\\nb' is not valid: the name must be of printable"),
    ({"backends": [{**BOX, "name": " a"}]}, "backends.0.name: ' a' is not valid: the name must be of printable"),
    ({"backends": [{**BOX, "io_threads": True}]}, "backends.0.io_threads: True is not valid: Input should be a valid"),
    (
        {"backends": [{**BOX, "load_timeout_seconds": "soon"}]},
        "backends.0.load_timeout_seconds: 'soon' is not a duration; write",
    ),
    ({"model_identity": ""}, "model_identity: '' is not valid: String should have at least 1 character"),
    ({"model_identity": "x" * 201}, f"model_identity: '{'x' * 20}"),
    ({"model_identity": " "}, "model_identity: ' ' is not valid: the name must be of printable characters, without"),
    ({"model_identity": "a\nb"}, "model_identity: 'a\\nb' is not valid: the name must be of printable characters"),
    ({"model_identity": 7}, "model_identity: 7 is not valid: Input should be a valid string"),
    ({"geometry_file": "g.txt"}, "geometry_file: 'g.txt' is not valid: the name must end in .json, .yaml or .yml"),
    ({"geometry_file": 7}, "geometry_file: 7 is not valid: Input is not a valid path"),
    ({"backends": [{"type": "box", "size": 1}]}, "backends.0.name: missing; add it"),
    ({"backends": [{"name": "first"}]}, "backends.0.type: missing; add it"),
    (
        {"backends": [{**BOX, "io_threads": 0}]},
        "backends.0.io_threads: 0 is not valid: Input should be greater than or",
    ),
    (
        {"backends": [{**BOX, "load_weight": math.inf}]},
        "backends.0.load_weight: inf is not valid: Input should be a",
    ),
    ({"backends": [{"name": "a", "type": "box"}]}, "backends.0.size: missing; add it"),
    ({"backends": [BOX, {**BOX, "name": "b", "size": 0}]}, "backends.1.size: 0 is not valid: Input should be greater"),
    (
        {"backends": [{**BOX, "labl": "x"}]},
        "backends.0.labl: unknown key (did you mean 'label'?); valid keys: "
        + ", ".join(sorted({*BackendConfig.model_fields, "class", "label", "size"})),
    ),
    (
        {"backends": [{**BOX, "clas": 1}]},
        "backends.0.clas: unknown key (did you mean 'class'?); valid keys: breaker_failures,",
    ),
    (
        {"backends": [{**BOX, "io_thread": 2}]},
        "backends.0.io_thread: unknown key (did you mean 'io_threads'?); valid keys:",
    ),
    (
        {"backends": [{**BOX, "type": "bux"}]},
        "backends.0.type: no plugin provides the backend type 'bux' (did you mean 'box'?); known types: box; "
        "install the package that provides it (entry point group 'offload_core')\n"
        "    plugins that failed and might provide it:\n"
        "      - plugin 'shelf' of shelf-plugin 2.0: ImportError: no wood",
    ),
]


@pytest.mark.parametrize(("keys", "expected"), ONE_PROBLEM, ids=[text[:60] for _, text in ONE_PROBLEM])
def test_a_problem_names_the_path_the_value_and_the_cure(keys: dict[str, Any], expected: str) -> None:
    (problem,) = problems({"backends": [BOX], **keys})
    assert problem.startswith(expected)


def test_a_key_that_is_no_text_is_refused() -> None:
    given: dict[Any, Any] = {"backends": [{**BOX, 7: "seven"}], None: 1}
    assert problems(given) == [
        "backends.0.7: a key must be text; put it in quotes",
        "None: a key must be text; put it in quotes",
    ]


def test_every_problem_is_in_one_error(tmp_path: Path) -> None:
    keys = {
        "staging_byte": "1GiB",
        "hybrid_chunk_size": "x",
        "load_timeout_seconds": 0,
        "backends": [
            {"name": "twin", "type": "box", "size": 0, "colour": "red", "load_weight": -2},
            {"name": "twin", "type": "bix"},
            "not a table",
            {"type": "box"},
        ],
    }
    path = tmp_path / "all.json"
    path.write_text(json.dumps(keys))
    found = problems({"config_file": str(path), "hybrid_chunk_size": 16})
    assert sorted(problem.split(":")[0] for problem in found) == sorted(
        [
            "hybrid_chunk_size",  # in both places; the inline one is valid and wins
            "staging_byte",
            "load_timeout_seconds",
            "backends.0.name",
            "backends.0.size",
            "backends.0.colour",
            "backends.0.load_weight",
            "backends.1.name",
            "backends.1.type",
            "backends.2",
            "backends.3.name",
            "backends.3.size",
        ]
    )
    assert [p for p in found if "twin" in p] == [
        f"backends.{index}.name: 'twin' is used by 2 backends; give each a name of its own" for index in (0, 1)
    ]


def test_the_installed_plugins_are_used_by_default(tmp_path: Path) -> None:
    config = load_config({"backends": [{"name": "d", "type": "disk", "path": str(tmp_path)}]})
    assert config.tiers[0].backend_type.name == "disk"
