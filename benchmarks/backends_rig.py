"""Contenders of ``benchmarks/backends.py``: our tiers, vLLM's file helpers and the limits of the machine.

All of them move the same bytes between the same memory and the same folder. The memory is touched beforehand.
"""

from __future__ import annotations

import asyncio
import hashlib
import math
import os
import resource
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np
from vllm.fs_io_C import batch_load_block, batch_store_block

from offload_core.api.backend import LoadOutcome, StoreOutcome
from offload_core.api.keys import ObjectKey
from offload_core.api.memory.shared_memory import SharedMemory
from offload_core.config.limits import Limits
from offload_core.config.loading import load_config
from offload_core.config.model import OffloadConfig
from offload_core.memory.staging_pool import Lease, StagingPool
from offload_core.memory.staging_shares import share_out
from offload_core.memory.staging_size import BATCH_BYTES, BATCH_OBJECTS, STORE_SHARE, StagingUse
from offload_core.objects import format as object_format
from offload_core.objects.format import HEADER_BYTES
from offload_core.runtime.io_loop import IoLoop
from offload_core.runtime.metrics import Counters
from offload_core.runtime.threads import DaemonExecutor
from offload_core.tiers.calls.call_slots import CallSlots
from offload_core.tiers.staged_object import StagedObject
from offload_core.tiers.tier import Tier
from offload_core.transfer.call_size import large_calls_in, load_size_of, load_slots_of, store_size_of
from offload_core.transfer.stores.store_queue import StoreBatch, StoreCall, StoreQueue

MIB = 1024 * 1024
CHUNK_BYTES = 2 * MIB
"""Bytes of one chunk in a pack: one page of 2 MiB, or eight of 256 KiB."""
PEER_CALL_BYTES = 16 * MIB
"""Bytes in one call of vLLM's helpers or of a store's client; large calls need fewer hops to threads."""
NAMESPACE = "0" * 64
MARK_BYTES = 16
Medium = Literal["page cache", "O_DIRECT", "memory", "network"]


@dataclass(frozen=True)
class Sample:
    """Durations of one pass over all bytes."""

    seconds: float
    cpu_seconds: float
    nbytes: int

    @property
    def gb_per_second(self) -> float:
        return self.nbytes / self.seconds / 1e9

    @property
    def cpu_seconds_per_gib(self) -> float:
        return self.cpu_seconds / self.nbytes * 1024**3


def timed(work: Callable[[], None], nbytes: int) -> Sample:
    """Run ``work`` and return its duration and the processor time of all threads."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    start = time.perf_counter()
    work()
    seconds = time.perf_counter() - start
    after = resource.getrusage(resource.RUSAGE_SELF)
    return Sample(seconds, after.ru_utime + after.ru_stime - usage.ru_utime - usage.ru_stime, nbytes)


class Memory:
    """Touched staging memory for ``chunks`` chunks.

    Args:
        leases_per_object: 2 if some tier encrypts, else 1.
    """

    def __init__(self, chunks: int, leases_per_object: int = 1) -> None:
        pages = CHUNK_BYTES // (256 * 1024)
        nbytes = leases_per_object * chunks * (CHUNK_BYTES + pages * HEADER_BYTES)
        self.shared = SharedMemory.create("benchmark", nbytes)
        self.pool = StagingPool(nbytes, 1.0, arena=self.shared.view)
        block = np.frombuffer(os.urandom(MIB), dtype=np.uint8)
        whole = np.frombuffer(self.pool.memory, dtype=np.uint8)
        whole[:] = np.resize(block, len(whole))

    def leases(self, payload_bytes: int, count: int) -> list[Lease]:
        leases = [self.pool.try_acquire(HEADER_BYTES + payload_bytes, for_store=False) for _ in range(count)]
        assert None not in leases, "the pool has room for all of them"
        return [lease for lease in leases if lease is not None]


class Contender(Protocol):
    """One way to store and load all bytes; ``clean`` deletes a round's bytes, and ``close`` ends the contender."""

    name: str
    nbytes: int

    def store(self, number: int) -> Sample: ...

    def load(self, number: int) -> Sample: ...

    def clean(self, number: int) -> None: ...

    def close(self) -> None: ...


def mark(payloads: Sequence[memoryview], number: int) -> None:
    for index, payload in enumerate(payloads):
        payload[:MARK_BYTES] = _mark(number, index)


def unmark(payloads: Sequence[memoryview]) -> None:
    for payload in payloads:
        payload[:MARK_BYTES] = bytes(MARK_BYTES)


