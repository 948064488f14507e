"""Objects in an L2 of a real LMCache server: they outlive its memory and the server, and damage to them is noticed."""

from __future__ import annotations

import os
import random
import time
from collections import Counter
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from offload_backend_lmcache.server import abandoned_tasks, lmcache_module
from offload_backend_lmcache.server.abandoned_tasks import AbandonedTasks
from offload_backend_lmcache.server.lmcache_module import LMCacheStore
from offload_backend_lmcache.server.object_store import StoreError
from offload_backend_lmcache.wire.frames import Entry, Found, Status

from offload_core.api.backend import LoadOutcome, StoreOutcome
from tests.backends.lmcache.calls import Calls, key, opened
from tests.backends.lmcache.l2_files import files, object_file, wait_until_written
from tests.support.clusters import lmcache
from tests.support.clusters.lmcache import LMCacheCluster

SIZES = [300_000, 300_000, 65_536, 1, 4096, 1_000_003]


def content(number: int) -> bytes:
    return random.Random(number).randbytes(SIZES[number])


def name_of(prefix: str, number: int) -> bytes:
    return f"{prefix}{key(number).path}".encode()


@pytest.fixture
def prefix(tmp_path: Path) -> str:
    return f"{tmp_path.name}/"


@pytest.fixture
def calls(cluster_on_disk: LMCacheCluster, prefix: str) -> Iterator[Calls]:
    with opened(cluster_on_disk.address, prefix=prefix) as calls:
        yield calls


def store_all(cluster: LMCacheCluster, calls: Calls, prefix: str) -> None:
    """Store the objects and wait until LMCache has written them to its L2."""
    numbers = range(len(SIZES))
    assert calls.store(*((number, content(number)) for number in numbers)) == [StoreOutcome.STORED] * len(SIZES)
    for number in numbers:
        wait_until_written(cluster, name_of(prefix, number), SIZES[number])


def check_all(calls: Calls) -> None:
    numbers = range(len(SIZES))
    assert list(calls.contains(*numbers, 99)) == [True] * len(SIZES) + [False]
    assert list(calls.sizes(*numbers, 99)) == [*SIZES, None], "the sizes are not known"
    loaded = calls.load_into(*((number, bytearray(SIZES[number])) for number in numbers))
    assert loaded == [(LoadOutcome.HIT, content(number)) for number in numbers]


def test_objects_are_found_when_they_have_left_the_memory(
    cluster_on_disk: LMCacheCluster, calls: Calls, prefix: str
) -> None:
    store_all(cluster_on_disk, calls, prefix)
    cluster_on_disk.clear_memory()
    check_all(calls)
    cluster_on_disk.clear_memory()
    assert calls.load(99, 5) == (LoadOutcome.MISS, bytes(5))


@pytest.mark.long
@pytest.mark.timeout(180)
def test_objects_are_found_after_a_restart_of_the_server(
    cluster_on_disk: LMCacheCluster, calls: Calls, prefix: str
) -> None:
    store_all(cluster_on_disk, calls, prefix)
    cluster_on_disk.stop()
    with pytest.raises(ConnectionRefusedError, match="no server at"):
        calls.contains(0)
    cluster_on_disk.start()
    check_all(calls)


def test_a_wrong_size_is_corrupt_and_does_not_hide_the_object(
    cluster_on_disk: LMCacheCluster, calls: Calls, prefix: str
) -> None:
    store_all(cluster_on_disk, calls, prefix)
    for wrong in (SIZES[0] - 1, SIZES[0] + 1, 1):
        cluster_on_disk.clear_memory()
        assert calls.load(0, wrong)[0] is LoadOutcome.CORRUPT
        assert calls.load(0, SIZES[0]) == (LoadOutcome.HIT, content(0)), "a load of another size spoils the object"


def _cut(path: Path, other: Path) -> None:
    os.truncate(path, 1000)


def _empty(path: Path, other: Path) -> None:
    os.truncate(path, 0)


