"""The storage of one tier: its backend with threads and codec, in this process or in another one.

:class:`~offload_core.tiers.tier.Tier` decides whether a call begins, and counts its end. A :class:`TierStorage` makes
the call.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeVar

from offload_core.api.backend import Backend, LoadOutcome, StoreOutcome
from offload_core.api.capabilities import Capabilities
from offload_core.api.context import tier_label
from offload_core.api.errors import BackendError
from offload_core.api.keys import ObjectKey
from offload_core.api.memory.pinned_memory import HostPinning
from offload_core.config.limits import Limits
from offload_core.config.model import TierConfig
from offload_core.plugins.registry import PluginRegistry
from offload_core.runtime.io_loop import log_unexpected
from offload_core.tiers.calls.answer import answer, awaitable
from offload_core.tiers.calls.lent_objects import LendingEnd, LendingEnded, Lent, OutcomeT, WantedObject, lend
from offload_core.tiers.compression import TierCodec
from offload_core.tiers.object_io import LoadEnd, ObjectIO
from offload_core.tiers.staged_object import StagedObject
from offload_core.tiers.tier_backend import TierBackend

if TYPE_CHECKING:
    from offload_core.memory.staging_pool import Lease  # which imports torch; the command line does without
    from offload_core.memory.staging_shares import TierShare

logger = logging.getLogger(__name__)

T = TypeVar("T")


class StorageAwayError(OSError):
    """The storage's process has ended and is being replaced. That says nothing about the medium."""


class StoreEnd(NamedTuple):
    """The end of one object's store.

    Args:
        outcome: ``None`` if there was no staging memory for its compressed or encrypted bytes.
        nbytes: number of bytes that the medium has, or was offered.
        compressed: whether these bytes are compressed.
    """

    outcome: StoreOutcome | None
    nbytes: int = 0
    compressed: bool = False


LoadEnded = Callable[[LoadEnd | Exception], None]
"""Gets the end of a load, or the backend's error. It is called once, on any thread."""
StoreEnded = Callable[[list[StoreEnd] | Exception], None]
"""Gets the ends of a store, one per object, or the backend's error. It is called once, on any thread."""


class StorageEvents(NamedTuple):
    """Functions for the changes of a storage that no call returns. They are called on the I/O loop."""

    evicted: Callable[[Sequence[ObjectKey]], None]
    """Gets the objects that the backend evicted for a store."""
    stuck_threads_changed: Callable[[int], None]
    """Gets the change of the number of stuck threads. It is called on any thread."""
    evicted_by_others: Callable[[Sequence[ObjectKey]], None] = lambda keys: None
    """Gets the objects that the backend evicted for a store of another process of the engine."""
    ended: Callable[[bool], None] = lambda lost: None
    """Called when the storage's process has ended unasked; gets whether the medium has lost all objects with it."""


