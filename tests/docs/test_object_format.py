"""``docs/object-format.md`` against the code and the golden files: offsets, sizes, codecs, refusals and paths."""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Callable, Sequence

import pytest
import xxhash
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from offload_core.api import ObjectFormatError
from offload_core.config.model import CODECS
from offload_core.objects.compression import SMALLEST_GAIN, restore, verify_any
from offload_core.objects.encryption import EncryptionKey, KeyRing
from offload_core.objects.fingerprint import fingerprint
from offload_core.objects.format import ENCRYPTED_VERSION, FORMAT_VERSION, HEADER_BYTES, MAGIC, Codec
from tests.golden.masks import DATA
from tests.golden.objects import KEY, NAMESPACE, PAYLOAD, golden_object
from tests.golden.subject import sealed
from tests.support.paths import ROOT

DOCUMENT = (ROOT / "docs" / "object-format.md").read_text()
GOLDEN = [(2, "none"), (2, "zstd"), (2, "zstd-planes")]
Change = Callable[[bytes], bytes]


def rows(*columns: str) -> list[list[str]]:
    """Read the cells of the table with these columns."""
    head = "| " + " | ".join(columns) + " |\n"
    assert DOCUMENT.count(head) == 1
    table = DOCUMENT.split(head)[1].split("\n\n")[0].splitlines()[1:]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table]


FIELDS = {
    f"{field} at {offset}": (int(offset), int(size), field, value)
    for offset, size, field, value in rows("offset", "bytes", "field", "value")
}


def digest(data: bytes) -> bytes:
    return xxhash.xxh3_128(data, seed=0).intdigest().to_bytes(16, "big")


def expected(whole: bytes, version: int, codec: str) -> dict[str, bytes]:
    """Return the bytes of every field of a golden object, from the meanings that the document gives."""
    payload = whole[4096:]
    return {
        "magic": b"OFFLCORE",
        "format version": struct.pack("<H", version),
        "codec": bytes([{name: int(number) for number, name, _ in rows("codec", "name", "stored payload")}[codec]]),
        "length of the chunk hash": bytes([len(KEY.chunk_hash)]),
        "length of the pack name": bytes([len(KEY.pack)]),
        "fingerprint": bytes.fromhex(KEY.namespace),
        "chunk hash": KEY.chunk_hash.ljust(64, b"\0"),
        "pack name": KEY.pack.encode("ascii").ljust(64, b"\0"),
        "raw length": struct.pack("<Q", len(PAYLOAD)),
        "stored length": struct.pack("<Q", len(payload)),
        "stored checksum": digest(payload),
        "raw checksum": bytes(16) if version == 1 else digest(PAYLOAD),
        "header checksum": digest(whole[:4080]),
    }


def test_the_fields_cover_the_header_without_gap_or_overlap() -> None:
    end = 0
    for offset, size, *_ in FIELDS.values():
        assert offset == end
        end = offset + size
    assert end == HEADER_BYTES == 4096
    assert "a header of 4,096 bytes" in DOCUMENT


def test_the_magic_and_the_version_are_those_of_the_code() -> None:
    assert FIELDS["magic at 0"][3] == f"`{MAGIC.decode()}` in ASCII"
    assert FIELDS["format version at 8"][3] == str(FORMAT_VERSION)
    assert f"format version {FORMAT_VERSION}." in DOCUMENT


@pytest.mark.parametrize(("version", "codec"), [(1, "none"), *GOLDEN])
@pytest.mark.parametrize("name", FIELDS)
def test_the_golden_files_have_each_field_where_the_document_says(name: str, version: int, codec: str) -> None:
    whole = golden_object(codec, version).read_bytes()
    offset, size, field, value = FIELDS[name]
    found = whole[offset : offset + size]
    assert found == (bytes(size) if (field, value) == ("reserved", "zero") else expected(whole, version, codec)[field])


@pytest.mark.parametrize("name", FIELDS)
def test_the_code_writes_each_field_where_the_document_says(name: str) -> None:
    whole = sealed(KEY, PAYLOAD)
    offset, size, field, _ = FIELDS[name]
    assert whole[offset : offset + size] == expected(whole, FORMAT_VERSION, "none").get(field, bytes(size))


