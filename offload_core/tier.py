"""A tier: one configured backend with its threads, its counters and the checks around every call."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Awaitable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from offload_core import events, object_format
from offload_core.backend import Backend, BackendContext, LoadOutcome, StoreOutcome
from offload_core.config import TierConfig
from offload_core.errors import BackendError, ObjectFormatError
from offload_core.event_delivery import EventDelivery
from offload_core.hookspecs import TierInfo
from offload_core.keys import ObjectKey
from offload_core.plugins import PluginRegistry
from offload_core.runtime import DaemonExecutor
from offload_core.stats import Counters
from offload_core.tier_index import TierChange

if TYPE_CHECKING:
    from offload_core.staging import Lease  # which imports torch; the command line does without

logger = logging.getLogger(__name__)

_MAX_PENDING_LOOKUPS = 16
# XXH3 checks this much in some 0.2 ms; handing it to a thread was seen to cost 0.1 ms, and 2 ms on busy cores.
_INLINE_CHECK_BYTES = 4 * 1024 * 1024

T = TypeVar("T")


@dataclass(frozen=True)
class StagedObject:
    """An object and the lease that holds, or is to hold, its bytes (header and payload)."""

    key: ObjectKey
    lease: Lease


class Tier:
    """One entry of ``backends``. All coroutines run on the I/O loop.

    Outcomes are values; a backend's exception becomes a failure of every key in its batch, is counted and is logged
    once until the operation succeeds again.

    Args:
        load_timeout_seconds: base deadline of a load when the tier has none of its own.
        plugins: those that may wrap the backend.
        observers: told what happens; ``None`` when there are none.

    Raises at construction:
        PluginError: a plugin failed to wrap the backend.
    """

    def __init__(
        self,
        config: TierConfig,
        load_timeout_seconds: float,
        counters: Counters,
        plugins: PluginRegistry | None = None,
        observers: EventDelivery | None = None,
    ) -> None:
        self.name = config.common.name
        self.keys = config.common
        """The keys that every tier has, as configured."""
        self.load_weight = config.common.load_weight
        self.load_timeout_seconds = config.common.load_timeout_seconds or load_timeout_seconds
        self._counters = counters
        self._executor = DaemonExecutor(config.common.io_threads, f"offload-{self.name}")
        backend = config.backend_type.backend(config.options, BackendContext(self.name, self._executor))
        info = TierInfo(self.name, config.backend_type.name, self.load_weight)
        self._backend = backend if plugins is None else plugins.wrap(backend, info)
        self.capabilities = self._backend.capabilities
        # Twice the threads, so that they go on reading while other batches are checked and handed over.
        self.load_slots = asyncio.Semaphore(2 * config.common.io_threads)
        """Held by the caller around :meth:`load`, from before it takes staging memory."""
        self._changes: deque[TierChange] | None = None if self.capabilities.shared else deque()
        self._store_slots = asyncio.Semaphore(config.common.io_threads)
        self._pending_lookups = 0
        self._failing: set[events.Operation] = set()
        self.observers = observers
        self._opened = False

    @property
    def backend(self) -> Backend[Any]:
        """The backend itself, for tools that need more than the engine does."""
        return self._backend

    async def open(self) -> None:
        """Open the backend.

        Raises:
            OSError: the medium cannot be used.
        """
        started = time.monotonic()
        await self._backend.open()
        self._opened = True
        if self.observers:
            self.observers.emit(events.TierOpened(self.name, time.monotonic() - started))

    async def close(self) -> None:
        """Close the backend and end its threads once they are idle."""
        try:
            await self._backend.close()
        finally:
            self._executor.shutdown()
            if self.observers and self._opened:
                self._opened = False
                self.observers.emit(events.TierClosed(self.name))

    def take_changes(self) -> list[TierChange]:
        """Return what has come to a medium that only this process sees, and left it, since the last call.

        May be called on any thread. Nothing for a shared medium, which can be asked by everyone.
        """
        changes: list[TierChange] = []
        while self._changes:
            changes.append(self._changes.popleft())
        return changes

    async def lookup(self, keys: Sequence[ObjectKey]) -> list[bool]:
        """Return, per key, whether the object is there; an error or too many lookups at once answers "no"."""
        if self._pending_lookups >= _MAX_PENDING_LOOKUPS:
            self._counters.add("lookup_failures", self.name)
            return [False] * len(keys)
        self._pending_lookups += 1
        try:
            answers = self._parallel(keys, await _answer(self._backend.contains(keys)), "contains")
            present = list(map(bool, answers))
        except Exception as error:
            self._failed("lookup", keys, error)
            self._counters.add("lookup_failures", self.name)
            return [False] * len(keys)
        finally:
            self._pending_lookups -= 1
        self._succeeded("lookup")
        hits = present.count(True)
        self._counters.add("lookup_hits", self.name, hits)
        self._counters.add("lookup_misses", self.name, len(keys) - hits)
        return present

    async def load(self, objects: Sequence[StagedObject]) -> list[LoadOutcome | None]:
        """Load and verify a batch.

        Returns:
            Per object: ``HIT`` when the lease holds the verified object, ``MISS``, ``CORRUPT`` (and the object is
            deleted), or ``None`` when the backend failed.
        """
        keys = [staged.key for staged in objects]
        started = time.monotonic()
        try:
            outcomes = await _answer(self._load_verified(objects, keys))
        except Exception as error:
            self._failed("load", keys, error)
            self._counters.add("load_failures", self.name, len(keys))
            self._tell_of_loads(started, failed=len(keys))
            return [None] * len(keys)
        self._succeeded("load")
        self._note((key for key, outcome in zip(keys, outcomes, strict=True) if outcome is not LoadOutcome.HIT), False)
        corrupt = [key for key, outcome in zip(keys, outcomes, strict=True) if outcome is LoadOutcome.CORRUPT]
        missing, hits = outcomes.count(LoadOutcome.MISS), outcomes.count(LoadOutcome.HIT)
        nbytes = sum(o.lease.nbytes for o, got in zip(objects, outcomes, strict=True) if got is LoadOutcome.HIT)
        self._counters.add("load_missing", self.name, missing)
        self._counters.add("load_hits", self.name, hits)
        self._counters.add("load_bytes", self.name, nbytes)
        self._tell_of_loads(started, hits, missing, len(corrupt), nbytes=nbytes)
        if corrupt:
            self._counters.add("load_corrupt", self.name, len(corrupt))
            if self.observers:
                self.observers.emit(events.ObjectsDamaged(self.name, tuple(corrupt)))
            await self._delete(corrupt)
        return list(outcomes)

    async def store(self, objects: Sequence[StagedObject]) -> list[bool]:
        """Store a batch of sealed objects; returns, per object, whether the tier has it now."""
        keys = [staged.key for staged in objects]
        try:
            async with self._store_slots:
                started = time.monotonic()
                outcomes = await _answer(self._store_wanted(objects, keys))
        except Exception as error:
            self._failed("store", keys, error)
            self._counters.add("store_failures", self.name, len(keys))
            self._tell_of_stores(started, failed=len(keys))
            return [False] * len(keys)
        self._succeeded("store")
        self._note((key for key, got in zip(keys, outcomes, strict=True) if got is not StoreOutcome.REJECTED), True)
        stored = [o for o, outcome in zip(objects, outcomes, strict=True) if outcome is StoreOutcome.STORED]
        present, rejected = outcomes.count(StoreOutcome.ALREADY_PRESENT), outcomes.count(StoreOutcome.REJECTED)
        nbytes = sum(o.lease.nbytes for o in stored)
        self._counters.add("stores", self.name, len(stored))
        self._counters.add("store_bytes", self.name, nbytes)
        self._counters.add("store_already_present", self.name, present)
        self._counters.add("store_rejected", self.name, rejected)
        self._tell_of_stores(started, len(stored), present, rejected, nbytes=nbytes)
        return [outcome is not StoreOutcome.REJECTED for outcome in outcomes]

    async def _load_verified(self, objects: Sequence[StagedObject], keys: Sequence[ObjectKey]) -> list[LoadOutcome]:
        reservation = await self._backend.prepare_load(keys)
        try:
            present = self._parallel(keys, reservation.present, "prepare_load")
            wanted = [staged for staged, there in zip(objects, present, strict=True) if there]
            if not wanted:
                return [LoadOutcome.MISS] * len(keys)
            wanted_keys = [staged.key for staged in wanted]
            buffers = [staged.lease.view for staged in wanted]
            loaded = self._parallel(wanted_keys, await self._backend.load_into(wanted_keys, buffers), "load_into")
            checked = iter(await self._verify(wanted, loaded))
            return [next(checked) if there else LoadOutcome.MISS for there in present]
        finally:
            await reservation.release()

    async def _verify(self, objects: Sequence[StagedObject], outcomes: Sequence[LoadOutcome]) -> list[LoadOutcome]:
        if sum(staged.lease.nbytes for staged in objects) <= _INLINE_CHECK_BYTES:
            return _verify_all(self.name, objects, outcomes)
        return await self._backend.run_blocking(_verify_all, self.name, objects, outcomes)

    async def _store_wanted(self, objects: Sequence[StagedObject], keys: Sequence[ObjectKey]) -> list[StoreOutcome]:
        reservation = await self._backend.prepare_store(keys, [staged.lease.nbytes for staged in objects])
        try:
            self._note(reservation.evicted, False)
            if self.observers and reservation.evicted:
                self.observers.emit(events.ObjectsEvicted(self.name, tuple(reservation.evicted)))
            prepared = self._parallel(keys, reservation.outcomes, "prepare_store")
            wanted = [staged for staged, outcome in zip(objects, prepared, strict=True) if outcome is None]
            if not wanted:
                return [outcome for outcome in prepared if outcome is not None]
            wanted_keys = [staged.key for staged in wanted]
            buffers = [staged.lease.view.toreadonly() for staged in wanted]
            stored = iter(self._parallel(wanted_keys, await self._backend.store(wanted_keys, buffers), "store"))
            return [next(stored) if outcome is None else outcome for outcome in prepared]
        finally:
            await reservation.release()

    async def _delete(self, keys: Sequence[ObjectKey]) -> None:
        try:
            await _answer(self._backend.delete(keys))
        except Exception as error:
            self._failed("delete", keys, error)
            self._counters.add("delete_failures", self.name, len(keys))
        else:
            self._succeeded("delete")

    def _note(self, keys: Iterable[ObjectKey], present: bool) -> None:
        if self._changes is not None:
            self._changes.extend(TierChange(self.name, key, present) for key in keys)

    def _parallel(self, keys: Sequence[ObjectKey], results: Sequence[T], call: str) -> list[T]:
        """Check clause C2: one result per key."""
        if len(results) != len(keys):
            raise BackendError(
                f"tier {self.name!r}: {call} returned {len(results)} results for {len(keys)} keys; "
                "clause C2 asks for one per key, in order"
            )
        return list(results)

    def _tell_of_loads(
        self, started: float, loaded: int = 0, missing: int = 0, damaged: int = 0, failed: int = 0, nbytes: int = 0
    ) -> None:
        if self.observers:
            seconds = time.monotonic() - started
            self.observers.emit(events.LoadsEnded(self.name, loaded, missing, damaged, failed, nbytes, seconds))

    def _tell_of_stores(
        self, started: float, stored: int = 0, present: int = 0, rejected: int = 0, failed: int = 0, nbytes: int = 0
    ) -> None:
        if self.observers:
            seconds = time.monotonic() - started
            self.observers.emit(events.StoresEnded(self.name, stored, present, rejected, failed, nbytes, seconds))

    def _failed(self, operation: events.Operation, keys: Sequence[ObjectKey], error: Exception) -> None:
        level = logging.DEBUG if operation in self._failing else logging.WARNING
        if self.observers and operation not in self._failing:
            self.observers.emit(events.TierFailing(self.name, operation, f"{type(error).__name__}: {error}"))
        self._failing.add(operation)
        logger.log(
            level,
            "tier %r: %s of %d objects failed (first: %s): %s: %s. The engine goes on without them; "
            "further failures are counted and not logged until one succeeds.",
            self.name, operation, len(keys), keys[0] if keys else "none", type(error).__name__, error,
        )  # fmt: skip

    def _succeeded(self, operation: events.Operation) -> None:
        if operation in self._failing:
            self._failing.discard(operation)
            logger.warning("tier %r: %s works again", self.name, operation)
            if self.observers:
                self.observers.emit(events.TierRecovered(self.name, operation))


async def _answer(call: Awaitable[T]) -> T:
    """Await a backend's call. A cancellation that nobody asked for is a failure of the backend like any other."""
    try:
        return await call
    except asyncio.CancelledError:
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            raise
        raise BackendError("the backend cancelled its own call") from None


def _verify_all(tier: str, objects: Sequence[StagedObject], outcomes: Sequence[LoadOutcome]) -> list[LoadOutcome]:
    """Check every hit's header and checksums."""
    checked: list[LoadOutcome] = []
    for staged, outcome in zip(objects, outcomes, strict=True):
        if outcome is LoadOutcome.HIT:
            try:
                object_format.verify(staged.lease.view, staged.key)
            except ObjectFormatError as error:
                logger.warning("tier %r: damaged object, deleting it: %s", tier, error)
                outcome = LoadOutcome.CORRUPT
        checked.append(outcome)
    return checked
