"""The contract of a storage backend. ``plugins.md`` explains the numbered clauses (C1, C2, …).

A backend moves opaque bytes between staging memory and a medium, under keys. It knows nothing of models, checksums,
deadlines or the engine. Before :meth:`Backend.store` the core adds a header and a checksum to each object, and after
:meth:`Backend.load_into` it verifies them. The core also keeps the deadlines: it stops waiting for a late answer, and
lets the call end by itself.

A minimal backend implements ``contains``, ``load_into``, ``store`` and ``delete``, all on batches. It inherits the
preparation steps.
"""

from __future__ import annotations

import asyncio
import enum
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, NamedTuple, ParamSpec, TypeVar

from offload_core.api.cancellation import ThreadCall, to_the_end
from offload_core.api.capabilities import Capabilities
from offload_core.api.checks.overrides import (
    lending_is_consistent,
    loads_in_one_call_are_consistent,
    sealing_is_consistent,
)
from offload_core.api.context import BackendContext as BackendContext
from offload_core.api.keys import ObjectKey
from offload_core.api.memory.shared_memory import SharedMemory
from offload_core.api.one_pass import LoadCheck, StoreSeal
from offload_core.api.options import BackendOptions, OptionsT
from offload_core.api.reservations import LoadReservation as LoadReservation
from offload_core.api.reservations import StoreReservation as StoreReservation

P = ParamSpec("P")
T = TypeVar("T")


class LoadOutcome(enum.Enum):
    """The outcome of a load for one key."""

    HIT = "hit"
    MISS = "miss"
    CORRUPT = "corrupt"


class StoreOutcome(enum.Enum):
    """The outcome of a store for one key."""

    STORED = "stored"
    ALREADY_PRESENT = "already present"
    REJECTED = "rejected"


class StoredObject(NamedTuple):
    """One object in the listing of :meth:`Backend.list_objects`."""

    key: ObjectKey
    nbytes: int
    """Size of the object in bytes. A buffer for :meth:`Backend.load_into` must have this size."""
    stored_at_seconds: float
    """Time of the store, in seconds since the epoch."""


