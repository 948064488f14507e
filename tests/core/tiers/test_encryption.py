"""A tier with encryption: objects come back whole; forged, plain and foreign ones, and those of other keys, do not."""

from __future__ import annotations

import base64
import logging
import os
import struct
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import xxhash
from offload_backend_disk.plugin import DISK

from offload_core.api.errors import ConfigError
from offload_core.api.keys import ObjectKey
from offload_core.config.model import BackendConfig, TierConfig
from offload_core.objects import format as object_format
from offload_core.objects.format import HEADER_BYTES
from offload_core.objects.stored_names import StoredNames
from offload_core.runtime.io_loop import IoLoop
from offload_core.runtime.metrics import Counters
from offload_core.tiers.opening import close_tiers
from offload_core.tiers.staged_object import StagedObject
from offload_core.tiers.tier import Tier
from tests.core.objects.test_codecs import bf16_normal
from tests.core.tiers.test_compression import (
    CORRUPT,
    HIT,
    MISS,
    OBJECT_BYTES,
    PAYLOAD_BYTES,
    SECONDS,
    Rig,
)
from tests.support.memory_backend import LIMITS, key

NEW, OLD = (f"{name}:{base64.b64encode(os.urandom(32)).decode()}" for name in ("2026-11", "2026-05"))
NEW_SECRET = NEW.split(":")[1]
OTHER = f"2026-11:{base64.b64encode(os.urandom(32)).decode()}"
"""Another key under the id of ``NEW``."""
PAYLOADS = {1: bf16_normal(PAYLOAD_BYTES), 2: os.urandom(PAYLOAD_BYTES), 3: bytes(70_001), 4: b"x"}
SIZES = {number: len(payload) for number, payload in PAYLOADS.items()}
ONE = {1: PAYLOADS[1]}
ONE_SIZE = {1: PAYLOAD_BYTES}
compressions = pytest.mark.parametrize("compression", ["none", "zstd", "zstd-planes"])


@pytest.fixture(params=["cpu", "disk", "bounded disk", "nfs"])
def rig(request: pytest.FixtureRequest, io: IoLoop, tmp_path: Path) -> Iterator[Rig]:
    rig = Rig(io, tmp_path, request.param)
    yield rig
    close_tiers(rig.tiers, io, SECONDS)


@pytest.fixture(params=["disk", "nfs"])
def folder(request: pytest.FixtureRequest, io: IoLoop, tmp_path: Path) -> Iterator[Rig]:
    rig = Rig(io, tmp_path, request.param)
    yield rig
    close_tiers(rig.tiers, io, SECONDS)


def files(rig: Rig) -> list[Path]:
    return sorted((rig.folder / "objects").rglob("*.kv"))


def resealed(whole: bytes) -> bytes:
    """Make the public checksums right again, as a writer without the key can."""
    changed = bytearray(whole)
    changed[192:208] = xxhash.xxh3_128_digest(bytes(changed[4096:]))
    changed[4080:4096] = xxhash.xxh3_128_digest(bytes(changed[:4080]))
    return bytes(changed)


@compressions
def test_objects_come_back_and_are_counted_as_without_encryption(rig: Rig, compression: str) -> None:
    tier = rig.tier(compression, NEW)
    assert rig.store(tier, PAYLOADS) == [True] * 4
    stored = rig.counted()
    assert rig.load(tier, {**SIZES, 5: 10}) == [*PAYLOADS.values(), MISS]
    loaded = rig.counted()
    assert (loaded["load_hits"], loaded["load_missing"]) == (4, 1)
    assert loaded["load_bytes"] == stored["store_bytes"]
    assert stored.get("store_uncompressed", 2) == 2
    assert rig.store(tier, PAYLOADS) == [True] * 4
    assert rig.counted() == {"store_already_present": 4}
    assert rig.run(tier.lookup([key(1), key(5)])) == [True, False]


@compressions
def test_an_object_without_payload_is_a_hit(rig: Rig, compression: str) -> None:
    tier = rig.tier(compression, NEW)
    assert rig.store(tier, {1: b""}) == [True]
    assert rig.load(tier, {1: 0}) == [b""]
    assert rig.load(tier, {1: 0}) == [b""], "it was not deleted"


