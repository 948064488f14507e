"""Options of the mooncake type: addresses, and errors that name the cure."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from offload_backend_mooncake import MooncakeOptions
from offload_backend_mooncake.addresses import Endpoint, is_private, literal, parse_endpoint
from pydantic import ValidationError


def valid(**options: Any) -> MooncakeOptions:
    return MooncakeOptions.model_validate({"master": "10.0.0.6:50051", **options})


def error_of(**options: Any) -> str:
    with pytest.raises(ValidationError) as caught:
        valid(**options)
    (problem,) = caught.value.errors()
    return problem["msg"]


@pytest.mark.parametrize(
    "master", ["10.0.0.6:50051", "127.0.0.1:1", "localhost:65535", "[fd00::6]:50051", "[::1]:9", "pool.cluster.local:7"]
)
def test_private_addresses_and_names_are_accepted(master: str) -> None:
    assert valid(master=master).master == master


@pytest.mark.parametrize("host", ["8.8.8.8", "100.64.0.1", "0.0.0.0", "2606:4700::1", "::ffff:8.8.8.8"])
def test_a_public_address_is_refused_unless_the_operator_says_insecure(host: str) -> None:
    master = str(Endpoint(host, 50051))
    assert "neither loopback nor private" in error_of(master=master)
    assert "insecure: true" in error_of(host=host)
    assert valid(master=master, host=host, insecure=True).master == master
    if ":" not in host:
        assert host in error_of(metadata=f"http://{host}:8080/metadata")


@pytest.mark.parametrize(
    ("master", "cure"),
    [
        ("10.0.0.6", "write host:port"),
        ("10.0.0.6:", "port from 1 to 65535"),
        ("10.0.0.6:0", "port from 1 to 65535"),
        ("10.0.0.6:65536", "port from 1 to 65535"),
        ("10.0.0.6:٣", "port from 1 to 65535"),
        ("10.0.0.600:1", "neither a host name nor an IP address"),
        ("a b:1", "neither a host name nor an IP address"),
        ("fd00::6:50051", "in brackets"),
        ("etcd://10.0.0.6:2379", "is a URL; write host:port"),
        ("", "write host:port"),
    ],
)
def test_a_wrong_master_is_named_with_the_cure(master: str, cure: str) -> None:
    message = error_of(master=master)
    assert repr(master) in message or repr(master.rpartition(":")[0]) in message
    assert cure in message


@pytest.mark.parametrize(
    ("options", "cure"),
    [
        ({"metadata": "etcd"}, "P2PHANDSHAKE"),
        ({"metadata": "http://["}, "P2PHANDSHAKE"),
        ({"device": "mlx5_0"}, "protocol: rdma"),
        ({"device": "mlx5_0 mlx5_1", "protocol": "rdma"}, "separated by commas"),
        ({"prefix": "a//b"}, "separated by '/'"),
        ({"prefix": ""}, "separated by '/'"),
        ({"transfer_timeout_seconds": "2500ms"}, "whole seconds"),
        ({"transfer_timeout_seconds": 13}, "12"),
        ({"replicas": 0}, "1"),
        ({"protocol": "quic"}, "rdma"),
    ],
)
def test_wrong_options_are_named_with_the_cure(options: dict[str, Any], cure: str) -> None:
    assert cure in error_of(**options)


def test_devices_are_for_rdma() -> None:
    assert valid(protocol="rdma", device="mlx5_0,mlx5_1").device == "mlx5_0,mlx5_1"


@given(st.text(max_size=40) | st.builds("{}:{}".format, st.text(max_size=30), st.integers(-1, 70_000)))
def test_any_text_is_an_endpoint_or_refused_with_a_reason(text: str) -> None:
    try:
        found = parse_endpoint(text)
    except ValueError:
        return
    assert parse_endpoint(str(found)) == found
    assert str(found) == text or ":0" in text


@given(st.ip_addresses())
def test_only_addresses_that_no_stranger_reaches_are_private(address: Any) -> None:
    assert literal(str(address)) == address
    if is_private(address):
        assert not address.is_global
