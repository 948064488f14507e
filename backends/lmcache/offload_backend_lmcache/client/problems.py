"""The errors of a connection as an operator needs them: the address, the problem and the cure."""

from __future__ import annotations

import errno
import json
import socket

from offload_backend_lmcache.wire.addresses import Address, is_loopback, is_private

SERVER_MODULE = "offload_backend_lmcache.server"
_TOKEN_VARIABLE = "KV_TOKEN"
INSECURE_CURE = "the traffic is not encrypted; use a private address or a tunnel, or set insecure: true"


def start_command(address: Address) -> str:
    """Return the command that starts an LMCache server with the module at an address.

    The module needs an IP address of its host, and a token except on loopback.
    """
    host = "IP-OF-SERVER" if is_private(address.host) is None else address.host
    config: dict[str, object] = {"address": str(Address(host, address.port))}
    token = ""
    if not is_loopback(host):
        token, config["token_variable"] = f"{_TOKEN_VARIABLE}=… ", _TOKEN_VARIABLE
        if is_private(host) is False:
            config["insecure"] = True
    module = json.dumps({"module_path": SERVER_MODULE, "config": config})
    return f"{token}lmcache server --l1-size-gb 20 --eviction-policy LRU --server-module '{module}'"


def nobody_answers(address: Address, cause: OSError) -> OSError:
    """Return the error of an address that cannot be reached, or whose server is dead."""
    reason = cause.strerror or str(cause) or type(cause).__name__
    if isinstance(cause, socket.gaierror):
        return OSError(
            errno.EHOSTUNREACH,
            f"no address for {address.host} ({reason}); correct the option address, or the name server of this host",
        )
    return _like(
        cause, errno.EHOSTUNREACH, f"no server at {address} ({reason}); start it with: {start_command(address)}"
    )


def foreign_server(address: Address, cause: OSError) -> OSError:
    """Return the error of a server that runs without the module, or is another one."""
    return OSError(
        errno.EPROTO,
        f"a server answers at {address}, but not offload-core's module of LMCache ({cause}); "
        "the address must be that of the module, not one of LMCache's own ports, and the LMCache server must be "
        f"started with the module: {start_command(address)}",
    )


def silent_server(address: Address, seconds: float) -> OSError:
    """Return the error of a server that accepts a connection and then says nothing."""
    return TimeoutError(
        errno.ETIMEDOUT,
        f"the server at {address} accepts connections, but did not answer within {seconds:g} s; it hangs or is "
        f"overloaded, or it is not offload-core's module of LMCache, which is started with: {start_command(address)}",
    )


def other_version(address: Address, theirs: int, ours: int) -> OSError:
    """Return the error of a server that speaks another version of the protocol."""
    return OSError(
        errno.EPROTO,
        f"the module at {address} speaks version {theirs} of the protocol, and this client version {ours}; "
        "install the same version of offload-core on both hosts",
    )


def too_many_connections(address: Address) -> OSError:
    """Return the error of a server whose connections are all in use."""
    return OSError(
        errno.EBUSY,
        f"the module at {address} has no connection left; raise max_connections in its config, "
        "or lower connections in the tiers that use it",
    )


def other_token(address: Address, variable: str) -> OSError:
    """Return the error of a client and a server whose tokens differ."""
    return OSError(
        errno.EACCES,
        f"the module at {address} has another token than this tier, or only one of the two has one; set {variable} "
        "here and the variable that token_variable names there to the same text",
    )


def lost(address: Address, cause: OSError) -> OSError:
    """Return the error of a connection that broke or timed out in a request."""
    if isinstance(cause, TimeoutError):
        return TimeoutError(errno.ETIMEDOUT, f"the server at {address} did not answer in time ({cause}); is it alive?")
    return _like(cause, errno.EIO, f"the connection to {address} was lost ({cause}); is the server alive?")


def request_failed(address: Address, text: str) -> OSError:
    """Return the error of a request that the server could not serve."""
    printable = "".join(char if char.isprintable() else "?" for char in text)
    return OSError(errno.EIO, f"the LMCache server at {address} failed: {printable}; its log tells more")


def _like(cause: OSError, default: int, text: str) -> OSError:
    return OSError(cause.errno or default, text)


def public_address(address: Address, peer: str) -> OSError:
    """Return the error of a host whose address is public although the tier does not allow it."""
    return OSError(errno.EACCES, f"{address} is at {peer}, a public address; {INSECURE_CURE}")