def test_the_codecs_are_those_of_the_code_and_of_the_configuration() -> None:
    documented = {name: int(number) for number, name, _ in rows("codec", "name", "stored payload")}
    assert documented == {"none": Codec.NONE, **{name: int(codec) for name, codec in CODECS.items()}}
    assert sorted(documented.values()) == sorted(Codec)
    assert FIELDS["codec at 10"][3].startswith(f"{min(Codec)} to {max(Codec)},")
    assert f"a saving of {SMALLEST_GAIN:.0%}".replace("%", " %") in DOCUMENT


def changed(offset: int, value: bytes) -> Change:
    """Return a change of one field under a right header checksum, as another writer could make it."""

    def change(whole: bytes) -> bytes:
        header = bytearray(whole[:4080])
        header[offset : offset + len(value)] = value
        return bytes(header) + digest(bytes(header)) + whole[4096:]

    return change


def place_of(field: str) -> int:
    ((offset, *_),) = [row for row in FIELDS.values() if row[2] == field]
    return offset


def number(field: str, value: int) -> Change:
    return changed(place_of(field), struct.pack("<Q", value))


def with_codec_1(payload: bytes, raw: bytes) -> Change:
    """Return a change into an object of codec 1 with this payload, made of these raw bytes."""
    lengths = struct.pack("<QQ", len(raw), len(payload))
    header = lengths + digest(payload) + digest(raw)
    return lambda whole: changed(place_of("raw length"), header)(changed(10, b"\1")(whole[:4096] + payload))


REFUSED: dict[str, Sequence[Change]] = {
    "short": [lambda whole: b"", lambda whole: whole[:4095]],
    "header checksum": [lambda whole: whole[:4000] + b"\1" + whole[4001:], lambda whole: whole[:4095] + b"?"],
    "magic": [changed(0, b"OFFLCORD")],
    "version": [changed(8, b"\1\0"), changed(8, b"\3\0")],
    "codec": [changed(10, b"\3")],
    "key": [changed(16, b"?"), changed(48, b"?"), changed(112, b"?"), changed(11, b"\1"), changed(12, b"\1")],
    "length": [lambda whole: whole + b"\0", lambda whole: whole[:-1], lambda whole: whole[:4096]],
    "codec 0 lengths": [number("raw length", len(PAYLOAD) - 1), number("raw length", len(PAYLOAD) + 1)],
    "codec gain": [changed(10, b"\1")],
    "stored checksum": [changed(192, bytes(16)), lambda whole: whole[:-1] + b"?"],
    "codec 0 checksums": [changed(208, bytes(16))],
    "raw length": [with_codec_1(golden_object("zstd").read_bytes()[4096:], PAYLOAD + bytes(1))],
    "raw checksum": [with_codec_1(golden_object("zstd").read_bytes()[4096:], PAYLOAD[:-1] + b"?")],
}


def accepted(whole: bytes) -> bool:
    try:
        verify_any(memoryview(whole), KEY)
    except ObjectFormatError:
        return False
    return True


def test_every_documented_refusal_is_tried() -> None:
    assert [case for case, _ in rows("case", "a reader refuses")] == list(REFUSED)
    assert "check the first ten before it decodes" in DOCUMENT
    assert list(REFUSED).index("stored checksum") == 9


@pytest.mark.parametrize(
    ("case", "change"), [(case, change) for case, changes in REFUSED.items() for change in changes]
)
def test_the_reader_refuses(case: str, change: Change) -> None:
    whole = golden_object("none").read_bytes()
    assert accepted(whole)
    assert accepted(changed(0, b"OFFLCORE")(whole))  # the change itself leaves a sound object sound
    assert accepted(with_codec_1(golden_object("zstd").read_bytes()[4096:], PAYLOAD)(whole))
    assert not accepted(change(whole))


def test_a_raw_length_other_than_the_packs_is_refused() -> None:
    compressed = memoryview(golden_object("zstd").read_bytes())
    restore(compressed, memoryview(bytearray(4096 + len(PAYLOAD))), KEY)
    with pytest.raises(ObjectFormatError, match="raw bytes"):
        restore(compressed, memoryview(bytearray(4096 + len(PAYLOAD) + 1)), KEY)