class TierStorage(Protocol):
    """The storage of one tier. All coroutines run on the I/O loop, and errors of the backend pass through.

    Loads and stores may start on any thread, once the storage is open. They do not call ``on_end`` themselves.
    """

    @property
    def capabilities(self) -> Capabilities:
        """The backend's capabilities."""
        ...

    @property
    def stuck_threads(self) -> int:
        """Number of the tier's threads that are stuck now."""
        ...

    @property
    def is_elsewhere(self) -> bool:
        """True if it is in another process.

        One call then takes several batches, which the storage divides among its threads.
        """
        ...

    @property
    def seals_stores(self) -> bool:
        """True if a store takes unsealed objects too, and seals them. Asked after ``open``."""
        ...

    @property
    def lends(self) -> bool:
        """True if the backend lends memory that this process can use now."""
        ...

    def lend_pinned_only(self, pinning: HostPinning | None) -> None:
        """Lend memory only while it is pinned in this process, since a device copies to and from it.

        The pinning goes on after this call. Call it once, before or after ``open``.

        Args:
            pinning: the means of pinning; ``None`` if there is none.
        """
        ...

    async def open(self) -> None:
        """Open the backend."""
        ...

    async def close(self) -> None:
        """Close the backend, and end its threads once they are idle."""
        ...

    async def contains(self, keys: Sequence[ObjectKey]) -> list[bool]:
        """Return, per key, whether the object is there."""
        ...

    def start_load(self, objects: Sequence[StagedObject], staging: TierShare | None, on_end: LoadEnded) -> None:
        """Load and verify objects.

        Raises:
            StorageAwayError: ``on_end`` will not be called.
        """
        ...

    def start_borrow(self, wanted: Sequence[WantedObject], on_end: LendingEnded[LoadOutcome], *, verify: bool) -> None:
        """Let the backend lend stored objects, and verify them unless the borrower does so.

        Raises:
            StorageAwayError: ``on_end`` will not be called.
        """
        ...

    def start_reserve(self, wanted: Sequence[WantedObject], on_end: LendingEnded[StoreOutcome]) -> None:
        """Let the backend lend memory for objects that will be stored.

        Raises:
            StorageAwayError: ``on_end`` will not be called.
        """
        ...

    def start_store(self, objects: Sequence[StagedObject], staging: TierShare | None, on_end: StoreEnded) -> None:
        """Store objects, in staging memory or in lent memory. They are sealed, but for those that say otherwise.

        Raises:
            StorageAwayError: ``on_end`` will not be called.
        """
        ...

    async def delete(self, keys: Sequence[ObjectKey]) -> None:
        """Remove objects."""
        ...

    async def touch(self, keys: Sequence[ObjectKey], spare: Sequence[bool]) -> None:
        """Set the order of eviction; see :meth:`Backend.touch`."""
        ...


StorageFactory = Callable[[TierConfig, Limits, PluginRegistry | None, StorageEvents, str], TierStorage]
"""Makes a tier's storage; its backend is not open yet. The arguments are the first of :class:`LocalStorage`."""


