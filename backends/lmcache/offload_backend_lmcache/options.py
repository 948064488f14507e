"""The options of the ``lmcache`` type."""

from __future__ import annotations

from pydantic import Field, SecretStr, field_validator, model_validator

from offload_backend_lmcache.client.problems import INSECURE_CURE
from offload_backend_lmcache.wire.addresses import Address, is_private, parse_address
from offload_core.api import BackendOptions, Seconds


class LMCacheOptions(BackendOptions):
    """Options of the ``lmcache`` type."""

    address: str = Field(
        description="host:port of offload-core's module in the LMCache server, such as 10.0.0.5:7555; not one of "
        "LMCache's own ports"
    )
    prefix: str = Field(
        "",
        pattern=r"^[A-Za-z0-9._/-]{0,128}$",
        description="text before the names of this tier's objects; tiers with different prefixes share no object",
    )
    connections: int = Field(
        2,
        ge=1,
        le=64,
        description="connections over which the objects of a batch are spread, as far as io_threads has free ones",
    )
    connect_timeout_seconds: Seconds = Field(2.0, gt=0, le=60, description="longest wait for a new connection")
    io_timeout_seconds: Seconds = Field(
        5.0,
        ge=0.1,
        le=300,
        description="longest wait for the server's next bytes; a transfer of n MiB may take n seconds more in all",
    )
    token: SecretStr | None = Field(
        None, description="the same text as in the server's token_variable; none by default"
    )
    insecure: bool = Field(
        False, description="allow an address that is neither loopback nor private, although nothing is encrypted"
    )

    @field_validator("address")
    @classmethod
    def _is_an_address(cls, address: str) -> str:
        return str(parse_address(address))

    @model_validator(mode="after")
    def _stays_private(self) -> LMCacheOptions:
        if not self.insecure and is_private(self.server.host) is False:
            raise ValueError(f"address {self.address} is neither loopback nor private; {INSECURE_CURE}")
        return self

    @property
    def server(self) -> Address:
        """The server's host and port."""
        return parse_address(self.address)