def test_the_reader_ignores_the_reserved_bytes() -> None:
    assert accepted(changed(13, b"\1\2\3")(golden_object("none").read_bytes()))
    assert accepted(changed(224, b"\1")(golden_object("none").read_bytes()))


def test_the_path_is_that_of_the_media() -> None:
    names = json.loads((DATA / "names-on-media.json").read_text())["objects"]
    shown, example = re.findall(r"^\S+\.kv$", DOCUMENT, flags=re.MULTILINE)
    assert example == shown.replace("FINGERPRINT", NAMESPACE).replace("PACK", KEY.pack).replace(
        "HASH", KEY.chunk_hash.hex()
    ).replace("HA", KEY.chunk_hash.hex()[:2])
    assert {medium["usual"] for medium in names.values()} == {example}
    assert len(fingerprint({})) == len(NAMESPACE) == 64


def test_every_version_has_a_row_and_a_golden_file() -> None:
    versions = [int(version) for version, *_ in rows("version", "difference", "a version 2 reader")]
    assert versions == list(range(1, ENCRYPTED_VERSION + 1))
    for version in versions:
        assert accepted(golden_object("none", version).read_bytes()) is (version == FORMAT_VERSION)


# Encryption, by an own reader of it

ENCRYPTED_NAME = KEY._replace(pack="full-u256-aes-golden")
SECRET = bytes(range(32))
ENCRYPTED_FIELDS = {
    f"{field} at {offset}": (int(offset), int(size), field)
    for offset, size, field, _ in rows("offset", "bytes", "field in version 3", "value")
}


def derived(length: int, salt: bytes | None, info: bytes) -> bytes:
    return HKDF(SHA256(), length, salt, info).derive(SECRET)


def decrypted(whole: bytes) -> bytes:
    """Return the raw payload of an uncompressed encrypted object, as the document says."""
    found = {field: whole[at : at + size] for at, size, field in ENCRYPTED_FIELDS.values()}
    assert whole[8:10] == b"\3\0"
    assert (found["cipher"], found["length of the key id"]) == (b"\1", b"\6")
    assert found["key id"] == b"golden".ljust(16, b"\0")
    assert found["key check"] == derived(16, None, b"OFFLCORE key check")
    assert whole[112:176] == ENCRYPTED_NAME.pack.encode().ljust(64, b"\0")
    secrets = derived(60, found["salt"], b"OFFLCORE object version 3")
    associated = bytearray(whole[:4080])
    associated[192:208] = associated[296:312] = bytes(16)
    raw = AESGCM(secrets[:32]).decrypt(secrets[32:44], whole[4096:] + found["tag"], bytes(associated))
    assert bytes(a ^ b for a, b in zip(whole[208:224], secrets[44:], strict=True)) == digest(raw)
    assert whole[192:208] == digest(whole[4096:])
    return raw


def test_the_fields_of_an_encrypted_object_fill_the_reserved_bytes() -> None:
    end = place_of("raw checksum") + 16
    for offset, size, _ in ENCRYPTED_FIELDS.values():
        assert offset == end
        end = offset + size
    assert end == place_of("header checksum")


def test_an_encrypted_object_is_what_the_document_says() -> None:
    source = memoryview(bytearray(sealed(KEY, PAYLOAD)))
    target = memoryview(bytearray(len(source)))
    ring = KeyRing((EncryptionKey("golden", SECRET),))
    ring.encrypt(verify_any(source, KEY), ENCRYPTED_NAME, source, target)
    assert decrypted(bytes(target)) == PAYLOAD
    assert f"`{ENCRYPTED_NAME.pack.replace('golden', '2026-11')}`" in DOCUMENT


def test_the_golden_encrypted_object_is_read() -> None:
    whole = golden_object("none", ENCRYPTED_VERSION).read_bytes()
    assert decrypted(whole) == PAYLOAD
    stored, target = memoryview(bytearray(whole)), memoryview(bytearray(len(whole)))
    header = verify_any(stored, ENCRYPTED_NAME)
    KeyRing((EncryptionKey("golden", SECRET),)).decrypt(header, stored, target, KEY)
    assert bytes(target) == sealed(KEY, PAYLOAD)
