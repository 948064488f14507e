"""Clients of one medium and their event loop; a test can hold the clients' threads.

A client calls its backend as the core does: every load and every store under a reservation.
"""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import logging
import random
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Mapping, Sequence
from concurrent.futures import Executor
from contextlib import asynccontextmanager, contextmanager, suppress
from typing import Any, TypeVar

from offload_core.api.backend import (
    Backend,
    BackendContext,
    BackendType,
    LoadOutcome,
    LoadReservation,
    StoredObject,
    StoreOutcome,
    StoreReservation,
)
from offload_core.api.capabilities import Capabilities
from offload_core.api.checks.answers import answer_problem
from offload_core.api.keys import ObjectKey
from offload_core.api.one_pass import LoadCheck, StoreSeal
from offload_core.runtime.threads import executors_of_tier
from offload_core.testing.rig.recording_check import RecordingCheck
from offload_core.testing.rig.recording_seal import RecordingSeal
from offload_core.testing.rig.watched_calls import Calls, WatchedLoopThreads, WatchedThreads, current_calls

logger = logging.getLogger(__name__)

T = TypeVar("T")
Keys = Sequence[ObjectKey]
Buffers = Sequence[memoryview]

THREADS = 4
"""Threads of each client: the default of ``io_threads``."""
TEST_SECONDS = 60.0
"""Longest time of one test, if the contract class does not set it."""
_CANCELLED_SECONDS = 1.0
"""Time for the end of an operation that was late and is cancelled. One that is slow but not stuck uses less."""


class Rig:
    """Clients of one medium and one event loop for them; use it as a context manager.

    Args:
        backend_type: the backend type under test.
        options: the tier's own keys, which name the medium.
        test_seconds: the longest time of one test.
    """

    def __init__(
        self, backend_type: BackendType, options: Mapping[str, Any], test_seconds: float = TEST_SECONDS
    ) -> None:
        self.backend_type = backend_type
        self.test_seconds = test_seconds
        self.options = dict(options)
        self._validated = backend_type.options.model_validate(self.options)
        self.clients: list[Client] = []
        self._loop_calls = Calls()
        self._runner = asyncio.Runner()
        loop = self._runner.get_loop()
        loop.set_default_executor(WatchedLoopThreads(self._loop_calls))
        # By default asyncio logs a lost error with its traceback when garbage is collected. That runs a parser, which
        # breaks the parser that pytest may be running just then (python/cpython#106905).
        loop.set_exception_handler(lambda _, context: logger.debug("%s", context.get("message")))
        self._numbers = itertools.count()
        self._stuck = False

    def __enter__(self) -> Rig:
        return self

    def __exit__(self, *_: object) -> None:
        try:
            if not self._stuck:
                self.run(self._close_clients())
        finally:
            if not self._stuck:  # a stuck operation never ends, and closing the loop would wait for it
                self._runner.close()

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run ``coroutine`` to its end.

        Raises:
            AssertionError: the coroutine took longer than ``test_seconds``, or the loop stood still while a call was
                held.
        """

        async def limited() -> T:
            task = asyncio.ensure_future(coroutine)
            await asyncio.wait({task}, timeout=self.test_seconds)
            if not task.done():
                self._open_gates()
                task.cancel()
                await asyncio.wait({task}, timeout=_CANCELLED_SECONDS)
                self._stuck = not task.done()
                raise AssertionError(
                    f"the operations under test did not end within {self.test_seconds:g} s "
                    "(raise test_seconds for a slow medium)"
                )
            gave_up = [calls for calls in self._all_calls() if calls.gave_up]
            for calls in gave_up:
                calls.gave_up = False
            if gave_up:
                raise AssertionError("C8: the event loop stood still for as long as a call was held in a thread")
            return task.result()

        return self._runner.run(limited())

    def construct(self, threads: int = THREADS) -> Client:
        """Construct a backend, without opening it."""
        calls = Calls()
        name = "contract"
        executors = executors_of_tier(name, lambda begin: WatchedThreads(threads, begin, calls))
        context = BackendContext(name, executors[0], threads, load_executor=executors[1], lookup_executor=executors[2])
        client = Client(self.backend_type.backend(self._validated, context), calls, executors)
        self.clients.append(client)
        return client

    async def client(self) -> Client:
        """Construct a backend and open it; the rig closes it in the end."""
        client = self.construct()
        await client.open()
        return client

    def capabilities(self) -> Capabilities:
        """Return the capabilities that the backend declares."""

        async def declared() -> Capabilities:
            return self.construct().backend.capabilities

        return self.run(declared())

    def loads_in_one_call(self) -> bool:
        """Return whether the backend declares that it loads in one call."""

        async def declared() -> bool:
            return self.construct().backend.loads_in_one_call

        return self.run(declared())

    def seals_stores(self) -> bool:
        """Return whether the backend has stores that seal, once it is open."""

        async def declared() -> bool:
            client = await self.client()
            return client.backend.seals_stores

        return self.run(declared())

    def lends(self) -> bool:
        """Return whether the core may use the views of the backend's reservations."""

        async def declared() -> bool:
            return self.construct().backend.lends

        return self.run(declared())

    def key(self) -> ObjectKey:
        """Return a key that the rig has not used before."""
        digest = hashlib.sha256(b"contract %d" % next(self._numbers)).digest()
        return ObjectKey("ab" * 32, "full-u256", digest)

    def keys(self, count: int) -> list[ObjectKey]:
        """Return ``count`` keys that the rig has not used before."""
        return [self.key() for _ in range(count)]

    async def settle(self) -> None:
        """Wait until no thread runs a call, then let the loop turn."""
        await until(lambda: all(calls.unfinished == 0 for calls in self._all_calls()))
        await turns()

    def _all_calls(self) -> list[Calls]:
        return [self._loop_calls, *(client.calls for client in self.clients)]

    def _open_gates(self) -> None:
        for calls in self._all_calls():
            calls.open()

    async def _close_clients(self) -> None:
        self._open_gates()
        for client in self.clients:
            if client.opened and not client.closed:
                with suppress(Exception):  # the tests of C13 report errors of close
                    await client.close()
            for executor in client.executors:
                executor.shutdown()