class LocalStorage:
    """A storage in this process.

    Args:
        limits: the limits in force for this tier.
        plugins: the plugins that may wrap the backend.
        changes: told of changes that no call returns.
        half: the half of the engine that uses it, for log lines; empty outside an engine.
        backend: a backend that other storages use too; by default one of its own.

    Raises:
        PluginError: a plugin failed to wrap the backend.
    """

    is_elsewhere = False

    def __init__(
        self,
        config: TierConfig,
        limits: Limits,
        plugins: PluginRegistry | None,
        changes: StorageEvents,
        half: str = "",
        backend: TierBackend | None = None,
    ) -> None:
        self.label = label = tier_label(config.common.name, half)
        """The words for the tier in log lines."""
        self.codec = TierCodec(config, label)
        self._shared = backend or TierBackend(config, limits, plugins, changes.stuck_threads_changed)
        self._shared.add_user()
        self._half = half
        self._encodes = config.common.encodes
        self.backend: Backend[Any] = self._shared.backend
        self._objects = ObjectIO(label, self.backend, self.codec, limits, changes.evicted)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._lends_pinned_only = False
        self._is_closed = False

    @property
    def capabilities(self) -> Capabilities:
        """The backend's capabilities."""
        return self.backend.capabilities

    @property
    def stuck_threads(self) -> int:
        """Number of the tier's threads that are stuck now."""
        return self._shared.stuck_threads

    @property
    def lends(self) -> bool:
        """True if the backend lends its memory. Objects that others may change, or that are encoded, are loaded."""
        capable = self.backend.lends and not self.backend.capabilities.shared and not self._encodes
        return capable and not self._lends_pinned_only

    @property
    def seals_stores(self) -> bool:
        """True if the backend stores unsealed objects and has them sealed meanwhile."""
        return self._objects.seals_stores

    def lend_pinned_only(self, pinning: HostPinning | None) -> None:
        """Lend nothing: no backend tells this process which memory it has pinned."""
        self._lends_pinned_only = True

    async def open(self) -> None:
        """Open the backend."""
        self._loop = asyncio.get_running_loop()
        await self._shared.open(self._half)

    async def close(self) -> None:
        """Close the backend if no other storage uses it, and end its threads once they are idle.

        Harmless when repeated.
        """
        if not self._is_closed:
            self._is_closed = True
            await self._shared.close(self._half)

    async def contains(self, keys: Sequence[ObjectKey]) -> list[bool]:
        """Return, per key, whether the object is there."""
        self._shared.call_begins()
        return await self._objects.contains(keys)

    async def load(self, objects: Sequence[StagedObject], staging: TierShare | None) -> LoadEnd:
        """Load and verify objects."""
        self._shared.call_begins()
        return await self._objects.load(objects, staging)

    def start_load(self, objects: Sequence[StagedObject], staging: TierShare | None, on_end: LoadEnded) -> None:
        """Start :meth:`load` on the I/O loop; see :class:`TierStorage`."""
        self._start(self.load(objects, staging), on_end)

    def start_store(self, objects: Sequence[StagedObject], staging: TierShare | None, on_end: StoreEnded) -> None:
        """Start :meth:`store` on the I/O loop; see :class:`TierStorage`."""
        self._start(self.store(objects, staging), on_end)

    async def borrow(self, wanted: Sequence[WantedObject], *, verify: bool) -> Lent[LoadOutcome]:
        """Let the backend lend stored objects, and verify them unless the borrower does so."""
        self._shared.call_begins()
        return await self._objects.borrow(wanted, verify=verify)

    async def reserve(self, wanted: Sequence[WantedObject]) -> Lent[StoreOutcome]:
        """Let the backend lend memory for objects that will be stored."""
        self._shared.call_begins()
        return await self._objects.reserve(wanted)

    def start_borrow(self, wanted: Sequence[WantedObject], on_end: LendingEnded[LoadOutcome], *, verify: bool) -> None:
        """Start :meth:`borrow` on the I/O loop; see :class:`TierStorage`."""
        self._start(self.borrow(wanted, verify=verify), partial(self._lend, on_end))

    def start_reserve(self, wanted: Sequence[WantedObject], on_end: LendingEnded[StoreOutcome]) -> None:
        """Start :meth:`reserve` on the I/O loop; see :class:`TierStorage`."""
        self._start(self.reserve(wanted), partial(self._lend, on_end))

    def _lend(self, on_end: LendingEnded[OutcomeT], lent: Lent[OutcomeT] | Exception) -> None:
        if isinstance(lent, Exception):
            on_end(lent)
        else:
            on_end(LendingEnd(lent.outcomes, lend(lent.views, partial(self._give_back, lent.release))))

    def _give_back(self, release: Callable[[], Awaitable[None]]) -> None:
        """Release a reservation, from any thread."""

        async def give_back() -> None:
            try:
                await answer(release())
            except Exception as error:
                logger.warning("%s: lent memory could not be given back: %s", self.label, error)

        assert self._loop is not None, "a storage lends after it has opened"
        asyncio.run_coroutine_threadsafe(give_back(), self._loop).add_done_callback(log_unexpected)

    async def store(self, objects: Sequence[StagedObject], staging: TierShare | None) -> list[StoreEnd]:
        """Store objects; unsealed ones if :attr:`seals_stores` is true."""
        self._shared.call_begins()
        scratch: list[Lease] = []
        try:
            forms = await self._objects.encode(objects, staging, scratch)
            outcomes = await self._objects.store(forms)
        finally:
            for lease in scratch:
                lease.release()
        return [
            StoreEnd(None) if form is None else StoreEnd(outcome, len(form.view), form.compressed)
            for form, outcome in zip(forms, outcomes, strict=True)
        ]

    async def delete(self, keys: Sequence[ObjectKey]) -> None:
        """Remove objects."""
        self._shared.call_begins()
        await awaitable("delete", self.backend.delete(self.codec.names.all_of(keys)))

    async def touch(self, keys: Sequence[ObjectKey], spare: Sequence[bool]) -> None:
        """Set the order of eviction; see :meth:`Backend.touch`."""
        names = self.codec.names
        await awaitable("touch", self.backend.touch(names.all_of(keys), list(spare) * len(names.forms)))

    def _start(self, call: Coroutine[Any, Any, T], on_end: Callable[[T | Exception], None]) -> None:
        async def run() -> None:
            end: T | Exception = BackendError("the call was cancelled")
            try:
                end = await answer(call)
            except Exception as error:
                end = error
            finally:
                on_end(end)

        loop = self._loop or asyncio.get_running_loop()
        asyncio.run_coroutine_threadsafe(run(), loop).add_done_callback(log_unexpected)
