"""The handshake: both sides prove that they speak this protocol, and that they know the same token.

The client speaks first. Its greeting begins with a line that no HTTP server takes for a request, so a foreign server
answers at once. The token itself is never sent: each side sends an HMAC of both greetings' random numbers.
"""

from __future__ import annotations

import enum
import hashlib
import hmac
import struct
from typing import NamedTuple

from offload_backend_lmcache.wire.frames import ProtocolError, sealed, unsealed

PROTOCOL_VERSION = 2
NONCE_BYTES = 16

_MAGIC = b"OCLM\r\n\r\n"
_CLIENT = struct.Struct("<8sHI16s")
_SERVER = struct.Struct("<8sHB16sQ")
_VERDICT = struct.Struct("<B32s")
_CHECKSUM_BYTES = 8

MAGIC_BYTES = len(_MAGIC)
CLIENT_GREETING_BYTES = _CLIENT.size + _CHECKSUM_BYTES
SERVER_GREETING_BYTES = _SERVER.size + _CHECKSUM_BYTES
PROOF_BYTES = 32
VERDICT_BYTES = _VERDICT.size


class ForeignProtocolError(ProtocolError):
    """The peer speaks another protocol altogether."""


class Verdict(enum.IntEnum):
    """The server's reply to a client's greeting or proof."""

    ACCEPTED = 0
    OTHER_VERSION = 1
    TOO_MANY_CONNECTIONS = 2
    OTHER_TOKEN = 3


class ClientGreeting(NamedTuple):
    """The client's greeting."""

    patience_milliseconds: int
    """The time for which the client waits for an answer."""
    nonce: bytes
    version: int = PROTOCOL_VERSION


class ServerGreeting(NamedTuple):
    """The server's greeting."""

    verdict: Verdict
    nonce: bytes
    max_object_bytes: int
    version: int = PROTOCOL_VERSION


def encode_client_greeting(greeting: ClientGreeting) -> bytes:
    """Return the bytes of a client's greeting."""
    return sealed(_CLIENT.pack(_MAGIC, greeting.version, greeting.patience_milliseconds, greeting.nonce))


def decode_client_greeting(content: bytes) -> ClientGreeting:
    """Parse a client's greeting.

    Raises:
        ProtocolError: it breaks the protocol.
    """
    if len(content) != CLIENT_GREETING_BYTES:
        raise ProtocolError(f"a greeting of {len(content)} bytes")
    check_magic(content)
    _, version, patience, nonce = _CLIENT.unpack(unsealed(content, "a greeting"))
    return ClientGreeting(patience, nonce, version)


def encode_server_greeting(greeting: ServerGreeting) -> bytes:
    """Return the bytes of a server's greeting."""
    return sealed(_SERVER.pack(_MAGIC, greeting.version, greeting.verdict, greeting.nonce, greeting.max_object_bytes))


def decode_server_greeting(content: bytes) -> ServerGreeting:
    """Parse a server's greeting.

    Raises:
        ProtocolError: it breaks the protocol.
    """
    if len(content) != SERVER_GREETING_BYTES:
        raise ProtocolError(f"a greeting of {len(content)} bytes")
    check_magic(content)
    _, version, verdict, nonce, max_object_bytes = _SERVER.unpack(unsealed(content, "a greeting"))
    return ServerGreeting(_verdict(verdict), nonce, max_object_bytes, version)


def check_magic(content: bytes) -> None:
    """Check the first bytes of a greeting.

    Raises:
        ForeignProtocolError: they are those of another protocol.
    """
    if content[:MAGIC_BYTES] != _MAGIC:
        raise ForeignProtocolError(f"it speaks another protocol; its first bytes are {content[:MAGIC_BYTES]!r}")


def client_proof(token: bytes, client_nonce: bytes, server_nonce: bytes) -> bytes:
    """Return the client's proof that it knows the token."""
    return _proof(b"client", token, client_nonce, server_nonce)


def server_proof(token: bytes, client_nonce: bytes, server_nonce: bytes) -> bytes:
    """Return the server's proof that it knows the token."""
    return _proof(b"server", token, client_nonce, server_nonce)


def same_proof(one: bytes, other: bytes) -> bool:
    """Compare two proofs in constant time."""
    return hmac.compare_digest(one, other)


def encode_verdict(verdict: Verdict, proof: bytes) -> bytes:
    """Return the server's reply to the client's proof."""
    return _VERDICT.pack(verdict, proof)


def decode_verdict(content: bytes) -> tuple[Verdict, bytes]:
    """Parse the server's reply to the client's proof.

    Raises:
        ProtocolError: it breaks the protocol.
    """
    if len(content) != VERDICT_BYTES:
        raise ProtocolError(f"a verdict of {len(content)} bytes")
    verdict, proof = _VERDICT.unpack(content)
    return _verdict(verdict), proof


def _verdict(value: int) -> Verdict:
    try:
        return Verdict(value)
    except ValueError as error:
        raise ProtocolError(f"unknown verdict {value}") from error


def _proof(side: bytes, token: bytes, client_nonce: bytes, server_nonce: bytes) -> bytes:
    return hmac.digest(token, side + client_nonce + server_nonce, hashlib.sha256)
