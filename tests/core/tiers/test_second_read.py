"""A damaged object of a shared medium is read again before it is deleted for everyone."""

from __future__ import annotations

import dataclasses
import logging
import os
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from offload_backend_disk import DiskBackend

from offload_core.api.backend import Backend, LoadOutcome
from offload_core.api.keys import ObjectKey
from offload_core.api.wrapper import BackendWrapper
from offload_core.config.limits import Limits
from offload_core.config.loading import load_config
from offload_core.config.model import TierConfig
from offload_core.runtime.io_loop import IoLoop
from offload_core.runtime.metrics import Counters
from offload_core.tiers.opening import close_tiers
from offload_core.tiers.tier import Tier
from tests.support import damage
from tests.support.memory_backend import LIMITS, MemoryBackend, key, memory_tier
from tests.support.staged_objects import StagedObjects

SECONDS = 30
HIT, MISS, CORRUPT = LoadOutcome.HIT, LoadOutcome.MISS, LoadOutcome.CORRUPT

Read = Callable[[bytes], bytes | None]
"""The bytes that a read brings of an object; ``None`` for other bytes than its own in number."""


def sound(content: bytes) -> bytes:
    return content


def flipped(at: int) -> Read:
    return partial(damage.flipped, at=at)


def of_another_length(content: bytes) -> None:
    return None


class Unsteady(MemoryBackend):
    """A medium whose objects are sound, and whose reads bring what :attr:`reads` says, one after the other."""

    reads: list[Read]

    def _load(self, wanted: ObjectKey, buffer: memoryview) -> LoadOutcome:
        if wanted != key(1):
            return super()._load(wanted, buffer)
        brought = self.reads.pop(0)(self.objects[wanted])
        if brought is None:
            return CORRUPT
        buffer[:] = brought
        return HIT


def with_backend(config: TierConfig, construct: Callable[[Any, Any], Backend[Any]]) -> TierConfig:
    backend_type = dataclasses.replace(config.backend_type, backend=construct)  # type: ignore[arg-type]
    return dataclasses.replace(config, backend_type=backend_type)


class Rig(StagedObjects):
    def __init__(self, io: IoLoop) -> None:
        super().__init__()
        self.io, self.counters = io, Counters()
        self.tiers: list[Tier] = []

    def unsteady(self, *reads: Read, limits: Limits = LIMITS, shared: bool = True) -> tuple[Tier, Unsteady]:
        """Return a tier with the objects 0 and 1."""
        config, _ = memory_tier(io_threads=2)
        made: list[Unsteady] = []

        def construct(options: Any, context: Any) -> Unsteady:
            made.append(Unsteady(options, context))
            made[0].reads, made[0].shared = list(reads), shared
            return made[0]

        tier = Tier(with_backend(config, construct), limits, self.counters)
        self.tiers.append(tier)
        made[0].objects = {key(number): bytes(self.sealed(number).lease.view) for number in (0, 1)}
        return tier, made[0]

    def load(self, tier: Tier, *numbers: int) -> list[LoadOutcome | None]:
        staged = [self.staged(number) for number in numbers]
        return list(self.io.submit(tier.load(staged)).result(SECONDS))

    def counted(self) -> dict[str, float]:
        return {name: count for (name, _), count in self.counters.take().items()}


@pytest.fixture
def rig(io: IoLoop) -> Iterator[Rig]:
    made = Rig(io)
    yield made
    close_tiers(made.tiers, io, SECONDS)


@pytest.mark.parametrize("first", [flipped(0), flipped(4100), of_another_length], ids=["header", "payload", "length"])
def test_a_sound_second_read_is_a_hit_and_nothing_is_deleted(
    rig: Rig, first: Read, caplog: pytest.LogCaptureFixture
) -> None:
    tier, backend = rig.unsteady(first, sound)
    assert rig.load(tier, 0, 1) == [HIT, HIT]
    assert set(backend.objects) == {key(0), key(1)}
    counted = rig.counted()
    assert (counted["load_hits"], counted["load_read_twice"]) == (2, 1)
    assert "load_corrupt" not in counted
    assert not [one for one in caplog.records if "deleting" in one.getMessage()]