class Client:
    """A backend with its own threads; :attr:`calls` counts the calls that it hands to threads."""

    def __init__(self, backend: Backend[Any], calls: Calls, executors: Sequence[Executor]) -> None:
        self.backend = backend
        self.calls = calls
        self.executors = executors
        self.opened = False
        self.closed = False

    async def open(self) -> None:
        """See :meth:`Backend.open`."""
        with self._counted():
            await self.backend.open()
        self.opened = True

    async def close(self) -> None:
        """See :meth:`Backend.close`."""
        self.closed = True
        with self._counted():
            await self.backend.close()

    async def contains(self, keys: Keys) -> list[bool]:
        """See :meth:`Backend.contains`."""
        with self._counted():
            return _answer("contains", await self.backend.contains(keys), bool)

    async def present(self, keys: Keys) -> list[ObjectKey]:
        """Return the keys whose objects are present."""
        return [key for key, there in zip(keys, await self.contains(keys), strict=True) if there]

    async def delete(self, keys: Keys) -> None:
        """See :meth:`Backend.delete`."""
        with self._counted():
            await self.backend.delete(keys)

    async def prepare_load(self, keys: Keys) -> LoadReservation:
        """See :meth:`Backend.prepare_load`; the caller releases it."""
        with self._counted():
            return await self.backend.prepare_load(keys)

    async def prepare_store(self, keys: Keys, nbytes: Sequence[int], spare: Sequence[bool] = ()) -> StoreReservation:
        """See :meth:`Backend.prepare_store`; the caller releases it. Without flags, the backend gets none either."""
        flags = [spare] if spare else []
        with self._counted():
            return await self.backend.prepare_store(keys, nbytes, *flags)

    async def touch(self, keys: Keys, spare: Sequence[bool]) -> None:
        """See :meth:`Backend.touch`."""
        with self._counted():
            await self.backend.touch(keys, spare)

    async def load_into(self, keys: Keys, buffers: Buffers) -> list[LoadOutcome]:
        """See :meth:`Backend.load_into`; the caller holds a reservation."""
        with self._counted():
            return _answer("load_into", await self.backend.load_into(keys, buffers), LoadOutcome)

    async def load_and_check(self, keys: Keys, buffers: Buffers, checks: Sequence[LoadCheck]) -> list[LoadOutcome]:
        """See :meth:`Backend.load_and_check`; without a reservation."""
        with self._counted():
            return _answer("load_and_check", await self.backend.load_and_check(keys, buffers, checks), LoadOutcome)

    async def store_and_seal(self, keys: Keys, buffers: Buffers, seals: Sequence[StoreSeal]) -> list[StoreOutcome]:
        """See :meth:`Backend.store_and_seal`; the caller holds a reservation that covers all objects."""
        with self._counted():
            return _answer(
                "store_and_seal",
                await self.backend.store_and_seal(keys, [one.toreadonly() for one in buffers], seals),
                StoreOutcome,
            )

    async def store_from(self, keys: Keys, buffers: Buffers) -> list[StoreOutcome]:
        """See :meth:`Backend.store`; the caller holds a reservation that covers all objects."""
        with self._counted():
            return _answer("store", await self.backend.store(keys, buffers), StoreOutcome)

    @property
    def ways_to_load(self) -> list[Callable[[Keys, Buffers], Coroutine[Any, Any, list[LoadOutcome]]]]:
        """The separate steps and, if the backend has it, the one call, which the core prefers."""
        return [self.load, self._load_in_one_call] if self.backend.loads_in_one_call else [self.load]

    @property
    def ways_to_store(self) -> list[Callable[[Keys, Buffers], Coroutine[Any, Any, list[StoreOutcome]]]]:
        """The plain store and, if the backend has it, the one that seals. The caller holds a reservation."""
        return [self.store_from, self._store_sealed] if self.backend.seals_stores else [self.store_from]

    async def _load_in_one_call(self, keys: Keys, buffers: Buffers) -> list[LoadOutcome]:
        return await self.load_and_check(keys, buffers, list(map(RecordingCheck, buffers)))

    async def _store_sealed(self, keys: Keys, buffers: Buffers) -> list[StoreOutcome]:
        return await self.store_and_seal(keys, buffers, list(map(RecordingSeal, buffers)))

    @asynccontextmanager
    async def loading(self, keys: Keys) -> AsyncIterator[LoadReservation]:
        """Hold a reservation for loads."""
        reservation = await self.prepare_load(keys)
        try:
            yield reservation
        finally:
            await self._release(reservation)

    @asynccontextmanager
    async def storing(
        self, keys: Keys, nbytes: Sequence[int], spare: Sequence[bool] = ()
    ) -> AsyncIterator[StoreReservation]:
        """Hold a reservation for stores."""
        reservation = await self.prepare_store(keys, nbytes, spare)
        try:
            yield reservation
        finally:
            await self._release(reservation)

    async def load(self, keys: Keys, buffers: Buffers) -> list[LoadOutcome]:
        """Load every key under a reservation, even the keys that it reports as absent."""
        async with self.loading(keys):
            return await self.load_into(keys, buffers)

    async def get(self, key: ObjectKey, nbytes: int, fill: int = 0) -> tuple[LoadOutcome, bytes]:
        """Load one object into a buffer of ``nbytes`` bytes, filled with ``fill`` before."""
        buffer = bytearray([fill]) * nbytes
        (outcome,) = await self.load([key], [memoryview(buffer)])
        return outcome, bytes(buffer)

    async def store(self, objects: Mapping[ObjectKey, bytes], *, spare: bool = False) -> list[StoreOutcome]:
        """Store objects as the core does: reserve, store the wanted objects, release."""
        keys = list(objects)
        flags = [True] * len(keys) if spare else []
        async with self.storing(keys, [len(objects[key]) for key in keys], flags) as reservation:
            outcomes = list(reservation.outcomes)
            wanted = [key for key, outcome in zip(keys, outcomes, strict=True) if outcome is None]
            stored: dict[ObjectKey, StoreOutcome] = {}
            if wanted:
                sources = [memoryview(bytearray(objects[key])) for key in wanted]
                stored = dict(zip(wanted, await self.store_from(wanted, sources), strict=True))
            return [stored[key] if outcome is None else outcome for key, outcome in zip(keys, outcomes, strict=True)]

    async def put(self, objects: Mapping[ObjectKey, bytes]) -> None:
        """Store objects that a test needs.

        Raises:
            AssertionError: an object was rejected.
        """
        for (key, content), outcome in zip(objects.items(), await self.store(objects), strict=True):
            if outcome is StoreOutcome.REJECTED:
                raise AssertionError(
                    f"{key} of {len(content)} bytes was rejected on a fresh medium; set a higher limit in `options`"
                )

    async def listed(self) -> list[StoredObject]:
        """Return everything that :meth:`Backend.list_objects` yields."""
        with self._counted():
            return [found async for batch in self.backend.list_objects() for found in batch]

    @contextmanager
    def _counted(self) -> Iterator[None]:
        token = current_calls.set(self.calls)
        try:
            yield
        finally:
            with suppress(ValueError):  # a coroutine that did not end in time is collected in another context
                current_calls.reset(token)

    async def _release(self, reservation: LoadReservation | StoreReservation) -> None:
        with self._counted(), suppress(Exception):  # the tests of C10 report errors of release
            await reservation.release()


