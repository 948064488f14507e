"""The stored object, byte by byte, against files that were written when its format was laid down.

The offsets stand here as numbers: they are the format, whatever the code calls them.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from pathlib import Path

import pytest
import xxhash

from tests.golden import subject
from tests.golden.objects import KEY, PAYLOAD, golden_object
from tests.golden.subject import ObjectFormatError, ObjectKey

CODECS = {"none": 0, "zstd": 1, "zstd-planes": 2}
STORED_FIELDS = range(184, 208)
"""Length and checksum of the stored payload, which differ from one version of zstd to another."""
HEADER_CHECKSUM = range(4080, 4096)
codecs = pytest.mark.parametrize("codec", CODECS)


def golden(codec: str) -> bytes:
    return golden_object(codec).read_bytes()


def accepted(whole: bytes) -> bool:
    try:
        subject.verify_any(memoryview(whole), KEY)
    except ObjectFormatError:
        return False
    return True


def resealed(whole: bytes, offset: int, value: bytes) -> bytes:
    """Change a field and make the header's checksum right again, as another writer would have."""
    changed = bytearray(whole)
    changed[offset : offset + len(value)] = value
    changed[4080:4096] = xxhash.xxh3_128_digest(bytes(changed[:4080]))
    return bytes(changed)


def test_there_is_a_file_of_every_format_version() -> None:
    assert subject.FORMAT_VERSION == 2
    assert all(golden_object("none", version).exists() for version in (1, 2))


@codecs
def test_the_fields_lie_where_the_format_says(codec: str) -> None:
    whole = golden(codec)
    payload = whole[4096:]
    fields = struct.unpack_from("<8sHBBB3s32s64s64sQQ16s16s", whole)
    assert fields == (
        b"OFFLCORE",
        2,
        CODECS[codec],
        32,
        len("full-u256"),
        bytes(3),
        bytes.fromhex(KEY.namespace),
        KEY.chunk_hash + bytes(32),
        b"full-u256" + bytes(55),
        len(PAYLOAD),
        len(payload),
        xxhash.xxh3_128_digest(payload),
        xxhash.xxh3_128_digest(PAYLOAD),
    )
    assert whole[224:4080] == bytes(3856)
    assert whole[4080:4096] == xxhash.xxh3_128_digest(whole[:4080])


def test_the_payload_without_a_codec_is_the_raw_bytes() -> None:
    assert golden("none")[4096:] == PAYLOAD


def test_zstd_planes_has_the_even_bytes_as_they_are() -> None:
    low = PAYLOAD[0::2]
    assert golden("zstd-planes")[4096 : 4096 + len(low)] == low


def test_the_code_writes_the_very_bytes_without_a_codec() -> None:
    assert subject.written("none", KEY, PAYLOAD) == golden("none")


@pytest.mark.parametrize("codec", ["zstd", "zstd-planes"])
def test_the_code_writes_the_same_header_with_a_codec(codec: str) -> None:
    now = subject.written(codec, KEY, PAYLOAD)
    own = {*STORED_FIELDS, *HEADER_CHECKSUM}
    differing = [offset for offset in range(4096) if offset not in own and now[offset] != golden(codec)[offset]]
    assert differing == []


@codecs
def test_the_code_accepts_the_file_and_refuses_it_with_any_byte_changed(codec: str) -> None:
    whole = golden(codec)
    assert accepted(whole)
    found = []
    for offset in range(len(whole)):
        changed = bytearray(whole)
        changed[offset] ^= 1 << offset % 8
        if accepted(bytes(changed)):
            found.append(offset)
    assert found == []


@codecs
@pytest.mark.parametrize(
    ("offset", "value"),
    [
        (0, b"OFFLCORD"),
        (8, b"\x01\x00"),
        (8, b"\x03\x00"),
        (10, b"\x03"),
        (11, b"\x1f"),
        (12, b"\x08"),
        (16, bytes(32)),
        (48, bytes(64)),
        (112, b"full-u255"),
        (176, struct.pack("<Q", len(PAYLOAD) + 1)),
        (176, struct.pack("<Q", len(PAYLOAD) - 1)),
        (184, struct.pack("<Q", 0)),
        (192, bytes(16)),
        (208, bytes(16)),
    ],
)
def test_the_code_refuses_a_field_of_another_value_under_a_right_checksum(
    codec: str, offset: int, value: bytes
) -> None:
    whole = golden(codec)
    assert resealed(whole, offset, whole[offset : offset + len(value)]) == whole
    assert not accepted(resealed(whole, offset, value))


