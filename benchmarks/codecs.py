"""Compression ratios and speeds of the codecs on the bytes of a KV cache.

    python -m benchmarks.codecs [--payload-mib 2] [--levels 1,3,9] [--seconds 0.5] [--json FILE] [FILE_OR_FOLDER …]

Each row compresses and restores one whole object, header and checksums included, on one thread. The data are synthetic:
numbers of a normal distribution, one scale per channel, as bf16, fp16 and fp32 values.

Name files with bytes of a real cache to measure these too. Objects of a disk tier (``*.kv``, without compression) are
read without their headers, other files whole. ``split, both`` compresses both planes, one after the other;
``zstd-planes`` compresses only one.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt
import zstandard

from benchmarks.reporting.document import Run, add_json_option
from benchmarks.reporting.rows import Codecs, Compression
from offload_core.api.keys import ObjectKey
from offload_core.objects import format as object_format
from offload_core.objects.compression import compress, restore
from offload_core.objects.format import HEADER_BYTES, Codec

_KEY = ObjectKey("ab" * 32, "bench", bytes(32))
_CHANNELS = 128


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--payload-mib", type=float, default=2, help="MiB of an object's payload")
    parser.add_argument("--levels", default="1,3,9", help="levels of zstd, with commas between them")
    parser.add_argument(
        "--seconds", type=float, default=0.5, help="repeat each operation for this time; the fastest run counts"
    )
    parser.add_argument("files", nargs="*", type=Path, help="files with bytes of a real KV cache, or folders of *.kv")
    add_json_option(parser)
    arguments = parser.parse_args()
    run = Run(arguments)
    nbytes = int(arguments.payload_mib * 1024 * 1024) // 4 * 4
    levels = [int(level) for level in arguments.levels.split(",")]
    zstd_version = ".".join(map(str, zstandard.ZSTD_VERSION))
    print(f"objects of {nbytes} payload bytes, one thread, zstd {zstd_version}")
    print(f"{'data':22} {'codec':12} {'level':>5} {'ratio':>6} {'encode MB/s':>12} {'decode MB/s':>12}")
    rows: list[Compression] = []
    for row in measured([*synthetic(nbytes).items(), *real(arguments.files, nbytes)], levels, arguments.seconds):
        show(row)
        rows.append(row)
    run.write(Codecs(zstd_version=zstd_version, payload_bytes=nbytes, compression=rows))


def measured(data: Iterable[tuple[str, bytes]], levels: list[int], seconds: float) -> Iterator[Compression]:
    """Yield a row for every way to compress."""
    for name, payload in data:
        for codec in (Codec.ZSTD, Codec.ZSTD_PLANES):
            for level in levels:
                yield measure(name, payload, codec, level, seconds)
        yield split_both(name, payload, seconds)


def show(row: Compression) -> None:
    """Print one row."""
    speeds = f"{'(does not get smaller)':>25}"
    if row.encode_mb_per_second is not None and row.decode_mb_per_second is not None:
        speeds = f"{row.encode_mb_per_second:12.0f} {row.decode_mb_per_second:12.0f}"
    print(f"{row.data:22} {row.codec:12} {row.level:5} {row.ratio:6.3f} {speeds}", flush=True)


def synthetic(nbytes: int) -> dict[str, bytes]:
    """Return numbers like those of a KV cache, in three formats."""
    random = np.random.default_rng(7)

    def numbers(itemsize: int) -> npt.NDArray[np.float32]:
        scales = np.exp(random.standard_normal(_CHANNELS)).astype(np.float32)
        rows = -(-nbytes // (itemsize * _CHANNELS))
        scaled: npt.NDArray[np.float32] = random.standard_normal((rows, _CHANNELS)).astype(np.float32) * scales
        return scaled

    return {
        "bf16": (numbers(2).view(np.uint32) >> 16).astype("<u2").tobytes()[:nbytes],
        "fp16": numbers(2).astype("<f2").tobytes()[:nbytes],
        "fp32": numbers(4).astype("<f4").tobytes()[:nbytes],
    }


def real(paths: Iterable[Path], nbytes: int) -> list[tuple[str, bytes]]:
    """Return up to ``nbytes`` bytes of each file or folder."""
    found: list[tuple[str, bytes]] = []
    for path in paths:
        payload = b""
        for file in sorted(path.rglob("*.kv")) if path.is_dir() else [path]:
            payload += file.read_bytes()[HEADER_BYTES if file.suffix == ".kv" else 0 :]
            if len(payload) >= nbytes:
                break
        found.append((path.name[-22:], payload[:nbytes]))
    return found


def measure(name: str, payload: bytes, codec: Codec, level: int, seconds: float) -> Compression:
    """Compress and restore one object repeatedly."""
    source = memoryview(bytearray(HEADER_BYTES + len(payload)))
    source[HEADER_BYTES:] = payload
    object_format.seal(source, _KEY)
    header = object_format.verify(source, _KEY)
    target = memoryview(bytearray(2 * len(source)))
    back = memoryview(bytearray(len(source)))
    used = compress(header, source, target, codec, level)
    if used is None:
        return Compression(data=name, codec=label(codec), level=level, ratio=1)
    encode = best(lambda: compress(header, source, target, codec, level), seconds)
    decode = best(lambda: restore(target[:used], back, _KEY), seconds)
    assert back == source
    return Compression(
        data=name,
        codec=label(codec),
        level=level,
        ratio=len(source) / used,
        encode_mb_per_second=len(payload) / encode / 1e6,
        decode_mb_per_second=len(payload) / decode / 1e6,
    )


def split_both(name: str, payload: bytes, seconds: float) -> Compression:
    """Compress both planes at level 1, without header and checksums."""
    compressor = zstandard.ZstdCompressor(level=1)
    whole = np.frombuffer(payload, np.uint8)

    def encode() -> bytes:
        return compressor.compress(np.concatenate([whole[0::2], whole[1::2]]).data)

    stored = encode()
    encoding = best(encode, seconds)
    decoding = best(lambda: zstandard.ZstdDecompressor().decompress(stored), seconds)
    return Compression(
        data=name,
        codec="split, both",
        level=1,
        ratio=len(payload) / len(stored),
        encode_mb_per_second=len(payload) / encoding / 1e6,
        decode_mb_per_second=len(payload) / decoding / 1e6,
    )


def best(operation: Callable[[], object], seconds: float) -> float:
    """Return the seconds of the fastest run."""
    fastest = float("inf")
    end = time.perf_counter() + seconds
    while (start := time.perf_counter()) < end:
        operation()
        fastest = min(fastest, time.perf_counter() - start)
    return fastest


def label(codec: Codec) -> str:
    """Return the codec's name as in a configuration."""
    return codec.name.lower().replace("_", "-")


if __name__ == "__main__":
    main()
