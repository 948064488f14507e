"""Network addresses that operators write, and the check that an address is not public."""

from __future__ import annotations

import ipaddress
import re
import socket
from typing import NamedTuple

IpAddress = ipaddress.IPv4Address | ipaddress.IPv6Address

_HOST_NAME = re.compile(
    r"(?=.{1,253}$)[A-Za-z0-9]([A-Za-z0-9_-]*[A-Za-z0-9])?(\.[A-Za-z0-9]([A-Za-z0-9_-]*[A-Za-z0-9])?)*"
)
MAX_PORT = 65535
NOT_PRIVATE = (
    "is neither loopback nor private, and Mooncake neither encrypts nor authenticates; "
    "use a private address, or write insecure: true"
)


class Endpoint(NamedTuple):
    """A host and a port."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def parse_endpoint(text: str) -> Endpoint:
    """Return the host and port of ``host:port`` or ``[ipv6]:port``.

    Raises:
        ValueError: it is neither; the message has the cure.
    """
    host, separator, port = text.rpartition(":")
    if "://" in text:
        raise ValueError(f"{text!r} is a URL; write host:port, such as 10.0.0.6:50051")
    if not separator or not re.fullmatch("[0-9]{1,5}", port) or not 0 < int(port) <= MAX_PORT:
        raise ValueError(f"{text!r} has no port from 1 to {MAX_PORT}; write host:port, such as 10.0.0.6:50051")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    elif ":" in host:
        raise ValueError(f"{text!r}: write an IPv6 address in brackets, such as [fd00::6]:50051")
    return Endpoint(parse_host(host), int(port))


def parse_host(text: str) -> str:
    """Return a host name or an address, unchanged.

    Raises:
        ValueError: it is neither.
    """
    if literal(text) is None and (not _HOST_NAME.fullmatch(text) or re.fullmatch(r"[0-9.]+", text)):
        raise ValueError(f"{text!r} is neither a host name nor an IP address; write one, such as 10.0.0.6")
    return text


def literal(host: str) -> IpAddress | None:
    """Return the address that ``host`` spells, or ``None`` for a name."""
    try:
        return ipaddress.ip_address(host)
    except ValueError:
        return None


def is_private(address: IpAddress) -> bool:
    """Return whether an address is loopback, link-local or in a private network."""
    mapped = getattr(address, "ipv4_mapped", None)
    if mapped is not None:
        return is_private(mapped)
    return (address.is_loopback or address.is_link_local or address.is_private) and not address.is_unspecified


def resolve(endpoint: Endpoint) -> list[IpAddress]:
    """Return the addresses of a host. Blocks for a name.

    Raises:
        OSError: the name has no address.
    """
    found = socket.getaddrinfo(endpoint.host, endpoint.port, type=socket.SOCK_STREAM)
    return [ipaddress.ip_address(str(one[4][0]).partition("%")[0]) for one in found]


def own_address(endpoint: Endpoint) -> str:
    """Return this host's address on the way to ``endpoint``. Sends nothing.

    Raises:
        OSError: there is no way.
    """
    family, kind, protocol, _, address = socket.getaddrinfo(endpoint.host, endpoint.port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(address)
        return str(probe.getsockname()[0])


def free_port(host: str) -> int:
    """Return a TCP port of an address of this host that nobody uses now.

    Raises:
        OSError: the address is not one of this host.
    """
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as free:
        free.bind((host, 0))
        return int(free.getsockname()[1])