def check(name: str, payloads: Sequence[memoryview], number: int) -> None:
    """Stop the benchmark if a load returned other bytes: a fast wrong answer is no result."""
    if any(payload[:MARK_BYTES] != _mark(number, index) for index, payload in enumerate(payloads)):
        raise SystemExit(f"{name}: a load returned other bytes than were stored")


def _mark(number: int, index: int) -> bytes:
    return b"%7d/%8d" % (number, index)


class OurTier:
    """One of our backends, used as the engine uses it: sealed and checked objects, in the engine's batches and calls.

    As many calls run at once as in the engine, and as large ones as with the default staging memory.

    Args:
        checked: write and check headers and checksums; if false, call the backend alone.
    """

    def __init__(
        self,
        name: str,
        memory: Memory,
        chunks: int,
        payload_bytes: int,
        backend: dict[str, Any],
        *,
        checked: bool = True,
    ) -> None:
        self.name = name
        self._checked = checked
        config = self._config({"name": "bench", **backend})
        self._io = IoLoop.acquire()
        self._threads = config.tiers[0].common.io_threads
        self._tier = self._open(config)
        if self._tier.encodes:
            uses = {self._tier.name: StagingUse(1.0, encodes=True)}
            self._tier.staging = share_out(memory.pool, uses, payload_bytes)[self._tier.name]
        self._sealers = DaemonExecutor(2, "bench-seal")  # as many as the transfer engine has
        self._pool = memory
        self._count = chunks * CHUNK_BYTES // payload_bytes
        self._payload_bytes = payload_bytes
        self._at_once = max(1, min(BATCH_OBJECTS, -(-BATCH_BYTES // payload_bytes)))
        share = int(config.settings.staging_bytes * STORE_SHARE)
        self._store_size = store_size_of(self._tier, share)
        self._load_slots = CallSlots(large_calls_in(self._tier, load_slots_of(self._tier)), spare_slots=0)
        self._load_size = load_size_of(self._tier, share)
        self.nbytes = chunks * CHUNK_BYTES
        self._leases: list[Lease] = []

    def _config(self, backend: dict[str, Any]) -> OffloadConfig:
        return load_config({"backends": [backend]})

    def _open(self, config: OffloadConfig) -> Tier:
        tier = Tier(config.tiers[0], Limits(), Counters())
        self._io.submit(tier.open()).result()
        return tier

    def _take(self, number: int, *, to_load: bool = False) -> list[StagedObject]:
        leases = self._leases = self._pool.leases(self._payload_bytes, self._count)
        scratch: Sequence[Lease | None] = [None] * self._count
        if to_load and self._tier.encodes:
            scratch = self._pool.leases(self._payload_bytes, self._count)
            self._leases = [*leases, *scratch]
        keys = (
            ObjectKey(NAMESPACE, "bench", hashlib.sha256(b"%d/%d" % (number, index)).digest())
            for index in range(self._count)
        )
        return [StagedObject(*parts) for parts in zip(keys, leases, scratch, strict=True)]

    def _give_back(self) -> None:
        for lease in self._leases:
            lease.release()

    def store(self, number: int) -> Sample:
        objects = self._take(number)
        mark([staged.lease.view[HEADER_BYTES:] for staged in objects], number)
        sample = timed(partial(self._store_objects, objects), self.nbytes)
        self._give_back()
        return sample

    def load(self, number: int) -> Sample:
        objects = self._take(number, to_load=True)
        payloads = [staged.lease.view[HEADER_BYTES:] for staged in objects]
        unmark(payloads)
        sample = timed(partial(self._load_objects, objects), self.nbytes)
        check(self.name, payloads, number)
        self._give_back()
        return sample

    def look_up(self, keys: Sequence[ObjectKey]) -> None:
        self._io.submit(self._tier.lookup(keys)).result()

    def _batches(self, objects: list[StagedObject]) -> list[list[StagedObject]]:
        return [objects[start : start + self._at_once] for start in range(0, len(objects), self._at_once)]

    def _store_objects(self, objects: list[StagedObject]) -> None:
        self._io.submit(self._store_all(objects)).result()

    def _load_objects(self, objects: list[StagedObject]) -> None:
        self._io.submit(self._load_all(objects)).result()

    async def _store_all(self, objects: list[StagedObject]) -> None:
        """Seal the batches at once, and store them in calls that take the batches waiting by then.

        Some backends let the tier seal the objects during the store.
        """
        slots = self._threads + int(self._checked)
        queue: StoreQueue[StagedObject] = StoreQueue(slots, 0, lambda staged: staged.lease.nbytes)
        calls: list[asyncio.Task[None]] = []

        def start_calls() -> None:
            while (call := queue.start_next(self._store_size.take)) is not None:
                calls.append(asyncio.create_task(store(call)))

        async def prepare(batch: StoreBatch[StagedObject]) -> None:
            if self._checked and not self._tier.seals_stores:
                await asyncio.get_running_loop().run_in_executor(self._sealers, _seal_all, batch.items)
            queue.prepared(batch)
            start_calls()

        async def store(call: StoreCall[StagedObject]) -> None:
            started = time.monotonic()
            await self._store_call(call.items)
            self._store_size.ended(len(call.batches), time.monotonic() - started, worked=True)
            queue.ended(call)
            start_calls()

        if self._checked and self._tier.seals_stores:
            objects = [replace(staged, unsealed=True) for staged in objects]
        await asyncio.gather(*[prepare(queue.begin(batch, math.inf)) for batch in self._batches(objects)])
        for call in calls:  # grows meanwhile
            await call

    async def _load_all(self, objects: list[StagedObject]) -> None:
        """Load the batches as one job of the engine."""
        left = deque(self._batches(objects))
        fair = -(-len(left) // self._load_slots.slots)

        async def load_next() -> None:
            async with self._load_slots.held(math.inf):
                count = self._load_size.take((sum(one.lease.nbytes for one in batch) for batch in left), fair)
                call = [staged for _ in range(count) for staged in left.popleft()]
                if call:
                    started = time.monotonic()
                    await self._load_call(call)
                    self._load_size.ended(count, time.monotonic() - started, worked=True)

        await asyncio.gather(*[load_next() for _ in range(len(left))])

    async def _store_call(self, objects: list[StagedObject]) -> None:
        if self._checked:
            stored = all(await self._tier.store(objects))
        else:
            keys, views = [staged.key for staged in objects], [staged.lease.view.toreadonly() for staged in objects]
            reservation = await self._tier.backend.prepare_store(keys, list(map(len, views)))
            outcomes = await self._tier.backend.store(keys, views)
            await reservation.release()
            stored = set(outcomes) == {StoreOutcome.STORED}
        if not stored:
            raise SystemExit(f"{self.name}: the tier did not store some objects")

    async def _load_call(self, objects: list[StagedObject]) -> None:
        if self._checked:
            outcomes = set(await self._tier.load(objects))
        else:
            keys, views = [staged.key for staged in objects], [staged.lease.view for staged in objects]
            reservation = await self._tier.backend.prepare_load(keys)
            outcomes = set(await self._tier.backend.load_into(keys, views))
            await reservation.release()
        if outcomes != {LoadOutcome.HIT}:
            raise SystemExit(f"{self.name}: the tier did not load some objects: {outcomes}")

    def clean(self, number: int) -> None:
        objects = self._take(number)
        self._give_back()
        self._delete(objects)

    def _delete(self, objects: list[StagedObject]) -> None:
        self._io.submit(self._tier.storage.delete([staged.key for staged in objects])).result()

    def close(self) -> None:
        self._io.submit(self._tier.close()).result()
        self._end()

    def _end(self) -> None:
        self._sealers.shutdown()
        self._io.release()


def _seal_all(batch: list[StagedObject]) -> None:
    for staged in batch:
        object_format.seal(staged.lease.view, staged.key)


class PlainThreads:
    """Contender that calls functions on plain threads."""

    def __init__(self, name: str, memory: Memory, chunks: int, threads: int) -> None:
        self.name = name
        self.threads = threads
        self.nbytes = chunks * CHUNK_BYTES
        self._views = [memory.pool.memory[start : start + CHUNK_BYTES] for start in range(0, self.nbytes, CHUNK_BYTES)]
        self._executor = ThreadPoolExecutor(threads)
        list(self._executor.map(lambda _: time.sleep(0.01), range(threads)))  # starts them

    def store(self, number: int) -> Sample:
        mark(self._views, number)
        return self._run(self._store_calls(number))

    def load(self, number: int) -> Sample:
        unmark(self._views)
        sample = self._run(self._load_calls(number))
        check(self.name, self._views, number)
        return sample

    def _run(self, calls: Sequence[Callable[[], Any]]) -> Sample:
        def work() -> None:
            for future in [self._executor.submit(call) for call in calls]:
                future.result()

        return timed(work, self.nbytes)

    def _store_calls(self, number: int) -> list[Callable[[], Any]]:
        raise NotImplementedError

    def _load_calls(self, number: int) -> list[Callable[[], Any]]:
        raise NotImplementedError

    def clean(self, number: int) -> None:
        """Do nothing by default: the round left nothing to delete."""

    def close(self) -> None:
        self._executor.shutdown()


class Pages(PlainThreads):
    """Contender with one object per page."""

    def __init__(self, name: str, memory: Memory, chunks: int, threads: int, page_bytes: int) -> None:
        super().__init__(name, memory, chunks, threads)
        self._pages = [
            view[start : start + page_bytes] for view in self._views for start in range(0, CHUNK_BYTES, page_bytes)
        ]
        self._at_once = max(1, PEER_CALL_BYTES // page_bytes)

    def _batches(self, number: int) -> Iterator[tuple[list[str], list[memoryview]]]:
        names = [f"alone/{number}/{index}" for index in range(len(self._pages))]
        for start in range(0, len(names), self._at_once):
            yield names[start : start + self._at_once], self._pages[start : start + self._at_once]


class VllmHelpers(PlainThreads):
    """vLLM's own file helpers: one file per block, no checksum."""

    def __init__(
        self, name: str, memory: Memory, chunks: int, threads: int, folder: Path, block_bytes: int, direct: bool
    ) -> None:
        super().__init__(name, memory, chunks, threads)
        self._direct = direct
        self._blocks = [
            view[start : start + block_bytes] for view in self._views for start in range(0, CHUNK_BYTES, block_bytes)
        ]
        self._folder = folder
        self._at_once = PEER_CALL_BYTES // block_bytes

    def _calls(self, number: int) -> list[tuple[list[str], list[memoryview]]]:
        names = [hashlib.sha256(b"%d/%d" % (number, index)).hexdigest() for index in range(len(self._blocks))]
        paths = [f"{self._folder}/{name[:2]}/{name}.bin" for name in names]  # sub-folders as in vLLM's file mapper
        return [
            (paths[start : start + self._at_once], self._blocks[start : start + self._at_once])
            for start in range(0, len(paths), self._at_once)
        ]

    def _store_calls(self, number: int) -> list[Callable[[], Any]]:
        return [
            partial(batch_store_block, [f"{path}.tmp" for path in paths], paths, views, self._direct)
            for paths, views in self._calls(number)
        ]

    def _load_calls(self, number: int) -> list[Callable[[], Any]]:
        return [partial(batch_load_block, paths, views, self._direct) for paths, views in self._calls(number)]

    def clean(self, number: int) -> None:
        for paths, _ in self._calls(number):
            for path in paths:
                Path(path).unlink()


class OneLargeFile(PlainThreads):
    """Limit of the disk: plain ``pwrite`` and ``pread`` of one large file, 2 MiB at a time."""

    def __init__(self, name: str, memory: Memory, chunks: int, threads: int, folder: Path, direct: bool) -> None:
        super().__init__(name, memory, chunks, threads)
        folder.mkdir(exist_ok=True)
        self._path = folder / "large"
        self._flags = os.O_DIRECT if direct else 0

    def _store_calls(self, number: int) -> list[Callable[[], Any]]:
        self._descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | self._flags, 0o600)
        starts = range(0, self.nbytes, CHUNK_BYTES)
        return [partial(os.pwrite, self._descriptor, *call) for call in zip(self._views, starts, strict=True)]

    def _load_calls(self, number: int) -> list[Callable[[], Any]]:
        starts = range(0, self.nbytes, CHUNK_BYTES)
        return [partial(os.preadv, self._descriptor, [v], start) for v, start in zip(self._views, starts, strict=True)]

    def clean(self, number: int) -> None:
        os.close(self._descriptor)
        self._path.unlink()


class CopyOfMemory(PlainThreads):
    """Limit of host memory: copies to and from other memory, 2 MiB at a time."""

    def __init__(self, name: str, memory: Memory, chunks: int, threads: int) -> None:
        super().__init__(name, memory, chunks, threads)
        self._ours = [np.frombuffer(view, dtype=np.uint8) for view in self._views]
        self._theirs = [np.ones_like(view) for view in self._ours]

    def _store_calls(self, number: int) -> list[Callable[[], Any]]:
        return [partial(np.copyto, *pair) for pair in zip(self._theirs, self._ours, strict=True)]

    def _load_calls(self, number: int) -> list[Callable[[], Any]]:
        return [partial(np.copyto, *pair) for pair in zip(self._ours, self._theirs, strict=True)]
