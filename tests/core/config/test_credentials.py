"""Credentials in a configuration are refused before any other check, and no output shows them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given
from hypothesis import strategies as st
from typer.testing import CliRunner

from offload_core.api.checks.credentials import MASK, holds_credential, is_credential_name, without_credentials
from offload_core.api.errors import ConfigError
from offload_core.cli import app
from offload_core.config.loading import load_config
from tests.support.random_examples import examples

SECRET = "hunter2/canary+9"

CREDENTIAL_NAMES = [
    "Authorization", "authorization", "Proxy-Authorization", "x-api-key", "X-Api-Key", "apiKey", "APIKEY", "api_key",
    "session-token", "sessionToken", "X-Amz-Security-Token", "token", "authToken", "refresh_token", "cookie",
    "Set-Cookie", "secret", "clientSecret", "AWS_SECRET_ACCESS_KEY", "aws_access_key_id", "password", "dbPassword",
    "passwd", "user.pass", "key", "accountKey", "SSECustomerKey", "credential", "credentials", "signature",
    "X-Amz-Signature", "sig", "sas", "sas_token", "session", "bearer", "connection_string", "connectionString",
    "basic-auth", "auth", "%73ig",
]  # fmt: skip
HARMLESS_NAMES = [
    "endpoint_url", "profile", "anon", "read_timeout", "signature_version", "SSEKMSKeyId", "key_prefix", "token_file",
    "session_kwargs", "client_kwargs", "secure", "author", "keepalive", "passive", "design", "bucket", "region_name",
    "monkey", "tokenizer", "compass", "secretary", "config_kwargs", "addressing_style", "",
]  # fmt: skip


@pytest.mark.parametrize("name", CREDENTIAL_NAMES)
def test_a_name_of_a_credential_is_recognised_in_any_writing(name: str) -> None:
    assert is_credential_name(name)


@pytest.mark.parametrize("name", HARMLESS_NAMES)
def test_other_names_are_not_taken_for_credentials(name: str) -> None:
    assert not is_credential_name(name)


URLS = [
    "s3://KEY:{}@bucket/kv", "https://{}@host/kv", "https://user:{}@host", "http://host/kv?sig={}",
    "http://host/kv?a=1&X-Amz-Signature={}", "http://host/#access_token={}", "nonsense://a:{}@b", "sftp://a:{}@h/kv",
]  # fmt: skip
HEADERS = ["Authorization: Bearer {}", "Bearer {}", "Cookie: id={}", "x-api-key: {}"]


@pytest.mark.parametrize("text", [*URLS, *HEADERS])
def test_a_value_with_a_credential_inside_is_recognised(text: str) -> None:
    assert holds_credential(text.format(SECRET))


@pytest.mark.parametrize(
    "text",
    [
        *("s3://bucket/kv", "sftp://user@host/kv", "abfs://box@account.dfs.core.windows.net/kv", "file:///mnt/a@b"),
        *("http://10.0.0.1:9000", "http://host/?region=eu", "aws:kms", "[::1]:7555", "/mnt/pool@snapshot", "Basic"),
    ],
)
def test_other_values_are_not_taken_for_credentials(text: str) -> None:
    assert not holds_credential(text)


@pytest.mark.parametrize("text", [*URLS, "Authorization: Bearer {}", "me:{}@10.0.0.1:7555"])
def test_a_message_about_another_problem_masks_the_credential(text: str) -> None:
    message = f"backends.0.x: {text.format(SECRET)!r} is not valid: Input should be a number"
    shown = str(ConfigError([message], text.format(SECRET)))
    if not text.startswith("https://{}"):  # without a password this may be the name of a user
        assert SECRET not in shown
        assert MASK in shown
    assert "Input should be a number" in without_credentials(message)


def problems(**tier: Any) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        load_config({"backends": [{"name": "far", "type": "nfs", "url": "s3://bucket/kv", **tier}]})
    assert SECRET not in str(caught.value)
    return list(caught.value.problems)


@pytest.mark.parametrize("unit", ["n", "a://", ":", "@", "x-", "?a", "&sig", "Bearer ", "a:b@", "A-", "%41", "://@"])
def test_long_texts_take_time_in_proportion_to_their_length(unit: str) -> None:
    text = (unit * 256 * 1024)[: 256 * 1024]
    began = time.process_time()
    holds_credential(text)
    is_credential_name(text)
    without_credentials(text)
    assert time.process_time() - began < 20  # a search that begins again at each character takes minutes


@pytest.mark.parametrize("name", ["headers", "client_kwargs"])
def test_pairs_of_a_name_and_a_value_are_read_as_keys(name: str) -> None:
    for pairs in ([["Authorization", SECRET]], [{"name": "x-api-key", "value": SECRET}]):
        (problem,) = problems(storage_options={name: pairs})
        assert "holds a credential; remove it from the configuration, which vLLM logs" in problem


def test_all_credentials_are_reported_together_and_alone() -> None:
    found = problems(storage_options={"headers": {"Cookie": SECRET}, "secret": SECRET}, io_threads=SECRET, url=SECRET)
    assert [problem.split(":")[0] for problem in found] == [
        "backends.0.storage_options.headers.Cookie",
        "backends.0.storage_options.secret",
    ]


def test_empty_values_and_flags_under_such_names_are_no_credentials(tmp_path: Path) -> None:
    options: dict[str, Any] = {"token": "", "key": None, "auth": False, "headers": {"Cookie": {}}}
    config = load_config({"backends": [{"name": "a", "type": "nfs", "url": "memory://a", "storage_options": options}]})
    assert len(config.tiers) == 1


# A secret stands under a name for one, or within a URL, somewhere in a configuration. What else is wrong varies.
VALUES = st.sampled_from([SECRET, [SECRET], {"a": SECRET}, [["b", {"c": SECRET}]]])
PLANTED = st.tuples(st.sampled_from(CREDENTIAL_NAMES), VALUES).map(lambda pair: {pair[0]: pair[1]}) | st.tuples(
    st.sampled_from(["endpoint_url", "proxy", "where"]), st.sampled_from(URLS)
).map(lambda pair: {pair[0]: pair[1].format(SECRET)})
NESTED = st.recursive(
    PLANTED,
    lambda inner: st.tuples(
        st.sampled_from(["headers", "client_kwargs", "x"]), inner | st.lists(inner, min_size=1)
    ).map(lambda pair: {pair[0]: pair[1]}),
    max_leaves=3,
)
TIERS = st.fixed_dictionaries(
    {"storage_options": NESTED},
    optional={
        "name": st.sampled_from(["far", "", 7]),
        "type": st.sampled_from(["nfs", "nfs", "disk", "lmcache", "mooncake", "nixl", "none", 5]),
        "url": st.sampled_from([f"s3://K:{SECRET}@b", "file:///nowhere/kv", 5, {"key": SECRET}]),
        "path": st.sampled_from(["/nowhere/kv", f"https://u:{SECRET}@h"]),
        "address": st.just(f"http://u:{SECRET}@h:1"),
        "params": NESTED,
        "io_threads": st.sampled_from([0, f"http://u:{SECRET}@h", {"token": SECRET}]),
    },
)


@examples(200, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(tiers=st.lists(TIERS, min_size=1, max_size=2), at_the_top=st.none() | PLANTED, as_json=st.booleans())
def test_the_command_shows_no_planted_secret(
    tmp_path: Path, tiers: list[dict[str, Any]], at_the_top: dict[str, Any] | None, as_json: bool
) -> None:
    config = tmp_path / "offload.json"
    config.write_text(json.dumps({**(at_the_top or {}), "backends": tiers}))
    done = CliRunner().invoke(app, ["check", str(config), *(["--json"] if as_json else [])], catch_exceptions=False)
    assert done.exit_code == 2
    assert "holds a credential" in done.output
    assert_not_shown(done.output)


def test_a_process_of_the_command_shows_no_planted_secret(tmp_path: Path) -> None:
    names = {f"{name}-{place}": {name: SECRET} for place, name in enumerate(CREDENTIAL_NAMES)}
    config = tmp_path / "offload.json"
    tier = {"name": "far", "type": "nfs", "url": f"s3://K:{SECRET}@bucket", "storage_options": names}
    config.write_text(json.dumps({"backends": [tier], "geometry_file": f"https://u:{SECRET}@h"}))
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    for command in (["check", str(config)], ["check", str(config), "--json"], ["plugins"]):
        done = subprocess.run(
            [sys.executable, "-m", "offload_core.cli", *command], capture_output=True, text=True, env=environment
        )
        assert done.returncode == (0 if command == ["plugins"] else 2)
        assert_not_shown(done.stdout + done.stderr)


def assert_not_shown(output: str) -> None:
    for part in (SECRET, "hunter2", "canary"):
        assert part not in output
