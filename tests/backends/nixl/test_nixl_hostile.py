"""A child that answers wrongly: its answers are failures or corrupt objects, never other bytes or an endless wait."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import pytest
from offload_backend_nixl.backend import NixlBackend
from offload_backend_nixl.parent import connection
from offload_backend_nixl.parent.connection import Child
from offload_backend_nixl.parent.transfers import load_batch, store_batch

from offload_core.api import LoadOutcome
from tests.backends.nixl.conftest import Nixl, key
from tests.support.polling import wait_until
from tests.support.process_state import is_running, process_state

pytestmark = pytest.mark.needs_no_nixl


@pytest.fixture
def hostile(nixl: Nixl, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Make a backend whose child has a behaviour."""

    def make(behaviour: str) -> NixlBackend:
        monkeypatch.setattr(connection, "CHILD_MODULE", "tests.backends.nixl.hostile_child")
        monkeypatch.setenv("BEHAVIOUR", behaviour)
        return nixl(plugin="POSIX", path=tmp_path, ring="1MiB", transfer_timeout_seconds=2)

    return make


FAILURES = {
    "nonsense": "it answered nonsense .a packet of the unknown kind 255",
    "too long": "it answered nonsense .a packet of",
    "cut": "it answered nonsense .a packet of 24 bytes ends in a field",
    "too few results": "it answered MOVED to another question",
    "digest": "it answered MOVED to another question",
    "too many results": "it answered MOVED to another question",
    "other request": "it answered nonsense .an answer to the request 1001, which nobody sent",
    "other question": "it answered ENTRIES to another question",
    "end": "it exited with code 7",
    "crash": "it was killed by signal 11",
    "silence": "it did not answer for 2 s",
}


@pytest.mark.parametrize("behaviour", FAILURES)
def test_a_wrong_answer_is_a_failure_and_ends_the_child(hostile: Any, behaviour: str) -> None:
    async def run() -> None:
        backend = hostile(behaviour)
        await backend.open()
        first = backend.child_pid
        buffer = bytearray(b"\xa5" * 100)
        with pytest.raises(OSError, match=FAILURES[behaviour]) as failed:
            await backend.load_into([key(1)], [memoryview(buffer)])
        assert "tier 'fabric'" in str(failed.value), "the message names the tier"
        assert buffer == b"\xa5" * 100, "a failed load touched its buffer"
        assert backend.child_pid is None, f"the child {first} is still used"
        await backend.close()

    asyncio.run(run())


def test_a_store_that_was_not_done_is_a_failure(hostile: Any) -> None:
    async def run() -> None:
        backend = hostile("miss of a store")
        await backend.open()
        with pytest.raises(OSError, match="it answered MOVED to another question"):
            await backend.store([key(1)], [memoryview(bytes(100))])
        await backend.close()

    asyncio.run(run())


def test_too_few_sizes_are_a_failure(hostile: Any) -> None:
    async def run() -> None:
        backend = hostile("too few sizes")
        await backend.open()
        with pytest.raises(OSError, match="it answered SIZES to another question"):
            await backend.contains([key(1)])
        await backend.close()

    asyncio.run(run())


def test_endless_answers_are_read_once(hostile: Any) -> None:
    async def run() -> None:
        backend = hostile("endless")
        await backend.open()
        child = backend._supervisor.child()
        assert await backend.load_into([key(1)], [memoryview(bytearray(100))]) == [LoadOutcome.MISS]
        await asyncio.to_thread(wait_until, lambda: child.has_ended, "the child may answer for ever")
        assert "an answer to the request 1, which nobody sent" in child.reason
        await backend.close()

    asyncio.run(run())


@pytest.mark.parametrize("operation", ["load", "store"])
def test_i3_after_the_announcement_of_its_end_requests_of_a_child_end_with_it(hostile: Any, operation: str) -> None:
    """It may still write to the memory of a load, and name a file that it writes from the memory of a store."""

    async def run() -> None:
        backend = hostile("ending")
        await backend.open()
        child, pid = backend._supervisor.child(), backend.child_pid
        work: Coroutine[Any, Any, Any]
        if operation == "load":
            work = asyncio.to_thread(load_batch, child, [key(1)], [memoryview(bytearray(100))], 9.0, in_place=True)
        else:
            seals: Any = [SealAfterTheEnd(child, index) for index in range(2)]
            sources = [memoryview(bytes(100))] * 2
            work = asyncio.to_thread(store_batch, child, [key(1), key(2)], sources, 9.0, seals)
        child._deadline_seconds = 100
        call = asyncio.ensure_future(work)
        await asyncio.to_thread(wait_until, lambda: child.has_ended, "the announcement is not read")
        await asyncio.to_thread(wait_until, lambda: any(child._last_answers.values()), "the answer is not read")
        await asyncio.to_thread(wait_until, lambda: process_state(pid) == "T", "the child does not stop")
        for _ in range(20):
            assert not call.done(), "the child may still use the memory"
            await asyncio.sleep(0.01)
        os.kill(pid, signal.SIGKILL)
        if operation == "load":
            assert await call == [LoadOutcome.CORRUPT]
        else:
            with pytest.raises(OSError, match="ended: a file is bad; the next request starts another"):
                await call
        assert not is_running(pid)
        await backend.close()

    asyncio.run(run())


def test_a_load_that_waits_for_the_ring_of_a_child_fails_with_its_end(hostile: Any) -> None:
    async def run() -> None:
        backend = hostile("silence")
        await backend.open()
        child = backend._supervisor.child()
        assert child.ring.reserve(child.ring.nbytes, 0.0) is not None
        call = asyncio.to_thread(load_batch, child, [key(1)], [memoryview(bytearray(100))], 1000.0)
        load = asyncio.ensure_future(call)
        await asyncio.to_thread(wait_until, lambda: bool(child.ring._waiting), "the load does not wait")
        child.end("it is killed")
        with pytest.raises(OSError, match="ended: it is killed"):
            await asyncio.wait_for(load, 20)
        await backend.close()

    asyncio.run(run())


class SealAfterTheEnd:
    """A seal of the second object that waits for the end of its child."""

    def __init__(self, child: Child, index: int) -> None:
        self._child = child
        self._index = index

    def parts(self, buffer: memoryview) -> list[tuple[int, memoryview]]:
        if self._index:
            wait_until(lambda: self._child.has_ended, "the announcement is not read")
        return [(0, buffer)]


@pytest.mark.parametrize("behaviour", ["other bytes", "no bytes"])
def test_bytes_that_are_not_the_objects_are_corrupt(hostile: Any, behaviour: str) -> None:
    async def run() -> None:
        backend = hostile(behaviour)
        await backend.open()
        buffer = bytearray(b"\xa5" * 100)
        for _ in range(3):
            assert await backend.load_into([key(1)], [memoryview(buffer)]) == [LoadOutcome.CORRUPT]
        assert await backend.store([key(1)], [memoryview(b"x" * 100).toreadonly()])
        if behaviour == "no bytes":  # the frame of the store is still in the slot; a load must not take it for its own
            assert await backend.load_into([key(1)], [memoryview(buffer)]) == [LoadOutcome.CORRUPT]
        await backend.close()

    asyncio.run(run())


def test_a_child_that_does_not_start_ends_at_the_deadline(hostile: Any) -> None:
    async def run() -> None:
        backend = hostile("no start")
        began = time.monotonic()
        with pytest.raises(OSError, match="it did not answer for 2 s"):
            await backend.open()
        assert time.monotonic() - began < 20
        await backend.close()

    asyncio.run(run())
