"""The messages of the lmcache backend about its options, and of the module about its config."""

from __future__ import annotations

import asyncio
import json
import shlex
import socket
from typing import Any

import pytest
from offload_backend_lmcache import LMCacheBackend, LMCacheOptions
from offload_backend_lmcache.client import pool, problems
from offload_backend_lmcache.client.connection import Connection, Target
from offload_backend_lmcache.server.config import ServerConfig, read_config
from offload_backend_lmcache.server.lmcache_module import check_version
from offload_backend_lmcache.wire.addresses import parse_address

from offload_core.api.backend import BackendContext
from offload_core.api.errors import ConfigError
from offload_core.config.loading import load_config
from offload_core.runtime.threads import DaemonExecutor
from tests.backends.lmcache.calls import key, opened
from tests.backends.lmcache.shelf import Shelf, listening

ENCRYPTION_CURE = "the traffic is not encrypted; use a private address or a tunnel, or set insecure: true"


def options(environ: dict[str, str] | None = None, **given: Any) -> LMCacheOptions:
    config = load_config({"backends": [{"name": "cluster", "type": "lmcache", **given}]}, environ=environ or {})
    found = config.tiers[0].options
    assert isinstance(found, LMCacheOptions)
    return found


def problem(**given: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        options(**given)
    (only,) = caught.value.problems
    return only


@pytest.mark.parametrize(
    "address", ["127.0.0.1:7555", "10.0.0.5:7555", "192.168.1.1:1", "[::1]:7555", "[fd00::5]:7555", "localhost:7555"]
)
def test_a_private_address(address: str) -> None:
    assert options(address=address).address == address


def test_a_host_name_is_resolved_when_the_tier_opens() -> None:
    assert options(address="kv.example:7555").server == ("kv.example", 7555)


@pytest.mark.parametrize("address", ["10.0.0.5", "10.0.0.5:", ":7555", "10.0.0.5:0", "10.0.0.5:65536", "a b:1", "::1"])
def test_a_text_that_is_no_address(address: str) -> None:
    assert problem(address=address) == (
        f"backends.0.address: {address!r} is not valid: no address; write host:port, such as 127.0.0.1:7555 or "
        "[::1]:7555"
    )


@pytest.mark.parametrize("address", ["8.8.8.8:7555", "[2606:4700::1]:7555", "0.0.0.0:7555", "[::ffff:8.8.8.8]:7555"])
def test_a_public_address_needs_a_decision(address: str) -> None:
    assert problem(address=address).endswith(f"address {address} is neither loopback nor private; {ENCRYPTION_CURE}")
    assert options(address=address, insecure=True).address == address


def test_the_token_comes_from_the_environment_only() -> None:
    found = options({"OFFLOAD_CORE_CLUSTER_TOKEN": "secret"}, address="127.0.0.1:7555")
    assert found.token is not None
    assert found.token.get_secret_value() == "secret"
    assert "OFFLOAD_CORE_CLUSTER_TOKEN" in problem(address="127.0.0.1:7555", token="secret")


def test_a_prefix_that_cannot_be_part_of_a_name() -> None:
    assert "prefix" in problem(address="127.0.0.1:7555", prefix="a b")
    assert "prefix" in problem(address="127.0.0.1:7555", prefix="a" * 129)


def config_problem(**given: Any) -> str:
    with pytest.raises(ValueError, match="the config of offload-core's module") as caught:
        read_config(given)
    return str(caught.value)


def test_the_module_listens_on_loopback_by_default() -> None:
    assert read_config({}).server == ("127.0.0.1", 7555)


def test_an_unknown_key_of_the_module_is_refused_with_the_known_ones() -> None:
    text = config_problem(adress="127.0.0.1:7555")
    assert "adress: Extra inputs are not permitted" in text
    assert all(name in text for name in ServerConfig.model_fields)


def test_the_module_needs_a_token_on_an_address_of_the_network() -> None:
    assert 'token_variable, or set "insecure": true' in config_problem(address="10.0.0.5:7555")
    assert read_config({"address": "10.0.0.5:7555", "token_variable": "KV_TOKEN"}).token({"KV_TOKEN": "x"}) == b"x"
    assert read_config({"address": "10.0.0.5:7555", "insecure": True}).token({}) == b""


def test_the_module_does_not_listen_on_all_interfaces_unasked() -> None:
    assert "is not private" in config_problem(address="0.0.0.0:7555", token_variable="KV_TOKEN")
    assert "is not private" in config_problem(address="8.8.8.8:7555", token_variable="KV_TOKEN")
    assert "no IP address" in config_problem(address="kv.example:7555")


@pytest.mark.parametrize(
    ("address", "starts_at"),
    [
        ("127.0.0.1:7555", "127.0.0.1:7555"),
        ("localhost:7555", "localhost:7555"),
        ("[::1]:7555", "[::1]:7555"),
        ("127.0.0.2:7555", "127.0.0.2:7555"),
        ("10.0.0.5:7555", "10.0.0.5:7555"),
        ("[fd00::5]:7555", "[fd00::5]:7555"),
        ("8.8.8.8:7555", "8.8.8.8:7555"),
        ("kv.example:7555", "IP-OF-SERVER:7555"),
    ],
)
def test_the_command_of_a_message_starts_a_server(address: str, starts_at: str) -> None:
    command = str(problems.nobody_answers(parse_address(address), ConnectionRefusedError()))
    words = shlex.split(command.partition("start it with: ")[2])
    given = json.loads(words[-1])["config"]
    assert given["address"] == starts_at
    if starts_at != address:
        given["address"] = "10.0.0.5:7555"  # the reader's part
    environ = dict(word.split("=") for word in words[: words.index("lmcache")])
    assert (read_config(given).token(environ) != b"") == ("token_variable" in given)


def test_a_name_without_an_address_is_no_dead_server() -> None:
    unknown = socket.gaierror(socket.EAI_NONAME, "Name or service not known")
    assert str(problems.nobody_answers(parse_address("kv.example:7555"), unknown)) == (
        "[Errno 113] no address for kv.example (Name or service not known); correct the option address, or the name "
        "server of this host"
    )


def test_a_token_that_is_not_set_stops_the_module() -> None:
    with pytest.raises(ValueError, match="KV_TOKEN, which is empty or not set"):
        read_config({"token_variable": "KV_TOKEN"}).token({"KV_TOKEN": ""})


@pytest.mark.parametrize("version", ["0.5.6", "0.5.7", "0.5.10", "0.5.6.post1", "0.5.6+cpu"])
def test_a_supported_version_of_lmcache(version: str) -> None:
    check_version(version)


@pytest.mark.parametrize("version", ["0.5.5", "0.4.7", "0.6.0", "1.0"])
def test_another_version_of_lmcache(version: str) -> None:
    with pytest.raises(RuntimeError, match=f"does not support LMCache {version}; it needs 0.5.6 or a later release of"):
        check_version(version)


def test_no_client_timeout_is_longer_than_the_tiers_deadlines() -> None:
    executor = DaemonExecutor(1, "cluster")
    found = options(address="127.0.0.1:7555", connect_timeout_seconds=2, io_timeout_seconds=5)
    patient = LMCacheBackend(found, BackendContext("cluster", executor))
    assert (patient.target().connect_seconds, patient.target().io_seconds) == (2, 5)
    deadlines: dict[str, Any] = {"open_timeout_seconds": 1, "load_timeout_seconds": 3, "store_timeout_seconds": 4}
    hurried = LMCacheBackend(found, BackendContext("cluster", executor, **deadlines))
    assert (hurried.target().connect_seconds, hurried.target().io_seconds) == (1, 4)
    executor.shutdown()


def test_a_connection_is_kept_for_each_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Connection] = []

    class Counted(Connection):
        def __init__(self, target: Target) -> None:
            super().__init__(target)
            made.append(self)

    async def store_all(backend: LMCacheBackend) -> None:
        for start in range(0, 64, 4):
            stores = (backend.store([key(start + at)], [memoryview(bytes(100))]) for at in range(4))
            await asyncio.gather(*stores)

    monkeypatch.setattr(pool, "Connection", Counted)
    with listening(Shelf()) as (address, _), opened(address, threads=4, connections=1) as calls:
        calls.run(store_all(calls.backend))
    assert len(made) <= 4, "connections are closed and made again"
