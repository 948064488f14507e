"""The stored object: a sealed object is verified, any other bytes are refused."""

from __future__ import annotations

import re
import struct

import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from offload_core.api.errors import ObjectFormatError
from offload_core.api.keys import ObjectKey
from offload_core.objects.format import HEADER_BYTES, object_bytes, seal, verify

KEY = ObjectKey("ab" * 32, "full-u256", bytes(range(32)))
PAYLOAD = b"forty bytes of payload, more or less...!"


def sealed(key: ObjectKey = KEY, payload: bytes = PAYLOAD) -> bytearray:
    # Dirty memory in front: the header must overwrite all of it.
    whole = bytearray(b"\xee" * HEADER_BYTES + payload)
    seal(memoryview(whole), key)
    return whole


def resealed(whole: bytearray, offset: int, value: bytes) -> bytearray:
    """Change a field and make the header's checksum right again, as another writer would have."""
    whole[offset : offset + len(value)] = value
    whole[4080:4096] = xxhash.xxh3_128_digest(whole[:4080])
    return whole


@given(
    namespace=st.binary(min_size=32, max_size=32),
    pack=st.text("abcdefghijklmnopqrstuvwxyz0123456789-", min_size=1, max_size=64),
    chunk_hash=st.binary(min_size=1, max_size=64),
    payload=st.binary(max_size=300),
)
def test_what_was_sealed_is_verified(namespace: bytes, pack: str, chunk_hash: bytes, payload: bytes) -> None:
    key = ObjectKey(namespace.hex(), pack, chunk_hash)
    whole = sealed(key, payload)
    verify(memoryview(whole), key)
    assert whole[HEADER_BYTES:] == payload
    assert len(whole) == object_bytes(len(payload))


def test_every_changed_bit_is_detected() -> None:
    whole = sealed()
    view = memoryview(whole)
    for position in range(len(whole)):
        for bit in range(8):
            whole[position] ^= 1 << bit
            with pytest.raises(ObjectFormatError):
                verify(view, KEY)
            whole[position] ^= 1 << bit
    verify(view, KEY)


def test_every_truncation_and_a_longer_object_are_detected() -> None:
    whole = sealed()
    for length in range(len(whole)):
        with pytest.raises(ObjectFormatError):
            verify(memoryview(whole)[:length], KEY)
    with pytest.raises(ObjectFormatError, match="payload of 41 bytes, but the header says 40"):
        verify(memoryview(whole + b"\x00"), KEY)


@pytest.mark.parametrize(
    "other",
    [
        KEY._replace(namespace="ac" + "ab" * 31),
        KEY._replace(pack="full-u25"),
        KEY._replace(pack="full-u2560"),
        KEY._replace(chunk_hash=bytes(range(31))),
        KEY._replace(chunk_hash=bytes(range(33))),
        KEY._replace(chunk_hash=bytes(range(32)) + b"\x00"),
        KEY._replace(chunk_hash=bytes(32)),
    ],
    ids=["namespace", "shorter pack", "longer pack", "shorter hash", "longer hash", "zero-extended hash", "other hash"],
)
def test_an_object_of_another_key_is_refused_with_both_names(other: ObjectKey) -> None:
    with pytest.raises(ObjectFormatError, match=f"{re.escape(str(KEY))}: the header names another object") as caught:
        verify(memoryview(sealed(other)), KEY)
    assert str(other) in str(caught.value)


@pytest.mark.parametrize(
    ("offset", "value", "message"),
    [
        (0, b"OFFLCORF", "magic b'OFFLCORF'"),
        (8, struct.pack("<H", 1), "format version 1, of an older .*; this reader accepts version 2 or 3"),
        (10, b"\x03", "codec 3; this reader accepts"),
        (10, b"\x01", r"header says 40 stored and 40 raw \(codec 1\)"),
        (11, b"\x1f", "names another object"),
        (12, b"\x08", "names another object"),
        (176, struct.pack("<Q", 41), "header says 40 stored and 41 raw"),
        (184, struct.pack("<Q", 39), "header says 39 stored and 40 raw"),
        (192, bytes(16), "the payload's checksum does not match its 40 bytes"),
        (208, bytes(16), "a wrong raw checksum, in place of uncompressed bytes"),
    ],
    ids=[
        *("magic", "version", "no codec", "codec", "hash length", "pack length", "raw length", "stored length"),
        *("stored checksum", "raw checksum"),
    ],
)
def test_a_header_with_a_right_checksum_and_a_wrong_field_is_refused(offset: int, value: bytes, message: str) -> None:
    with pytest.raises(ObjectFormatError, match=message):
        verify(memoryview(resealed(sealed(), offset, value)), KEY)


@pytest.mark.parametrize(
    "key",
    [
        KEY._replace(chunk_hash=b""),
        KEY._replace(chunk_hash=bytes(65)),
        KEY._replace(pack=""),
        KEY._replace(pack="p" * 65),
    ],
    ids=["no hash", "hash of 65 bytes", "no pack", "pack of 65 bytes"],
)
def test_a_key_that_does_not_fit_the_header_is_refused(key: ObjectKey) -> None:
    with pytest.raises(ObjectFormatError, match="cannot be stored"):
        sealed(key)