class Backend(ABC, Generic[OptionsT]):
    """A storage medium.

    Guarantees of the core:

    * All coroutines run on one event loop. ``open`` is called once, before everything else, and ``close`` at the end.
    * The number of concurrent calls is bounded.
    * A call has its buffers to itself until it returns or raises. The core owns their memory.
    * A buffer is a one-dimensional ``memoryview`` of bytes. It may start at any address. In ``store`` it is read-only.
    * ``load_into`` is called while a reservation of :meth:`prepare_load` for its keys is held.
    * ``store`` is called while a reservation of :meth:`prepare_store` is held, only for the keys with ``None`` in it.
    * A call that is late is not cancelled. The core stops waiting for it and keeps its buffers until it has ended.

    Duties of the implementation:

    * Return one outcome per key in the order of the request, for empty batches and repeated keys too (C2).
    * Make an object visible whole or not at all (C6).
    * Leave a buffer alone after the call has ended by return, error or cancellation (C7).
    * Leave the bytes beside a buffer alone (C17).
    * Keep the event loop free (C8): run blocking code through :meth:`run_blocking`.

    The implementation may not do I/O in its constructor (C14). It may not raise for the outcome of one key (C2).
    :class:`offload_core.testing.BackendContract` checks all of this.

    Cancellation: a thread cannot be stopped, and may still write into a buffer. A cancelled call must therefore wait
    for its threads to end before it lets the cancellation through (C7). :meth:`run_blocking` does that.

    Args:
        options: the checked options of the tier.
        context: the tier's name and threads.
    """

    def __init__(self, options: OptionsT, context: BackendContext) -> None:
        self.options = options
        self.context = context
        self.__running: set[asyncio.Future[Any]] = set()

    @property
    @abstractmethod
    def capabilities(self) -> Capabilities:
        """The kind of medium. It is constant after construction; a class attribute will do."""

    async def open(self) -> None:
        """Connect to the medium. By default there is nothing to do.

        A call that passes ``open_timeout_seconds`` is not cancelled. The engine starts without the tier, and uses the
        tier once ``open`` has returned.

        Raises:
            OSError: the medium cannot be used at all. The engine then does not start.
        """

    async def close(self) -> None:
        """Wait for running operations and release the medium (C13).

        It must be harmless when repeated, after a failed ``open`` and without ``open``. This implementation waits for
        the work of :meth:`run_blocking` and :meth:`run_to_the_end`. An override must await it first. If the call is
        cancelled, it stops waiting.
        """
        while self.__running:
            await asyncio.wait(self.__running)

    @abstractmethod
    async def contains(self, keys: Sequence[ObjectKey]) -> Sequence[bool]:
        """Return one flag per key: whether a whole object is present.

        The core also asks this to find out whether a failed medium works again. A medium that is gone must therefore
        raise, and not answer ``False``. Cancellation has no effect on the medium.

        Raises:
            OSError: the medium failed for the whole batch.
        """

    @abstractmethod
    async def load_into(self, keys: Sequence[ObjectKey], buffers: Sequence[memoryview]) -> Sequence[LoadOutcome]:
        """Fill each key's buffer with its object (C1).

        If the call is cancelled, it waits for its threads. The buffers then hold anything, and the medium is unchanged.

        Args:
            keys: names, in any order; a key may be repeated.
            buffers: one writable buffer per key, as long in bytes as the object must be.

        Returns:
            One outcome per key. ``HIT``: the buffer is full. ``MISS``: the object is absent, and the buffer is
            untouched (C3). ``CORRUPT``: an object is present, but it has another size or is known to be damaged (C16).
            The buffer of a corrupt object holds anything.

        Raises:
            OSError: the medium failed for the whole batch.
        """

    @abstractmethod
    async def store(self, keys: Sequence[ObjectKey], buffers: Sequence[memoryview]) -> Sequence[StoreOutcome]:
        """Write each buffer under its key. Storing an object twice is harmless (C4).

        After ``STORED`` the object is visible to this client and, on shared media, to other clients (C5). If the call
        is cancelled or fails half-way, each object is either whole or absent (C6).

        Args:
            keys: names, in any order; a key may be repeated.
            buffers: one read-only buffer per key, of the size that :meth:`prepare_store` was given.

        Returns:
            One outcome per key.

        Raises:
            OSError: the medium failed for the whole batch.
        """

    @abstractmethod
    async def delete(self, keys: Sequence[ObjectKey]) -> None:
        """Remove objects. An absent object is no error (C12).

        If the call is cancelled, each object is either whole or absent (C6).

        Raises:
            OSError: the medium failed for the whole batch.
        """

    async def prepare_load(self, keys: Sequence[ObjectKey]) -> LoadReservation:
        """Find the objects that are present and pin them until the reservation is released (C9).

        By default this asks ``contains`` and pins nothing. If the call is cancelled, it must unpin at once, because
        nobody holds the reservation.

        Raises:
            OSError: the medium failed for the whole batch.
        """
        return LoadReservation(await self.contains(keys))

    async def load_and_check(
        self, keys: Sequence[ObjectKey], buffers: Sequence[memoryview], checks: Sequence[LoadCheck]
    ) -> Sequence[LoadOutcome]:
        """Do ``prepare_load``, ``load_into`` and the release in one call, for speed. Optional.

        The core calls it without a reservation, so it pins the objects by itself. All else holds as for ``load_into``.
        If an object has another size than its buffer, the core repeats the load with the separate steps.

        The backend calls ``filled`` of an object's check after each part that it has read, on the thread that read it
        (C22). It may leave this out. The core then checks the object after the call.

        Args:
            keys: names, in any order; a key may be repeated.
            buffers: one writable buffer per key.
            checks: one check per key.

        Raises:
            OSError: the medium failed for the whole batch.
        """
        raise NotImplementedError(f"tier {self.context.name!r}: {type(self).__name__} has no loads in one call")

    @property
    def loads_in_one_call(self) -> bool:
        """``True`` if the core may use :meth:`load_and_check`.

        By default it is ``True`` if the class overrides that method together with ``prepare_load`` and ``load_into``. A
        subclass that overrides one of these two alone is loaded with the separate steps.
        """
        return loads_in_one_call_are_consistent(self)

    async def store_and_seal(
        self, keys: Sequence[ObjectKey], buffers: Sequence[memoryview], seals: Sequence[StoreSeal]
    ) -> Sequence[StoreOutcome]:
        """Do the same as ``store`` for objects that the core seals meanwhile, for speed. Optional.

        The beginning of each buffer is final only once its seal's ``seal`` has returned (C26). So the backend stores it
        last, as :meth:`StoreSeal.parts` does. Call a seal on the thread that stores its object. An object that is not
        stored needs no seal.

        Args:
            keys: names, in any order; a key may be repeated.
            buffers: one read-only buffer per key, of the size that :meth:`prepare_store` was given.
            seals: one seal per key.

        Raises:
            OSError: the medium failed for the whole batch.
        """
        raise NotImplementedError(f"tier {self.context.name!r}: {type(self).__name__} has no stores that seal")

    @property
    def seals_stores(self) -> bool:
        """``True`` if the core may use :meth:`store_and_seal`. Asked after ``open``.

        By default it is ``True`` if the class overrides that method together with ``store``. The objects of a subclass
        that overrides ``store`` alone are sealed before the store.
        """
        return sealing_is_consistent(self)

    @property
    def lends(self) -> bool:
        """``True`` if the core may use the views of reservations.

        By default it is ``True`` if the capability ``lends`` is declared. The exception is a subclass that overrides
        ``load_into`` without ``prepare_load``, or ``store`` without ``prepare_store``. It sees every load and store.
        """
        return self.capabilities.lends and lending_is_consistent(self)

    @property
    def lent_memory(self) -> SharedMemory | None:
        """The memory in which all views lie, so that another process can map it. Asked after ``open``.

        It stays the same until ``close``. With ``None``, the default, only this process uses views.
        """
        return None

    @property
    def pins_lent_memory(self) -> bool:
        """``True``, the default, if a process with a GPU may page-lock all of :attr:`lent_memory`.

        The system then gives all of the memory soon after ``open``. Without it, a GPU copies through staging memory.
        """
        return True

    async def prepare_store(
        self, keys: Sequence[ObjectKey], nbytes: Sequence[int], spare: Sequence[bool] = ()
    ) -> StoreReservation:
        """Reserve capacity for objects of ``nbytes`` bytes each, before a byte is written (C11).

        By default this asks ``contains``: present objects are ``ALREADY_PRESENT``, and the capacity has no limit. A
        backend whose medium is not shared may evict here only, or the core's index of its objects goes stale. If the
        call is cancelled, it must return the capacity at once, because nobody holds the reservation.

        Args:
            keys: names, in any order; a key may be repeated.
            nbytes: the size of each object in bytes.
            spare: one flag per key, or nothing, which stands for no spare object. The core passes flags only to a
                backend that declares ``spares``. Nothing is evicted for a spare object: without free capacity it is
                ``REJECTED`` (C20).

        Raises:
            OSError: the medium failed for the whole batch.
        """
        present = await self.contains(keys)
        return StoreReservation([StoreOutcome.ALREADY_PRESENT if there else None for there in present])

    async def touch(self, keys: Sequence[ObjectKey], spare: Sequence[bool]) -> None:
        """Make objects the most recently used ones, in this order: the last key is evicted last (C21).

        The core calls this when a request has used a prefix, with the deepest objects first, so that no prefix loses
        its head. A touch alone is no use: it makes no object protected. The call is a hint. No load or store waits for
        it, and absent objects are no error. By default it does nothing. The core calls it only if ``spares`` is
        declared.

        Args:
            keys: names of objects; none is repeated.
            spare: one flag per key: whether the object is spare from now on.
        """

    def list_objects(self) -> AsyncIterator[Sequence[StoredObject]]:
        """Yield every object on the medium once, in batches and in any order, for the operator's tools (C18).

        An object that is stored or deleted meanwhile may be listed or not. Foreign files on the medium are skipped. The
        reader may stop at any batch, also by cancellation. Optional: declare ``Capabilities.lists`` to offer it.

        Raises:
            NotImplementedError: the backend does not list.
        """
        raise NotImplementedError(f"tier {self.context.name!r}: {type(self).__name__} does not list its objects")

    async def run_blocking(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run a blocking function on the tier's own threads and wait for its end.

        If the call is cancelled, the cancellation goes through after the function has ended (C7).
        """
        return await self.__run_on(self.context.executor, partial(function, *args, **kwargs))

    async def run_load(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Do the same as :meth:`run_blocking` for a load, on threads that only loads use.

        A request waits for a load, and nobody waits for a store. The function runs beside those of
        :meth:`run_blocking`, and as many at a time.
        """
        return await self.__run_on(self.context.load_executor, partial(function, *args, **kwargs))

    async def run_lookup(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Do the same as :meth:`run_load` for a short question about objects, such as that of ``contains``."""
        return await self.__run_on(self.context.lookup_executor, partial(function, *args, **kwargs))

    async def __run_on(self, executor: Executor, function: Callable[[], T]) -> T:
        call = ThreadCall(executor, function)
        self.__running.add(call)
        try:
            return await call
        finally:
            if call.done():  # else the coroutine is closed early
                self.__running.discard(call)

    async def run_to_the_end(self, awaitable: Awaitable[T]) -> T:
        """Await work that other code runs on threads, and let :meth:`close` wait for it too (C13).

        If the call is cancelled, the cancellation goes through after the work has ended (C7).
        """
        future = asyncio.ensure_future(awaitable)
        self.__running.add(future)
        future.add_done_callback(self.__running.discard)
        return await to_the_end(future)


class Requirement(NamedTuple):
    """A Python module that a backend type needs and that its distribution does not always install.

    Args:
        module: name of a top-level module, such as ``boto3``. The core only looks for it and does not import it.
        install: the command that installs it, for messages.
    """

    module: str
    install: str


@dataclass(frozen=True)
class BackendType:
    """A type of backend that a plugin registers: its name, its class and its options.

    Args:
        name: the ``type`` that users write, ``[a-z][a-z0-9_-]*``.
        backend: a subclass of :class:`Backend`, which the core constructs as ``backend(options, context)``.
        options: a subclass of :class:`BackendOptions` that checks the tier's own keys.
        requires: modules that the backend imports when it is constructed or opened. A configuration that names the type
            is refused while one is missing.
    """

    name: str
    backend: type[Backend[Any]]
    options: type[BackendOptions]
    requires: tuple[Requirement, ...] = ()
