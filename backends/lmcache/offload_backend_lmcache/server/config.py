"""The config of the module, as it stands in ``lmcache server --server-module``."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from offload_backend_lmcache.wire.addresses import Address, is_loopback, is_private, parse_address
from offload_core.api import Bytes, Seconds


class ServerConfig(BaseModel):
    """The keys of the module's ``config``."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    address: str = Field("127.0.0.1:7555", description="IP address and port to listen on; loopback by default")
    token_variable: str | None = Field(
        None, description="environment variable of the LMCache server that holds the clients' token; none by default"
    )
    insecure: bool = Field(
        False, description="allow an address that is neither loopback nor private, or one that is open without a token"
    )
    max_connections: int = Field(
        256, ge=1, le=4096, description="further connections of clients with the token are refused"
    )
    max_object: Bytes = Field(1024**3, ge=1, le=64 * 1024**3, description="size of the largest object")
    transfer_seconds: Seconds = Field(
        10.0, ge=0.1, le=10, description="longest wait for a client's next bytes in a transfer"
    )
    idle_seconds: Seconds = Field(900.0, ge=1, description="a connection without requests is closed after this time")
    eviction_seconds: Seconds = Field(
        1.0, le=10, description="longest wait in a request until LMCache has evicted enough for an object"
    )
    l2_seconds: Seconds = Field(
        4.0, gt=0, le=100, description="longest wait for LMCache's L2; at most half of the client's io_timeout_seconds"
    )

    @field_validator("address")
    @classmethod
    def _is_an_ip_address(cls, address: str) -> str:
        parsed = parse_address(address)
        if parsed.host != "localhost" and _is_a_name(parsed.host):
            raise ValueError(f"{parsed.host!r} is no IP address; write that of this host, such as 10.0.0.5:7555")
        return str(parsed)

    @model_validator(mode="after")
    def _is_protected(self) -> ServerConfig:
        host = self.server.host
        if self.insecure or is_loopback(host):
            return self
        if not is_private(host):
            raise ValueError(
                f"address {self.address} is not private, and nothing is encrypted; use a private address of this "
                'host, or set "insecure": true'
            )
        if self.token_variable is None:
            raise ValueError(
                f"address {self.address} can be reached from other hosts; name the environment variable of a token "
                'in token_variable, or set "insecure": true to serve everybody'
            )
        return self

    @property
    def server(self) -> Address:
        """The host and port to listen on."""
        return parse_address(self.address)

    def token(self, environ: Mapping[str, str] = os.environ) -> bytes:
        """Return the token, empty without one.

        Raises:
            ValueError: the variable is not set.
        """
        if self.token_variable is None:
            return b""
        if not (token := environ.get(self.token_variable)):
            raise ValueError(
                f"token_variable names {self.token_variable}, which is empty or not set; set it for the LMCache server"
            )
        return token.encode()


def _is_a_name(host: str) -> bool:
    return is_private(host) is None


def read_config(given: Mapping[str, Any]) -> ServerConfig:
    """Return the checked config.

    Raises:
        ValueError: with every problem, the bad value and the good ones.
    """
    try:
        return ServerConfig(**given)
    except ValidationError as error:
        known = ", ".join(ServerConfig.model_fields)
        problems = "; ".join(
            f"{'.'.join(map(str, one['loc'])) or 'config'}: {one['msg'].removeprefix('Value error, ')}"
            for one in error.errors(include_input=False, include_url=False)
        )
        raise ValueError(f"the config of offload-core's module of LMCache: {problems}. Its keys are {known}") from error
