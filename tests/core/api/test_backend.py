"""The inherited part of every backend: cancellation that waits for the end of a thread, and the preparation (C7)."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Iterator
from typing import Any, Literal

import pytest
from offload_backend_cpu import CpuBackend, CpuOptions

from offload_core.api.backend import Backend, BackendContext, StoreOutcome
from offload_core.api.cancellation import to_the_end
from offload_core.api.capabilities import Capabilities
from offload_core.api.wrapper import BackendWrapper
from offload_core.runtime.threads import DaemonExecutor
from tests.support.memory_backend import MemoryBackend, MemoryOptions, key

SECONDS = 30


@pytest.fixture
def executor() -> Iterator[DaemonExecutor]:
    threads = DaemonExecutor(2, "test-threads")
    yield threads
    threads.shutdown()


@pytest.fixture
def backend(executor: DaemonExecutor) -> MemoryBackend:
    return MemoryBackend(MemoryOptions(), BackendContext("memory", executor))


class SlowWrite:
    """A blocking call that writes into a buffer when the test lets it."""

    def __init__(self) -> None:
        self.buffer = bytearray(4)
        self.started = threading.Event()
        self.gate = threading.Event()

    def __call__(self) -> str:
        self.started.set()
        assert self.gate.wait(SECONDS)
        self.buffer[:] = b"late"
        return "written"


async def wait_for(event: threading.Event) -> None:
    assert await asyncio.to_thread(event.wait, SECONDS)


def test_run_blocking_returns_what_its_function_returns_and_raises_what_it_raises(backend: MemoryBackend) -> None:
    assert asyncio.run(backend.run_blocking(divmod, 7, 2)) == (3, 1)
    with pytest.raises(ZeroDivisionError):
        asyncio.run(backend.run_blocking(divmod, 7, 0))


class Panic(BaseException):
    """An error as of a Rust extension."""


@pytest.mark.parametrize("error", [StopIteration("end"), SystemExit(3), Panic("rust"), KeyboardInterrupt()])
def test_run_blocking_ends_with_an_ordinary_error_whatever_its_function_raises(
    backend: MemoryBackend, error: BaseException
) -> None:
    def fails() -> None:
        raise error

    async def main() -> None:
        async with asyncio.timeout(SECONDS):
            await backend.run_blocking(fails)

    with pytest.raises(RuntimeError, match=f"a function on a thread has raised {type(error).__name__}") as caught:
        asyncio.run(main())
    assert caught.value.__cause__ is error


def test_run_blocking_uses_the_tiers_own_threads_with_keyword_arguments(backend: MemoryBackend) -> None:
    def name(*, suffix: str) -> str:
        return threading.current_thread().name + suffix

    assert asyncio.run(backend.run_blocking(name, suffix="!")) == "test-threads-0!"


def test_loads_and_lookups_have_threads_of_their_own(executor: DaemonExecutor) -> None:
    more = [DaemonExecutor(2, name) for name in ("test-loads", "test-lookups")]
    context = BackendContext("memory", executor, 2, load_executor=more[0], lookup_executor=more[1])
    backend = MemoryBackend(MemoryOptions(), context)
    writes = [SlowWrite(), SlowWrite()]

    async def main() -> None:
        stores = [asyncio.ensure_future(backend.run_blocking(write)) for write in writes]
        for write in writes:
            await wait_for(write.started)
        async with asyncio.timeout(SECONDS):
            load, lookup = [await run(threading.current_thread) for run in (backend.run_load, backend.run_lookup)]
        assert (load.name, lookup.name) == ("test-loads-0", "test-lookups-0")
        for write in writes:
            write.gate.set()
        await asyncio.gather(*stores)

    asyncio.run(main())
    for threads in more:
        threads.shutdown()


def test_loads_and_lookups_use_the_tiers_threads_if_there_are_no_others(backend: MemoryBackend) -> None:
    for run in (backend.run_load, backend.run_lookup):
        assert asyncio.run(run(threading.current_thread)).name.startswith("test-threads-")


def through_run_blocking(write: SlowWrite, backend: MemoryBackend, executor: DaemonExecutor) -> Awaitable[str]:
    return backend.run_blocking(write)


def through_run_lookup(write: SlowWrite, backend: MemoryBackend, executor: DaemonExecutor) -> Awaitable[str]:
    return backend.run_lookup(write)


def through_run_load(write: SlowWrite, backend: MemoryBackend, executor: DaemonExecutor) -> Awaitable[str]:
    return backend.run_load(write)


def through_to_the_end(write: SlowWrite, backend: MemoryBackend, executor: DaemonExecutor) -> Awaitable[str]:
    return to_the_end(asyncio.get_running_loop().run_in_executor(executor, write))


@pytest.mark.parametrize("start", [through_run_blocking, through_run_load, through_run_lookup, through_to_the_end])
@pytest.mark.parametrize("cancellations", [1, 3])
def test_c7_a_cancellation_is_held_back_until_the_thread_has_ended(
    start: Callable[[SlowWrite, MemoryBackend, DaemonExecutor], Awaitable[str]],
    cancellations: int,
    backend: MemoryBackend,
    executor: DaemonExecutor,
) -> None:
    write = SlowWrite()

    async def main() -> None:
        task = asyncio.ensure_future(start(write, backend, executor))
        await wait_for(write.started)
        for _ in range(cancellations):
            task.cancel()
            for _ in range(5):
                await asyncio.sleep(0)
            assert not task.done()
        assert write.buffer == bytes(4)
        write.gate.set()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert write.buffer == b"late", "the call has ended before its thread"

    asyncio.run(main())


def test_c7_a_cancellation_wins_over_what_the_thread_raised() -> None:
    async def main() -> None:
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        task = asyncio.ensure_future(to_the_end(future))
        await asyncio.sleep(0)
        task.cancel()
        await asyncio.sleep(0)
        future.set_exception(OSError("the medium is gone"))
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(main())


def test_to_the_end_hands_on_a_result_and_an_error() -> None:
    async def answer() -> int:
        await asyncio.sleep(0)
        return 42

    async def fail() -> int:
        raise OSError("the medium is gone")

    assert asyncio.run(to_the_end(answer())) == 42
    with pytest.raises(OSError, match="the medium is gone"):
        asyncio.run(to_the_end(fail()))


def test_a_deadline_cannot_end_a_call_before_its_thread(backend: MemoryBackend) -> None:
    write = SlowWrite()

    async def main() -> None:
        call = asyncio.ensure_future(asyncio.wait_for(backend.run_blocking(write), 0.01))
        await wait_for(write.started)
        asyncio.get_running_loop().call_later(0.1, write.gate.set)  # well after the deadline
        with pytest.raises(TimeoutError):
            await call
        assert write.buffer == b"late", "the call has ended before its thread"

    asyncio.run(main())


def test_the_inherited_preparation_steps_say_what_contains_says(backend: MemoryBackend) -> None:
    backend.objects[key(1)] = b"one"

    async def main() -> None:  # the test backend has steps of its own, so the base class is asked
        loads = await Backend.prepare_load(backend, [key(0), key(1), key(1)])
        assert loads.present == (False, True, True)
        stores = await Backend.prepare_store(backend, [key(0), key(1)], [10, 10])
        assert stores.outcomes == (None, StoreOutcome.ALREADY_PRESENT)
        assert stores.evicted == ()
        await loads.release()
        await stores.release()
        assert (await Backend.prepare_load(backend, [])).present == ()
        assert (await Backend.prepare_store(backend, [], [])).outcomes == ()

    asyncio.run(main())


@pytest.mark.parametrize("wrapped", [False, True])
@pytest.mark.parametrize("method", ["run_blocking", "run_load", "run_lookup"])
def test_c13_the_inherited_close_waits_for_what_its_threads_run(
    backend: MemoryBackend, wrapped: bool, method: str
) -> None:
    write = SlowWrite()
    outermost: Backend[Any] = BackendWrapper(backend) if wrapped else backend

    async def main() -> None:
        task = asyncio.ensure_future(getattr(outermost, method)(write))
        await wait_for(write.started)
        # The test backend has a close of its own, so the base class is asked.
        closing = asyncio.ensure_future(outermost.close() if wrapped else Backend.close(outermost))
        for _ in range(5):
            await asyncio.sleep(0)
        assert not closing.done()
        write.gate.set()
        await closing
        assert write.buffer == b"late", "close returned before the thread had ended"
        await task
        await outermost.close()

    asyncio.run(main())


def test_a_backend_without_a_limit_knows_no_spare_objects() -> None:
    with pytest.raises(ValueError, match="without a limit nothing is evicted, so no object is spare"):
        Capabilities(medium="host", persistent=False, shared=False, spares=True)


def test_a_medium_cannot_both_evict_by_itself_and_keep_a_limit_of_the_backend() -> None:
    with pytest.raises(ValueError, match="declare bounded if the backend chooses the objects to evict, else evicts"):
        Capabilities(medium="remote", persistent=True, shared=True, bounded=True, evicts=True)


@pytest.mark.parametrize("medium", ["disk", "remote"])
def test_memory_alone_is_lent(medium: Literal["disk", "remote"]) -> None:
    with pytest.raises(ValueError, match=f"lends=True, medium='{medium}'.*lend memory only"):
        Capabilities(medium=medium, persistent=True, shared=False, lends=True)


@pytest.mark.parametrize(
    ("overridden", "lends"),
    [
        ((), True),
        (("prepare_load",), True),
        (("prepare_store", "touch"), True),
        (("load_into",), False),
        (("store",), False),
        (("load_into", "store", "prepare_load", "prepare_store"), False),
    ],
    ids=str,
)
def test_a_wrapper_that_overrides_loads_or_stores_sees_them_all(
    executor: DaemonExecutor, overridden: tuple[str, ...], lends: bool
) -> None:
    options = CpuOptions.model_validate({"capacity": 1 << 20})
    inner = CpuBackend(options, BackendContext("cpu", executor))
    wrapper = type("Wrapper", (BackendWrapper,), {name: getattr(BackendWrapper, name) for name in overridden})
    assert inner.lends
    assert wrapper(inner).lends == lends


@pytest.mark.parametrize("overridden", ["load_into", "store"])
def test_a_subclass_that_overrides_loads_or_stores_alone_sees_them_all(
    executor: DaemonExecutor, overridden: str
) -> None:
    subclass = type("Subclass", (CpuBackend,), {overridden: getattr(CpuBackend, overridden)})
    options = CpuOptions.model_validate({"capacity": 1 << 20})
    assert not subclass(options, BackendContext("cpu", executor)).lends
