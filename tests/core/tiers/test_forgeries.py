"""Forged encrypted objects, one list of all kinds: none is a hit, and none is an error of the tier.

Each forgery is made from a sound object and takes its place on the medium. It is loaded as it is, and with the public
checksums of the header or of everything made right again, as a writer without the key can do.

The format has one ciphertext per object, without parts of its own. So the forgeries of parts move blocks of the cipher,
sectors and halves.
"""

from __future__ import annotations

import base64
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import pytest
import xxhash
from offload_backend_disk.plugin import DISK

from offload_core.api.errors import ObjectFormatError
from offload_core.api.keys import ObjectKey
from offload_core.cli.probes import sealed
from offload_core.objects.format import HEADER_BYTES, Codec
from offload_core.runtime.io_loop import IoLoop
from offload_core.tiers.compression import TierCodec
from offload_core.tiers.opening import close_tiers
from offload_core.tiers.tier import Tier
from tests.core.objects.test_codecs import bf16_normal
from tests.core.tiers.test_compression import CORRUPT, MISS, PAYLOAD_BYTES, SECONDS, Rig, tier_config
from tests.core.tiers.test_encryption import resealed
from tests.support.memory_backend import key


def _new_key(key_id: str) -> str:
    return f"{key_id}:{base64.b64encode(os.urandom(32)).decode()}"


NEW, OLD, STRANGE = _new_key("new"), _new_key("old"), _new_key("new")
"""The tier has the first two. The third is another key under the id of the first."""
RING = f"{NEW},{OLD}"
NAME = key(1, "full-u16-aes-new")
PAYLOAD = bf16_normal(PAYLOAD_BYTES)

FIELDS: Mapping[str, slice] = {
    "magic": slice(0, 8),
    "version": slice(8, 10),
    "codec": slice(10, 11),
    "hash length": slice(11, 12),
    "pack length": slice(12, 13),
    "first padding": slice(13, 16),
    "namespace": slice(16, 48),
    "chunk hash": slice(48, 80),
    "end of the chunk hash": slice(80, 112),
    "pack": slice(112, 176),
    "raw bytes": slice(176, 184),
    "stored bytes": slice(184, 192),
    "stored checksum": slice(192, 208),
    "raw checksum": slice(208, 224),
    "cipher": slice(224, 225),
    "id length": slice(225, 226),
    "second padding": slice(226, 232),
    "key id": slice(232, 248),
    "key check": slice(248, 264),
    "salt": slice(264, 296),
    "tag": slice(296, 312),
    "rest of the header": slice(312, 4080),
    "header checksum": slice(4080, 4096),
}
ENCRYPTION = slice(FIELDS["cipher"].start, FIELDS["tag"].stop)


@dataclass(frozen=True)
class Forger:
    """A person who can write to the medium, and has other objects of it.

    Args:
        whole: the sound object whose place the forgery takes.
        compression: the tier's.
    """

    whole: bytes
    compression: str

    def made(self, name: ObjectKey, keys: str = NEW, payload: bytes = PAYLOAD) -> bytes:
        """Return a sound object of a name, encrypted with the first of ``keys``."""
        codec = TierCodec(tier_config(DISK, {"path": "unused"}, self.compression, keys), "forger")
        (form,) = codec.encoded_copies([name], [sealed(name, payload)])
        return bytes(form)

    @property
    def body(self) -> bytes:
        return self.whole[HEADER_BYTES:]

    def with_body(self, body: bytes) -> bytes:
        return self.whole[:HEADER_BYTES] + body

    def with_declared_body(self, body: bytes) -> bytes:
        """Return the object with another body, whose size the header declares."""
        declared = len(body).to_bytes(8, "little")
        whole = _with(self.with_body(body), "stored bytes", declared)
        return whole if self.compression != "none" else _with(whole, "raw bytes", declared)

    def with_field_of(self, other: bytes, *fields: str) -> bytes:
        whole = self.whole
        for field in fields:
            whole = _with(whole, field, other[FIELDS[field]])
        return whole

    def with_codec(self, codec: Codec) -> bytes:
        return _with(self.whole, "codec", bytes([codec]))