@compressions
def test_nothing_of_the_content_is_on_the_medium(folder: Rig, compression: str) -> None:
    payload = b"the text of a user, which nobody else may read. " * 200
    folder.store(folder.tier(compression, NEW), {1: payload})
    (path,) = files(folder)
    whole = path.read_bytes()
    assert path.parts[-3] == "full-u16-aes-2026-11"
    assert xxhash.xxh3_128_digest(payload) not in whole, "whoever guesses the content could confirm it"
    assert payload[:16] not in whole
    assert b"\x28\xb5\x2f\xfd" not in whole, "a zstd frame"
    if compression == "none":
        assert len(whole) == HEADER_BYTES + len(payload)


def test_a_key_id_may_be_the_end_of_another() -> None:
    names = StoredNames([object_format.name_suffix(key_id) for key_id in ("a", "b-aes-a")])
    stored = [*names.of([key(1)], 0), *names.of([key(1)], 1)]
    assert stored[1].pack == "full-u16-aes-b-aes-a"
    assert names.keys_of(stored) == [key(1), key(1)]


def test_equal_objects_differ_on_the_medium(folder: Rig) -> None:
    contents = set()
    for _ in range(2):
        tier = folder.tier("none", NEW)
        folder.store(tier, ONE)
        (path,) = files(folder)
        contents.add(path.read_bytes()[HEADER_BYTES:])
        folder.run(tier.backend.delete(tier.storage.codec.names.of([key(1)])))
    assert len(contents) == 2


@compressions
def test_a_change_of_any_byte_is_no_hit_also_under_right_checksums(folder: Rig, compression: str) -> None:
    payload = bf16_normal(501)
    tier = folder.tier(compression, NEW)
    folder.store(tier, {1: payload})
    (path,) = files(folder)
    whole = path.read_bytes()
    accepted = []
    codec, (name,) = tier.storage.codec, tier.storage.codec.names.of([key(1)])
    for repair in (bytes, resealed):
        for offset in range(len(whole)):
            changed = bytearray(whole)
            changed[offset] ^= 1 << offset % 8
            if repair(bytes(changed)) == whole:
                continue  # it has changed a checksum only
            target = memoryview(bytearray(HEADER_BYTES + len(payload)))
            stored = memoryview(bytearray(repair(bytes(changed))))
            if codec.decode_copy(stored, name, target) is HIT or payload[:32] in bytes(target):
                accepted.append((repair.__name__, offset))
    assert accepted == []
    for offset in (9, 208, 240, 300, 4095, 4096, len(whole) - 1):
        changed = bytearray(whole)
        changed[offset] ^= 1
        path.write_bytes(resealed(bytes(changed)) if offset % 2 else bytes(changed))
        (found,) = folder.load(tier, {1: len(payload)})
        if offset != 4095:  # the checksum of the header alone is right again
            assert found is CORRUPT
            assert not path.exists()


@compressions
def test_a_forged_object_is_no_hit_and_leaves_its_place(
    folder: Rig, compression: str, caplog: pytest.LogCaptureFixture
) -> None:
    tier = folder.tier(compression, NEW)
    folder.store(tier, ONE)
    (path,) = files(folder)
    whole = path.read_bytes()
    path.write_bytes(resealed(whole[:HEADER_BYTES] + os.urandom(len(whole) - HEADER_BYTES)))
    assert folder.load(tier, ONE_SIZE) == [CORRUPT]
    assert "not authentic under the key '2026-11'" in caplog.text
    assert folder.load(tier, ONE_SIZE) == [MISS]
    assert folder.store(tier, ONE) == [True]
    assert folder.load(tier, ONE_SIZE) == [PAYLOADS[1]]


def test_no_byte_of_a_forged_object_is_left_in_the_buffer(folder: Rig) -> None:
    tier = folder.tier("none", NEW)
    folder.store(tier, {1: bytes(PAYLOAD_BYTES)})
    (path,) = files(folder)
    whole = bytearray(path.read_bytes())
    whole[-1] ^= 1  # the cipher turns all other bytes into those that were stored
    path.write_bytes(resealed(bytes(whole)))
    staged = StagedObject(key(1), folder.lease(), folder.lease())
    staged.lease.view[HEADER_BYTES:] = b"\x5a" * PAYLOAD_BYTES
    before = bytes(staged.lease.view)
    assert folder.run(tier.load([staged])) == [CORRUPT]
    left = bytes(staged.lease.view)
    cleared = bytes(len(before))  # a shared medium is read again, into cleared memory
    assert left in (before, before[:HEADER_BYTES] + bytes(PAYLOAD_BYTES), cleared)
    for lease in (staged.lease, staged.scratch):
        assert lease is not None
        lease.release()


