"""A tier: one configured backend in service, with its deadlines and health."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from offload_core.api.backend import Backend, LoadOutcome, StoreOutcome
from offload_core.api.cancellation import to_the_end
from offload_core.api.context import tier_label
from offload_core.api.keys import ObjectKey
from offload_core.config.limits import Limits
from offload_core.config.model import TierConfig
from offload_core.plugins.observers import EventSink
from offload_core.plugins.registry import PluginRegistry
from offload_core.runtime.metrics import Counters
from offload_core.tiers.accounting import TierAccounting
from offload_core.tiers.calls.answer import answer
from offload_core.tiers.calls.lending import TierLending
from offload_core.tiers.calls.lent_objects import WantedObject
from offload_core.tiers.calls.lookups import TierLookups
from offload_core.tiers.changes import TierChange, TierChanges
from offload_core.tiers.circuit_breaker import Call
from offload_core.tiers.compression import check_sizes
from offload_core.tiers.health import TierHealth
from offload_core.tiers.object_io import LoadEnd
from offload_core.tiers.prober import Prober
from offload_core.tiers.staged_object import StagedObject
from offload_core.tiers.storage import LocalStorage, StorageAwayError, StorageEvents, StorageFactory, StoreEnd

if TYPE_CHECKING:
    from offload_core.memory.staging_shares import TierShare  # which imports torch; the command line does without

logger = logging.getLogger(__name__)
T = TypeVar("T")


class Tier:
    """One entry of ``backends``. All coroutines run on the I/O loop.

    Outcomes are values. An exception of the backend becomes a failure of every key in its batch; it is counted and
    reported to :attr:`health`. While the health refuses an operation, the tier answers at once, without a call of the
    backend: every object is absent, not loaded or not stored.

    Args:
        limits: the global limits; the tier's own limits take precedence.
        plugins: the plugins that may wrap the backend.
        observers: receivers of events; ``None`` when there are none.
        clock: seconds, used by :attr:`health`.
        half: the half of the engine that uses the tier, for log lines; empty outside an engine.
        make_storage: makes the tier's storage; by default one in this process.

    Raises at construction:
        PluginError: a plugin failed to wrap the backend.
    """

    def __init__(
        self,
        config: TierConfig,
        limits: Limits,
        counters: Counters,
        plugins: PluginRegistry | None = None,
        observers: EventSink | None = None,
        clock: Callable[[], float] = time.monotonic,
        half: str = "",
        make_storage: StorageFactory = LocalStorage,
    ) -> None:
        self.name = config.common.name
        self.label = tier_label(self.name, half)
        """The words for the tier in log lines."""
        self.config = config.common
        """The configuration keys that every tier has."""
        self.load_weight = config.common.load_weight
        self.limits = limits.overridden_by(config.common)
        """The limits in force for this tier."""
        self.encodes = config.common.encodes
        """True if :meth:`load` needs a second lease per object."""
        self.observers = observers
        self._accounting = TierAccounting(self.name, counters, self.config.compression != "none", observers)
        self.health = TierHealth(self.name, self.limits, counters, observers, clock, self.label)
        """Failures and availability. Callers that watch a deadline report its timeouts here."""
        storage_events = StorageEvents(
            self._evicted, self._accounting.stuck_threads_changed, self._evicted_by_others, self._storage_ended
        )
        self._storage = make_storage(config, self.limits, plugins, storage_events, half)
        self._prober = Prober(self.health, self._storage.contains, self.limits.breaker_max_pause_seconds)
        self.capabilities = self._storage.capabilities
        self.is_elsewhere = self._storage.is_elsewhere
        """True if the storage is in another process."""
        self._changes = TierChanges(self.name, self.capabilities.shared)
        self.staging: TierShare | None = None
        """Staging memory for compressed stores; the transfer engine sets it."""
        self._lookups = TierLookups(self._storage, self.health, self._accounting, self._failed)
        self.lending = TierLending(
            self._storage, self.health, self._load_ended, self._store_ended, self._failed, self._start_delete
        )
        """Loads and stores in the tier's own memory."""
        self._loop: asyncio.AbstractEventLoop | None = None
        self._opening = self._close_after_opening = self._touch_has_failed = False

    @property
    def storage(self) -> LocalStorage:
        """The storage in this process, for tools that need more than the engine does.

        Raises:
            TypeError: the storage is in another process.
        """
        if not isinstance(self._storage, LocalStorage):
            raise TypeError(f"the storage of tier {self.name!r} is in another process; set io_process to off")
        return self._storage

    @property
    def seals_stores(self) -> bool:
        """True if :meth:`start_store` takes unsealed objects."""
        return self._storage.seals_stores

    @property
    def backend(self) -> Backend[Any]:
        """The backend of :attr:`storage`."""
        return self.storage.backend

    async def open(self) -> None:
        """Open the backend.

        Raises:
            ConfigError: compression is configured, and the backend does not support it.
            OSError: the medium cannot be used.
        """
        check_sizes(self.config, self.capabilities)
        self._loop = asyncio.get_running_loop()
        self._prober.attach()
        started = time.monotonic()
        self._opening = True
        try:
            await answer(self._storage.open())
        except Exception as error:
            self.health.open_failed(error)
            raise
        finally:
            self._opening = False
            if self._close_after_opening:
                await self.close()
        if self._close_after_opening:
            return
        self._accounting.opened(time.monotonic() - started)
        self.health.opened()

    async def close(self) -> None:
        """Close the backend and end its threads once they are idle.

        If ``open`` is still running, this returns at once, and the backend is closed after ``open``.
        """
        self._prober.close()
        if self._opening:
            self._close_after_opening = True
            return
        try:
            await answer(self._storage.close())
        finally:
            self._accounting.closed()

    def take_changes(self) -> list[TierChange]:
        """Return the objects that came to the medium and left it since the last call. May be called on any thread.

        Changes are kept only for a medium that no other process sees; a shared medium answers everyone itself. After
        :meth:`keep_changes` they are kept for each medium, as far as this process learns of them.
        """
        return self._changes.take()

    def keep_changes(self) -> None:
        """Keep changes of a shared medium too. Call it before the first load and store."""
        self._changes.keep()

    async def lookup(self, keys: Sequence[ObjectKey], within_seconds: float | None = None) -> list[bool]:
        """Return the answers of :meth:`ask`; without an answer no object is there."""
        return await self.ask(keys, within_seconds) or [False] * len(keys)

    async def ask(self, keys: Sequence[ObjectKey], within_seconds: float | None = None) -> list[bool] | None:
        """Return, per key, whether the object is there; ``None`` after an error, or with too many lookups at once.

        Args:
            within_seconds: deadline of the call, by default the tier's own. A call that misses it is counted and
                reported to :attr:`health`. It goes on, and while a few are late no further lookups begin.
        """
        self._prober.attach()
        seconds = self.limits.lookup_timeout_seconds if within_seconds is None else within_seconds
        return await self._lookups.lookup(keys, seconds)

    async def check(self, keys: Sequence[ObjectKey]) -> list[bool] | None:
        """Return, per key, whether the object is there; ``None`` if the tier cannot tell. No hit or miss is counted."""
        self._prober.attach()
        return await self._lookups.ask(keys, self.limits.lookup_timeout_seconds)

    async def load(self, objects: Sequence[StagedObject]) -> list[LoadOutcome | None]:
        """Load and verify a batch. If cancelled, it ends when the call has ended.

        Returns:
            Per object: ``HIT`` when the lease holds the verified object, ``MISS``, or ``CORRUPT`` for an object that is
            deleted now. ``None`` means that the backend failed or the health refused the load.
        """
        self._prober.attach()
        outcomes = await _ended(partial(self.start_load, objects))
        return [None] * len(objects) if outcomes is None else list(outcomes)

    def start_load(
        self, objects: Sequence[StagedObject], on_end: Callable[[Sequence[LoadOutcome | None]], None]
    ) -> bool:
        """Start a load of a batch. After ``open`` has begun, any thread may call this.

        Args:
            on_end: gets the result of :meth:`load`, or nothing after a defect of the core. It is called once, on any
                thread, and not by this call itself.

        Returns:
            ``False`` if nothing is loaded, and ``on_end`` will not be called.
        """
        started = time.monotonic()
        call = self.health.begin("load")
        if call is None:
            return False

        def ended(end: LoadEnd | Exception) -> None:
            self.health.ended(call)
            outcomes: list[LoadOutcome | None] = []
            try:
                outcomes = self._load_ended(call, objects, started, end)
            finally:
                pairs = zip(objects, outcomes, strict=False)  # there may be no outcomes
                if corrupt := [staged.key for staged, outcome in pairs if outcome is LoadOutcome.CORRUPT]:
                    self._start_delete(corrupt, lambda: on_end(outcomes))
                else:
                    on_end(outcomes)

        try:
            self._storage.start_load(objects, self.staging, ended)
        except Exception as error:
            self.health.ended(call)
            self._load_ended(call, objects, started, error)
            return False
        return True

    async def store(self, objects: Sequence[StagedObject]) -> list[bool]:
        """Store a batch of sealed objects; see :attr:`seals_stores`. If cancelled, it ends when the call has ended.

        Returns:
            Per object, whether the tier has it now.
        """
        self._prober.attach()
        stored = await _ended(partial(self.start_store, objects))
        return [False] * len(objects) if stored is None else list(stored)

    def start_store(self, objects: Sequence[StagedObject], on_end: Callable[[Sequence[bool]], None]) -> bool:
        """Start a store of a batch. After ``open`` has begun, any thread may call this.

        Args:
            on_end: gets the result of :meth:`store`, or nothing after a defect of the core. It is called once, on any
                thread, and not by this call itself.

        Returns:
            ``False`` if nothing is stored, and ``on_end`` will not be called.
        """
        started = time.monotonic()
        call = self.health.begin("store")
        if call is None:
            self._accounting.store_refused(len(objects))
            return False

        def ended(ends: list[StoreEnd] | Exception) -> None:
            self.health.ended(call)
            stored: list[bool] = []
            try:
                stored = self._store_ended(call, objects, started, ends)
            finally:
                on_end(stored)

        try:
            self._storage.start_store(objects, self.staging, ended)
        except Exception as error:
            self.health.ended(call)
            self._store_ended(call, objects, started, error)
            return False
        return True

    async def touch(self, keys: Sequence[ObjectKey], spare: Sequence[bool]) -> None:
        """Set the order of eviction, if the backend knows spare objects. A hint: an error is logged once and forgotten.

        Args:
            spare: one flag per key, as for :meth:`Backend.touch`.
        """
        if not self.capabilities.spares:
            return
        try:
            await answer(self._storage.touch(keys, spare))
        except StorageAwayError:
            pass
        except Exception:
            if not self._touch_has_failed:
                logger.warning("%s: touch failed; only the order of eviction suffers", self.label, exc_info=True)
            self._touch_has_failed = True

    async def delete(self, keys: Sequence[ObjectKey]) -> bool:
        """Remove objects. Returns whether they are gone; an error is counted, and nothing is tried again."""
        if gone := await self._delete(keys):
            self._changes.add(keys, present=False)
        return gone

    async def _delete(self, keys: Sequence[ObjectKey]) -> bool:
        call = self.health.begin("delete")
        if call is None:
            return False
        try:
            await answer(self._storage.delete(keys))
        except Exception as error:
            self._failed(call, keys, error)
            self._accounting.delete_failed(len(keys))
            return False
        else:
            self.health.succeeded(call)
            return True
        finally:
            self.health.ended(call)

    def _load_ended(
        self, call: Call, objects: Sequence[StagedObject | WantedObject], started: float, end: LoadEnd | Exception
    ) -> list[LoadOutcome | None]:
        """Record the end of a load on any thread, and return its outcomes."""
        seconds = time.monotonic() - started
        if isinstance(end, Exception):
            self._failed(call, [staged.key for staged in objects], end)
            self._accounting.load_failed(len(objects), seconds)
            return [None] * len(objects)
        self.health.succeeded(call)
        pairs = list(zip(objects, end.outcomes, strict=True))
        self._changes.add((one.key for one, outcome in pairs if outcome is not LoadOutcome.HIT), present=False)
        self._changes.found(one.key for one, outcome in pairs if outcome is LoadOutcome.HIT)
        self._accounting.loaded(objects, end, seconds)
        return list(end.outcomes)

    def found_damaged(self, key: ObjectKey, reason: str) -> None:
        """Delete an object that was lent unverified and is damaged, and log the reason. Any thread may call this."""
        logger.warning("%s: damaged object, deleting it: %s", self.label, reason)
        self._changes.add([key], present=False)
        self._accounting.damaged((key,))
        self._start_delete([key], lambda: None)

    def _store_ended(
        self,
        call: Call,
        objects: Sequence[StagedObject | WantedObject],
        started: float,
        ends: list[StoreEnd] | Exception,
    ) -> list[bool]:
        """Record the end of a store on any thread, and return whether the tier has each object."""
        seconds = time.monotonic() - started
        if isinstance(ends, Exception):
            self._failed(call, [staged.key for staged in objects], ends)
            self._accounting.store_failed(len(objects), seconds)
            return [False] * len(objects)
        self.health.succeeded(call)
        there = [end.outcome in (StoreOutcome.STORED, StoreOutcome.ALREADY_PRESENT) for end in ends]
        self._changes.stored((one.key for one, stays in zip(objects, there, strict=True) if stays), since=started)
        self._accounting.stored(objects, ends, seconds)
        return there

    def _start_delete(self, keys: Sequence[ObjectKey], on_end: Callable[[], None]) -> None:
        """Delete damaged objects, from any thread, and call ``on_end`` afterwards."""
        loop = self._loop or asyncio.get_running_loop()
        asyncio.run_coroutine_threadsafe(self._delete(keys), loop).add_done_callback(lambda _: on_end())

    def _failed(self, call: Call, keys: Sequence[ObjectKey], error: Exception) -> None:
        if not isinstance(error, StorageAwayError):
            self.health.failed(call, keys, error)

    def _evicted(self, keys: Sequence[ObjectKey]) -> None:
        self._changes.evicted(keys)
        self._accounting.evicted(keys)

    def _evicted_by_others(self, keys: Sequence[ObjectKey]) -> None:
        self._changes.evicted(keys, by_others=True)
        self._accounting.evicted_by_others(keys)

    def _storage_ended(self, lost: bool) -> None:
        self._accounting.storage_ended()
        if lost:
            self._changes.lost()


async def _ended(start: Callable[[Callable[[Sequence[T]], None]], bool]) -> Sequence[T] | None:
    """Start a call and wait for its end; ``None`` if it was refused."""
    loop = asyncio.get_running_loop()
    ended: asyncio.Future[Sequence[T]] = loop.create_future()

    def on_end(result: Sequence[T]) -> None:
        loop.call_soon_threadsafe(ended.set_result, result)

    return await to_the_end(ended) if start(on_end) else None
