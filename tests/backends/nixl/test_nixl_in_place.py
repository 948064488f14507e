"""Objects in shared memory, as in an engine: the child moves their content itself, and the ring has only the frames."""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from offload_backend_nixl.backend import NixlBackend
from offload_backend_nixl.naming import name_of
from offload_backend_nixl.parent.connection import Child, Ticket
from offload_backend_nixl.protocol import Item, Operation, Outcome

from offload_core.api import LoadOutcome, SharedMemory, StoreOutcome
from offload_core.objects import format as object_format
from offload_core.objects.arriving_object import ArrivingObject
from tests.backends.nixl.conftest import Nixl, key
from tests.media.fuse.mount import FaultFs
from tests.support.polling import wait_until
from tests.support.process_state import is_running, process_state

SIZE = 3 * 1024**2 + 100
FREE = 0xA5
BEFORE, AFTER = 4096 + 1, 77
"""Bytes of the memory before and after the objects, which nobody may change."""
OBJECTS = 12


class Staging:
    """Shared memory with places for objects."""

    def __init__(self) -> None:
        self.memory = SharedMemory.create("in place", BEFORE + OBJECTS * SIZE + AFTER)
        self.memory.view[:] = bytes([FREE]) * self.memory.nbytes

    def place(self, number: int) -> memoryview:
        return self.memory.view[BEFORE + number * SIZE : BEFORE + (number + 1) * SIZE]

    def fill(self, *numbers: int) -> None:
        for number in numbers:
            self.place(number)[:] = content(number)

    def clear(self) -> None:
        self.memory.view[:] = bytes([FREE]) * self.memory.nbytes

    def check(self, *numbers: int) -> None:
        """Check that these objects are in their places, and that nothing else was written."""
        assert set(self.memory.view[:BEFORE]) | set(self.memory.view[-AFTER:]) == {FREE}
        for number in range(OBJECTS):
            wanted = content(number) if number in numbers else bytes([FREE]) * SIZE
            assert self.place(number) == wanted, f"other bytes are in the place of object {number}"


