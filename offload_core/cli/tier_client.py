"""A tier as the commands use it: opened as in the engine, with a deadline and a clear error for every call."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Coroutine, Sequence
from contextlib import suppress
from typing import Any, NamedTuple, TypeVar

from offload_core.api.backend import Backend, LoadOutcome, StoredObject, StoreOutcome
from offload_core.api.errors import BackendError
from offload_core.api.keys import ObjectKey
from offload_core.config.model import OffloadConfig, TierConfig
from offload_core.objects.format import HEADER_BYTES
from offload_core.runtime.metrics import Counters
from offload_core.tiers.calls.answer import answer, awaitable
from offload_core.tiers.calls.one_per_key import one_per_key
from offload_core.tiers.tier import Tier

T = TypeVar("T")


class OperationError(BackendError):
    """A call of a backend failed or was late. The message names the operation and the cause.

    Args:
        message: the operation, the cause and, where there is one, the cure.
        late: the call missed its deadline, and may still be running.
    """

    def __init__(self, message: str, *, late: bool = False) -> None:
        super().__init__(message)
        self.late = late


class Stored(NamedTuple):
    """The result of a store of a batch."""

    outcomes: list[StoreOutcome]
    evicted: int
    """Number of objects that the backend evicted to free capacity."""


class TierClient:
    """One entry of ``backends``. All coroutines run on the I/O loop and raise only :class:`OperationError`.

    A late or cancelled call returns at once, but its backend's call continues. Its buffers must not be used again.
    :meth:`wait_for_late_calls` waits for the end of such calls.
    """

    def __init__(self, config: TierConfig, whole: OffloadConfig) -> None:
        self._config = config
        self._whole = whole
        self.tier = Tier(config, whole.settings.limits, Counters(), whole.plugins)
        self.name = self.tier.name
        self.type_name = config.common.type
        self.io_threads = config.common.io_threads
        self.capacity_bytes = config.capacity_bytes
        self.capabilities = self.tier.capabilities
        self._codec = self.tier.storage.codec
        self._running: dict[asyncio.Task[Any], str] = {}

    def stored_name(self, key: ObjectKey) -> ObjectKey:
        """Return the name on the medium of a new object. All calls take such names."""
        (name,) = self._codec.names.of([key])
        return name

    @property
    def running(self) -> list[str]:
        """The names of the operations that have not ended yet, including late ones."""
        return list(self._running.values())

    async def open(self) -> None:
        """Open the backend within ``open_timeout_seconds``."""
        seconds = self.tier.limits.open_timeout_seconds
        await self._call("open", self.tier.open(), seconds, "open_timeout_seconds")

    async def contains(self, keys: Sequence[ObjectKey]) -> list[bool]:
        """Return one flag per key for its presence, within ``lookup_timeout_seconds``."""
        seconds = self.tier.limits.lookup_timeout_seconds
        return await self._call("lookup", self._contains(keys), seconds, "lookup_timeout_seconds")

    async def store(self, keys: Sequence[ObjectKey], buffers: Sequence[memoryview]) -> Stored:
        """Store sealed objects, encoded as configured, within the tier's deadline for a load of this size."""
        return await self._transfer("store", self._store(keys, buffers), sum(map(len, buffers)))

    async def load(self, keys: Sequence[ObjectKey], buffers: Sequence[memoryview]) -> list[LoadOutcome]:
        """Load sealed objects into ``buffers`` of their size, unverified, within the tier's deadline for loads.

        Compressed objects are decompressed, and encrypted ones are authenticated and decrypted.
        """
        return await self._transfer("load", self._load(keys, buffers, decode=True), sum(map(len, buffers)))

    async def load_stored(self, keys: Sequence[ObjectKey], buffers: Sequence[memoryview]) -> list[LoadOutcome]:
        """Load the bytes on the medium into ``buffers`` of their size, within the tier's deadline for loads."""
        return await self._transfer("load", self._load(keys, buffers, decode=False), sum(map(len, buffers)))

    async def delete(self, keys: Sequence[ObjectKey], seconds: float | None = None) -> None:
        """Remove objects within ``seconds``, or by default within the tier's ``load_timeout_seconds``."""
        own, setting = self.tier.limits.load_timeout_seconds, "load_timeout_seconds"
        limit = (own, setting) if seconds is None else (seconds, "clean-up")
        await self._call("delete", self._delete(keys), *limit)

    async def delete_on_new_threads(self, keys: Sequence[ObjectKey], seconds: float) -> None:
        """Remove objects through another instance of the backend. Use it when all threads of this one hang."""
        other = TierClient(self._config, self._whole)
        try:
            await other._call("open", other.tier.open(), seconds, "clean-up")
            await other.delete(keys, seconds)
        finally:
            with suppress(OperationError):
                await other._call("close", other.tier.close(), seconds, "clean-up")

    async def objects(self) -> AsyncGenerator[Sequence[StoredObject], None]:
        """Yield the backend's listing, each batch within the tier's ``load_timeout_seconds``."""
        batches = _batches(self.tier.backend)
        while (batch := await self._transfer("list", _next(batches), 0)) is not None:
            yield batch

    async def wait_for_late_calls(self, operation: str, seconds: float) -> bool:
        """Wait for late calls of ``operation``; return ``True`` if all of them have ended within ``seconds``."""
        calls = [task for task, running in self._running.items() if running == operation]
        return not calls or not (await asyncio.wait(calls, timeout=seconds))[1]

    async def _transfer(self, operation: str, call: Coroutine[Any, Any, T], nbytes: int) -> T:
        seconds = self.tier.limits.load_seconds(nbytes)
        return await self._call(operation, call, seconds, "load_timeout_seconds")

    async def _call(self, operation: str, call: Coroutine[Any, Any, T], seconds: float, setting: str) -> T:
        task = asyncio.ensure_future(answer(call))  # a SystemExit would end the loop
        self._running[task] = operation
        task.add_done_callback(self._ended)
        done, _ = await asyncio.wait([task], timeout=seconds)
        if not done:
            raise OperationError(
                f"{operation}: no answer within {round(seconds, 2):g} s ({setting}); "
                "check that the medium responds, or raise the limit if the medium is slow",
                late=True,
            )
        if task.cancelled():
            raise OperationError(f"{operation}: the backend cancelled its own call")
        try:
            return task.result()
        except Exception as error:  # a plugin may raise any error
            reason = str(error) if isinstance(error, OSError) and str(error) else f"{type(error).__name__}: {error}"
            raise OperationError(f"{operation}: {reason}") from error

    def _ended(self, task: asyncio.Task[Any]) -> None:
        del self._running[task]
        if not task.cancelled():
            task.exception()  # retrieved, so that asyncio does not log it as lost

    async def _contains(self, keys: Sequence[ObjectKey]) -> list[bool]:
        present = await awaitable("contains", self.tier.backend.contains(keys))
        return one_per_key(keys, present, "contains", bool)

    async def _store(self, keys: Sequence[ObjectKey], buffers: Sequence[memoryview]) -> Stored:
        if self.tier.encodes:
            buffers = await self.tier.backend.run_blocking(self._codec.encoded_copies, keys, buffers)
        backend = self.tier.backend
        reservation = await awaitable("prepare_store", backend.prepare_store(keys, [len(buffer) for buffer in buffers]))
        try:
            prepared = one_per_key(keys, reservation.outcomes, "prepare_store", StoreOutcome, or_none=True)
            wanted = [index for index, outcome in enumerate(prepared) if outcome is None]
            wanted_keys = [keys[index] for index in wanted]
            stored: Sequence[StoreOutcome] = []
            if wanted:
                views = [buffers[index].toreadonly() for index in wanted]
                stored = await awaitable("store", backend.store(wanted_keys, views))
            outcomes = iter(one_per_key(wanted_keys, stored, "store", StoreOutcome))
            return Stored([next(outcomes) if o is None else o for o in prepared], len(reservation.evicted))
        finally:
            await reservation.release()

    async def _load(
        self, keys: Sequence[ObjectKey], buffers: Sequence[memoryview], *, decode: bool
    ) -> list[LoadOutcome]:
        reservation = await awaitable("prepare_load", self.tier.backend.prepare_load(keys))
        try:
            present = one_per_key(keys, reservation.present, "prepare_load", bool)
            wanted = [index for index, there in enumerate(present) if there]
            wanted_keys = [keys[index] for index in wanted]
            sizes = one_per_key(keys, reservation.nbytes, "prepare_load (nbytes)", int, or_none=True)
            views = [buffers[index] for index in wanted]
            if decode:
                views = [self._stored_buffer(buffers[index], sizes[index]) for index in wanted]
            loaded: Sequence[LoadOutcome] = []
            if wanted:
                loaded = await awaitable("load_into", self.tier.backend.load_into(wanted_keys, views))
            answers = one_per_key(wanted_keys, loaded, "load_into", LoadOutcome)
            if any(view is not buffers[index] for index, view in zip(wanted, views, strict=True)):
                targets = [buffers[index] for index in wanted]
                answers = await self.tier.backend.run_blocking(self._decode_all, wanted_keys, views, targets, answers)
            outcomes = iter(answers)
            return [next(outcomes) if there else LoadOutcome.MISS for there in present]
        finally:
            await reservation.release()

    def _stored_buffer(self, buffer: memoryview, nbytes: int | None) -> memoryview:
        """Return the buffer for an object's bytes on the medium: ``buffer``, or new memory if it is to be decoded.

        Args:
            nbytes: size of the object on the medium, ``None`` if unknown.
        """
        if nbytes is None or not self.capabilities.sizes or not HEADER_BYTES < nbytes <= len(buffer):
            nbytes = len(buffer)
        return buffer if nbytes == len(buffer) and not self._codec.encrypts else memoryview(bytearray(nbytes))

    def _decode_all(
        self,
        keys: Sequence[ObjectKey],
        views: Sequence[memoryview],
        buffers: Sequence[memoryview],
        outcomes: Sequence[LoadOutcome],
    ) -> list[LoadOutcome]:
        """Decode the objects that were loaded into other memory than their buffer."""
        return [
            self._codec.decode_copy(view, key, buffer) if outcome is LoadOutcome.HIT and view is not buffer else outcome
            for key, view, buffer, outcome in zip(keys, views, buffers, outcomes, strict=True)
        ]

    async def _delete(self, keys: Sequence[ObjectKey]) -> None:
        await awaitable("delete", self.tier.backend.delete(keys))


async def _batches(backend: Backend[Any]) -> AsyncIterator[Sequence[StoredObject]]:
    async for batch in backend.list_objects():  # called here, so that its errors belong to the first batch
        yield batch


async def _next(batches: AsyncIterator[T]) -> T | None:
    return await anext(batches, None)
