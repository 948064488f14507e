"""What a storage backend promises. The numbered clauses (C1, C2, …) are explained in plugins.md.

A backend moves opaque bytes between staging memory and a medium, under keys. It knows nothing of models, checksums,
deadlines or the engine: the core adds the header and the checksum before :meth:`Backend.store` and checks them after
:meth:`Backend.load_into`; the core measures time and gives up on an answer, while it lets the call end in its own time.

A minimal backend implements ``contains``, ``load_into``, ``store`` and ``delete``, all on batches; the preparation
steps are inherited.
"""

from __future__ import annotations

import asyncio
import enum
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import Any, Generic, Literal, NamedTuple, ParamSpec, TypeVar

from offload_core.api.keys import ObjectKey
from offload_core.api.options import BackendOptions, OptionsT

P = ParamSpec("P")
T = TypeVar("T")


@dataclass(frozen=True)
class Capabilities:
    """What kind of medium a backend is.

    Args:
        medium: ``host`` (memory), ``disk`` (local) or ``remote``.
        persistent: objects outlive the process.
        shared: other processes may read, add and remove objects at any time.
        bounded: keeps a limit on its bytes: ``prepare_load`` pins, ``prepare_store`` reserves room (C9 to C11).
        lists: :meth:`Backend.list_objects` works (C18).
        sizes: ``prepare_load`` says how many bytes each object has (C19); compressed objects need it.
    """

    medium: Literal["host", "disk", "remote"]
    persistent: bool
    shared: bool
    bounded: bool = False
    lists: bool = False
    sizes: bool = False


@dataclass(frozen=True)
class BackendContext:
    """What the core gives a backend at construction.

    Args:
        name: the tier's name in the configuration, for messages.
        executor: this tier's own threads; a hung call can hold only these (invariant I4).
    """

    name: str
    executor: Executor


class LoadOutcome(enum.Enum):
    """What happened to one key of a load."""

    HIT = "hit"
    MISS = "miss"
    CORRUPT = "corrupt"


class StoreOutcome(enum.Enum):
    """What happened to one key of a store."""

    STORED = "stored"
    ALREADY_PRESENT = "already present"
    REJECTED = "rejected"


class StoredObject(NamedTuple):
    """One object as :meth:`Backend.list_objects` finds it."""

    key: ObjectKey
    nbytes: int
    """Bytes of the object as :meth:`Backend.load_into` takes them: the size its buffer must have."""
    stored_at_seconds: float
    """When it was stored, in seconds since the epoch."""


class LoadReservation:
    """The result of :meth:`Backend.prepare_load`: what is there, pinned against eviction until :meth:`release`.

    Args:
        present: one flag per key of the request, in its order; ``False`` where nothing is there, so that it is not
            tried.
        on_release: unpins.
        nbytes: per key the bytes of its object, as :attr:`StoredObject.nbytes`, or ``None`` where nothing is there or
            that is not known (C19). None are known by default.
    """

    def __init__(
        self,
        present: Sequence[bool],
        on_release: Callable[[], Awaitable[None]] | None = None,
        nbytes: Sequence[int | None] | None = None,
    ) -> None:
        self.present = tuple(present)
        self.nbytes = (None,) * len(self.present) if nbytes is None else tuple(nbytes)
        self._on_release = on_release

    async def release(self) -> None:
        """Unpin (C10). The core calls it exactly once, also after an error or cancellation."""
        if self._on_release is not None:
            await self._on_release()