def test_damage_that_stays_the_same_is_deleted_after_two_reads(rig: Rig, caplog: pytest.LogCaptureFixture) -> None:
    tier, backend = rig.unsteady(flipped(4100), flipped(4100))
    assert rig.load(tier, 0, 1) == [HIT, CORRUPT]
    assert set(backend.objects) == {key(0)}
    assert len([one for one in caplog.records if "damaged object, deleting it" in one.getMessage()]) == 1
    assert rig.counted()["load_read_twice"] == 1


@pytest.mark.parametrize(
    ("first", "second"), [(flipped(4100), flipped(4101)), (flipped(0), of_another_length)], ids=["bytes", "length"]
)
def test_damage_that_changes_is_of_the_way_and_the_object_stays(
    rig: Rig, first: Read, second: Read, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    tier, backend = rig.unsteady(first, second)
    assert rig.load(tier, 0, 1) == [HIT, MISS]
    assert set(backend.objects) == {key(0), key(1)}
    assert any("the object stays" in one.getMessage() for one in caplog.records)


def test_without_time_for_a_second_read_the_object_stays(rig: Rig) -> None:
    hasty = LIMITS.model_copy(update={"load_timeout_seconds": 1e-9})
    tier, backend = rig.unsteady(flipped(4100), limits=hasty)
    assert rig.load(tier, 0, 1) == [HIT, MISS]
    assert set(backend.objects) == {key(0), key(1)}
    assert "load_read_twice" not in rig.counted()


def test_a_medium_of_one_process_is_read_once(rig: Rig) -> None:
    tier, backend = rig.unsteady(flipped(4100), shared=False)
    assert rig.load(tier, 0, 1) == [HIT, CORRUPT]
    assert set(backend.objects) == {key(0)}
    assert "load_read_twice" not in rig.counted()


class FirstReadFlipped(BackendWrapper):
    """A disk whose first read flips a bit on its way."""

    is_first = True

    async def load_into(self, keys: Any, buffers: Any) -> Any:
        outcomes = await super().load_into(keys, buffers)
        if self.is_first:
            self.is_first = False
            buffers[0][len(buffers[0]) // 2] ^= 1
        return outcomes


@pytest.mark.parametrize("on_the_medium", [True, False])
def test_a_disk_keeps_a_sound_file_and_deletes_a_damaged_one(rig: Rig, tmp_path: Path, on_the_medium: bool) -> None:
    config = load_config({"backends": [{"name": "nvme", "type": "disk", "path": str(tmp_path / "kv")}]}).tiers[0]
    made: list[Backend[Any]] = []

    def construct(options: Any, context: Any) -> Backend[Any]:
        disk: Backend[Any] = DiskBackend(options, context)
        made.append(disk if on_the_medium else FirstReadFlipped(disk))
        return made[0]

    tier = Tier(with_backend(config, construct), Limits(), rig.counters)
    rig.tiers.append(tier)
    rig.io.submit(tier.open()).result(SECONDS)
    assert rig.io.submit(tier.store([rig.sealed(1)])).result(SECONDS) == [True]
    (file,) = (tmp_path / "kv").rglob("*.kv")
    if on_the_medium:
        with file.open("r+b") as opened:
            opened.seek(file.stat().st_size // 2)
            byte = opened.read(1)
            opened.seek(-1, os.SEEK_CUR)
            opened.write(bytes([byte[0] ^ 1]))
    assert rig.load(tier, 1) == [CORRUPT if on_the_medium else HIT]
    assert file.exists() is not on_the_medium
    assert rig.counted()["load_read_twice"] == 1
