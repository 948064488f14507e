"""A compressed object: the sealed object comes back, and every change of a byte is found, with every codec."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from offload_core.api.errors import ObjectFormatError
from offload_core.api.keys import ObjectKey
from offload_core.objects import codecs
from offload_core.objects import format as object_format
from offload_core.objects.compression import compress, largest_compressed_bytes, restore, verify_any
from offload_core.objects.format import HEADER_BYTES, Codec
from tests.core.objects.test_codecs import bf16_normal

KEY = ObjectKey("ab" * 32, "full-u256", bytes(range(32)))
CODECS = [Codec.ZSTD, Codec.ZSTD_PLANES]
PAYLOAD = bf16_normal(3001)


def sealed(payload: bytes = PAYLOAD, key: ObjectKey = KEY) -> bytearray:
    whole = bytearray(b"\xee" * HEADER_BYTES + payload)
    object_format.seal(memoryview(whole), key)
    return whole


def compressed(codec: Codec, payload: bytes = PAYLOAD, key: ObjectKey = KEY, level: int = 1) -> bytearray | None:
    source = memoryview(bytes(sealed(payload, key)))
    target = bytearray(b"\xdd" * largest_compressed_bytes(len(source)))
    nbytes = compress(object_format.verify(source, key), source, memoryview(target), codec, level)
    return None if nbytes is None else target[:nbytes]


def stored(codec: Codec, key: ObjectKey = KEY) -> bytearray:
    found = sealed(key=key) if codec is Codec.NONE else compressed(codec, key=key)
    assert found is not None
    return found


def take(whole: bytearray | memoryview, key: ObjectKey = KEY, payload_bytes: int = len(PAYLOAD)) -> bytes:
    """Take an object in as a tier does, and return its payload.

    Raises:
        ObjectFormatError: it is not the object; looking at it without a buffer says the same.
    """
    view = memoryview(whole)
    size = HEADER_BYTES + payload_bytes
    target = bytearray(size)
    try:
        if len(view) == size:
            object_format.verify(view, key)
            target[:] = view
        else:
            restore(view, memoryview(target), key)
    except ObjectFormatError:
        if payload_bytes == len(PAYLOAD):
            with pytest.raises(ObjectFormatError):
                verify_any(view, key)
        raise
    verify_any(view, key)
    assert target == sealed(bytes(target[HEADER_BYTES:]), key), "what is restored is the sealed object, header and all"
    return bytes(target[HEADER_BYTES:])


@pytest.mark.parametrize("codec", CODECS)
@given(
    pattern=st.binary(min_size=1, max_size=50),
    times=st.integers(1, 100),
    tail=st.binary(max_size=3),
    level=st.integers(1, 19),
)
def test_what_was_compressed_comes_back_or_is_left_as_it_is(
    codec: Codec, pattern: bytes, times: int, tail: bytes, level: int
) -> None:
    payload = pattern * times + tail
    found = compressed(codec, payload, level=level)
    if found is not None:
        assert len(found) - HEADER_BYTES <= 0.95 * len(payload)
        assert take(found, payload_bytes=len(payload)) == payload


@pytest.mark.parametrize("codec", [*CODECS, Codec.NONE])
def test_every_changed_byte_is_detected(codec: Codec) -> None:
    whole = stored(codec)
    assert take(whole) == PAYLOAD
    for position, right in enumerate(bytes(whole)):
        for wrong in {right ^ 0x01, right ^ 0x80, right ^ 0xFF, 0} - {right}:
            whole[position] = wrong
            with pytest.raises(ObjectFormatError):
                object_format.verify_stored(memoryview(whole), KEY)
        whole[position] = right
    assert take(whole) == PAYLOAD


@pytest.mark.long
@pytest.mark.parametrize("codec", [*CODECS, Codec.NONE])
def test_every_other_value_of_every_byte_is_detected(codec: Codec) -> None:
    whole = stored(codec)
    for position, right in enumerate(bytes(whole)):
        for wrong in set(range(256)) - {right}:
            whole[position] = wrong
            with pytest.raises(ObjectFormatError):
                object_format.verify_stored(memoryview(whole), KEY)
        whole[position] = right
    assert take(whole) == PAYLOAD


@pytest.mark.parametrize("codec", [*CODECS, Codec.NONE])
def test_truncation_at_every_length_and_a_longer_object_are_detected(codec: Codec) -> None:
    whole = stored(codec)
    for length in range(len(whole)):
        with pytest.raises(ObjectFormatError):
            take(memoryview(whole)[:length])
    with pytest.raises(ObjectFormatError):
        take(whole + b"\0")


@pytest.mark.parametrize("codec", [*CODECS, Codec.NONE])
@pytest.mark.parametrize(
    "other",
    [KEY._replace(namespace="ac" + "ab" * 31), KEY._replace(pack="full-u25"), KEY._replace(chunk_hash=bytes(32))],
    ids=["fingerprint", "pack", "chunk"],
)
def test_an_object_of_another_key_is_refused(codec: Codec, other: ObjectKey) -> None:
    with pytest.raises(ObjectFormatError, match=f"{re.escape(str(KEY))}: the header names another object"):
        take(stored(codec, other))


def relabelled(whole: bytearray, offset: int, value: bytes) -> bytearray:
    """Change a field and make the checksums right again, as a defective or hostile writer would have."""
    whole[offset : offset + len(value)] = value
    whole[192:208] = xxhash.xxh3_128_digest(whole[HEADER_BYTES:])
    whole[4080:4096] = xxhash.xxh3_128_digest(whole[:4080])
    return whole


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda whole: relabelled(whole, 10, bytes([3 - whole[10]])), "codec"),
        (lambda whole: relabelled(whole, 10, b"\0"), "stored and 3001 raw"),
        (lambda whole: relabelled(whole, 176, (3000).to_bytes(8, "little")), "header says 3000 raw bytes"),
        (lambda whole: relabelled(whole, 176, (1 << 40).to_bytes(8, "little")), f"header says {1 << 40} raw bytes"),
        (lambda whole: relabelled(whole, 208, bytes(16)), "the raw checksum does not match the decoded bytes"),
        (lambda whole: relabelled(whole, len(whole) - 40, b"\0" * 40), "codec"),
        (lambda whole: relabelled(whole, HEADER_BYTES, b"\0" * 40), "codec"),
    ],
    ids=["other codec", "no codec", "raw length", "bomb", "raw checksum", "end of the payload", "start of the payload"],
)
def test_a_defect_behind_right_checksums_is_found_by_decoding(
    codec: Codec, damage: Callable[[bytearray], bytearray], message: str
) -> None:
    with pytest.raises(ObjectFormatError, match=message):
        take(damage(stored(codec)))


def test_a_raw_length_beyond_the_packs_is_refused_before_anything_is_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = relabelled(stored(Codec.ZSTD), 176, (1 << 40).to_bytes(8, "little"))
    monkeypatch.setattr(codecs, "decode", lambda *_: pytest.fail("decoded"))
    with pytest.raises(ObjectFormatError, match="a compressed object of 3001 raw bytes is expected"):
        restore(memoryview(whole), memoryview(bytearray(HEADER_BYTES + 3001)), KEY)


def test_a_gain_below_five_percent_is_not_taken() -> None:
    noise = bytes(range(256)) * 4
    assert compressed(Codec.ZSTD, xxhash.xxh3_128_digest(b"x") * 1) is None
    gains = [compressed(Codec.ZSTD, bf16_normal(2000, seed) + bytes(zeros)) for seed, zeros in ((1, 0), (1, 400))]
    assert all(found is not None for found in gains)
    assert compressed(Codec.ZSTD, noise) is not None
    assert largest_compressed_bytes(HEADER_BYTES + 1000) == HEADER_BYTES + 950


@pytest.mark.parametrize("codec", CODECS)
def test_what_decodes_to_other_bytes_than_were_compressed_is_not_restored(codec: Codec) -> None:
    whole = relabelled(stored(codec), 208, bytes(16))
    with pytest.raises(ObjectFormatError, match="the raw checksum does not match the decoded bytes"):
        restore(memoryview(whole), memoryview(bytearray(HEADER_BYTES + len(PAYLOAD))), KEY)
