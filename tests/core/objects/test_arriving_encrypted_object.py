"""An encrypted object that is decrypted while it arrives: it passes if its bytes arrived once, in order, authentic."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence

import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from offload_core.api.keys import ObjectKey
from offload_core.objects import format as object_format
from offload_core.objects.arriving_encrypted_object import ArrivingEncryptedObject
from offload_core.objects.encryption import EncryptionKey, KeyRing
from offload_core.objects.format import HEADER_BYTES, seal
from tests.core.objects.test_arriving_object import KEY, SIZE, cuts, sealed

NEW, OLD = EncryptionKey("new", os.urandom(32)), EncryptionKey("old", os.urandom(32))
NAME = KEY._replace(pack=f"{KEY.pack}-aes-old")
SEALED = bytes(sealed())
RING = KeyRing((NEW, OLD))


def encrypted(content: bytes = SEALED, name: ObjectKey = NAME, key: EncryptionKey = OLD) -> bytearray:
    source, target = memoryview(content), bytearray(len(content))
    KeyRing((key,)).encrypt(object_format.read_header(source, KEY), name, source, memoryview(target))
    return target


STORED = bytes(encrypted())


class Load:
    """A load into fresh memory."""

    def __init__(self, ring: KeyRing = RING, size: int = SIZE) -> None:
        self.buffer, self.target = bytearray(size), bytearray(SIZE)
        views = memoryview(self.buffer), memoryview(self.target)
        self.check = ArrivingEncryptedObject(ring, views[0], NAME, views[1], KEY)

    def bring(self, content: bytes, parts: Sequence[int]) -> bool:
        """Tell the check of parts, each of which arrives just before; return whether the object passes."""
        start = 0
        for nbytes in parts:
            assert not self.check.passed
            self.buffer[start : start + nbytes] = content[start : start + nbytes]
            self.check.filled(nbytes)
            start += nbytes
        return self.check.passed


@given(st.sets(st.integers(1, SIZE - 1), max_size=6))
def test_a_whole_object_passes_in_any_parts_and_is_sealed_again(places: set[int]) -> None:
    load = Load()
    assert load.bring(STORED, cuts(places))
    assert load.target == SEALED


@given(st.sets(st.integers(1, SIZE - 1), max_size=4), st.integers(0, SIZE - 1), st.integers(0, 7), st.booleans())
def test_a_flipped_bit_does_not_pass_also_under_right_checksums(
    places: set[int], at: int, bit: int, repaired: bool
) -> None:
    content = bytearray(STORED)
    content[at] ^= 1 << bit
    if repaired:
        content[192:208] = xxhash.xxh3_128_digest(bytes(content[HEADER_BYTES:]))
        content[4080:4096] = xxhash.xxh3_128_digest(bytes(content[:4080]))
    assert content == STORED or not Load().bring(bytes(content), cuts(places))


@pytest.mark.parametrize(
    "parts", [[], [SIZE - 1], [HEADER_BYTES], [SIZE + 1], [5000, SIZE], [5000, SIZE - 5000, 1], [0, SIZE], [-1, SIZE]]
)
def test_parts_that_are_not_the_buffer_once_in_order_do_not_pass(parts: list[int]) -> None:
    load = Load()
    load.buffer[:] = STORED
    for nbytes in parts:
        load.check.filled(nbytes)
    assert not load.check.passed


@pytest.mark.parametrize("part", [SIZE, 5000, 512])
def test_parts_that_are_told_before_they_arrive_do_not_pass(part: int) -> None:
    load = Load()
    load.buffer[:HEADER_BYTES] = STORED[:HEADER_BYTES]
    for start in range(0, SIZE, part):
        load.check.filled(min(part, SIZE - start))
    load.buffer[:] = STORED
    assert not load.check.passed


def test_bytes_that_change_after_their_decryption_do_not_reach_the_target() -> None:
    load = Load()
    load.buffer[:] = STORED
    load.check.filled(5000)
    load.buffer[HEADER_BYTES:5000] = bytes(5000 - HEADER_BYTES)
    load.check.filled(SIZE - 5000)
    assert load.check.passed
    assert load.target == SEALED


def _renamed() -> bytes:
    return bytes(encrypted(name=NAME._replace(chunk_hash=bytes(31) + b"x")))


def _raw_checksum_of_other_bytes() -> bytes:
    content = bytearray(SEALED)
    content[-1] ^= 1  # after its seal: the writer's memory was damaged
    return bytes(encrypted(bytes(content)))


def _wrong_stored_checksum() -> bytes:
    content = bytearray(STORED)
    content[192:208] = bytes(16)
    content[4080:4096] = xxhash.xxh3_128_digest(bytes(content[:4080]))
    return bytes(content)


def _plain() -> bytes:
    content = bytearray(SEALED)
    seal(memoryview(content), NAME)
    return bytes(content)


def _compressed() -> bytes:
    content = bytearray(SEALED)
    header = object_format.read_header(memoryview(content), KEY)
    other = header._replace(codec=object_format.Codec.ZSTD, raw_bytes=2 * SIZE)
    KeyRing((OLD,)).encrypt(other, NAME, memoryview(bytes(content)), memoryview(content))
    return bytes(content)


@pytest.mark.parametrize(
    "content", [_renamed, _raw_checksum_of_other_bytes, _wrong_stored_checksum, _plain, _compressed]
)
def test_another_object_does_not_pass(content: Callable[[], bytes]) -> None:
    for parts in ([SIZE], [5000, SIZE - 5000]):
        assert not Load().bring(content(), parts)


@pytest.mark.parametrize("ring", [KeyRing((NEW,)), KeyRing((EncryptionKey("old", os.urandom(32)),))])
def test_an_object_of_another_key_does_not_pass(ring: KeyRing) -> None:
    assert not Load(ring).bring(STORED, [SIZE])


def test_a_buffer_of_another_size_than_the_target_does_not_pass() -> None:
    small = bytearray(HEADER_BYTES + 100)
    seal(memoryview(small), KEY)
    assert not Load(size=len(small)).bring(bytes(encrypted(bytes(small))), [len(small)])


def test_a_buffer_that_is_too_small_for_a_header_does_not_pass() -> None:
    assert not Load(size=100).bring(bytes(100), [60, 40])
