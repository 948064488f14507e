"""A tier with compression: objects come back whole, incompressible ones stay as they are, damaged ones are misses."""

from __future__ import annotations

import os
from collections.abc import Callable, Coroutine, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from offload_backend_cpu.plugin import CPU
from offload_backend_disk.backend import DiskBackend
from offload_backend_disk.plugin import DISK
from offload_backend_nfs.plugin import NFS

from offload_core.api.backend import BackendType, LoadOutcome, LoadReservation
from offload_core.api.errors import ConfigError
from offload_core.api.keys import ObjectKey
from offload_core.config.encryption_keys import parse_keys
from offload_core.config.model import BackendConfig, OffloadConfig, OffloadSettings, TierConfig
from offload_core.memory.staging_pool import Lease, StagingPool
from offload_core.memory.staging_shares import share_out
from offload_core.memory.staging_size import StagingUse
from offload_core.objects import format as object_format
from offload_core.objects.format import HEADER_BYTES
from offload_core.runtime.io_loop import IoLoop
from offload_core.runtime.metrics import Counters
from offload_core.tiers.compression import RETRY_EVERY, TRIALS, CompressionHistory
from offload_core.tiers.opening import close_tiers, open_tiers
from offload_core.tiers.staged_object import StagedObject, StoredForm
from offload_core.tiers.tier import Tier
from tests.core.objects.test_codecs import bf16_normal
from tests.support.memory_backend import LIMITS, key, memory_tier

SECONDS = 30
PAYLOAD_BYTES = 8001
OBJECT_BYTES = HEADER_BYTES + PAYLOAD_BYTES
HIT, MISS, CORRUPT = LoadOutcome.HIT, LoadOutcome.MISS, LoadOutcome.CORRUPT


class DiskInSteps(DiskBackend):
    """A disk whose objects are loaded with the separate steps, since it changes only one of them."""

    async def prepare_load(self, keys: Sequence[ObjectKey]) -> LoadReservation:
        return await super().prepare_load(keys)


DISK_IN_STEPS = BackendType(DISK.name, DiskInSteps, DISK.options)


def tier_config(
    backend_type: BackendType, options: dict[str, object], compression: str, keys: str | None = None
) -> TierConfig:
    """Return the configuration of a tier.

    Args:
        keys: as in the environment variable; the tier then encrypts.
    """
    encryption = "none" if keys is None else "aes-256-gcm"
    common = BackendConfig.model_validate(
        {"name": "tier", "type": backend_type.name, "compression": compression, "encryption": encryption}
    )
    parsed = None if keys is None else parse_keys(keys)
    return TierConfig(common, backend_type, backend_type.options.model_validate(options), parsed)