def content(number: int) -> bytes:
    return bytes([number + 1]) * (SIZE // 2) + bytes([number + 101]) * (SIZE - SIZE // 2)


@pytest.fixture
def staging() -> Iterator[Staging]:
    staging = Staging()
    yield staging
    staging.memory.close()


async def opened(nixl: Nixl, folder_options: dict[str, Any], **options: Any) -> NixlBackend:
    backend = nixl(**folder_options, **options)
    await backend.open()
    return backend


async def store(backend: NixlBackend, staging: Staging, *numbers: int) -> None:
    staging.fill(*numbers)
    outcomes = await backend.store([key(number) for number in numbers], [staging.place(number) for number in numbers])
    assert list(outcomes) == [StoreOutcome.STORED] * len(numbers)


async def load(backend: NixlBackend, staging: Staging, *numbers: int) -> list[LoadOutcome]:
    return list(
        await backend.load_into([key(number) for number in numbers], [staging.place(number) for number in numbers])
    )


def ring_bytes(pid: int) -> int:
    """Return the memory of the ring that a process has touched."""
    lines = Path(f"/proc/{pid}/smaps").read_text().splitlines()
    (start,) = (index for index, line in enumerate(lines) if "memfd:offload-nixl" in line)
    (resident,) = (line.split()[1] for line in lines[start : start + 8] if line.startswith("Rss:"))
    return int(resident) * 1024


def test_objects_do_not_pass_through_the_ring(nixl: Nixl, folder_options: dict[str, Any], staging: Staging) -> None:
    async def run() -> None:
        backend = await opened(nixl, folder_options)
        await store(backend, staging, *range(OBJECTS))
        staging.check(*range(OBJECTS))
        staging.clear()
        assert await load(backend, staging, *range(0, OBJECTS, 2)) == [LoadOutcome.HIT] * (OBJECTS // 2)
        staging.check(*range(0, OBJECTS, 2))
        assert backend.child_pid is not None
        assert ring_bytes(backend.child_pid) <= 1024**2, "one page for each object on its way"
        assert await backend.contains([key(OBJECTS)]) == [False]
        await backend.close()

    asyncio.run(run())


def test_objects_are_the_same_as_those_that_passed_through_the_ring(
    nixl: Nixl, folder_options: dict[str, Any], staging: Staging
) -> None:
    async def run() -> None:
        backend = await opened(nixl, folder_options)
        await store(backend, staging, 1)
        await backend.store([key(2)], [memoryview(content(2))])
        staging.clear()
        assert await load(backend, staging, 2) == [LoadOutcome.HIT]
        staging.check(2)
        own = bytearray(SIZE)
        assert await backend.load_into([key(1)], [memoryview(own)]) == [LoadOutcome.HIT]
        assert own == content(1)
        await backend.close()

    asyncio.run(run())


def damage(path: Path) -> None:
    """Change one byte in the middle of a file."""
    with path.open("r+b") as file:
        file.seek(SIZE // 2)
        file.write(b"\xee")


def make_unreadable(path: Path) -> None:
    """Put a link to itself in the place of a file."""
    path.unlink()
    path.symlink_to(path)


class NoParts(ArrivingObject):
    """A check that is told of no parts."""

    def filled(self, nbytes: int) -> bool:
        raise AssertionError("the backend's thread reads the object")


class PartsOnly(ArrivingObject):
    """A check that takes no digest, as that of an encrypted object."""

    @property
    def hash_start(self) -> None:
        return None


def test_the_child_hashes_the_objects_that_it_has_read(
    nixl: Nixl, folder_options: dict[str, Any], staging: Staging
) -> None:
    """An object with one wrong byte does not pass. A check that takes no digest gets the parts."""

    async def run() -> None:
        backend = await opened(nixl, folder_options)
        numbers = range(OBJECTS)
        staging.fill(*numbers)
        for number in numbers:
            object_format.seal(staging.place(number), key(number))
        sealed = [bytes(staging.place(number)) for number in numbers]
        await backend.store([key(number) for number in numbers], [staging.place(number) for number in numbers])
        damage(Path(folder_options["path"], name_of(key(1))))
        staging.clear()
        places = [staging.place(number) for number in numbers]
        kinds = [PartsOnly if number in (2, 3) else NoParts for number in numbers]
        checks = [kind(place, key(number)) for kind, place, number in zip(kinds, places, numbers, strict=True)]
        outcomes = await backend.load_and_check([key(number) for number in numbers], places, checks)
        assert list(outcomes) == [LoadOutcome.HIT] * OBJECTS
        assert [number for number in numbers if not checks[number].passed] == [1]
        assert [number for number in numbers if places[number] != sealed[number]] == [1]
        await backend.close()

    asyncio.run(run())


def watched_requests(child: Child, monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, Ticket]]:
    """Return the requests that are sent from now on: the number of objects, and the ticket of each."""
    requests: list[tuple[int, Ticket]] = []
    send = child.send

    def watched(*arguments: Any, **fields: Any) -> Ticket:
        ticket = send(*arguments, **fields)
        requests.append((len(fields["items"]), ticket))
        return ticket

    monkeypatch.setattr(child, "send", watched)
    return requests


def test_a_request_has_several_objects_and_not_too_many_bytes(
    nixl: Nixl, folder_options: dict[str, Any], staging: Staging, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def run() -> None:
        backend = await opened(nixl, folder_options)
        await store(backend, staging, *range(OBJECTS))
        child = backend._supervisor.child()
        requests = watched_requests(child, monkeypatch)
        assert await load(backend, staging, *range(OBJECTS)) == [LoadOutcome.HIT] * OBJECTS
        assert [count for count, _ in requests] == [11, 1], "11 objects of 3 MiB have 33 MiB"
        await backend.close()

    asyncio.run(run())


def test_a_failed_request_ends_the_load_after_the_others_and_frees_the_ring(
    nixl: Nixl, folder_options: dict[str, Any], staging: Staging, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def run() -> None:
        backend = await opened(nixl, folder_options)
        await store(backend, staging, *range(OBJECTS))
        child = backend._supervisor.child()
        make_unreadable(Path(folder_options["path"], name_of(key(0))))
        staging.clear()
        keys, places = [key(number) for number in range(OBJECTS)], [staging.place(number) for number in range(OBJECTS)]
        kinds = [PartsOnly, *[ArrivingObject] * (OBJECTS - 1)]  # the first one has a request of its own
        checks = [kind(place, name) for kind, place, name in zip(kinds, places, keys, strict=True)]
        requests = watched_requests(child, monkeypatch)
        with pytest.raises(OSError, match=os.strerror(errno.ELOOP)):
            await backend.load_and_check(keys, places, checks)
        assert [(count, ticket.answered.is_set()) for count, ticket in requests] == [(1, True), (OBJECTS - 1, True)]
        staging.check(*range(1, OBJECTS))
        assert child.ring.reserve(child.ring.nbytes, 0.0) is not None, "a part of the ring was not given back"
        assert not child.has_ended
        await backend.close()

    asyncio.run(run())


def test_misses_and_files_of_other_sizes_leave_the_memory_as_it_is(
    nixl: Nixl, folder_options: dict[str, Any], staging: Staging
) -> None:
    async def run() -> None:
        backend = await opened(nixl, folder_options)
        await store(backend, staging, 1, 2, 3)
        cut, other = (Path(folder_options["path"], name_of(key(number))) for number in (1, 2))
        os.truncate(cut, SIZE - 1)
        staging.clear()
        assert await load(backend, staging, 0, 1, 3) == [LoadOutcome.MISS, LoadOutcome.CORRUPT, LoadOutcome.HIT]
        staging.check(3)
        other.unlink()
        other.hardlink_to(Path(folder_options["path"], name_of(key(3))))
        assert await load(backend, staging, 2) == [LoadOutcome.CORRUPT], "it is whole, and of another key"
        await backend.close()

    asyncio.run(run())


def test_an_unreadable_file_costs_its_own_request_only(
    nixl: Nixl, fault_fs: FaultFs, staging: Staging, caplog: pytest.LogCaptureFixture
) -> None:
    """Its child ends, since NIXL may still write to the memory. The child first answers all other requests."""

    async def run() -> None:
        backend = await opened(nixl, {"plugin": "POSIX", "path": str(fault_fs.path / "objects"), "ring": "16MiB"})
        await store(backend, staging, *range(OBJECTS))
        pid = backend.child_pid
        staging.clear()
        hang = fault_fs.add("read", "*.kv", "hang")
        fault_fs.add("read", f"*{name_of(key(1))}", "error")
        loads = [asyncio.ensure_future(load(backend, staging, number)) for number in (0, 2)]
        await asyncio.to_thread(fault_fs.wait_for_hit, hang, 2)
        loads += [asyncio.ensure_future(load(backend, staging, *some)) for some in ([1], range(3, OBJECTS))]
        tickets = backend._supervisor.child()._tickets
        await asyncio.to_thread(wait_until, lambda: len(tickets) == 4, "some loads are not asked for")
        fault_fs.remove(hang)
        outcomes = await asyncio.gather(*loads, return_exceptions=True)
        error = outcomes.pop(2)
        assert outcomes == [[LoadOutcome.HIT]] * 2 + [[LoadOutcome.HIT] * (OBJECTS - 3)]
        assert isinstance(error, OSError)
        assert name_of(key(1)) in str(error), "the message names the file"
        assert pid is not None
        assert not is_running(pid), "the memory is given back too early"
        assert await load(backend, staging, 2) == [LoadOutcome.HIT]
        await backend.close()

    with caplog.at_level(logging.WARNING):
        asyncio.run(run())
    (message,) = {record.getMessage() for record in caplog.records if "nixl" in record.name}
    assert (
        message == f"tier 'fabric': the NIXL process ended: NIXL could not read {name_of(key(1))}; another is started"
    )


def test_i3_a_load_has_not_ended_before_its_child(
    nixl: Nixl, folder_options: dict[str, Any], staging: Staging, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kill of a child that is in a call that nothing interrupts has no effect until that call ends."""

    async def run() -> None:
        backend = await opened(nixl, folder_options)
        await store(backend, staging, 1)
        assert await load(backend, staging, 1) == [LoadOutcome.HIT], "the child has the memory"
        child = backend._supervisor.child()
        child._deadline_seconds = 1.0  # of this child alone: the option is also the deadline of a child's start
        process, pid = child._process, backend.child_pid
        assert process is not None
        assert pid is not None
        monkeypatch.setattr(process, "kill", lambda: None)
        os.kill(pid, signal.SIGSTOP)
        wait_until(lambda: process_state(pid) == "T", "the child does not stop")
        call = asyncio.ensure_future(load(backend, staging, 1))
        await asyncio.to_thread(wait_until, lambda: child.has_ended, "the deadline has no effect")
        began = time.monotonic()
        while time.monotonic() - began < 0.2:
            assert not call.done(), "the child may still write to the memory"
            await asyncio.sleep(0.01)
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(OSError, match="did not answer for 1 s"):
            await call
        assert not is_running(pid)
        assert await load(backend, staging, 1) == [LoadOutcome.HIT], "the next child has the memory too"
        await backend.close()

    asyncio.run(run())


def test_memory_that_the_child_does_not_have_is_refused(
    nixl: Nixl, folder_options: dict[str, Any], staging: Staging
) -> None:
    async def run() -> None:
        backend = await opened(nixl, folder_options)
        await store(backend, staging, 1)
        child = backend._supervisor.child()
        name = name_of(key(1))
        for offset, memory, start in ((0, 1, BEFORE + OBJECTS * SIZE), (0, 2, 0), (16 * 1024**2, 0, 0)):
            item = Item(name, offset, SIZE + 48, memory, start)
            answer = child.wait(child.send(Operation.LOAD, items=(item,)))
            assert answer.outcome is Outcome.FAILED
            assert "is outside of the shared memory" in answer.text
        await backend.close()

    asyncio.run(run())
