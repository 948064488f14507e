"""The options of the ``mooncake`` type."""

from __future__ import annotations

import re
from typing import Literal
from urllib.parse import urlsplit

from pydantic import Field, field_validator, model_validator

from offload_backend_mooncake.addresses import NOT_PRIVATE, is_private, literal, parse_endpoint, parse_host
from offload_core.api import BackendOptions, Seconds

NO_METADATA_SERVER = "P2PHANDSHAKE"


class MooncakeOptions(BackendOptions):
    """Options of the ``mooncake`` type."""

    master: str = Field(description="address of mooncake_master, host:port")
    metadata: str = Field(
        NO_METADATA_SERVER,
        description="the segment owners' metadata server, such as http://10.0.0.6:8080/metadata; "
        "P2PHANDSHAKE if there is none",
    )
    host: str | None = Field(
        None,
        description="address of this host for the segment owners; by default the one on the way to the master",
    )
    protocol: Literal["tcp", "rdma"] = Field("tcp", description="transport to the segment owners, tcp or rdma")
    device: str = Field("", description="rdma: names of the devices, separated by commas; by default all devices")
    replicas: int = Field(
        1, ge=1, le=16, description="copies of each object on different owners; fewer if there are too few owners"
    )
    soft_pin: bool = Field(
        False, description="ask the master to evict other objects before these, for its --default_kv_soft_pin_ttl"
    )
    prefix: str = Field(
        "offload-core",
        max_length=100,
        description="first part of each object's name; tiers with different prefixes share no objects",
    )
    request_timeout_seconds: Seconds = Field(
        5.0, ge=0.1, le=60, description="limit on one request to the master; the same in all mooncake tiers"
    )
    connect_timeout_seconds: Seconds = Field(
        2.0, ge=0.1, le=60, description="limit on a connection to the master; the same in all mooncake tiers"
    )
    transfer_timeout_seconds: Seconds = Field(
        5.0,
        ge=1,
        le=12,
        description="time without progress after which a transfer fails, in whole seconds; a call with several objects "
        "may take four times as long; the same in all mooncake tiers",
    )
    full_wait_seconds: Seconds = Field(
        1.0,
        le=60,
        description="time for which a store is retried while the cluster evicts or another engine writes the object",
    )
    insecure: bool = Field(
        False, description="allow addresses that are neither loopback nor private, without encryption or passwords"
    )

    @field_validator("master")
    @classmethod
    def _is_an_endpoint(cls, master: str) -> str:
        return str(parse_endpoint(master))

    @field_validator("host")
    @classmethod
    def _is_a_host(cls, host: str | None) -> str | None:
        return host if host is None else parse_host(host)

    @field_validator("metadata")
    @classmethod
    def _is_a_metadata_server(cls, metadata: str) -> str:
        if metadata != NO_METADATA_SERVER and not _metadata_host(metadata):
            raise ValueError(
                f"{metadata!r} is no metadata server; write {NO_METADATA_SERVER}, or a URL such as "
                "http://10.0.0.6:8080/metadata"
            )
        return metadata

    @field_validator("device")
    @classmethod
    def _are_devices(cls, device: str) -> str:
        if not re.fullmatch(r"([A-Za-z0-9_.:-]+(,[A-Za-z0-9_.:-]+)*)?", device):
            raise ValueError(
                f"{device!r} is no list of devices; write names separated by commas, such as mlx5_0,mlx5_1"
            )
        return device

    @field_validator("prefix")
    @classmethod
    def _is_a_prefix(cls, prefix: str) -> str:
        if not re.fullmatch(r"[A-Za-z0-9._-]+(/[A-Za-z0-9._-]+)*", prefix):
            raise ValueError(
                f"{prefix!r} is no prefix; use letters, digits, '.', '_' and '-', in parts separated by '/'"
            )
        return prefix

    @field_validator("transfer_timeout_seconds")
    @classmethod
    def _is_whole(cls, seconds: float) -> float:
        if seconds != int(seconds):
            raise ValueError(f"{seconds:g} s is not a number of whole seconds, and Mooncake takes no other; round it")
        return seconds

    @model_validator(mode="after")
    def _fits_together(self) -> MooncakeOptions:
        if self.device and self.protocol != "rdma":
            raise ValueError(f"device {self.device!r} is for protocol rdma; remove it, or write protocol: rdma")
        hosts = {
            "master": parse_endpoint(self.master).host,
            "host": self.host,
            "metadata": _metadata_host(self.metadata),
        }
        for option, host in hosts.items():
            address = literal(host or "")
            if address is not None and not self.insecure and not is_private(address):
                raise ValueError(f"{option}: {host} {NOT_PRIVATE}")
        return self


def _metadata_host(metadata: str) -> str | None:
    try:
        return urlsplit(metadata).hostname if "://" in metadata else None
    except ValueError:
        return None