class Rig:
    """Tiers over one medium, and staging memory for their objects."""

    def __init__(self, io: IoLoop, folder: Path, kind: str) -> None:
        self.io, self.counters, self.folder = io, Counters(), folder
        self.kind = kind
        self.pool = StagingPool(4 << 20, 0.5)
        self.tiers: list[Tier] = []

    def tier(self, compression: str, keys: str | None = None) -> Tier:
        if self.kind == "cpu":
            config = tier_config(CPU, {"capacity": 1 << 20}, compression, keys)
        elif self.kind == "nfs":
            (self.folder / "objects").mkdir(exist_ok=True)
            config = tier_config(NFS, {"url": (self.folder / "objects").as_uri()}, compression, keys)
        else:
            capacity = {"capacity": 1 << 24} if self.kind == "bounded disk" else {}
            backend_type = DISK_IN_STEPS if self.kind == "disk in steps" else DISK
            config = tier_config(backend_type, {"path": str(self.folder / "objects"), **capacity}, compression, keys)
        tier = Tier(config, LIMITS, self.counters)
        tier.staging = share_out(self.pool, {tier.name: StagingUse(encodes=tier.encodes)}, PAYLOAD_BYTES)[tier.name]
        self.run(tier.open())
        self.tiers.append(tier)
        return tier

    def run(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        return self.io.submit(coroutine).result(SECONDS)

    def lease(self, nbytes: int = OBJECT_BYTES) -> Lease:
        lease = self.pool.try_acquire(nbytes, for_store=False)
        assert lease is not None
        lease.tensor.fill_(0x5A)
        return lease

    def sealed(self, number: int, payload: bytes) -> StagedObject:
        lease = self.lease(HEADER_BYTES + len(payload))
        lease.view[HEADER_BYTES:] = payload
        object_format.seal(lease.view, key(number))
        return StagedObject(key(number), lease)

    def store(self, tier: Tier, objects: dict[int, bytes]) -> list[bool]:
        staged = [self.sealed(number, payload) for number, payload in objects.items()]
        before = [bytes(one.lease.view) for one in staged]
        stored: list[bool] = self.run(tier.store(staged))
        assert [bytes(one.lease.view) for one in staged] == before, "others read the object at the same time"
        for one in staged:
            one.lease.release()
        assert self.pool.used_bytes == 0
        return stored

    def load(self, tier: Tier, sizes: dict[int, int]) -> list[LoadOutcome | bytes]:
        """Load objects with so many payload bytes; a hit is its payload."""
        staged = [
            StagedObject(
                key(n), self.lease(HEADER_BYTES + size), self.lease(HEADER_BYTES + size) if tier.encodes else None
            )
            for n, size in sizes.items()
        ]
        outcomes = self.run(tier.load(staged))
        found: list[LoadOutcome | bytes] = []
        for one, outcome in zip(staged, outcomes, strict=True):
            if outcome is HIT:
                object_format.verify(one.lease.view, one.key)  # sealed again, for the next tier
            found.append(bytes(one.lease.view[HEADER_BYTES:]) if outcome is HIT else outcome)
            one.lease.release()
            if one.scratch is not None:
                one.scratch.release()
        assert self.pool.used_bytes == 0
        return found

    def counted(self) -> dict[str, float]:
        return {name: count for (name, tier), count in self.counters.take().items() if tier == "tier"}


@pytest.fixture(params=["cpu", "disk", "bounded disk"])
def rig(request: pytest.FixtureRequest, io: IoLoop, tmp_path: Path) -> Iterator[Rig]:
    rig = Rig(io, tmp_path, request.param)
    yield rig
    close_tiers(rig.tiers, io, SECONDS)


@pytest.fixture
def disk(io: IoLoop, tmp_path: Path) -> Iterator[Rig]:
    rig = Rig(io, tmp_path, "disk")
    yield rig
    close_tiers(rig.tiers, io, SECONDS)


@pytest.mark.parametrize("compression", ["none", "zstd", "zstd-planes"])
def test_objects_come_back_smaller_ones_and_those_that_cannot_be(rig: Rig, compression: str) -> None:
    tier = rig.tier(compression)
    objects = {1: bf16_normal(PAYLOAD_BYTES), 2: os.urandom(PAYLOAD_BYTES), 3: bytes(70_001), 4: b"x"}
    assert rig.store(tier, objects) == [True] * 4
    counted = rig.counted()
    raw = sum(HEADER_BYTES + len(payload) for payload in objects.values())
    assert counted["stores"] == 4
    if compression == "none":
        assert counted["store_bytes"] == raw
        assert not counted.keys() & {"store_raw_bytes", "store_uncompressed"}
    else:
        assert counted["store_raw_bytes"] == raw
        assert counted["store_uncompressed"] == 2
        assert counted["store_bytes"] < raw - 0.9 * 70_001 / 2 - 0.1 * PAYLOAD_BYTES
    sizes = {number: len(payload) for number, payload in objects.items()}
    assert rig.load(tier, {**sizes, 5: 10}) == [*objects.values(), MISS]
    loaded = rig.counted()
    assert (loaded["load_hits"], loaded["load_missing"]) == (4, 1)
    assert loaded["load_bytes"] == counted["store_bytes"]
    assert loaded.get("load_raw_bytes", raw) == raw
    assert rig.store(tier, objects) == [True] * 4
    assert rig.counted() == {"store_already_present": 4}


def test_what_was_stored_under_another_setting_can_be_loaded(disk: Rig) -> None:
    settings = ["none", "zstd", "zstd-planes"]
    payloads = {number: bf16_normal(PAYLOAD_BYTES, number) for number in range(3)}
    for number, compression in enumerate(settings):
        disk.store(disk.tier(compression), {number: payloads[number]})
    for compression in settings:
        assert disk.load(disk.tier(compression), dict.fromkeys(payloads, PAYLOAD_BYTES)) == list(payloads.values())


def test_without_staging_memory_to_spare_a_store_is_dropped_and_counted(disk: Rig) -> None:
    tier = disk.tier("zstd")
    hog = disk.pool.try_acquire(disk.pool.store_limit_bytes, for_store=True)
    assert hog is not None
    staged = disk.sealed(1, bf16_normal(PAYLOAD_BYTES))
    assert disk.run(tier.store([staged])) == [False]
    assert disk.counted() == {"store_dropped": 1}
    hog.release()
    assert disk.run(tier.store([staged])) == [True]
    staged.lease.release()
    assert disk.pool.used_bytes == 0


def test_an_object_that_cannot_be_decompressed_for_want_of_memory_stays(disk: Rig) -> None:
    payload = bf16_normal(PAYLOAD_BYTES)
    disk.store(disk.tier("zstd"), {1: payload})
    plain = disk.tier("none")
    hog = disk.pool.try_acquire(disk.pool.capacity_bytes - 4 * 4096, for_store=False)  # room for the object alone
    assert hog is not None
    staged = StagedObject(key(1), disk.lease())
    assert disk.run(plain.load([staged])) == [MISS]
    for lease in (hog, staged.lease):
        lease.release()
    assert disk.load(plain, {1: PAYLOAD_BYTES}) == [payload]


def test_what_does_not_pay_is_left_and_tried_again_now_and_then(disk: Rig) -> None:
    tier = disk.tier("zstd")
    noise, zeros = os.urandom(PAYLOAD_BYTES), bytes(PAYLOAD_BYTES)
    compressed: list[int] = []
    for number in range(TRIALS + RETRY_EVERY + 3):
        payload = zeros if number >= TRIALS else noise
        disk.store(tier, {number: payload})
        if disk.counted()["store_bytes"] < OBJECT_BYTES:
            compressed.append(number)
    first = TRIALS + RETRY_EVERY - 1
    assert compressed == list(range(first, first + 4)), "the try that pays makes all of them worth it again"


def test_packs_are_remembered_one_by_one() -> None:
    memory = CompressionHistory()
    for _ in range(TRIALS):
        assert memory.worth_trying("noise")
        memory.record("noise", shrunk=False)
    assert [memory.worth_trying("noise") for _ in range(2 * RETRY_EVERY)].count(True) == 2
    assert memory.worth_trying("states")


Damage = Callable[[bytearray], bytes]


@pytest.mark.parametrize(
    "damage",
    [
        *(
            lambda whole, at=at: whole[:at] + bytes([whole[at] ^ 0x10]) + whole[at + 1 :]
            for at in (0, 10, 180, 4090, 4096, -1)
        ),
        *(lambda whole, at=at: whole[:at] for at in (0, 100, 4096, 4097, -1)),
        lambda whole: whole + b"\0",
        lambda whole: whole + bytes(PAYLOAD_BYTES),
        lambda whole: bytes(1) * len(whole),
    ],
)
@pytest.mark.parametrize("compression", ["none", "zstd", "zstd-planes"])
def test_damage_on_the_disk_is_deleted_and_never_a_hit(disk: Rig, compression: str, damage: Damage) -> None:
    tier = disk.tier(compression)
    payloads = {number: bf16_normal(PAYLOAD_BYTES, number) for number in (1, 2)}
    disk.store(tier, payloads)
    (path,) = (path for path in (disk.folder / "objects").rglob("*") if key(1).chunk_hash.hex() in path.name)
    path.write_bytes(damage(bytearray(path.read_bytes())))
    assert disk.load(tier, dict.fromkeys(payloads, PAYLOAD_BYTES)) == [CORRUPT, payloads[2]]
    assert disk.load(tier, dict.fromkeys(payloads, PAYLOAD_BYTES)) == [MISS, payloads[2]]
    assert disk.store(tier, payloads) == [True, True]
    assert disk.load(tier, dict.fromkeys(payloads, PAYLOAD_BYTES)) == list(payloads.values())


@pytest.mark.parametrize("compression", ["none", "zstd", "zstd-planes"])
def test_swapped_files_are_damage(disk: Rig, compression: str) -> None:
    tier = disk.tier(compression)
    disk.store(tier, {number: bf16_normal(PAYLOAD_BYTES, number) for number in (1, 2)})
    one, two = (
        path
        for number in (1, 2)
        for path in (disk.folder / "objects").rglob("*")
        if key(number).chunk_hash.hex() in path.name
    )
    contents = one.read_bytes(), two.read_bytes()
    two.write_bytes(contents[0])
    one.write_bytes(contents[1])
    assert disk.load(tier, {1: PAYLOAD_BYTES, 2: PAYLOAD_BYTES}) == [CORRUPT, CORRUPT]


def test_a_backend_that_cannot_tell_sizes_is_refused_with_the_cure(io: IoLoop, counters: Counters) -> None:
    config, _ = memory_tier("odd", compression="zstd")
    settings = OffloadSettings.model_validate({"backends": [config.common.model_dump()]})
    with pytest.raises(ConfigError) as caught:
        open_tiers(OffloadConfig(settings, (config,)), io, counters)
    (problem,) = caught.value.problems
    assert problem.startswith(
        "backend 'odd' cannot be opened: compression: tier 'odd' cannot compress, since its backend"
    )
    assert problem.endswith("set compression to none, or use another backend type")


@pytest.mark.parametrize("compression", ["none", "zstd"])
def test_an_object_of_unknown_size_is_loaded_only_where_nothing_is_compressed(disk: Rig, compression: str) -> None:
    tier = disk.tier(compression)
    staged = StagedObject(key(1), disk.lease(), disk.lease())
    target = tier.storage.codec.load_target(staged, staged.key, None, tier.staging, [], {})
    if compression == "none":
        assert isinstance(target, StoredForm)
        assert len(target.view) == OBJECT_BYTES
    else:
        assert target is MISS, "a compressed object would not fit its buffer, and be deleted as damaged"


def test_a_size_that_no_object_can_have_is_damage_before_it_is_loaded(disk: Rig) -> None:
    tier = disk.tier("zstd")
    staged = StagedObject(key(1), disk.lease(), disk.lease())
    for nbytes in (0, HEADER_BYTES, OBJECT_BYTES + 1):
        assert tier.storage.codec.load_target(staged, staged.key, nbytes, tier.staging, [], {}) is CORRUPT
