"""Tiers and the transfer engine on a real file system that hangs, fails and lies (I1 to I5)."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

from tests.media.fuse.conftest import TierOn
from tests.media.fuse.mount import FaultFs
from tests.media.fuse.rig_steps import (
    KEYS,
    STORE_DEADLINE_SECONDS,
    cache_untouched,
    fill,
    in_time,
    is_well,
    keeps_serving,
    load_four,
    short_load_deadline,
    until,
)
from tests.media.fuse.rules import Fault
from tests.support.transfer_rig import Rig, disk_tier, item

KINDS = ("disk", "disk-bounded", "nfs")


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def started(rig: Rig, tier_on: TierOn, kind: str) -> Rig:
    """A rig with a tier on the fault file system that has objects 0 to 3."""
    rig.add_tier(tier_on(kind))
    fill(rig)
    return rig


def _objects(fault_fs: FaultFs) -> list[Path]:
    return sorted(fault_fs.backing.rglob("*.kv"))


@pytest.mark.parametrize("operation", ["read", "open", "getattr", "all of them"])
def test_i3_load_that_hangs_ends_at_its_deadline_and_its_buffers_when_the_call_does(
    started: Rig, fault_fs: FaultFs, operation: str
) -> None:
    with cache_untouched(started):
        if operation == "all of them":
            fault_fs.pause()
        else:
            rule = fault_fs.add(operation, "*.kv", "hang")
        with in_time(), short_load_deadline(started):
            result = load_four(started)
        assert (result.status, result.failed_keys) == ("timed out", KEYS)
        assert started.counted("load_timeouts", "files") == 1
        if operation != "all of them":
            fault_fs.wait_for_hit(rule)
        assert started.staging.used_bytes > 0, "timed out is not ended: the kernel may still write into the buffers"
    started.kv_cache[8:12].random_()  # the blocks belong to other requests by now
    with cache_untouched(started):
        assert started.engine.poll() == []
        assert started.staging.used_bytes > 0
        fault_fs.clear()
        fault_fs.resume()
        started.all_leases_are_back()
        assert started.engine.poll() == []
    assert started.counted("load_late", "files") > 0
    is_well(started)


@pytest.mark.parametrize(
    ("operation", "number"), [("read", errno.EIO), ("open", errno.EIO), ("read", errno.ESTALE), ("open", errno.ESTALE)]
)
def test_i5_load_that_fails_is_told_at_once(started: Rig, fault_fs: FaultFs, operation: str, number: int) -> None:
    with cache_untouched(started):
        rule = fault_fs.add(operation, "*.kv", "error", number=number)
        result = load_four(started)
        assert (result.status, result.failed_keys) == ("failed", KEYS)
        assert fault_fs.hits(rule)
        started.all_leases_are_back()
    fault_fs.clear()
    is_well(started)


@pytest.mark.parametrize("fault", ["cut", "flip"])
def test_i1_missing_and_wrong_bytes_are_never_served(started: Rig, fault_fs: FaultFs, fault: Fault) -> None:
    with cache_untouched(started):
        fault_fs.add("read", "*.kv", fault)
        assert load_four(started).status == "failed"
        started.all_leases_are_back()
    assert started.counted("load_corrupt", "files") == 4
    fault_fs.clear()
    until(lambda: not _objects(fault_fs), "what was read as damaged is not deleted")
    assert all(started.store_all(*(item(number, block=number) for number in range(4))).values()), "and is stored anew"
    is_well(started)


def test_reads_and_writes_that_do_a_part_of_what_they_are_asked_for_are_gone_on_with(
    started: Rig, fault_fs: FaultFs
) -> None:
    read = fault_fs.add("read", "*", "part")
    written = fault_fs.add("write", "*", "part")
    is_well(started)
    assert fault_fs.hits(read)
    assert fault_fs.hits(written)


def test_i1_what_was_written_wrong_is_never_served(started: Rig, fault_fs: FaultFs) -> None:
    with fault_fs.fault("write", "*/*.*", "flip") as rule:
        started.store_all(item(30, block=5))
        assert fault_fs.hits(rule)
    with cache_untouched(started):
        started.load(item(30, block=9), tier="files")
        assert started.result().status == "failed"
    is_well(started)


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO, errno.ESTALE])
def test_store_that_fails_leaves_nothing_behind(started: Rig, fault_fs: FaultFs, number: int) -> None:
    with fault_fs.fault("write", "*", "error", number=number) as rule:
        assert started.store_all(*(item(40 + one, block=one) for one in range(3))) == dict.fromkeys((40, 41, 42), False)
        assert fault_fs.hits(rule)
        started.all_leases_are_back()
        assert len(_objects(fault_fs)) == 4
    is_well(started)
    assert [path.name for path in fault_fs.backing.rglob("*") if "tmp" in path.suffix] == []


def test_mount_vanishes_in_the_middle_of_a_load_and_comes_back(started: Rig, fault_fs: FaultFs) -> None:
    with cache_untouched(started):
        rule = fault_fs.add("read", "*.kv", "hang")
        started.load(*(item(number, block=8 + number) for number in range(4)), tier="files")
        fault_fs.wait_for_hit(rule)
        fault_fs.abort()
        result = started.result()
        assert result.status in ("failed", "timed out")
        started.all_leases_are_back()
        assert started.store_all(item(50, block=5)) == {50: False}
        assert load_four(started).status == "failed"
    fault_fs.clear()
    fault_fs.mount()
    is_well(started)


def test_i3_store_that_hangs_ends_at_its_deadline_and_its_buffers_when_the_call_does(
    rig: Rig, tier_on: TierOn, kind: str, fault_fs: FaultFs
) -> None:
    rig.add_tier(tier_on(kind, store_timeout_seconds=STORE_DEADLINE_SECONDS))
    fill(rig)
    rule = fault_fs.add("write", "*/*.*", "hang")
    with in_time():
        rig.engine.submit_stores([item(60, block=5)])
        told: dict[int, bool] = {}
        rig.step_until(lambda: bool(told.update(rig.store_results()) or told))
    assert told == {60: False}
    fault_fs.wait_for_hit(rule)
    assert rig.counted("store_timeouts", "files") == 1
    assert rig.staging.used_bytes > 0, "the kernel may still read from the buffer"
    fault_fs.clear()
    rig.all_leases_are_back()
    assert rig.store_results() == {}, "each object has one result"
    assert rig.counted("store_late", "files") == 1
    is_well(rig)


@pytest.mark.parametrize("hangs", ["every operation", "a read"])
def test_i4_a_healthy_tier_serves_while_another_hangs(
    rig: Rig, tier_on: TierOn, kind: str, fault_fs: FaultFs, tmp_path: Path, hangs: str
) -> None:
    rig.add_tier(tier_on(kind))
    rig.add_tier(disk_tier("healthy", str(tmp_path / "healthy")))
    fill(rig)
    if hangs == "a read":
        rule = fault_fs.add("read", "*.kv", "hang")
    else:
        fault_fs.pause()
    with short_load_deadline(rig):
        assert load_four(rig).status == "timed out"
    held = rig.staging.used_bytes
    assert held > 0
    keeps_serving(rig, "healthy")
    numbers = range(70, 90)
    for number in numbers:
        rig.engine.submit_stores([item(number, block=3)])
    told: dict[int, bool] = {}
    rig.step_until(lambda: told.update(rig.store_results()) or len(told) == len(numbers))
    assert told == dict.fromkeys(numbers, True), "stored is stored, as soon as one tier has it"
    fault_fs.clear()
    fault_fs.resume()
    if hangs == "a read":
        fault_fs.wait_for_hit(rule)
    rig.all_leases_are_back()
    is_well(rig)
