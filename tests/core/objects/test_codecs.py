"""The codecs lose nothing, write no further than they may, and take anything for input."""

from __future__ import annotations

import os

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from offload_core.api.errors import ObjectFormatError
from offload_core.objects import codecs
from offload_core.objects.format import Codec

CODECS = [Codec.ZSTD, Codec.ZSTD_PLANES]
BLOCK = codecs.BLOCK_BYTES


def bf16_normal(nbytes: int, seed: int = 1) -> bytes:
    """Return the bytes of bf16 numbers of a normal distribution."""
    numbers = np.random.default_rng(seed).standard_normal(-(-nbytes // 2)).astype(np.float32)
    return (numbers.view(np.uint32) >> 16).astype("<u2").tobytes()[:nbytes]


def encoded(codec: Codec, level: int, raw: bytes) -> bytes:
    target = memoryview(bytearray(2 * len(raw) + 1000))
    used = codecs.encode(codec, level, memoryview(raw), target)
    assert used is not None
    return bytes(target[:used])


def decoded(codec: Codec, stored: bytes, raw_bytes: int) -> bytes:
    """Decode into the middle of a buffer, of which nothing else may change; both ways of decoding must agree."""
    around = bytearray(b"\xa5" * (raw_bytes + 200))
    codecs.decode(codec, memoryview(stored), memoryview(around)[100 : 100 + raw_bytes])
    assert around[:100] == around[100 + raw_bytes :] == b"\xa5" * 100
    result = bytes(around[100 : 100 + raw_bytes])
    assert b"".join(bytes(block) for block in codecs.decoded_blocks(codec, memoryview(stored), raw_bytes)) == result
    return result


@pytest.mark.parametrize("codec", CODECS)
@given(raw=st.binary(max_size=3000), level=st.integers(1, 19))
def test_any_bytes_come_back(codec: Codec, raw: bytes, level: int) -> None:
    assert decoded(codec, encoded(codec, level, raw), len(raw)) == raw


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("level", range(1, 20))
def test_every_level_takes_numbers_zeros_and_noise(codec: Codec, level: int) -> None:
    for raw in (bf16_normal(50_001), bytes(50_000), os.urandom(3001)):
        assert decoded(codec, encoded(codec, level, raw), len(raw)) == raw


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("nbytes", [0, 1, 2, 3, 2 * BLOCK - 1, 2 * BLOCK, 2 * BLOCK + 1, 2 * BLOCK + 3, 5 * BLOCK + 7])
def test_lengths_around_the_blocks_come_back(codec: Codec, nbytes: int) -> None:
    for raw in (bf16_normal(nbytes), bytes(nbytes), os.urandom(nbytes)):
        assert decoded(codec, encoded(codec, 1, raw), nbytes) == raw


def test_numbers_of_16_bits_are_smaller_by_planes() -> None:
    raw = bf16_normal(1 << 20)
    whole, planes = (len(encoded(codec, 1, raw)) for codec in CODECS)
    assert len(raw) / whole > 1.25
    assert len(raw) / planes > 1.4


@pytest.mark.parametrize("codec", CODECS)
def test_a_target_that_is_too_small_is_not_overrun(codec: Codec) -> None:
    raw = bf16_normal(3 * BLOCK)
    needed = len(encoded(codec, 1, raw))
    for room in (0, 1, needed // 4, needed // 2, len(raw) // 2, needed - 1):
        memory = bytearray(b"\xa5" * (needed + 100))
        assert codecs.encode(codec, 1, memoryview(raw), memoryview(memory)[:room]) is None
        assert memory[room:] == b"\xa5" * (needed + 100 - room)
    assert codecs.encode(codec, 1, memoryview(raw), memoryview(bytearray(needed))) == needed


@pytest.mark.parametrize("codec", CODECS)
def test_another_length_than_the_raw_one_is_refused(codec: Codec) -> None:
    raw = bf16_normal(5000)
    stored = encoded(codec, 1, raw)
    for wrong in (0, 1, 2500, 4998, 4999, 5001, 5002, 10_000, 1 << 20):
        with pytest.raises(ObjectFormatError):
            codecs.decode(codec, memoryview(stored), memoryview(bytearray(wrong)))
        with pytest.raises(ObjectFormatError):
            list(codecs.decoded_blocks(codec, memoryview(stored), wrong))


@pytest.mark.parametrize("codec", CODECS)
def test_a_bomb_is_refused_before_it_goes_off(codec: Codec) -> None:
    huge = 64 << 20
    stored = (
        encoded(codec, 1, bytes(huge))[-20_000:] if codec is Codec.ZSTD else b"\0" + encoded(Codec.ZSTD, 1, bytes(huge))
    )
    blocks = codecs.decoded_blocks(codec, memoryview(stored), 2 if codec is Codec.ZSTD_PLANES else 1000)
    with pytest.raises(ObjectFormatError, match="more than"):
        list(blocks)
    with pytest.raises(ObjectFormatError, match="more than"):
        codecs.decode(codec, memoryview(stored), memoryview(bytearray(2)))


@pytest.mark.parametrize("codec", CODECS)
@given(stored=st.binary(max_size=300), raw_bytes=st.integers(0, 300))
def test_noise_is_refused_or_decoded_and_nothing_else(codec: Codec, stored: bytes, raw_bytes: int) -> None:
    target = memoryview(bytearray(raw_bytes))
    try:
        codecs.decode(codec, memoryview(stored), target)
    except ObjectFormatError:
        return
    assert b"".join(map(bytes, codecs.decoded_blocks(codec, memoryview(stored), raw_bytes))) == bytes(target)