def test_a_plain_object_under_the_name_of_an_encrypted_one_is_no_hit(folder: Rig) -> None:
    tier = folder.tier("none", NEW)
    folder.store(tier, ONE)
    (path,) = files(folder)
    (name,) = tier.storage.codec.names.of([key(1)])
    forged = memoryview(bytearray(OBJECT_BYTES))
    object_format.seal(forged, name)
    path.write_bytes(forged)
    assert folder.load(tier, ONE_SIZE) == [CORRUPT]


def test_plain_and_encrypted_objects_do_not_meet(folder: Rig) -> None:
    plain, encrypted = folder.tier("none"), folder.tier("none", NEW)
    folder.store(plain, {1: PAYLOADS[1]})
    folder.store(encrypted, {4: PAYLOADS[4]})
    assert folder.load(encrypted, ONE_SIZE) == [MISS]
    assert folder.load(plain, {4: 1}) == [MISS]
    assert len(files(folder)) == 2, "neither has deleted the other's object"
    folder.store(encrypted, {1: PAYLOADS[1]})
    folder.store(plain, {4: PAYLOADS[4]})
    both = {1: PAYLOAD_BYTES, 4: 1}
    assert folder.load(plain, both) == folder.load(encrypted, both) == [PAYLOADS[1], PAYLOADS[4]]


@compressions
def test_swapped_files_are_no_hits(folder: Rig, compression: str) -> None:
    tier = folder.tier(compression, NEW)
    folder.store(tier, {number: bf16_normal(PAYLOAD_BYTES, number) for number in (1, 2)})
    one, two = files(folder)
    contents = one.read_bytes(), two.read_bytes()
    two.write_bytes(contents[0])
    one.write_bytes(contents[1])
    # A backend that remembers sizes finds another size at first, and the object stays: a miss.
    assert set(folder.load(tier, dict.fromkeys((1, 2), PAYLOAD_BYTES))) <= {CORRUPT, MISS}


@pytest.mark.parametrize(
    "rename",
    [
        lambda whole: whole[:48] + key(2).chunk_hash + whole[80:],
        lambda whole: whole[:16] + bytes.fromhex("cd" * 32) + whole[48:],
        lambda whole: whole[:112] + whole[112:].replace(b"full-u16-", b"full-u32-", 1),
    ],
    ids=["another chunk", "another namespace", "another pack"],
)
def test_an_object_that_is_renamed_under_right_checksums_is_no_hit(
    folder: Rig, rename: Callable[[bytes], bytes]
) -> None:
    tier = folder.tier("none", NEW)
    folder.store(tier, ONE)
    whole = resealed(rename(files(folder)[0].read_bytes()))
    fields = struct.unpack_from("<8sHBBB3x32s64s64s", whole)
    name = ObjectKey(fields[5].hex(), fields[7].rstrip(b"\0").decode(), fields[6][:32])
    view = memoryview(bytearray(whole))
    assert object_format.verify_stored(view, name).encryption is not None, "its checksums are right"
    assert tier.storage.codec.decode_copy(view, name, memoryview(bytearray(OBJECT_BYTES))) is CORRUPT


def test_another_key_of_the_same_id_is_a_miss_that_says_so_once_and_the_object_stays(
    folder: Rig, caplog: pytest.LogCaptureFixture
) -> None:
    payloads = {number: bf16_normal(PAYLOAD_BYTES, number) for number in (1, 2, 3)}
    sizes = dict.fromkeys(payloads, PAYLOAD_BYTES)
    right = folder.tier("none", NEW)
    folder.store(right, payloads)
    caplog.set_level(logging.WARNING)
    wrong = folder.tier("none", OTHER)
    assert folder.load(wrong, sizes) == folder.load(wrong, sizes) == [MISS] * 3
    (line,) = [record.getMessage() for record in caplog.records if "another key" in record.getMessage()]
    assert "'tier'" in line
    assert "'2026-11'" in line
    assert NEW_SECRET not in caplog.text
    assert folder.load(right, sizes) == list(payloads.values())


