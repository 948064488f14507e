"""The order of eviction, its begin and end, and the space to keep free."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from offload_backend_disk import DiskBackend

from offload_core.api.backend import StoreOutcome
from offload_core.api.keys import ObjectKey
from tests.backends.disk.conftest import Disk, files_under, key, open_account, tmpfs

KIB = 1024
CAPACITY = 400
SIZES = {number: (37 * number) % 130 + 10 for number in range(12)}


class Oracle:
    """Both orders as plain lists, the next victim first."""

    def __init__(self, *, segmented: bool) -> None:
        self.segmented = segmented
        self.unprotected: list[int] = []
        self.protected: list[int] = []

    def all(self) -> list[int]:
        return self.unprotected + self.protected

    def store(self, number: int) -> list[int]:
        evicted = []
        while sum(SIZES[one] for one in [*self.all(), number]) > CAPACITY:
            evicted.append((self.unprotected or self.protected).pop(0))
        self.unprotected.append(number)
        return evicted

    def use(self, number: int) -> None:
        for segment in (self.unprotected, self.protected):
            if number in segment:
                segment.remove(number)
        if not self.segmented:
            self.unprotected.append(number)
            return
        self.protected.append(number)
        while sum(SIZES[one] for one in self.protected) > 0.8 * CAPACITY:
            self.unprotected.append(self.protected.pop(0))


STEP = st.tuples(
    st.sampled_from(["store", "store", "store", "use", "use", "pin", "delete"]), st.sampled_from(sorted(SIZES))
)


@pytest.mark.parametrize("policy", ["lru", "slru"])
@settings(max_examples=50, deadline=None)
@given(steps=st.lists(STEP, min_size=20, max_size=60))
def test_the_order_of_eviction_is_that_of_a_brute_force_oracle(
    tmp_path_factory: pytest.TempPathFactory, policy: str, steps: list[tuple[str, int]]
) -> None:
    root = tmp_path_factory.mktemp("order")
    account = open_account(root, CAPACITY, policy=policy)
    account.finish_scan()
    oracle = Oracle(segmented=policy == "slru")
    try:
        for step, number in steps:
            one, there = key(number), number in oracle.all()
            if step == "store" and not there:
                (granted,), evicted = account.reserve([(one, SIZES[number])])
                assert granted is not None
                assert evicted == [key(gone) for gone in oracle.store(number)]
                path = root / one.namespace / one.pack / one.chunk_hash.hex()[:2] / f"{one.chunk_hash.hex()}.kv"
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(bytes(SIZES[number]))
                account.release([granted], stored=[one])
            elif step == "delete" and there:
                account.remove([one])
                for segment in (oracle.unprotected, oracle.protected):
                    if number in segment:
                        segment.remove(number)
            elif there:
                if step == "pin":
                    assert account.pin([one]) != [None]
                    account.unpin([one])
                else:
                    account.record_use([one])
                account.flush()
                oracle.use(number)
            assert account.used_bytes == sum(SIZES[each] for each in oracle.all())
    finally:
        account.close()


async def put(
    backend: DiskBackend, *numbers: int, nbytes: int = 10 * KIB
) -> tuple[list[StoreOutcome], list[ObjectKey]]:
    """Store as a tier does; return the outcome of each key, and the evicted keys."""
    keys = [key(number) for number in numbers]
    reservation = await backend.prepare_store(keys, [nbytes] * len(keys))
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
