"""The order of eviction, its begin and end, and the space to keep free."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from offload_backend_disk import DiskBackend
from offload_backend_disk.capacity.account import Account, segment_of
from offload_backend_disk.folder.processes import STATE_FOLDER

from offload_core.api import EvictionOrder, EvictionPolicy
from offload_core.api.backend import StoreOutcome
from offload_core.api.keys import ObjectKey
from tests.backends.disk.conftest import Disk, files_under, key, open_account, recover, tmpfs

KIB = 1024
CAPACITY = 400
SIZES = {number: (37 * number) % 130 + 10 for number in range(12)}


class Oracle:
    """The public order of eviction, and the capacity."""

    def __init__(self, policy: EvictionPolicy) -> None:
        self.order: EvictionOrder[int] = EvictionOrder(policy, CAPACITY)

    def store(self, number: int, *, spare: bool) -> list[int] | None:
        """Return the evicted objects, or ``None`` if the object is rejected."""
        evicted: list[int] = []
        while self.order.size + SIZES[number] > CAPACITY:
            if spare:
                return None
            evicted.append(self.order.next_victim())
            self.order.remove(evicted[-1])
        self.order.add(number, SIZES[number], spare=spare)
        return evicted


VERBS = ["store", "store", "store", "store as spare", "use", "use", "touch", "touch as spare", "pin", "delete"]
STEP = st.tuples(st.sampled_from(VERBS), st.sampled_from(sorted(SIZES)))


@pytest.mark.parametrize("policy", ["lru", "slru"])
@settings(max_examples=60, deadline=None)
@given(steps=st.lists(STEP, min_size=20, max_size=60))
def test_the_order_of_eviction_is_that_of_the_public_one(
    tmp_path_factory: pytest.TempPathFactory, policy: EvictionPolicy, steps: list[tuple[str, int]]
) -> None:
    root = tmp_path_factory.mktemp("order")
    account = open_account(root, CAPACITY, policy=policy)
    account.finish_scan()
    oracle = Oracle(policy)
    try:
        for step, number in steps:
            one, there, spare = key(number), number in oracle.order, step.endswith("as spare")
            if step.startswith("store") and not there:
                (granted,), evicted = account.reserve([(one, SIZES[number])], [spare])
                expected = oracle.store(number, spare=spare)
                assert evicted == [key(gone) for gone in expected or []]
                assert (granted is None) == (expected is None)
                if granted is not None:
                    write(root, one, SIZES[number])
                    account.release([granted], stored=[(one, segment_of(spare))])
            elif step == "delete" and there:
                account.remove([one])
                oracle.order.remove(number)
            elif step.startswith("touch"):  # absent objects too
                account.touch([one], [spare])
                account.flush()
                if there:
                    oracle.order.touch(number, spare=spare)
            elif there:
                if step == "pin":
                    assert account.pin([one]) != [None]
                    account.unpin([one])
                else:
                    account.record_use([one])
                account.flush()
                oracle.order.record_use(number)
            assert account.used_bytes == oracle.order.size
    finally:
        account.close()


def path_of(root: Path, one: ObjectKey) -> Path:
    return root / one.namespace / one.pack / one.chunk_hash.hex()[:2] / f"{one.chunk_hash.hex()}.kv"


def write(root: Path, one: ObjectKey, nbytes: int) -> None:
    path = path_of(root, one)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(bytes(nbytes))


def store(account: Account, root: Path, *numbers: int, spare: bool = False) -> None:
    """Store objects of ten bytes."""
    for number in numbers:
        (granted,), _ = account.reserve([(key(number), 10)], [spare])
        assert granted is not None
        write(root, key(number), 10)
        account.release([granted], stored=[(key(number), segment_of(spare))])


def evicted_by(account: Account, *sizes: int) -> list[int]:
    """Return the objects that reservations evict, one reservation after the other."""
    evicted: list[ObjectKey] = []
    for number, size in enumerate(sizes, 100):
        evicted += account.reserve([(key(number), size)])[1]
    return [one.chunk_hash[0] for one in evicted]


def test_one_call_touches_its_keys_in_their_order_and_the_last_is_evicted_last(tmp_path: Path) -> None:
    account = open_account(tmp_path, 80)
    account.finish_scan()
    store(account, tmp_path, *range(8))
    account.touch([key(2), key(5), key(1), key(4)], [False, True, False, True])
    assert evicted_by(account, *[10] * 8) == [5, 4, 0, 3, 6, 7, 2, 1]
    account.close()


def test_changes_that_wait_for_one_transaction_count_as_if_each_had_its_own(tmp_path: Path) -> None:
    account = open_account(tmp_path, 60, policy="slru")
    account.finish_scan()
    store(account, tmp_path, 0, 1, 2, 3)
    store(account, tmp_path, 4, 5, spare=True)
    account.record_use([key(0), key(1), key(4)])
    account.touch([key(0), key(1), key(5)], [False, True, True])  # 0 stays protected, 1 is spare
    account.record_use([key(5)])
    assert evicted_by(account, *[10] * 6) == [1, 2, 3, 4, 0, 5]
    account.close()


def test_every_process_evicts_spare_objects_first_and_the_latest_change_wins(tmp_path: Path) -> None:
    one, other = open_account(tmp_path, 60), open_account(tmp_path, 60, "other")
    one.finish_scan()
    store(one, tmp_path, 0, 1, 2)
    store(other, tmp_path, 3, 4, 5, spare=True)
    one.touch([key(0)], [True])
    other.touch([key(0), key(1)], [False, True])
    one.record_use([key(1)])
    other.record_use([key(2)])
    one.touch([key(2)], [True])
    one.flush()  # out of order: the changes of the other process are older than some of these
    other.flush()
    assert evicted_by(one, *[10] * 6) == [3, 4, 5, 2, 0, 1]
    one.close()
    other.close()


def test_a_spare_object_of_a_process_that_was_killed_is_spare(tmp_path: Path) -> None:
    killed = open_account(tmp_path, 40, "killed")
    killed.finish_scan()
    store(killed, tmp_path, 0)
    killed.reserve([(key(1), 10), (key(2), 10)], [True, False])
    write(tmp_path, key(1), 10)
    write(tmp_path, key(2), 10)
    account = open_account(tmp_path, 40)
    account.touch([key(2)], [True])  # it has no row yet
    account.flush()
    killed._processes.unregister()
    account.release_dead_reservations()
    assert account.used_bytes == 30
    assert evicted_by(account, 10, 10, 10) == [1, 0]
    account.close()


def test_an_object_that_another_process_stored_as_spare_is_kept_if_a_killed_process_kept_it(tmp_path: Path) -> None:
    killed, account = open_account(tmp_path, 40, "killed"), open_account(tmp_path, 40)
    killed.finish_scan()
    killed.reserve([(key(0), 10)])
    store(account, tmp_path, 0, spare=True)
    killed._processes.unregister()
    account.release_dead_reservations()
    store(account, tmp_path, 1, spare=True)
    assert evicted_by(account, 20, 10, 10) == [1, 0]
    account.close()


def test_an_account_that_a_scan_has_rebuilt_keeps_every_object(tmp_path: Path) -> None:
    account = open_account(tmp_path, 30)
    account.finish_scan()
    store(account, tmp_path, 0)
    store(account, tmp_path, 1, spare=True)
    for number in (0, 1):
        os.utime(path_of(tmp_path, key(number)), (number, number))
    account.close()
    for file in (tmp_path / STATE_FOLDER).glob("account.sqlite*"):
        file.unlink()
    assert recover(tmp_path, 30) == (20, [])
    account = open_account(tmp_path, 30)
    assert evicted_by(account, 10, 10) == [0]
    account.close()


def test_a_touch_of_an_object_in_use_does_not_make_it_spare(tmp_path: Path) -> None:
    account = open_account(tmp_path, 30)
    account.finish_scan()
    store(account, tmp_path, 0, 1, 2)
    account.pin([key(2)])
    account.touch([key(2)], [True])
    account.unpin([key(2)])
    assert evicted_by(account, 10) == [0]
    account.close()


async def put(
    backend: DiskBackend, *numbers: int, nbytes: int = 10 * KIB, spare: bool = False
) -> tuple[list[StoreOutcome], list[ObjectKey]]:
    """Store as a tier does; return the outcome of each key, and the evicted keys."""
    keys = [key(number) for number in numbers]
    reservation = await backend.prepare_store(keys, [nbytes] * len(keys), [spare] * len(keys))
    wanted = [one for one, outcome in zip(keys, reservation.outcomes, strict=True) if outcome is None]
    stored = iter(await backend.store(wanted, [memoryview(bytes(nbytes))] * len(wanted)))
    await reservation.release()
    return [outcome or next(stored) for outcome in reservation.outcomes], list(reservation.evicted)


def test_one_pass_over_many_prompts_does_not_evict_reused_objects_under_slru(disk: Disk, tmp_path: Path) -> None:
    async def main(policy: str) -> list[bool]:
        backend = disk(tmp_path / policy, capacity=100 * KIB, low_watermark=1, eviction=policy)
        await backend.open()
        await put(backend, 0, 1)
        await (await backend.prepare_load([key(0), key(1)])).release()
        for number in range(2, 42):
            await put(backend, number)
        return list(await backend.contains([key(0), key(1)]))

    assert asyncio.run(main("lru")) == [False, False]
    assert asyncio.run(main("slru")) == [True, True]


def test_an_eviction_begins_at_the_high_watermark_and_ends_at_the_low_one(disk: Disk, tmp_path: Path) -> None:
    async def main() -> None:
        backend = disk(tmp_path / "objects", capacity=100 * KIB, high_watermark=0.8, low_watermark=0.5)
        await backend.open()
        assert (await put(backend, *range(8)))[1] == []
        assert (await put(backend, 8))[1] == [key(number) for number in range(3)]
        assert (await put(backend, 9, 10))[1] == []
        assert (await put(backend, 11))[1] == [key(number) for number in range(3, 6)]

    asyncio.run(main())


def test_a_long_eviction_goes_on_with_the_stores_that_follow(disk: Disk, tmp_path: Path) -> None:
    async def main() -> list[int]:
        backend = disk(tmp_path / "objects", capacity=1000, low_watermark=0.5)
        await backend.open()
        for start in range(0, 250, 50):
            await put(backend, *range(start, start + 50), nbytes=4)
        return [len((await put(backend, 250 + number, nbytes=4))[1]) for number in range(4)]

    assert asyncio.run(main()) == [65, 61, 0, 0], "64 per step beside the victims for the store itself"


def fill_above(root: Path, *, scanned: bool) -> list[ObjectKey]:
    """Store 1000 objects of ten bytes, which the account counts."""
    keys = [ObjectKey("ab" * 32, "full-u256", number.to_bytes(4, "big")) for number in range(1000)]
    account = open_account(root, 10_000)
    for one in keys:
        write(root, one, 10)
    account.release([], [(one, segment_of(False)) for one in keys])
    if scanned:
        account.finish_scan()
    account.close()
    return keys


def test_a_lowered_capacity_is_reached_in_steps_that_each_reject_one_call(tmp_path: Path) -> None:
    keys = fill_above(tmp_path, scanned=True)
    account = open_account(tmp_path, 1000)
    evicted: list[ObjectKey] = []
    for used in (7440, 4880, 2320):
        granted, gone = account.reserve([(key(1), 10), (key(2), 10)])
        assert granted == [None, None]
        assert account.used_bytes == used
        evicted += gone
    granted, gone = account.reserve([(key(1), 10), (key(2), 10)])
    assert None not in granted
    assert account.used_bytes == 1000
    evicted += gone
    assert evicted == keys[:902]
    account.close()


@pytest.mark.parametrize(
    ("limits", "spare", "scanned"),
    [
        ({"capacity_bytes": 1000}, True, True),
        ({"capacity_bytes": 1000}, False, False),
        ({"capacity_bytes": 10_000, "keep_free_bytes": 2**60}, False, True),
    ],
    ids=["for a spare object", "before the scan has ended", "for space that the tier cannot free"],
)
def test_objects_above_a_limit_stay(tmp_path: Path, limits: dict[str, Any], spare: bool, scanned: bool) -> None:
    fill_above(tmp_path, scanned=scanned)
    account = open_account(tmp_path, **limits)
    assert account.reserve([(key(1), 10), (key(2), 10)], [spare] * 2) == ([None, None], [])
    assert account.used_bytes == 10_000
    account.close()


def test_a_store_that_cannot_fit_evicts_nothing_even_if_others_could(tmp_path: Path) -> None:
    fill_above(tmp_path, scanned=True)
    account = open_account(tmp_path, 1000)
    assert account.reserve([(key(1), 1001)]) == ([None], [])
    assert account.used_bytes == 10_000
    assert len(account.reserve([(key(1), 1001), (key(2), 10)])[1]) == 256
    account.close()


def test_spare_objects_are_stored_below_the_low_watermark_only(disk: Disk, tmp_path: Path) -> None:
    async def main() -> None:
        backend = disk(tmp_path / "objects", capacity=100 * KIB, high_watermark=0.8, low_watermark=0.5)
        await backend.open()
        await put(backend, *range(3))
        outcomes, evicted = await put(backend, *range(3, 7), spare=True)
        assert outcomes == [StoreOutcome.STORED] * 2 + [StoreOutcome.REJECTED] * 2
        assert evicted == []
        assert await put(backend, 0, 3, spare=True) == ([StoreOutcome.ALREADY_PRESENT] * 2, [])
        await put(backend, 7, 8, 9)
        assert (await put(backend, 10))[1] == [key(number) for number in (3, 4, 0)]
        assert await put(backend, 11, spare=True) == ([StoreOutcome.REJECTED], []), "the evicted bytes are not for it"
        assert await put(backend, 11) == ([StoreOutcome.STORED], [])

    asyncio.run(main())


@pytest.mark.parametrize("order", [[0, 1], [1, 0]])
def test_an_object_that_two_calls_store_at_once_is_kept_if_either_keeps_it(
    disk: Disk, tmp_path: Path, order: list[int]
) -> None:
    async def main() -> None:
        backend = disk(tmp_path / "objects", capacity=40 * KIB, low_watermark=1)
        await backend.open()
        reservations = [await backend.prepare_store([key(0)], [10 * KIB], [number == 0]) for number in order]
        for _ in order:
            await backend.store([key(0)], [memoryview(bytes(10 * KIB))])
        for reservation in reservations:
            await reservation.release()
        await put(backend, 1, 2)
        await put(backend, 3, spare=True)
        assert (await put(backend, 4, 5))[1] == [key(3), key(0)]

    asyncio.run(main())


def fill(folder: Path, leave_bytes: int) -> Path:
    """Fill a file system up to ``leave_bytes``."""
    filler = folder / "filler"
    status = os.statvfs(folder)
    filler.write_bytes(bytes(status.f_bavail * status.f_frsize - leave_bytes))
    return filler


def test_space_to_keep_free_is_freed_by_eviction_and_otherwise_stores_are_rejected(disk: Disk) -> None:
    async def main(folder: Path) -> None:
        backend = disk(folder / "objects", capacity="100MiB", keep_free=200 * KIB)
        await backend.open()
        await put(backend, *range(5), nbytes=20 * KIB)
        filler = fill(folder, 230 * KIB)
        assert await put(backend, 10, nbytes=40 * KIB, spare=True) == ([StoreOutcome.REJECTED], [])
        evicted: list[ObjectKey] = []
        for number in (10, 11):
            outcomes, gone = await put(backend, number, nbytes=20 * KIB)
            assert outcomes == [StoreOutcome.STORED]
            evicted += gone
            status = os.statvfs(folder)
            assert status.f_bavail * status.f_frsize >= (200 - 64) * KIB, "the account's own file may have grown"
        assert evicted == [key(number) for number in range(len(evicted))] != []
        assert await put(backend, 12, nbytes=190 * KIB) == ([StoreOutcome.REJECTED], [])
        assert list(await backend.contains([key(4), key(11)])) == [True, True], "evicted in vain"
        filler.unlink()
        assert await put(backend, 12, nbytes=190 * KIB) == ([StoreOutcome.STORED], [])
        await backend.close()

    with tmpfs("1m") as folder:
        asyncio.run(main(folder))


def test_without_a_capacity_a_store_that_leaves_too_little_free_is_rejected(disk: Disk) -> None:
    async def main(folder: Path) -> None:
        backend = disk(folder / "objects", keep_free=200 * KIB)
        await backend.open()
        filler = fill(folder, 230 * KIB)
        outcomes, _ = await put(backend, 0, 1, nbytes=16 * KIB)
        assert outcomes == [StoreOutcome.STORED, StoreOutcome.REJECTED]
        outcomes, _ = await put(backend, 0, 1, nbytes=16 * KIB)
        assert outcomes == [StoreOutcome.ALREADY_PRESENT, StoreOutcome.REJECTED]
        filler.unlink()
        assert (await put(backend, 1, nbytes=16 * KIB))[0] == [StoreOutcome.STORED]
        assert len(files_under(folder)) == 2
        await backend.close()

    with tmpfs("1m") as folder:
        asyncio.run(main(folder))
