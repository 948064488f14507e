"""The codecs, from bytes to bytes. They are lossless for any bytes of any length.

``zstd`` compresses the bytes as they are.

``zstd-planes`` is for 16-bit values. The low byte of a bf16 number is nearly all mantissa, which looks random. The high
byte has the sign and the exponent, which repeat. The codec stores the low bytes as they are, and compresses only the
high ones. Compressing both planes took two to three times as long and saved no more.

The high plane has few repeated strings, and a search for short ones costs both time and space. A match must therefore
have at least seven bytes. Most of the saving comes from entropy coding (``python -m benchmarks.codecs``).

No function here needs more memory than one or two blocks. The plane is divided into frames of ``BLOCK_BYTES``. On the
way back it is decoded into the end of the target and spread from there. Each thread keeps its own contexts of zstd.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import zstandard

from offload_core.api.errors import ObjectFormatError
from offload_core.objects.format import Codec

BLOCK_BYTES = 128 * 1024
"""Bytes of the high plane per zstd frame: the size of one zstd block, and small enough to stay in the cache."""
_LARGEST_WINDOW_BYTES = 1 << 25  # level 19 uses 8 MiB; a frame with a larger window is from another writer
_SPREAD_BYTES = 32 * 1024

_Bytes = npt.NDArray[np.uint8]
_contexts = threading.local()


def encode(codec: Codec, level: int, raw: memoryview, target: memoryview) -> int | None:
    """Encode ``raw`` into ``target``.

    Args:
        codec: any but ``NONE``.
        level: compression level of zstd, 1 to 19.
        raw: any bytes; may be read-only.
        target: writable. Its content beyond the result is undefined afterwards.

    Returns:
        The number of bytes used in ``target``, or ``None`` if ``target`` is too small.
    """
    if not raw:
        return 0
    if codec is Codec.ZSTD:
        return _encode_whole(_compressor(codec, level), raw, target)
    low_bytes = len(raw) - len(raw) // 2
    if low_bytes > len(target):
        return None
    source = np.frombuffer(raw, np.uint8)
    np.frombuffer(target, np.uint8)[:low_bytes] = source[0::2]
    used = _encode_blocks(_compressor(codec, level), source[1::2], target[low_bytes:])
    return None if used is None else low_bytes + used


def decode(codec: Codec, stored: memoryview, target: memoryview) -> None:
    """Decode ``stored`` into all of ``target``.

    Args:
        codec: any but ``NONE``.
        stored: the result of :func:`encode`. Other bytes are harmless.
        target: writable, of exactly the raw length.

    Raises:
        ObjectFormatError: ``stored`` does not decode to exactly the raw length. ``target`` then holds anything.
    """
    if codec is Codec.ZSTD:
        _decode_whole(stored, target)
        return
    low, frames = _split_planes(stored, len(target))
    half = len(target) // 2
    # The high plane is decoded into the second half. Spreading it from the start never overwrites a byte still unread.
    _decode_whole(frames, target[len(target) - half :])
    result = np.frombuffer(target, np.uint8)
    high = result[len(target) - half :]
    for start in range(0, half, _SPREAD_BYTES):
        end = min(start + _SPREAD_BYTES, half)
        block = high[start:end].copy()
        result[2 * start : 2 * end : 2] = low[start:end]
        result[2 * start + 1 : 2 * end : 2] = block
    if len(target) % 2:
        result[-1] = low[-1]


def decoded_blocks(codec: Codec, stored: memoryview, raw_bytes: int) -> Iterator[memoryview]:
    """Decode ``stored`` in small blocks, for checks with little memory. A block is valid until the next one.

    Raises:
        ObjectFormatError: ``stored`` does not decode to exactly ``raw_bytes`` bytes.
    """
    if codec is Codec.ZSTD:
        for block in _decode_in_blocks(stored, raw_bytes):
            yield memoryview(block)
        return
    low, frames = _split_planes(stored, raw_bytes)
    start = 0
    for block in _decode_in_blocks(frames, raw_bytes // 2):
        whole = np.empty(2 * len(block), np.uint8)
        whole[0::2] = low[start : start + len(block)]
        whole[1::2] = np.frombuffer(block, np.uint8)
        start += len(block)
        yield whole.data
    if raw_bytes % 2:
        yield memoryview(low[-1:].tobytes())


def _encode_whole(compressor: zstandard.ZstdCompressor, raw: memoryview, target: memoryview) -> int | None:
    """Compress into one frame, directly in ``target``."""
    used = 0
    with compressor.stream_reader(raw, size=len(raw), closefd=False) as reader:
        while used < len(target):
            count = reader.readinto(target[used:])
            if not count:
                return used
            used += count
        return None if reader.read(1) else used


def _encode_blocks(compressor: zstandard.ZstdCompressor, plane: _Bytes, target: memoryview) -> int | None:
    """Compress into one frame per block of a strided ``plane``."""
    used = 0
    for start in range(0, len(plane), BLOCK_BYTES):
        frame = compressor.compress(np.ascontiguousarray(plane[start : start + BLOCK_BYTES]).data)
        if used + len(frame) > len(target):
            return None
        target[used : used + len(frame)] = frame
        used += len(frame)
    return used


def _split_planes(stored: memoryview, raw_bytes: int) -> tuple[_Bytes, memoryview]:
    low_bytes = raw_bytes - raw_bytes // 2
    if len(stored) < low_bytes:
        raise ObjectFormatError(f"{len(stored)} stored bytes are fewer than the {low_bytes} of the low plane")
    return np.frombuffer(stored[:low_bytes], np.uint8), stored[low_bytes:]


def _decode_whole(frames: memoryview, target: memoryview) -> None:
    try:
        with _decompressor().stream_reader(frames, read_across_frames=True, closefd=False) as reader:
            done = 0
            while done < len(target):
                count = reader.readinto(target[done:])
                if not count:
                    raise ObjectFormatError(f"decoding ends after {done} of {len(target)} bytes")
                done += count
            if reader.read(1):
                raise ObjectFormatError(f"decoding gives more than {len(target)} bytes")
    except zstandard.ZstdError as error:
        raise ObjectFormatError(f"decoding fails: {error}") from error


def _decode_in_blocks(frames: memoryview, raw_bytes: int) -> Iterator[bytes]:
    try:
        with _decompressor().stream_reader(frames, read_across_frames=True, closefd=False) as reader:
            done = 0
            while block := reader.read(min(BLOCK_BYTES, raw_bytes - done + 1)):
                done += len(block)
                if done > raw_bytes:
                    raise ObjectFormatError(f"decoding gives more than {raw_bytes} bytes")
                yield block
            if done < raw_bytes:
                raise ObjectFormatError(f"decoding ends after {done} of {raw_bytes} bytes")
    except zstandard.ZstdError as error:
        raise ObjectFormatError(f"decoding fails: {error}") from error


def _compressor(codec: Codec, level: int) -> zstandard.ZstdCompressor:
    """Return this thread's compressor, which only one thread at a time may use."""
    compressors: dict[tuple[Codec, int], zstandard.ZstdCompressor] = _contexts.__dict__.setdefault("compressors", {})
    found = compressors.get((codec, level))
    if found is None:
        found = compressors[codec, level] = _new_compressor(codec, level)
    return found


def _new_compressor(codec: Codec, level: int) -> zstandard.ZstdCompressor:
    if codec is Codec.ZSTD:
        return zstandard.ZstdCompressor(level=level, write_checksum=False)
    parameters: dict[str, Any] = {"min_match": 7}
    if level == 1:
        parameters["hash_log"] = 10  # finds runs and copies; a larger table finds chance matches and is slower
    return zstandard.ZstdCompressor(
        compression_params=zstandard.ZstdCompressionParameters.from_level(
            level, source_size=BLOCK_BYTES, write_checksum=0, **parameters
        )
    )


def _decompressor() -> zstandard.ZstdDecompressor:
    found: zstandard.ZstdDecompressor | None = getattr(_contexts, "decompressor", None)
    if found is None:
        found = _contexts.decompressor = zstandard.ZstdDecompressor(max_window_size=_LARGEST_WINDOW_BYTES)
    return found