class StoreReservation:
    """The result of :meth:`Backend.prepare_store`: room reserved until :meth:`release`.

    Args:
        outcomes: one entry per key: ``None`` where room is reserved and the bytes are wanted, else why they are not.
        evicted: objects removed to make room.
        on_release: gives back room that was not used.
    """

    def __init__(
        self,
        outcomes: Sequence[StoreOutcome | None],
        evicted: Sequence[ObjectKey] = (),
        on_release: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        self.outcomes = tuple(outcomes)
        self.evicted = tuple(evicted)
        self._on_release = on_release

    async def release(self) -> None:
        """Give back room not used (C10). The core calls it exactly once, also after an error or cancellation."""
        if self._on_release is not None:
            await self._on_release()


class Backend(ABC, Generic[OptionsT]):
    """A storage medium.

    Guaranteed by the framework: all coroutines run on one event loop; buffers are exclusively the call's until it
    returns or raises, may start at any address, and are read-only in ``store`` (C17); the number of calls at once is
    bounded; ``open`` is called once before anything else and ``close`` once at the end. ``load_into`` is called while a
    reservation of :meth:`prepare_load` for its keys is held, ``store`` while one of :meth:`prepare_store` is, and only
    for keys for which that said ``None``.

    The implementation must: return outcomes parallel to the request, for empty batches and repeated keys too (C2);
    make an object visible whole or not at all (C6); not touch a buffer after the call has ended, whichever way it ended
    (C7), nor ever anything beside it (C17); not block the event loop (C8), for which :meth:`run_blocking` is there.

    The implementation may not: do I/O in its constructor (C14), or raise for what is an outcome of one key (C2).
    :class:`offload_core.testing.BackendContract` checks all of it.

    When a call is cancelled, an implementation that waits for a thread must wait for that thread to end before it lets
    the cancellation through, because the thread may still be writing into a buffer (C7). :meth:`run_blocking` does.
    """

    def __init__(self, options: OptionsT, context: BackendContext) -> None:
        self.options = options
        self.context = context
        self.__running: set[asyncio.Future[Any]] = set()

    @property
    @abstractmethod
    def capabilities(self) -> Capabilities:
        """What kind of medium this is."""

    async def open(self) -> None:
        """Connect. Raises ``OSError`` when the medium cannot be used at all; the engine then does not start.

        One that is late is not cancelled: the engine starts without the tier, and uses it when this has returned.
        """

    async def close(self) -> None:
        """Wait for running operations and let go of the medium (C13). Idempotent; also called where ``open`` failed.

        This one waits for what :meth:`run_blocking` and :meth:`run_to_the_end` run: await it first in an override.
        Cancelled, it stops waiting.
        """
        while self.__running:
            await asyncio.wait(self.__running)

    @abstractmethod
    async def contains(self, keys: Sequence[ObjectKey]) -> Sequence[bool]:
        """Return, per key, whether a whole object is there. Cancellation has no effect on the medium."""

    @abstractmethod
    async def load_into(self, keys: Sequence[ObjectKey], buffers: Sequence[memoryview]) -> Sequence[LoadOutcome]:
        """Fill each key's buffer with its object.

        Args:
            keys: names, any order, repeats allowed.
            buffers: one writable buffer per key, of the size the object must have.

        Returns:
            Per key: ``HIT`` and the buffer is full; ``MISS`` and the buffer is untouched (C3); ``CORRUPT`` when an
            object is there but has another size or is known to be damaged (C16), and the buffer holds anything.

        Raises:
            OSError: the medium failed for the whole batch.
        """

    @abstractmethod
    async def store(self, keys: Sequence[ObjectKey], buffers: Sequence[memoryview]) -> Sequence[StoreOutcome]:
        """Write each buffer under its key. Storing what is already there is harmless (C4).

        After a ``STORED`` outcome the object is visible to this and, on shared media, to other clients (C5).
        Cancelled or failed half-way, an object is either whole or absent (C6).

        Raises:
            OSError: the medium failed for the whole batch.
        """

    @abstractmethod
    async def delete(self, keys: Sequence[ObjectKey]) -> None:
        """Remove objects. Absent ones are no error (C12)."""

    async def prepare_load(self, keys: Sequence[ObjectKey]) -> LoadReservation:
        """Say what is there and pin it until the reservation is released (C9). By default: ``contains``, no pin."""
        return LoadReservation(await self.contains(keys))

    async def prepare_store(self, keys: Sequence[ObjectKey], nbytes: Sequence[int]) -> StoreReservation:
        """Reserve room for objects of ``nbytes`` bytes each, before a byte is written (C11).

        By default: what ``contains`` finds is already present, all else is wanted, with no limit on room.
        """
        present = await self.contains(keys)
        return StoreReservation([StoreOutcome.ALREADY_PRESENT if there else None for there in present])

    def list_objects(self) -> AsyncIterator[Sequence[StoredObject]]:
        """Yield every object on the medium, in batches and any order, for the operator's tools (C18).

        What is stored or deleted meanwhile may be listed or not; foreign things on the medium are passed over. A
        listing may be left at any batch. Optional: declare ``Capabilities.lists`` to say that it works.

        Raises:
            NotImplementedError: the backend does not list.
        """
        raise NotImplementedError(f"tier {self.context.name!r}: {type(self).__name__} does not list its objects")

    async def run_blocking(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run a blocking function on this tier's own threads and wait for its real end, cancelled or not (C7)."""
        loop = asyncio.get_running_loop()
        return await self.run_to_the_end(loop.run_in_executor(self.context.executor, lambda: function(*args, **kwargs)))

    async def run_to_the_end(self, awaitable: Awaitable[T]) -> T:
        """Await what other code runs on threads to its real end, cancelled or not (C7); ``close`` waits too (C13)."""
        future = asyncio.ensure_future(awaitable)
        self.__running.add(future)
        future.add_done_callback(self.__running.discard)
        return await to_the_end(future)


async def to_the_end(awaitable: Awaitable[T]) -> T:
    """Await ``awaitable`` to its real end, holding a cancellation back until then.

    A thread cannot be stopped: cancelling the task that waits for it would leave it writing into a buffer that is no
    longer the call's (C7).
    """
    future = asyncio.ensure_future(awaitable)
    cancelled = False
    while not future.done():
        try:
            await asyncio.wait([future])
        except asyncio.CancelledError:
            cancelled = True
    if cancelled:
        future.exception()  # retrieved, so that asyncio does not log it as lost
        raise asyncio.CancelledError
    return future.result()


@dataclass(frozen=True)
class BackendType:
    """What a plugin registers: a type for the configuration file, a class and its options.

    Args:
        name: the ``type`` that users write, ``[a-z][a-z0-9_-]*``.
        backend: subclass of :class:`Backend`, constructed as ``backend(options, context)``.
        options: subclass of :class:`BackendOptions` that checks the tier's own keys.
    """

    name: str
    backend: type[Backend[Any]]
    options: type[BackendOptions]