def _answer(call: str, answer: Sequence[T], kind: type) -> list[T]:
    if problem := answer_problem(call, answer, kind):
        raise AssertionError(f"C2: {problem}")
    return list(answer)


def content(nbytes: int, seed: int = 0) -> bytes:
    """Return bytes that depend on ``seed`` and look random."""
    return random.Random(f"content:{seed}:{nbytes}").randbytes(nbytes)


async def turns(count: int = 20) -> None:
    """Let the event loop turn."""
    for _ in range(count):
        await asyncio.sleep(0)


async def until(condition: Callable[[], bool]) -> None:
    """Let the event loop turn until ``condition`` holds."""
    while not condition():  # noqa: ASYNC110 - the condition changes on other threads
        await asyncio.sleep(0.0005)


async def held_or_done(client: Client, operation: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
    """Start ``operation``; wait until it has ended, or until all its running calls stand at the gate."""
    task = asyncio.ensure_future(operation)
    calls = client.calls
    await until(lambda: task.done() or (calls.waiting > 0 and calls.waiting == calls.unfinished))
    await turns()
    return task


async def ended(task: asyncio.Task[Any]) -> BaseException | None:
    """Wait for ``task`` and return its error, if it failed."""
    await asyncio.wait({task})
    return asyncio.CancelledError() if task.cancelled() else task.exception()