Forgery = Callable[[Forger], bytes]


def _with(whole: bytes, field: str, value: bytes) -> bytes:
    place = FIELDS[field]
    assert len(value) == place.stop - place.start
    return whole[: place.start] + value + whole[place.stop :]


def _edited(field: str, at: int) -> Forgery:
    def edit(forger: Forger) -> bytes:
        changed = bytearray(forger.whole)
        changed[range(len(changed))[FIELDS[field]][at]] ^= 1
        return bytes(changed)

    return edit


def _twin(forger: Forger) -> bytes:
    """Return another object of the same name and payload; its salt is its own."""
    return forger.made(NAME)


def _of_the_old_key(forger: Forger) -> bytes:
    return forger.made(key(1, "full-u16-aes-old"), OLD)


def _renamed(forger: Forger, other: bytes) -> bytes:
    """Return another object with the names of this one."""
    for field in ("namespace", "chunk hash", "pack", "pack length"):
        other = _with(other, field, forger.whole[FIELDS[field]])
    return other


def _plain(forger: Forger) -> bytes:
    return bytes(sealed(NAME, bytes(PAYLOAD_BYTES)))


def _swapped(nbytes: int) -> Forgery:
    return lambda forger: forger.with_body(
        forger.body[nbytes : 2 * nbytes] + forger.body[:nbytes] + forger.body[2 * nbytes :]
    )


