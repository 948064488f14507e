"""An object that is checked while it arrives: it passes if all of its bytes arrived once, in order, and are its own."""

from __future__ import annotations

import os
from itertools import pairwise
from typing import Any

import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from offload_core.api.keys import ObjectKey
from offload_core.api.one_pass import LoadCheck
from offload_core.objects import format as object_format
from offload_core.objects.arriving_object import ArrivingObject
from offload_core.objects.format import HEADER_BYTES, seal

KEY = ObjectKey("ab" * 32, "full-u256", bytes(32))
SIZE = HEADER_BYTES + 10_000


def sealed() -> bytearray:
    whole = bytearray(os.urandom(SIZE))
    seal(memoryview(whole), KEY)
    return whole


def cuts(places: set[int]) -> list[int]:
    """Return the sizes of the parts between the places."""
    return [end - start for start, end in pairwise([0, *sorted(places), SIZE])]


@given(st.sets(st.integers(1, SIZE - 1), max_size=6))
def test_a_whole_object_passes_in_any_parts(places: set[int]) -> None:
    content, buffer = sealed(), bytearray(SIZE)
    arriving = ArrivingObject(memoryview(buffer), KEY)
    start = 0
    for nbytes in cuts(places):
        assert not arriving.passed
        buffer[start : start + nbytes] = content[start : start + nbytes]
        start += nbytes
        assert arriving.filled(nbytes) is (start == SIZE)
    assert arriving.passed


@given(st.sets(st.integers(1, SIZE - 1), max_size=4), st.integers(0, SIZE - 1), st.integers(0, 7))
def test_a_flipped_bit_does_not_pass(places: set[int], at: int, bit: int) -> None:
    buffer = sealed()
    buffer[at] ^= 1 << bit
    arriving = ArrivingObject(memoryview(buffer), KEY)
    assert not any(arriving.filled(nbytes) for nbytes in cuts(places))
    assert not arriving.passed


@pytest.mark.parametrize(
    "parts",
    [
        [],
        [SIZE - 1],
        [HEADER_BYTES],
        [SIZE + 1],
        [5000, SIZE],
        [5000, SIZE - 5000, 1],
        [SIZE, SIZE],
        [SIZE, 0],
        [0, SIZE],
        [-1, SIZE, 1],
        [5000, -5000, SIZE],
        [SIZE + 5000, -5000],
    ],
)
def test_parts_that_are_not_the_buffer_once_in_order_do_not_pass(parts: list[int]) -> None:
    arriving = ArrivingObject(memoryview(sealed()), KEY)
    for nbytes in parts:
        arriving.filled(nbytes)
    assert not arriving.passed


@pytest.mark.parametrize("part", [SIZE, 5000, 1])
def test_parts_that_are_told_before_they_arrive_do_not_pass(part: int) -> None:
    content, buffer = sealed(), bytearray(SIZE)
    buffer[:HEADER_BYTES] = content[:HEADER_BYTES]
    arriving = ArrivingObject(memoryview(buffer), KEY)
    for start in range(0, SIZE, part):
        arriving.filled(min(part, SIZE - start))
    buffer[:] = content
    assert not arriving.passed


def test_a_whole_object_passes_by_the_digest_of_its_payload() -> None:
    buffer = memoryview(sealed())
    arriving = ArrivingObject(buffer, KEY)
    assert arriving.hash_start == HEADER_BYTES
    assert arriving.hashed(xxhash.xxh3_128_digest(buffer[HEADER_BYTES:]))
    assert arriving.passed


@given(st.integers(0, SIZE - 1), st.integers(0, 7))
def test_a_flipped_bit_does_not_pass_by_a_digest(at: int, bit: int) -> None:
    buffer = sealed()
    buffer[at] ^= 1 << bit
    arriving = ArrivingObject(memoryview(buffer), KEY)
    assert not arriving.hashed(xxhash.xxh3_128_digest(buffer[HEADER_BYTES:]))
    assert not arriving.passed


def test_only_a_whole_digest_that_comes_alone_and_once_passes() -> None:
    buffer = memoryview(sealed())
    digest = xxhash.xxh3_128_digest(buffer[HEADER_BYTES:])
    for wrong in (b"", digest[:15], digest + b"\0", bytes(16)):
        assert not ArrivingObject(buffer, KEY).hashed(wrong)
    after_parts = ArrivingObject(buffer, KEY)
    after_parts.filled(5000)
    assert not after_parts.hashed(digest)
    twice = ArrivingObject(buffer, KEY)
    assert twice.hashed(digest)
    assert not twice.hashed(digest)
    assert not twice.passed
    other = ArrivingObject(buffer, KEY._replace(chunk_hash=bytes(31) + b"x"))
    assert not other.hashed(digest)
    short = ArrivingObject(memoryview(bytearray(100)), KEY)
    assert short.hash_start is None
    assert not short.hashed(xxhash.xxh3_128_digest(b""))


def test_a_check_takes_no_digest_by_default() -> None:
    class Parts(LoadCheck):
        def filled(self, nbytes: int) -> bool:
            return True

    assert Parts().hash_start is None
    assert not Parts().hashed(bytes(16))


def test_another_object_does_not_pass() -> None:
    arriving = ArrivingObject(memoryview(sealed()), KEY._replace(chunk_hash=bytes(31) + b"x"))
    arriving.filled(SIZE)
    assert not arriving.passed


def test_a_compressed_object_does_not_pass() -> None:
    whole = memoryview(sealed())
    header = object_format.read_header(whole, KEY)
    object_format.write_header(whole, header._replace(codec=object_format.Codec.ZSTD, raw_bytes=2 * SIZE))
    object_format.verify_stored(whole, KEY)
    for parts in ([SIZE], [5000, SIZE - 5000]):
        arriving = ArrivingObject(whole, KEY)
        for nbytes in parts:
            arriving.filled(nbytes)
        assert not arriving.passed


def test_a_buffer_that_is_too_small_for_a_header_does_not_pass() -> None:
    arriving = ArrivingObject(memoryview(bytearray(100)), KEY)
    arriving.filled(60)
    arriving.filled(40)
    assert not arriving.passed


def test_each_byte_of_the_payload_is_hashed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    hashed: list[int] = []
    real = xxhash.xxh3_128

    class Counting:
        def __init__(self) -> None:
            self._digest = real()

        def update(self, data: Any) -> None:
            hashed.append(len(data))
            self._digest.update(data)

        def digest(self) -> bytes:
            return bytes(self._digest.digest())

    content = sealed()
    monkeypatch.setattr(xxhash, "xxh3_128", Counting)
    arriving = ArrivingObject(memoryview(content), KEY)
    for nbytes in (1000, 5000, SIZE - 6000):
        arriving.filled(nbytes)
    assert arriving.passed
    assert sum(hashed) == SIZE - HEADER_BYTES
