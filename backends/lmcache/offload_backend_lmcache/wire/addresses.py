"""Addresses ``host:port``, and whether their traffic stays on this host or in a private network."""

from __future__ import annotations

import ipaddress
import re
from typing import NamedTuple

_FORM = re.compile(r"(?P<host>\[[0-9A-Fa-f:.%a-z]+\]|[A-Za-z0-9._-]+):(?P<port>[0-9]{1,5})")


class Address(NamedTuple):
    """A host and a TCP port."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def parse_address(text: str) -> Address:
    """Return the address that a text names.

    Raises:
        ValueError: with the form that an address must have.
    """
    match = _FORM.fullmatch(text)
    if match is None or not 1 <= int(match["port"]) <= 65535:
        raise ValueError("no address; write host:port, such as 127.0.0.1:7555 or [::1]:7555")
    return Address(match["host"].strip("[]"), int(match["port"]))


def is_loopback(host: str) -> bool:
    """Return whether a server needs no token on this address, since only its own host reaches it."""
    return host in ("localhost", "127.0.0.1", "::1")


def is_private(host: str) -> bool | None:
    """Return whether an IP address is a loopback or private one, or ``None`` for the name of a host."""
    if host == "localhost":
        return True
    try:
        address = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return None
    mapped = getattr(address, "ipv4_mapped", None)
    return bool((mapped or address).is_private and not address.is_unspecified)
