"""Load and store at random through staging, a cpu tier and a disk tier; print the growth of the process.

    python -m tests.backends.cpu.memory_child FOLDER STAGING_BYTES CAPACITY_BYTES STORED_BYTES

The file's name keeps pytest from collecting it.
"""

from __future__ import annotations

import asyncio
import gc
import random
import re
import sys
from collections.abc import Sequence
from pathlib import Path

from offload_core.api.keys import ObjectKey
from offload_core.config.limits import Limits
from offload_core.config.loading import load_config
from offload_core.memory.staging_pool import Lease, StagingPool
from offload_core.memory.staging_size import BATCH_OBJECTS, STORE_SHARE
from offload_core.objects import format as object_format
from offload_core.objects.format import HEADER_BYTES
from offload_core.runtime.metrics import Counters
from offload_core.tiers.staged_object import StagedObject
from offload_core.tiers.tier import Tier

PAYLOADS_BYTES = (4096, 20_000, 256 * 1024, 2 * 1024 * 1024)
CLIENTS = 6
REMEMBERED = 400


def status_bytes(field: str) -> int:
    found = re.search(rf"^{field}:\s+(\d+) kB$", Path("/proc/self/status").read_text(), re.MULTILINE)
    assert found is not None
    return int(found[1]) * 1024


def reset_peak() -> int:
    """Reset the peak of the process to its size now; return that size."""
    Path("/proc/self/clear_refs").write_text("5")
    return status_bytes("VmRSS")


class Load:
    """Clients that store and load until a number of bytes is stored."""

    def __init__(self, pool: StagingPool, tiers: Sequence[Tier], payloads_bytes: Sequence[int]) -> None:
        self._pool = pool
        self._tiers = tiers
        self._payloads_bytes = payloads_bytes
        self._chooser = random.Random(5)
        self._stored_objects: list[tuple[ObjectKey, int]] = []
        self.stored_bytes = 0
        self.hits = 0

    async def run(self, stored_bytes: int) -> None:
        await asyncio.gather(*(self._client(stored_bytes) for _ in range(CLIENTS)))

    async def _client(self, stored_bytes: int) -> None:
        while self.stored_bytes < stored_bytes:
            await (self._store() if self._chooser.random() < 0.5 else self._load())
            for tier in self._tiers:
                tier.take_changes()  # as a worker does in each step

    async def _store(self) -> None:
        payload_bytes = self._chooser.choice(self._payloads_bytes)
        batch: list[StagedObject] = []
        for _ in range(self._chooser.randint(1, BATCH_OBJECTS)):
            lease = self._pool.try_acquire(HEADER_BYTES + payload_bytes, for_store=True)
            if lease is None:
                break
            key = ObjectKey("ab" * 32, "full-u256", self._chooser.randbytes(32))
            lease.tensor[HEADER_BYTES:].fill_(self._chooser.randrange(128))
            object_format.seal(lease.view, key)
            batch.append(StagedObject(key, lease))
        try:
            stored = [await tier.store(batch) for tier in self._tiers if batch]
        finally:
            for staged in batch:
                staged.lease.release()
        if stored:
            assert all(map(all, stored))
            self.stored_bytes += sum(staged.lease.nbytes for staged in batch)
            self._stored_objects = [*self._stored_objects, *((staged.key, staged.lease.nbytes) for staged in batch)][
                -REMEMBERED:
            ]
        else:
            await asyncio.sleep(0)

    async def _load(self) -> None:
        wanted = self._chooser.sample(self._stored_objects, min(BATCH_OBJECTS, len(self._stored_objects)))
        leases: list[Lease] = []
        try:
            for _, nbytes in wanted:
                lease = self._pool.try_acquire(nbytes, for_store=False)
                if lease is None:
                    break
                leases.append(lease)
            batch = [StagedObject(key, lease) for (key, _), lease in zip(wanted, leases, strict=False)]
            if batch:
                outcomes = await self._chooser.choice(self._tiers).load(batch)
                assert None not in outcomes
                self.hits += sum(outcome is not None and outcome.value == "hit" for outcome in outcomes)
        finally:
            for lease in leases:
                lease.release()
        await asyncio.sleep(0)


async def main(folder: Path, staging_bytes: int, capacity_bytes: int, stored_bytes: int) -> None:
    async def run(name: str, staging: int, capacity: int, amount: int, payloads_bytes: Sequence[int]) -> int:
        entries = [
            {"name": "ram", "type": "cpu", "capacity": capacity},
            {"name": "disk", "type": "disk", "path": str(folder / name), "capacity": 2 * capacity},
        ]
        tiers = [Tier(config, Limits(), Counters()) for config in load_config({"backends": entries}).tiers]
        for tier in tiers:
            await tier.open()
        pool = StagingPool(staging, STORE_SHARE)
        load = Load(pool, tiers, payloads_bytes)
        await load.run(amount)
        assert load.hits
        assert pool.used_bytes == 0
        for tier in tiers:
            await tier.close()
        return load.stored_bytes

    # The first use imports, starts and grows things once; these are not part of the cost of a load.
    await run("warm-up", 1 << 22, 1 << 20, 1 << 22, [20_000])
    gc.collect()
    before = reset_peak()
    for name, amount, payloads_bytes in (
        ("mixed", stored_bytes, PAYLOADS_BYTES),
        ("small", capacity_bytes * 5 // 4, PAYLOADS_BYTES[:2]),
    ):
        await run(name, staging_bytes, capacity_bytes, amount, payloads_bytes)
        print(name, status_bytes("VmHWM") - before, flush=True)


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1]), *map(int, sys.argv[2:])))