@codecs
@pytest.mark.parametrize(
    "change", [lambda w: w[:-1], lambda w: w + b"\0", lambda w: w[:4096], lambda w: w[:100], lambda w: b""]
)
def test_the_code_refuses_another_length(codec: str, change: Callable[[bytes], bytes]) -> None:
    assert not accepted(change(golden(codec)))


def test_the_code_refuses_an_object_of_version_1() -> None:
    whole = golden_object("none", 1).read_bytes()
    assert (whole[:8], struct.unpack_from("<H", whole, 8), whole[4096:]) == (b"OFFLCORE", (1,), PAYLOAD)
    assert whole[4080:4096] == xxhash.xxh3_128_digest(whole[:4080])
    assert not accepted(whole)


# Through a tier, as a worker uses it


def file_of(folder: Path, key: ObjectKey) -> Path:
    digest = key.chunk_hash.hex()
    return folder / "tier" / key.namespace / key.pack / digest[:2] / f"{digest}.kv"


def place(folder: Path, whole: bytes) -> Path:
    path = file_of(folder, KEY)
    path.parent.mkdir(parents=True)
    path.write_bytes(whole)
    return path


def tier(folder: Path, compression: str) -> dict[str, object]:
    entry = {"name": "golden", "type": "disk", "path": str(folder / "tier"), "compression": compression}
    return {"backends": [entry]}


@codecs
@pytest.mark.parametrize("compression", CODECS)
def test_a_tier_of_any_compression_loads_the_file(codec: str, compression: str, tmp_path: Path) -> None:
    place(tmp_path, golden(codec))
    with subject.open_tier(tier(tmp_path, compression), len(PAYLOAD)) as opened:
        assert opened.load(KEY, len(PAYLOAD)) == ("hit", golden("none"))


@codecs
def test_a_tier_stores_the_object_where_and_as_the_file_has_it(codec: str, tmp_path: Path) -> None:
    with subject.open_tier(tier(tmp_path, codec), len(PAYLOAD)) as opened:
        assert opened.store(KEY, PAYLOAD)
    stored = file_of(tmp_path, KEY).read_bytes()
    assert stored == (golden("none") if codec == "none" else subject.written(codec, KEY, PAYLOAD))


@codecs
@pytest.mark.parametrize("offset", [9, 4095, 4096, -1])
def test_a_tier_takes_a_damaged_file_for_corrupt_and_deletes_it(codec: str, offset: int, tmp_path: Path) -> None:
    whole = bytearray(golden(codec))
    whole[offset] ^= 0x10
    path = place(tmp_path, bytes(whole))
    with subject.open_tier(tier(tmp_path, codec), len(PAYLOAD)) as opened:
        assert opened.load(KEY, len(PAYLOAD)) == ("corrupt", b"")
    assert not path.exists()


@pytest.mark.parametrize("compression", CODECS)
def test_an_object_of_version_1_is_no_hit_and_no_failure(compression: str, tmp_path: Path) -> None:
    place(tmp_path, golden_object("none", 1).read_bytes())
    with subject.open_tier(tier(tmp_path, compression), len(PAYLOAD)) as opened:
        assert opened.load(KEY, len(PAYLOAD))[0] in ("miss", "corrupt")
        assert opened.store(KEY, PAYLOAD)
        assert opened.load(KEY, len(PAYLOAD)) == ("hit", golden("none"))


def test_what_is_not_there_is_a_miss(tmp_path: Path) -> None:
    with subject.open_tier(tier(tmp_path, "none"), len(PAYLOAD)) as opened:
        assert opened.load(KEY, len(PAYLOAD)) == ("miss", b"")
