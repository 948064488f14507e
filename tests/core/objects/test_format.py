"""The stored object: what was sealed is verified, anything else is refused."""

from __future__ import annotations

import re
import struct

import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from offload_core.api.errors import ObjectFormatError
from offload_core.api.keys import ObjectKey
from offload_core.objects import format as object_format
from offload_core.objects.format import HEADER_BYTES, object_bytes, seal, verify

KEY = ObjectKey("ab" * 32, "full-u256", bytes(range(32)))
PAYLOAD = b"forty bytes of payload, more or less...!"


def sealed(key: ObjectKey = KEY, payload: bytes = PAYLOAD) -> bytearray:
    # Dirty memory in front: the header must overwrite all of it.
    whole = bytearray(b"\xee" * HEADER_BYTES + payload)
    seal(memoryview(whole), key)
    return whole


def documented_fields() -> dict[str, tuple[int, int]]:
    """Read the table in the module's docstring: ``{what it says: (offset, bytes)}`` (payload excluded)."""
    rows = re.findall(r"^ *(\d+) +(\d+)  (.+)$", object_format.__doc__ or "", flags=re.MULTILINE)
    return {f"{offset} {text}": (int(offset), int(size)) for offset, size, text in rows}


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
    with pytest.raises(ObjectFormatError, match="payload of 41 bytes, header says 40"):
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
        (8, struct.pack("<H", 1), "version 1, codec 0; this reader knows .* version 2, codec 0 to 2"),
        (10, b"\x03", "codec 3; this reader knows"),
        (10, b"\x01", r"header says 40 stored and 40 raw \(codec 1\)"),
        (11, b"\x1f", "names another object"),
        (12, b"\x08", "names another object"),
        (176, struct.pack("<Q", 41), "header says 40 stored and 41 raw"),
        (184, struct.pack("<Q", 39), "header says 39 stored and 40 raw"),
        (192, bytes(16), "the payload's checksum does not match its 40 bytes"),
        (208, bytes(16), "another raw checksum, where raw bytes are expected"),
    ],
    ids=[
        *("magic", "version", "no codec", "codec", "hash length", "pack length", "raw length", "stored length"),
        *("stored checksum", "raw checksum"),
    ],
)
def test_a_header_with_a_right_checksum_and_a_wrong_field_is_refused(offset: int, value: bytes, message: str) -> None:
    with pytest.raises(ObjectFormatError, match=message):
        verify(memoryview(resealed(sealed(), offset, value)), KEY)


def test_the_documented_fields_cover_the_header_without_gap_or_overlap() -> None:
    end = 0
    for offset, size in documented_fields().values():
        assert offset == end
        end = offset + size
    assert end == HEADER_BYTES == 4096


def test_the_bytes_are_where_the_documentation_says() -> None:
    whole = sealed()
    expected = {
        "magic": b"OFFLCORE",
        "format version": struct.pack("<H", 2),
        "codec": b"\x00",
        "length of the chunk hash": b"\x20",
        "length of the pack name": b"\x09",
        "fingerprint": bytes.fromhex("ab" * 32),
        "chunk hash": bytes(range(32)) + bytes(32),
        "pack name": b"full-u256" + bytes(55),
        "raw length": struct.pack("<Q", 40),
        "stored length": struct.pack("<Q", 40),
        "XXH3-128 of the stored payload": xxhash.xxh3_128(PAYLOAD).digest(),
        "XXH3-128 of the raw bytes": xxhash.xxh3_128(PAYLOAD).digest(),
        "XXH3-128 of bytes 0 to 4079": xxhash.xxh3_128(whole[:4080]).digest(),
    }
    fields = documented_fields()
    for name, value in expected.items():
        ((offset, size),) = [place for text, place in fields.items() if text.split(" ", 1)[1].startswith(name)]
        assert whole[offset : offset + size] == value, name
    reserved = [place for text, place in fields.items() if text.endswith(" zero")]
    assert len(reserved) == 2
    assert all(whole[offset : offset + size] == bytes(size) for offset, size in reserved)


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