EDITS: Mapping[str, Forgery] = {
    f"{end} of {field}": _edited(field, at) for field in FIELDS for end, at in (("start", 0), ("end", -1))
}
OTHER_OBJECTS: Mapping[str, Forgery] = {
    "another chunk": lambda forger: forger.made(key(2, NAME.pack)),
    "another chunk, renamed": lambda forger: _renamed(forger, forger.made(key(2, NAME.pack))),
    "another pack": lambda forger: forger.made(NAME._replace(pack="state-aes-new")),
    "another pack, renamed": lambda forger: _renamed(forger, forger.made(NAME._replace(pack="state-aes-new"))),
    "another namespace": lambda forger: forger.made(NAME._replace(namespace="cd" * 32)),
    "another namespace, renamed": lambda forger: _renamed(forger, forger.made(NAME._replace(namespace="cd" * 32))),
    "the old key's object": _of_the_old_key,
    "the old key's object, renamed": lambda forger: _renamed(forger, _of_the_old_key(forger)),
    "written with the old key": lambda forger: forger.made(NAME, OLD),
    "written with the old key, this id": lambda forger: _with(
        forger.made(NAME, OLD), "key id", forger.whole[FIELDS["key id"]]
    ),
    "written with the old key, this id and check": lambda forger: _with(
        _with(forger.made(NAME, OLD), "key id", forger.whole[FIELDS["key id"]]),
        "key check",
        forger.whole[FIELDS["key check"]],
    ),
    "the old key's id": lambda forger: forger.with_field_of(_of_the_old_key(forger), "key id"),
    "the old key's id and check": lambda forger: forger.with_field_of(_of_the_old_key(forger), "key id", "key check"),
    "written with a strange key": lambda forger: forger.made(NAME, STRANGE),
    "written with a strange key, this check": lambda forger: _with(
        forger.made(NAME, STRANGE), "key check", forger.whole[FIELDS["key check"]]
    ),
    "without encryption": _plain,
    "without encryption, version 3": lambda forger: _with(_plain(forger), "version", b"\x03\0"),
    "without encryption, fields of an encrypted one": lambda forger: (
        _with(_plain(forger), "version", b"\x03\0")[: ENCRYPTION.start]
        + forger.whole[ENCRYPTION]
        + _plain(forger)[ENCRYPTION.stop :]
    ),
    "without encryption, under the plain name": lambda forger: bytes(sealed(key(1), PAYLOAD)),
    "version 2": lambda forger: _with(forger.whole, "version", b"\x02\0"),
}
MIXTURES: Mapping[str, Forgery] = {
    "the body of an older object": lambda forger: forger.with_body(_twin(forger)[HEADER_BYTES:]),
    "the body of another chunk": lambda forger: forger.with_body(forger.made(key(2, NAME.pack))[HEADER_BYTES:]),
    "the salt of an older object": lambda forger: forger.with_field_of(_twin(forger), "salt"),
    "the tag of an older object": lambda forger: forger.with_field_of(_twin(forger), "tag"),
    "salt and tag of an older object": lambda forger: forger.with_field_of(_twin(forger), "salt", "tag"),
    "salt, tag and raw checksum of an older object": lambda forger: forger.with_field_of(
        _twin(forger), "salt", "tag", "raw checksum"
    ),
    "a tag of zeros": lambda forger: _with(forger.whole, "tag", bytes(16)),
    **{f"codec {codec.name}": lambda forger, codec=codec: forger.with_codec(codec) for codec in Codec},  # type: ignore[misc]
    "a larger raw size": lambda forger: _with(forger.whole, "raw bytes", (PAYLOAD_BYTES + 1).to_bytes(8, "little")),
    "a huge raw size, compressed": lambda forger: _with(
        forger.with_codec(Codec.ZSTD), "raw bytes", b"\xff" * 7 + b"\x7f"
    ),
}
BODIES: Mapping[str, Forgery] = {
    "blocks of the cipher swapped": _swapped(16),
    "sectors swapped": _swapped(512),
    "halves swapped": lambda forger: _swapped(len(forger.body) // 2)(forger),
    "a block in place of the next": lambda forger: forger.with_body(
        forger.body[:16] + forger.body[:16] + forger.body[32:]
    ),
    "a block twice": lambda forger: forger.with_declared_body(forger.body[:16] + forger.body),
    "a block less": lambda forger: forger.with_declared_body(forger.body[16:]),
    "the last block less": lambda forger: forger.with_declared_body(forger.body[:-16]),
    "zeros": lambda forger: forger.with_body(bytes(len(forger.body))),
    "other bytes": lambda forger: forger.with_body(os.urandom(len(forger.body))),
    "the body twice": lambda forger: forger.with_declared_body(forger.body * 2),
    "a byte less": lambda forger: forger.whole[:-1],
    "a byte less, declared": lambda forger: forger.with_declared_body(forger.body[:-1]),
    "a byte more": lambda forger: forger.whole + b"\0",
    "a byte more, declared": lambda forger: forger.with_declared_body(forger.body + b"\0"),
    "a page more": lambda forger: forger.whole + bytes(4096),
    "half of the object": lambda forger: forger.whole[: len(forger.whole) // 2],
    "a header only": lambda forger: forger.whole[:HEADER_BYTES],
    "a header only, declared": lambda forger: forger.with_declared_body(b""),
    "a header less a byte": lambda forger: forger.whole[: HEADER_BYTES - 1],
    "a body only": lambda forger: forger.body,
    "a byte": lambda forger: forger.whole[:1],
    "an empty file": lambda forger: b"",
    "a file of zeros": lambda forger: bytes(len(forger.whole)),
    "a file of other bytes": lambda forger: os.urandom(len(forger.whole)),
}
FORGERIES: Mapping[str, Forgery] = {**EDITS, **OTHER_OBJECTS, **MIXTURES, **BODIES}
OF_ANOTHER_KEY = {
    "start of key check",
    "end of key check",
    "written with a strange key",
    "written with the old key, this id",
}
"""Forgeries that look like sound objects of another key of the same id. They may be, so they stay."""


@dataclass
class Medium:
    """A tier in service, and the place of one object on its medium."""

    rig: Rig
    tier: Tier
    compression: str

    def forger(self) -> Forger:
        """Store the object if it is not there, and return a person who can read and write it."""
        self.rig.store(self.tier, {1: PAYLOAD})
        (self.path,) = (self.rig.folder / "objects").rglob(f"{NAME.pack}/*/*.kv")
        return Forger(self.path.read_bytes(), self.compression)

    def remove(self) -> None:
        self.rig.run(self.tier.backend.delete([NAME]))

    def load(self) -> object:
        (found,) = self.rig.load(self.tier, {1: PAYLOAD_BYTES})
        return found


@pytest.fixture(
    scope="module",
    params=[("disk", "none"), ("disk in steps", "none"), ("disk", "zstd-planes"), ("nfs", "none")],
    ids=" ".join,
)
def medium(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Medium]:
    kind, compression = request.param
    io = IoLoop.acquire()
    rig = Rig(io, tmp_path_factory.mktemp("medium"), kind)
    yield Medium(rig, rig.tier(compression, RING), compression)
    close_tiers(rig.tiers, io, SECONDS)
    io.release()


def _forms(forger: Forger, forgery: str) -> dict[str, bytes]:
    """Return the forgery as it is and, where that differs, with right checksums."""
    forged = FORGERIES[forgery](forger)
    forms = {"as it is": forged}
    if len(forged) >= HEADER_BYTES:
        forms["right checksums"] = resealed(forged)
        header = forged[: FIELDS["header checksum"].start]
        forms["right checksum of the header"] = header + xxhash.xxh3_128_digest(header) + forged[HEADER_BYTES:]
    return {form: content for form, content in forms.items() if content != forger.whole}


@pytest.mark.parametrize("forgery", FORGERIES)
def test_a_forged_object_is_no_hit_and_no_error(medium: Medium, forgery: str) -> None:
    for form, content in _forms(medium.forger(), forgery).items():
        medium.forger()
        medium.path.write_bytes(content)
        try:
            found = medium.load()
            if form == "right checksums" and forgery in OF_ANOTHER_KEY:
                assert found is MISS
            if found is MISS:
                # A share remembers sizes, so an object of another size is a miss at first.
                assert forgery in OF_ANOTHER_KEY or medium.rig.kind == "nfs", form
                assert medium.path.read_bytes() == content, "a miss may be an object of another engine, and stays"
            else:
                assert found is CORRUPT, form
                assert not medium.path.exists()
        finally:
            medium.remove()  # a forgery that is accepted must not spoil the next case


def test_a_sound_object_is_a_hit_also_an_older_one_of_the_same_name(medium: Medium) -> None:
    forger = medium.forger()
    assert medium.load() == PAYLOAD
    medium.path.write_bytes(_twin(forger))
    assert medium.load() == PAYLOAD


def test_a_sound_object_of_the_same_name_and_another_size_is_no_hit(medium: Medium) -> None:
    for nbytes in (PAYLOAD_BYTES - 1, PAYLOAD_BYTES + 4096):
        other = medium.forger().made(NAME, payload=os.urandom(nbytes))
        medium.path.write_bytes(other)
        assert medium.load() in (CORRUPT, MISS)
        medium.remove()


@pytest.mark.parametrize("compression", ["none", "zstd-planes"])
@pytest.mark.parametrize("forgery", FORGERIES)
def test_the_check_of_stored_objects_passes_no_forgery(forgery: str, compression: str) -> None:
    codec = TierCodec(tier_config(DISK, {"path": "unused"}, compression, RING), "tier")
    passed = []
    for form, content in _forms(_forger(compression), forgery).items():
        try:
            if codec.check_stored(memoryview(bytearray(content)), NAME):
                passed.append(form)
        except ObjectFormatError:
            continue
    assert passed == []


def _forger(compression: str) -> Forger:
    return Forger(Forger(b"", compression).made(NAME), compression)
