"""A tier: one configured backend with its threads, its counters and the checks around every call."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from offload_core.api import events
from offload_core.api.backend import Backend, BackendContext, LoadOutcome, StoreOutcome
from offload_core.api.errors import BackendError, ConfigError
from offload_core.api.hooks import TierInfo
from offload_core.api.keys import ObjectKey
from offload_core.config.model import TierConfig
from offload_core.config.tier_limits import TierLimits
from offload_core.plugins.observers import EventDelivery
from offload_core.plugins.registry import PluginRegistry
from offload_core.runtime.metrics import Counters
from offload_core.runtime.threads import DaemonExecutor, StuckThreadTimer
from offload_core.tiers.call_slots import CallSlots
from offload_core.tiers.circuit_breaker import Call
from offload_core.tiers.compression import StagedObject as StagedObject  # its users have it from here
from offload_core.tiers.compression import StoredForm, TierCodec
from offload_core.tiers.health import TierHealth
from offload_core.tiers.prober import Prober

if TYPE_CHECKING:
    from offload_core.memory.staging_pool import Lease  # which imports torch; the command line does without
    from offload_core.memory.staging_shares import TierShare

_MAX_PENDING_LOOKUPS = 16
_MAX_OVERDUE_LOOKUPS = 4

T = TypeVar("T")


class TierChange(NamedTuple):
    """An object has come to a tier or left it."""

    tier: str
    key: ObjectKey
    present: bool


class Tier:
    """One entry of ``backends``. All coroutines run on the I/O loop.

    Outcomes are values; a backend's exception becomes a failure of every key in its batch, is counted and told to
    :attr:`health`. While that refuses an operation, it is answered at once: nothing is there, loaded or stored.

    Args:
        limits: those of a tier that has none of its own.
        plugins: those that may wrap the backend.
        observers: told what happens; ``None`` when there are none.
        clock: seconds, by which :attr:`health` goes.

    Raises at construction:
        PluginError: a plugin failed to wrap the backend.
    """

    def __init__(
        self,
        config: TierConfig,
        limits: TierLimits,
        counters: Counters,
        plugins: PluginRegistry | None = None,
        observers: EventDelivery | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.name = config.common.name
        self.keys = config.common
        """The keys that every tier has, as configured."""
        self.load_weight = config.common.load_weight
        self.limits = limits.overridden_by(config.common)
        """The tier's own limits, and in place of those that it has not the global ones."""
        self._counters = counters
        self.health = TierHealth(self.name, self.limits, counters, observers, clock)
        """What fails, and whether the tier is used; told of calls past their deadlines by those who know."""
        self._prober = Prober(self.health, self._probe, self.limits.breaker_max_pause_seconds)
        stuck_after = self.limits.longest_seconds
        self._executor = DaemonExecutor(
            config.common.io_threads, f"offload-{self.name}", stuck_after, self._count_stuck
        )
        self._stuck_thread_timer = StuckThreadTimer(self._executor, stuck_after / 2)
        backend = config.backend_type.backend(config.options, BackendContext(self.name, self._executor))
        info = TierInfo(self.name, config.backend_type.name, self.load_weight)
        self._backend = backend if plugins is None else plugins.wrap(backend, info)
        self.capabilities = self._backend.capabilities
        self.codec = TierCodec(config.common)
        self.compresses = self.codec.compresses
        """Whether :meth:`load` needs a second lease per object."""
        self.staging: TierShare | None = None
        """Where stores that compress find memory; set by whoever moves objects."""
        # Twice the threads, so that they go on reading while other batches are checked and handed over.
        self.load_slots = CallSlots(2 * config.common.io_threads, spare_slots=config.common.io_threads)
        """Held by the caller around :meth:`load`, from before it takes staging memory."""
        self._changes: deque[TierChange] | None = None if self.capabilities.shared else deque()
        self._pending_lookups = 0
        self._overdue_lookups: set[Call] = set()
        self.observers = observers
        self._opening = self._close_after_opening = self._opened = False

    @property
    def backend(self) -> Backend[Any]:
        """The backend itself, for tools that need more than the engine does."""
        return self._backend

    async def open(self) -> None:
        """Open the backend.

        Raises:
            ConfigError: the tier is to compress, and its backend cannot have that.
            OSError: the medium cannot be used.
        """
        if self.compresses and not self.capabilities.sizes:
            raise ConfigError(
                [
                    f"compression: tier {self.name!r} cannot compress, since its backend does not say how large stored "
                    "objects are (capability sizes, clause C19); set compression to none, or use another backend type"
                ],
                "backends",
            )
        self._prober.attach()
        self._stuck_thread_timer.start()
        started = time.monotonic()
        self._opening = True
        try:
            await _answer(self._backend.open())
        except Exception as error:
            self.health.opening_failed(error)
            raise
        finally:
            self._opening = False
            if self._close_after_opening:
                await self.close()
        if self._close_after_opening:
            return
        self._opened = True
        if self.observers:
            self.observers.emit(events.TierOpened(self.name, time.monotonic() - started))
        self.health.opened()

    async def close(self) -> None:
        """Close the backend and end its threads once they are idle.

        One that has not come back from ``open`` is closed when it has, and not waited for.
        """
        self._prober.close()
        self._stuck_thread_timer.close()
        if self._opening:
            self._close_after_opening = True
            return
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

    async def lookup(self, keys: Sequence[ObjectKey], within_seconds: float | None = None) -> list[bool]:
        """Return, per key, whether the object is there; an error, or too many lookups at once, answers "no".

        Args:
            within_seconds: after which the answer is late, which is counted and told to :attr:`health`; by default the
                tier's own deadline. The call goes on, and while a few are late no more are begun.
        """
        max_overdue = _MAX_OVERDUE_LOOKUPS + self._executor.stuck  # those whose threads have been replaced
        hangs = len(self._overdue_lookups) >= max_overdue
        if hangs or self._pending_lookups >= _MAX_PENDING_LOOKUPS:
            self._counters.add("lookup_failures", self.name)
            if hangs:  # what it would come to, if it were begun
                self.health.timed_out("lookup", keys[0] if keys else None)
            return [False] * len(keys)
        call = self._begin("lookup")
        if call is None:
            return [False] * len(keys)
        seconds = self.limits.lookup_timeout_seconds if within_seconds is None else within_seconds
        timer = asyncio.get_running_loop().call_later(seconds, self._lookup_is_late, call, keys)
        self._pending_lookups += 1
        try:
            present = await self._contains(keys)
        except Exception as error:
            self.health.failed(call, keys, error)
            self._counters.add("lookup_failures", self.name)
            return [False] * len(keys)
        finally:
            self.health.ended(call)
            self._pending_lookups -= 1
            timer.cancel()
            self._overdue_lookups.discard(call)
        self.health.succeeded(call)
        hits = present.count(True)
        self._counters.add("lookup_hits", self.name, hits)
        self._counters.add("lookup_misses", self.name, len(keys) - hits)
        return present

    async def load(self, objects: Sequence[StagedObject]) -> list[LoadOutcome | None]:
        """Load and verify a batch.

        Returns:
            Per object: ``HIT`` when the lease holds the verified object, ``MISS``, ``CORRUPT`` (and the object is
            deleted), or ``None`` when the backend failed or is not asked.
        """
        keys = [staged.key for staged in objects]
        started = time.monotonic()
        call = self._begin("load")
        if call is None:
            return [None] * len(keys)
        try:
            outcomes, nbytes = await _answer(self._load_verified(objects, keys))
        except Exception as error:
            self.health.failed(call, keys, error)
            self._counters.add("load_failures", self.name, len(keys))
            self._tell_of_loads(started, failed=len(keys))
            return [None] * len(keys)
        finally:
            self.health.ended(call)
        self.health.succeeded(call)
        self._note((key for key, outcome in zip(keys, outcomes, strict=True) if outcome is not LoadOutcome.HIT), False)
        corrupt = [key for key, outcome in zip(keys, outcomes, strict=True) if outcome is LoadOutcome.CORRUPT]
        missing, hits = outcomes.count(LoadOutcome.MISS), outcomes.count(LoadOutcome.HIT)
        if self.compresses:
            raw = (o.lease.nbytes for o, got in zip(objects, outcomes, strict=True) if got is LoadOutcome.HIT)
            self._counters.add("load_raw_bytes", self.name, sum(raw))
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
        call = self._begin("store")
        if call is None:
            self._counters.add("store_dropped", self.name, len(keys))
            return [False] * len(keys)
        scratch: list[Lease] = []
        started = time.monotonic()
        try:
            forms = await _answer(self._stored_forms(objects, keys, scratch))
            outcomes = await _answer(self._store_wanted(forms))
        except Exception as error:
            self.health.failed(call, keys, error)
            self._counters.add("store_failures", self.name, len(keys))
            self._tell_of_stores(started, failed=len(keys))
            return [False] * len(keys)
        finally:
            self.health.ended(call)
            for lease in scratch:
                lease.release()
        self.health.succeeded(call)
        there = [outcome in (StoreOutcome.STORED, StoreOutcome.ALREADY_PRESENT) for outcome in outcomes]
        self._note((key for key, stays in zip(keys, there, strict=True) if stays), True)
        stored = [form for form, got in zip(forms, outcomes, strict=True) if form and got is StoreOutcome.STORED]
        present, rejected = outcomes.count(StoreOutcome.ALREADY_PRESENT), outcomes.count(StoreOutcome.REJECTED)
        nbytes = sum(len(form.view) for form in stored)
        if self.compresses:
            self._counters.add("store_raw_bytes", self.name, sum(form.staged.lease.nbytes for form in stored))
            self._counters.add("store_uncompressed", self.name, sum(not form.compressed for form in stored))
            self._counters.add("store_dropped", self.name, forms.count(None))
        self._counters.add("stores", self.name, len(stored))
        self._counters.add("store_bytes", self.name, nbytes)
        self._counters.add("store_already_present", self.name, present)
        self._counters.add("store_rejected", self.name, rejected)
        self._tell_of_stores(started, len(stored), present, rejected, nbytes=nbytes)
        return there

    async def _load_verified(
        self, objects: Sequence[StagedObject], keys: Sequence[ObjectKey]
    ) -> tuple[list[LoadOutcome], int]:
        """Return the outcomes, and how many bytes came from the medium."""
        reservation = await self._backend.prepare_load(keys)
        scratch: list[Lease] = []
        try:
            present = self._parallel(keys, reservation.present, "prepare_load")
            known = reservation.nbytes if self.capabilities.sizes else (None,) * len(keys)
            sizes = self._parallel(keys, known, "prepare_load (nbytes)")
            places = [
                self.codec.incoming(staged, size, self.staging, scratch) if there else LoadOutcome.MISS
                for staged, there, size in zip(objects, present, sizes, strict=True)
            ]
            wanted = [place for place in places if isinstance(place, StoredForm)]
            checked: list[LoadOutcome] = []
            if wanted:
                wanted_keys = [form.staged.key for form in wanted]
                answer = await self._backend.load_into(wanted_keys, [form.view for form in wanted])
                loaded = self._parallel(wanted_keys, answer, "load_into")
                checked = await self.codec.verified(wanted, loaded, self._backend)
            nbytes = sum(len(f.view) for f, got in zip(wanted, checked, strict=True) if got is LoadOutcome.HIT)
            outcomes = iter(checked)
            return [next(outcomes) if isinstance(place, StoredForm) else place for place in places], nbytes
        finally:
            for lease in scratch:
                lease.release()
            await reservation.release()

    async def _stored_forms(
        self, objects: Sequence[StagedObject], keys: Sequence[ObjectKey], scratch: list[Lease]
    ) -> list[StoredForm | None]:
        """Return how each object is to be stored; what is there already need not be compressed for that."""
        as_they_are: list[StoredForm | None] = [StoredForm(staged, staged.lease.view) for staged in objects]
        if not self.compresses:
            return as_they_are
        there = self._parallel(keys, await self._backend.contains(keys), "contains")
        absent = [staged for staged, present in zip(objects, there, strict=True) if not present]
        forms = iter(await self.codec.compressed(absent, self._backend, self.staging, scratch))
        return [form if present else next(forms) for form, present in zip(as_they_are, there, strict=True)]

    async def _store_wanted(self, forms: Sequence[StoredForm | None]) -> list[StoreOutcome | None]:
        """Store what there is a form of; the others' outcome is ``None``."""
        objects = [form for form in forms if form is not None]
        outcomes = iter(await self._store_all(objects))
        return [None if form is None else next(outcomes) for form in forms]

    async def _store_all(self, objects: Sequence[StoredForm]) -> list[StoreOutcome]:
        keys = [form.staged.key for form in objects]
        reservation = await self._backend.prepare_store(keys, [len(form.view) for form in objects])
        try:
            self._note(reservation.evicted, False)
            if self.observers and reservation.evicted:
                self.observers.emit(events.ObjectsEvicted(self.name, tuple(reservation.evicted)))
            prepared = self._parallel(keys, reservation.outcomes, "prepare_store")
            wanted = [form for form, outcome in zip(objects, prepared, strict=True) if outcome is None]
            if not wanted:
                return [outcome for outcome in prepared if outcome is not None]
            wanted_keys = [form.staged.key for form in wanted]
            buffers = [form.view.toreadonly() for form in wanted]
            stored = iter(self._parallel(wanted_keys, await self._backend.store(wanted_keys, buffers), "store"))
            return [next(stored) if outcome is None else outcome for outcome in prepared]
        finally:
            await reservation.release()

    async def _delete(self, keys: Sequence[ObjectKey]) -> None:
        call = self._begin("delete")
        if call is None:
            return
        try:
            await _answer(self._backend.delete(keys))
        except Exception as error:
            self.health.failed(call, keys, error)
            self._counters.add("delete_failures", self.name, len(keys))
        else:
            self.health.succeeded(call)
        finally:
            self.health.ended(call)

    async def _contains(self, keys: Sequence[ObjectKey]) -> list[bool]:
        return list(map(bool, self._parallel(keys, await _answer(self._backend.contains(keys)), "contains")))

    async def _probe(self, keys: Sequence[ObjectKey]) -> None:
        self._stuck_thread_timer.start()
        await self._contains(keys)

    def _begin(self, operation: events.Operation) -> Call | None:
        self._prober.attach()
        self._stuck_thread_timer.start()
        return self.health.begin(operation)

    def _count_stuck(self, change: int) -> None:
        self._counters.add("stuck_threads", self.name, change)

    def _lookup_is_late(self, call: Call, keys: Sequence[ObjectKey]) -> None:
        self._overdue_lookups.add(call)
        self._counters.add("lookup_timeouts", self.name)
        self._counters.add("lookup_failures", self.name)
        self.health.timed_out("lookup", keys[0] if keys else None)

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


async def _answer(call: Awaitable[T]) -> T:
    """Await a backend's call. A cancellation that nobody asked for is a failure of the backend like any other."""
    try:
        return await call
    except asyncio.CancelledError:
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            raise
        raise BackendError("the backend cancelled its own call") from None
