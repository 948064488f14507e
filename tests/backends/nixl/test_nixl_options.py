"""The options of the nixl type: each refusal names the thing, the value and the cure."""

from __future__ import annotations

from typing import Any

import pydantic
import pytest
from offload_backend_nixl.options import NixlOptions
from offload_backend_nixl.plugin import NIXL

from offload_core.api import BackendContext, ConfigError
from offload_core.config.loading import load_config
from offload_core.runtime.threads import DaemonExecutor

pytestmark = pytest.mark.needs_no_nixl

OBJ = {"plugin": "OBJ", "params": {"bucket": "kv"}}


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({}, "plugin"),
        ({"plugin": "UCX"}, "'POSIX', 'GDS', 'GDS_MT' or 'OBJ'"),
        ({"plugin": "POSIX"}, "plugin POSIX needs a folder; add path"),
        ({"plugin": "GDS"}, "plugin GDS needs a folder; add path"),
        ({"plugin": "POSIX", "path": "~nobody-here/kv"}, "name a folder that this process may use"),
        ({"plugin": "POSIX", "path": "/no/such/kv"}, "the parent folder /no/such does not exist"),
        ({"plugin": "POSIX", "path": "/tmp/kv", "prefix": "a"}, "prefix: only the plugin OBJ has it"),
        ({"plugin": "POSIX", "path": "/tmp/kv", "secret_key": "a"}, "secret_key: only the plugin OBJ has it"),
        ({"plugin": "OBJ"}, "needs the name of a bucket; add params: {bucket: NAME}"),
        ({**OBJ, "path": "/tmp/kv"}, "the plugin OBJ keeps objects in a bucket; remove path"),
        ({**OBJ, "access_key": "a"}, "one of access_key and secret_key is missing"),
        (
            {"plugin": "OBJ", "params": {"bucket": "kv", "endpoint_override": "10.0.0.7:9000"}},
            "10.0.0.7:9000 has no scheme; write http://10.0.0.7:9000 or https://10.0.0.7:9000",
        ),
        ({**OBJ, "prefix": "/a"}, "'/a' is no prefix of object names"),
        ({**OBJ, "prefix": "a//b"}, "is no prefix of object names"),
        ({**OBJ, "prefix": "../b" * 60}, "is no prefix of object names"),
        ({**OBJ, "ring": "1KiB"}, "greater than or equal to 1048576"),
        ({**OBJ, "transfer_timeout_seconds": 0}, "greater than or equal to 1"),
        ({**OBJ, "bucket": "kv"}, "Extra inputs are not permitted"),
        ({**OBJ, "params": {"bucket": ["kv"]}}, "string"),
    ],
)
def test_a_refusal_names_the_cure(given: dict[str, Any], message: str) -> None:
    with pytest.raises(pydantic.ValidationError) as refused:
        NixlOptions(**given)
    assert message in str(refused.value)


@pytest.mark.parametrize(
    "params", [{"secret_key": "hunter2"}, {"endpoint_override": "http://me:hunter2@store"}], ids=["key", "address"]
)
def test_credentials_in_params_are_refused_with_the_places_for_them(params: dict[str, str]) -> None:
    tier = {"name": "kv", "type": "nixl", "plugin": "OBJ", "params": {"bucket": "kv", **params}}
    with pytest.raises(ConfigError) as refused:
        load_config({"backends": [tier]})
    (problem,) = refused.value.problems
    assert problem.startswith(f"backends.0.params.{next(iter(params))}: holds a credential; remove it")
    assert "OFFLOAD_CORE_<TIER NAME>_ACCESS_KEY" in problem
    assert "hunter2" not in problem


@pytest.mark.parametrize("path", ["", " ", "/", "/tmp/.."])
def test_no_folder_and_the_root_are_refused(path: str) -> None:
    with pytest.raises(pydantic.ValidationError, match="name a folder"):
        NixlOptions.model_validate({"plugin": "POSIX", "path": path})


def test_numbers_and_booleans_of_yaml_become_texts() -> None:
    params = {"bucket": "kv", "num_threads": 4, "use_virtual_addressing": True}
    options = NixlOptions.model_validate({"plugin": "OBJ", "params": params})
    assert options.params == {"bucket": "kv", "num_threads": "4", "use_virtual_addressing": "true"}


def test_secrets_are_hidden_and_reach_the_child() -> None:
    options = NixlOptions.model_validate({**OBJ, "access_key": "me", "secret_key": "hunter2"})
    assert "hunter2" not in repr(options)
    assert options.child_settings()["credentials"] == {"access_key": "me", "secret_key": "hunter2"}


@pytest.mark.parametrize(("given", "medium"), [(OBJ, "remote"), ({"plugin": "POSIX", "path": "/tmp/kv"}, "disk")])
def test_the_medium_follows_the_plugin(given: dict[str, Any], medium: str) -> None:
    backend = NIXL.backend(NixlOptions(**given), BackendContext("fabric", DaemonExecutor(1, "none")))
    capabilities = backend.capabilities
    assert (capabilities.medium, capabilities.shared, capabilities.persistent) == (medium, True, True)
