"""The tier stack behind another system's host memory.

The transfer engine does the work: write policies, promotion, compression, encryption, circuit breakers, deadlines and
the I/O process. So this room is above ``transfer``, and none of that is written twice. The engine copies on the thread
that calls it. A foreign scheduler's thread must not copy, so each store has one thread of its own.

Only that thread touches the other system's memory, and only before the result of the job is given out. Backends see
staging memory. So a deadline gives the memory back at once, and a call that ends later cannot reach it.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from functools import partial

from offload_core.api.errors import ConfigError
from offload_core.api.keys import ObjectKey
from offload_core.api.memory.shared_memory import SharedMemory
from offload_core.config.model import OffloadConfig
from offload_core.elsewhere.host_copier import HostCopier, PlaceView
from offload_core.elsewhere.jobs.host_jobs import EndedJob, Job, PlacedObject
from offload_core.elsewhere.locations import locate
from offload_core.io_process.processes import IoProcesses
from offload_core.memory.block_copier import BlockSlice
from offload_core.memory.payload_layout import PackLayout, PageRun
from offload_core.memory.staging_pool import StagingPool, arena_bytes
from offload_core.memory.staging_size import (
    STORE_SHARE,
    gather_limit_bytes,
    largest_payload_bytes,
    lease_bytes,
    smallest_pool_bytes,
)
from offload_core.objects.format import object_bytes
from offload_core.runtime.io_loop import IoLoop, log_unexpected
from offload_core.runtime.metrics import Counters
from offload_core.tiers.opening import close_tiers, open_tiers
from offload_core.transfer.batches import TransferObject
from offload_core.transfer.engine import TransferEngine
from offload_core.transfer.loads import LoadJob, LoadResult
from offload_core.transfer.stores.pending_store import StoreResult

logger = logging.getLogger(__name__)

_LOOK_SECONDS = 0.001
"""Time between two looks for results while jobs are under way."""


class HostStore:
    """Loads and stores between places in host memory and the tiers. No method waits, but for the last two.

    All methods are for any thread of the other system.

    Args:
        config: the tiers. Keys about the engine's tokens have no effect here.
        name: a name of the other system that is unique on this host while it runs.
        payload_bytes: per pack name, the bytes of its objects' places. Objects of other packs bring their sizes. If
            they are too large for the staging memory, they are not moved.
        view_of: returns the bytes of a place. The store's thread calls it while a job with the place is under way.
        on_ended: gets each job that has ended, on the store's thread. After :meth:`close` has begun, it may run in the
            call that submits the job. By default :meth:`take_ended` returns the jobs.

    Raises:
        ConfigError: a tier cannot be opened, or the staging memory is too small for the objects.
    """

    def __init__(
        self,
        config: OffloadConfig,
        name: str,
        payload_bytes: Mapping[str, int],
        view_of: PlaceView,
        on_ended: Callable[[EndedJob], None] | None = None,
    ) -> None:
        self._settings = settings = config.settings
        self.largest_payload_bytes = largest = max(
            payload_bytes.values(), default=largest_payload_bytes(settings.staging_bytes, settings.staging_uses)
        )
        needed = smallest_pool_bytes(max(1, largest), settings.staging_uses)
        if settings.staging_bytes < needed:
            raise ConfigError(
                [
                    f"staging_bytes: {settings.staging_bytes} is too small for objects of {largest} bytes; set it to "
                    f"{needed} or more, or let the other system make smaller objects"
                ]
            )
        self.counters = Counters()
        self._io = IoLoop.acquire()
        self._processes: IoProcesses | None = None
        self._memory: SharedMemory | None = None
        if settings.io_process == "off":
            self._staging = StagingPool(settings.staging_bytes, STORE_SHARE)
        else:
            self._processes = IoProcesses(name, self._io, config)
            self._memory = SharedMemory.create("offload-staging", arena_bytes(settings.staging_bytes))
            self._staging = StagingPool(settings.staging_bytes, STORE_SHARE, None, self._memory.view)
            self._processes.share_staging(self._memory)
        try:
            self.tiers = tuple(open_tiers(config, self._io, self.counters, half=name, host=self._processes))
        except ConfigError:
            self._release()
            raise
        layouts = {pack: PackLayout(pack, (PageRun(0, 0, size, 1, 0),), size) for pack, size in payload_bytes.items()}
        self._engine = TransferEngine(
            io=self._io,
            tiers=self.tiers,
            staging=self._staging,
            copier=HostCopier(view_of),
            layouts=layouts,
            counters=self.counters,
            largest_payload_bytes=largest,
            processes=self._processes,
        )
        self._payload_bytes = dict(payload_bytes)
        self._window_bytes = self._store_window(largest)
        self._commands: deque[tuple[Job, Callable[[Job], None]]] = deque()
        self._wake = threading.Event()
        self._ended: deque[EndedJob] = deque()
        self._on_ended = on_ended or self._ended.append
        self._running = 0  # under the condition, like both flags
        self._takes_jobs = True  # false from the end of the store's thread on, also if a defect has ended it
        self._is_closing = False
        self._idle = threading.Condition()
        self._waiting: deque[tuple[Job, PlacedObject]] = deque()  # this and the rest: for the store's thread
        self._stores: dict[ObjectKey, deque[tuple[Job, PlacedObject]]] = defaultdict(deque)
        self._loads: dict[int, tuple[Job, tuple[ObjectKey, ...]]] = {}
        self._next_load = 0
        self._stored_bytes = 0
        self._has_refused = False
        self._thread = threading.Thread(target=self._run, name="offload-elsewhere", daemon=True)
        self._thread.start()

    @property
    def is_running(self) -> bool:
        """True if the store's thread moves objects."""
        return self._thread.is_alive()

    def locate(self, keys: Sequence[ObjectKey]) -> Future[list[str | None]]:
        """Ask for the tier of each object; see :func:`~offload_core.elsewhere.locations.locate`."""
        return self._io.submit(locate(self.tiers, keys))

    def store(self, job_id: int, objects: Sequence[PlacedObject]) -> None:
        """Store objects. Their places must not change until the job has ended, at the latest at its deadline."""
        self._begin(Job(job_id, tuple(objects)), self._enqueue_stores)

    def load(self, job_id: int, objects: Sequence[PlacedObject], tiers: Sequence[str | None]) -> None:
        """Load objects into their places.

        Args:
            tiers: per object, the name of its tier. An object without one is not loaded.
        """
        self._begin(Job(job_id, tuple(objects)), partial(self._start_loads, tiers=tuple(tiers)))

    def delete(self, keys: Sequence[ObjectKey]) -> Future[bool]:
        """Delete objects from all tiers. The result, whether they are gone from each of them, has no deadline."""
        return self._io.submit(self._delete(keys))

    def touch(self, keys: Sequence[ObjectKey]) -> None:
        """Note a use of objects, for the order of eviction on the tiers that follow it."""
        for tier in self.tiers:
            if tier.capabilities.spares:
                self._io.submit(tier.touch(keys, [False] * len(keys))).add_done_callback(log_unexpected)

    def take_ended(self) -> list[EndedJob]:
        """Return the jobs that have ended since the last call."""
        ended = []
        while self._ended:
            ended.append(self._ended.popleft())
        return ended

    def drain(self) -> None:
        """Wait until all jobs have ended; their deadlines bound the wait. Afterwards nobody uses their places."""
        with self._idle:
            self._idle.wait_for(lambda: not self._running)

    def close(self) -> None:
        """Wait for pending stores, at most ``shutdown_timeout_seconds``, and close the tiers. Idempotent."""
        with self._idle:
            if self._is_closing:
                return
            self._is_closing = True
            self._takes_jobs = False
        self._wake.set()
        self._thread.join()
        close_tiers(self.tiers, self._io)
        self._release()

    async def _delete(self, keys: Sequence[ObjectKey]) -> bool:
        return all(await asyncio.gather(*(tier.delete(keys) for tier in self.tiers)))

    def _release(self) -> None:
        if self._processes is not None:
            self._processes.release(self._settings.close_timeout_seconds)
        self._staging.close()
        if self._memory is not None:
            self._memory.close()
        self._io.release()

    def _store_window(self, largest_payload_bytes: int) -> int:
        """Return the bytes of stores that no tier's share of the staging memory has to drop."""
        uses, limit = self._settings.staging_uses, self._staging.store_limit_bytes
        shares = [int(limit * use.share) // use.leases_per_object for use in uses]
        return max(lease_bytes(object_bytes(largest_payload_bytes)), min(gather_limit_bytes(limit, uses), *shares))

    def _begin(self, job: Job, start: Callable[[Job], None]) -> None:
        with self._idle:
            self._running += 1
            if self._takes_jobs and job.objects:
                self._commands.append((job, start))
                self._wake.set()
                return
        self._publish(job)

    # For the store's thread

    def _run(self) -> None:
        try:
            while not self._is_closing:
                self._step()
                if self._running:
                    self._engine.wait_for_arrival(_LOOK_SECONDS)
                else:
                    self._wake.wait()
                    self._wake.clear()
            end = time.monotonic() + self._settings.shutdown_timeout_seconds
            while (self._waiting or self._stores) and time.monotonic() < end:
                self._step()
                self._engine.wait_for_arrival(_LOOK_SECONDS)
        except Exception:
            logger.exception("the thread of stores and loads has ended; this is a defect, please report it")
        self._engine.close()
        self._give_up()

    def _step(self) -> None:
        while self._commands:
            job, start = self._commands.popleft()
            start(job)
        self._expire_waiting()
        self._submit_stores()
        for load in self._engine.poll():
            self._load_ended(load)
        for store in self._engine.take_store_results():
            self._store_ended(store)
        for tier in self.tiers:
            tier.take_changes()  # nobody here keeps an index

    def _enqueue_stores(self, job: Job) -> None:
        self._waiting.extend((job, placed) for placed in self._that_fit(job))

    def _that_fit(self, job: Job) -> list[PlacedObject]:
        """Return the objects of a new job that fit into the staging memory, and end the others."""
        fitting = [placed for placed in job.objects if self._nbytes(placed) <= self.largest_payload_bytes]
        if len(fitting) < len(job.objects):
            largest = max(map(self._nbytes, job.objects))
            if not self._has_refused:
                logger.error(
                    "objects of %d bytes are neither stored nor loaded: staging_bytes is %d; set it to %d or more",
                    largest, self._settings.staging_bytes, smallest_pool_bytes(largest, self._settings.staging_uses),
                )  # fmt: skip
            self._has_refused = True
            fits = set(fitting)
            self._end(job, [placed.key for placed in job.objects if placed not in fits], [])
        return fitting

    def _expire_waiting(self) -> None:
        """End the stores that have waited for staging memory until their deadline."""
        oldest = time.monotonic() - max(tier.limits.store_timeout_seconds for tier in self.tiers)
        while self._waiting and self._waiting[0][0].submitted < oldest:
            job, placed = self._waiting.popleft()
            self._end(job, [placed.key], [])

    def _submit_stores(self) -> None:
        """Give waiting stores to the engine, as many as there is staging memory for."""
        objects: list[TransferObject] = []
        while self._waiting:
            job, placed = self._waiting[0]
            nbytes = self._lease_bytes(placed)
            if self._stored_bytes and self._stored_bytes + nbytes > self._window_bytes:
                break
            self._waiting.popleft()
            self._stored_bytes += nbytes
            self._stores[placed.key].append((job, placed))
            objects.append(self._transfer_object(placed))
        if objects:
            self._engine.submit_stores(objects)

    def _store_ended(self, result: StoreResult) -> None:
        job, placed = self._stores[result.key].popleft()
        if not self._stores[result.key]:
            del self._stores[result.key]
        self._stored_bytes -= self._lease_bytes(placed)
        self._end(job, [result.key], [result.key] if result.stored else [])

    def _start_loads(self, job: Job, tiers: Sequence[str | None]) -> None:
        parts: dict[str | None, list[PlacedObject]] = defaultdict(list)
        tier_of = dict(zip(job.objects, tiers, strict=True))
        for placed in self._that_fit(job):
            parts[tier_of[placed]].append(placed)
        for tier, part in parts.items():
            keys = tuple(placed.key for placed in part)
            if tier is None:
                self._end(job, keys, [])
                continue
            self._next_load += 1
            self._loads[self._next_load] = (job, keys)
            self._engine.submit_load(LoadJob(self._next_load, tier, tuple(map(self._transfer_object, part))))

    def _load_ended(self, result: LoadResult) -> None:
        job, keys = self._loads.pop(result.job_id)
        missing = set(result.failed_keys) if result.failed_keys or result.status == "loaded" else set(keys)
        self._end(job, keys, [key for key in keys if key not in missing])

    def _give_up(self) -> None:
        """End all jobs that are left. Nobody starts another one."""
        with self._idle:
            self._takes_jobs = False
        jobs = {job for job, _ in self._loads.values()} | {job for job, _ in self._waiting}
        jobs |= {job for waiting in self._stores.values() for job, _ in waiting}
        while self._commands:
            jobs.add(self._commands.popleft()[0])
        for job in jobs:
            self._publish(job)

    def _end(self, job: Job, keys: Sequence[ObjectKey], moved: Sequence[ObjectKey]) -> None:
        if job.end(keys, moved):
            if used := job.deepest_first():  # stores and loads have left the head of the prefix as the oldest part
                self._engine.touch(used, [False] * len(used))
            self._publish(job)

    def _publish(self, job: Job) -> None:
        seconds = time.monotonic() - job.submitted
        try:
            self._on_ended(EndedJob(job.job_id, job.objects, frozenset(job.moved), seconds))
        except Exception:
            logger.exception("the end of a job was not taken; this is a defect, please report it")
        with self._idle:
            self._running -= 1
            self._idle.notify_all()

    def _nbytes(self, placed: PlacedObject) -> int:
        return self._payload_bytes[placed.key.pack] if placed.nbytes is None else placed.nbytes

    def _lease_bytes(self, placed: PlacedObject) -> int:
        return lease_bytes(object_bytes(self._nbytes(placed)))

    def _transfer_object(self, placed: PlacedObject) -> TransferObject:
        layout = None if placed.nbytes is None else PackLayout(placed.key.pack, (), placed.nbytes)
        return TransferObject(placed.key, (BlockSlice(0, (placed.place,)),), layout=layout)