@compressions
def test_rotation_old_objects_stay_readable_and_hide_no_new_ones(folder: Rig, compression: str) -> None:
    old = folder.tier(compression, OLD)
    folder.store(old, {1: PAYLOADS[1]})
    rotated = folder.tier(compression, f"{NEW}, {OLD}")
    folder.store(rotated, {2: PAYLOADS[2]})
    assert [path.parts[-3] for path in files(folder)] == ["full-u16-aes-2026-05", "full-u16-aes-2026-11"]
    sizes = {number: SIZES[number] for number in (1, 2)}
    assert folder.load(rotated, sizes) == [PAYLOADS[1], PAYLOADS[2]]
    assert folder.run(rotated.lookup([key(1), key(2), key(3)])) == [True, True, False]
    folder.counted()
    assert folder.store(rotated, {1: PAYLOADS[1]}) == [True]
    assert folder.counted() == {"store_already_present": 1}
    new = folder.tier(compression, NEW)
    assert folder.load(new, sizes) == [MISS, PAYLOADS[2]]
    assert folder.run(new.lookup([key(1), key(2)])) == [False, True]
    assert folder.store(new, {1: PAYLOADS[1]}) == [True]
    assert folder.load(new, sizes) == [PAYLOADS[1], PAYLOADS[2]]
    assert len(files(folder)) == 3, "the old object is still there for engines with its key"
    assert folder.load(old, ONE_SIZE) == [PAYLOADS[1]]


def test_a_damaged_object_of_an_old_key_is_deleted(folder: Rig) -> None:
    folder.store(folder.tier("none", OLD), ONE)
    (path,) = files(folder)
    *sound, last = path.read_bytes()
    path.write_bytes(bytes([*sound, last ^ 1]))
    rotated = folder.tier("none", f"{NEW},{OLD}")
    assert folder.load(rotated, ONE_SIZE) == [CORRUPT]
    assert files(folder) == []


def test_evicted_objects_are_told_by_their_keys(io: IoLoop, tmp_path: Path) -> None:
    rig = Rig(io, tmp_path, "cpu")
    tier = rig.tier("none", NEW)
    for number in range(200):  # more than the capacity
        rig.store(tier, {number: os.urandom(PAYLOAD_BYTES)})
    changes = tier.take_changes()
    assert {one.key.pack for one in changes} == {"full-u16"}
    assert any(not one.present for one in changes)
    close_tiers(rig.tiers, io, SECONDS)


def test_without_staging_memory_to_spare_nothing_is_stored_in_plain(folder: Rig) -> None:
    tier = folder.tier("none", NEW)
    hog = folder.pool.try_acquire(folder.pool.store_limit_bytes, for_store=True)
    assert hog is not None
    staged = folder.sealed(1, PAYLOADS[1])
    assert folder.run(tier.store([staged])) == [False]
    assert folder.counted() == {"store_dropped": 1}
    assert files(folder) == []
    for lease in (hog, staged.lease):
        lease.release()


def test_a_load_without_a_second_lease_takes_memory_of_its_own_or_is_a_miss(folder: Rig) -> None:
    tier = folder.tier("none", NEW)
    folder.store(tier, ONE)
    hog = folder.pool.try_acquire(folder.pool.capacity_bytes - 4 * 4096, for_store=False)  # room for the object alone
    assert hog is not None
    staged = StagedObject(key(1), folder.lease())
    assert folder.run(tier.load([staged])) == [MISS]
    hog.release()
    assert folder.run(tier.load([staged])) == [HIT]
    assert bytes(staged.lease.view[HEADER_BYTES:]) == PAYLOADS[1]
    staged.lease.release()
    assert folder.pool.used_bytes == 0


def test_a_tier_that_encrypts_is_refused_without_keys(tmp_path: Path) -> None:
    common = BackendConfig.model_validate({"name": "tier", "type": "disk", "encryption": "aes-256-gcm"})
    options = DISK.options.model_validate({"path": str(tmp_path)})
    with pytest.raises(ConfigError, match="tier 'tier' has no key"):
        Tier(TierConfig(common, DISK, options), LIMITS, Counters())