def _flip(path: Path, other: Path) -> None:
    damaged = bytearray(path.read_bytes())
    damaged[len(damaged) // 2] ^= 1
    path.write_bytes(damaged)


def _lengthen(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b"x")


def _exchange(path: Path, other: Path) -> None:
    path.write_bytes(other.read_bytes())


@pytest.mark.parametrize("damage", [_cut, _empty, _flip, _exchange])
def test_damage_in_the_l2_is_corrupt_and_can_be_mended(
    cluster_on_disk: LMCacheCluster, calls: Calls, prefix: str, damage: object
) -> None:
    store_all(cluster_on_disk, calls, prefix)
    cluster_on_disk.clear_memory()
    assert callable(damage)
    damage(object_file(cluster_on_disk, name_of(prefix, 0)), object_file(cluster_on_disk, name_of(prefix, 1)))
    assert calls.load(0, SIZES[0])[0] is LoadOutcome.CORRUPT
    assert calls.load(1, SIZES[1]) == (LoadOutcome.HIT, content(1))
    calls.delete(0)
    assert list(calls.contains(0)) == [False]
    assert calls.store((0, content(0))) == [StoreOutcome.STORED]
    assert calls.load(0, SIZES[0]) == (LoadOutcome.HIT, content(0))


def test_a_file_that_grew_is_no_other_object(cluster_on_disk: LMCacheCluster, calls: Calls, prefix: str) -> None:
    store_all(cluster_on_disk, calls, prefix)
    cluster_on_disk.clear_memory()
    _lengthen(object_file(cluster_on_disk, name_of(prefix, 0)))
    outcome, loaded = calls.load(0, SIZES[0])
    assert outcome is not LoadOutcome.HIT or loaded == content(0)


def test_a_deleted_object_is_gone_from_memory_and_l2(
    cluster_on_disk: LMCacheCluster, calls: Calls, prefix: str
) -> None:
    store_all(cluster_on_disk, calls, prefix)
    calls.delete(0, 1, 99)
    cluster_on_disk.clear_memory()
    calls.delete(2)
    assert list(calls.contains(0, 1, 2, 3)) == [False, False, False, True]
    assert not any(files(cluster_on_disk, name_of(prefix, number)) for number in (0, 1, 2)), (
        "a deleted object left files"
    )


@pytest.mark.long
def test_more_objects_than_the_memory_holds(cluster_on_disk: LMCacheCluster, calls: Calls) -> None:
    size, count = 8 * 1024**2, 64
    for number in range(count):
        deadline = time.monotonic() + 20
        while calls.store((number, random.Random(number).randbytes(16) * (size // 16))) == [StoreOutcome.REJECTED]:
            assert time.monotonic() < deadline, "LMCache does not evict"
    found = calls.contains(*range(count))
    hits = 0
    for number in range(count):
        outcome, loaded = calls.load(number, size)
        assert outcome in (LoadOutcome.HIT, LoadOutcome.MISS), "an object that did not fit is no damaged one"
        assert outcome is LoadOutcome.MISS or loaded == random.Random(number).randbytes(16) * (size // 16)
        hits += outcome is LoadOutcome.HIT
    assert hits >= count // 2, f"{hits} of {count} objects come back, {sum(found)} were found"
    calls.delete(*range(count))


def test_one_object_in_two_sizes_in_one_batch(cluster_on_disk: LMCacheCluster, calls: Calls, prefix: str) -> None:
    store_all(cluster_on_disk, calls, prefix)
    for sizes in ((SIZES[0], 1, SIZES[0]), (1, SIZES[0], 1)):
        cluster_on_disk.clear_memory()
        outcomes = [outcome for outcome, _ in calls.load_into(*((0, bytearray(size)) for size in sizes))]
        expected = {SIZES[0]: LoadOutcome.HIT, 1: LoadOutcome.CORRUPT}
        assert outcomes == [expected[size] for size in sizes]


def test_an_object_in_the_l2_is_not_stored_again(cluster_on_disk: LMCacheCluster, calls: Calls, prefix: str) -> None:
    store_all(cluster_on_disk, calls, prefix)
    cluster_on_disk.clear_memory()
    assert calls.store((0, bytes(5))) == [StoreOutcome.ALREADY_PRESENT], "the older copy would show again"
    assert calls.load(0, SIZES[0]) == (LoadOutcome.HIT, content(0))


def test_a_release_of_locks_that_fails_keeps_the_others(caplog: pytest.LogCaptureFixture) -> None:
    tasks, asked = AbandonedTasks(list), Counter[str]()

    def release(name: str, ends_at: int) -> bool:
        asked[name] += 1
        if name == "fails":
            raise RuntimeError("no such task")
        return asked[name] == ends_at

    for name, ends_at in (("early", 1), ("fails", 0), ("late", 2)):
        tasks.add(partial(release, name, ends_at))
    for _ in range(3):
        tasks.collect()
    assert asked == {"early": 1, "fails": 1, "late": 2}
    assert "no such task" in caplog.text


@pytest.fixture
def manager() -> Iterator[Any]:
    """LMCache's storage manager in this process, without an L2. Skips where LMCache cannot run."""
    if reason := lmcache.why_not():
        pytest.skip(reason)
    from lmcache.v1.distributed.config import (
        EvictionConfig,
        L1ManagerConfig,
        L1MemoryManagerConfig,
        StorageManagerConfig,
    )
    from lmcache.v1.distributed.storage_manager import StorageManager

    l1 = L1ManagerConfig(L1MemoryManagerConfig(64 * 1024**2, use_lazy=False, shm_name=""))
    manager = StorageManager(StorageManagerConfig(l1, EvictionConfig("LRU")))
    yield manager
    manager.close()


def load(store: LMCacheStore, name: bytes) -> Status:
    with store.reading([Entry(name, 7)], time.monotonic() + 10) as (content,):
        return content.status


def find(store: LMCacheStore, name: bytes, seconds: float) -> Found:
    (found,) = store.find([name], time.monotonic() + seconds)
    return found


def test_a_hung_l2_stops_no_load_from_the_memory_and_can_be_replaced(
    manager: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from lmcache.v1.distributed.l2_adapters.mock_l2_adapter import MockL2AdapterConfig

    monkeypatch.setattr(abandoned_tasks, "MAX_ABANDONED", 3)  # of 256
    store = LMCacheStore(manager, lmcache_module._only_l1(manager))
    writing = store.begin_write(Entry(b"in memory", 7), time.monotonic() + 10)
    assert not isinstance(writing, Status)
    writing.payload[:] = b"payload"
    assert writing.commit(0)
    hung_id = manager.add_l2_adapter(MockL2AdapterConfig(max_size_gb=0.1, mock_bandwidth_gb=1.0))
    ((_, hung),) = manager.l2_adapters()
    monkeypatch.setattr(hung, "query_lookup_and_lock_result", lambda task: None)
    for number in range(4):
        with pytest.raises(StoreError, match="did not answer a lookup in time"):
            find(store, b"%d" % number, 0.0)
    with pytest.raises(StoreError, match="has not answered 4 requests"):
        find(store, b"absent", 10)
    with pytest.raises(StoreError, match="has not answered 4 requests"):
        load(store, b"absent")
    assert load(store, b"in memory") is Status.HIT
    manager.delete_l2_adapter(hung_id)
    manager.add_l2_adapter(MockL2AdapterConfig(max_size_gb=0.1, mock_bandwidth_gb=1.0))
    assert find(store, b"absent", 10) == Found(False, None)
    assert load(store, b"absent") is Status.ABSENT


def test_a_load_from_the_memory_releases_the_locks_of_late_tasks(manager: Any) -> None:
    store, asked = LMCacheStore(manager, lmcache_module._only_l1(manager)), Counter[str]()

    def release() -> bool:
        asked["late"] += 1
        return True

    store._abandoned.add(release)
    for _ in range(2):
        assert load(store, b"absent") is Status.ABSENT
    assert asked == {"late": 1}
