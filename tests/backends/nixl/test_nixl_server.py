"""The loop of the child process, with a fake NIXL: transfers that fail, hang, or end out of order."""

from __future__ import annotations

import errno
import mmap
import os
import socket
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import xxhash
from offload_backend_nixl import protocol
from offload_backend_nixl.child import server
from offload_backend_nixl.child.engine import Piece
from offload_backend_nixl.child.folder import FolderStorage
from offload_backend_nixl.child.mover import pieces_of
from offload_backend_nixl.child.server import Server
from offload_backend_nixl.child.transfers import MAX_FAILURES
from offload_backend_nixl.protocol import NO_HASH, RING, Answer, Item, Operation, Outcome, Request, Result

from tests.support.polling import wait_until

pytestmark = pytest.mark.needs_no_nixl

SECONDS = 20
NAME = f"{'ab' * 32}/full-u16/ab/abcd.kv"


class FakeEngine:
    """An engine whose transfers end as the test says."""

    def __init__(self) -> None:
        self.started: list[FakeTransfer] = []
        self.memories: dict[int, mmap.mmap] = {}
        self.outcome: bool | None = None
        """How transfers end at once, as with the plugin POSIX; ``None`` if the test ends them later."""
        self.starting = threading.Semaphore(0)
        self.may_start = threading.Semaphore(1000)

    def add_memory(self, number: int, memory: mmap.mmap) -> None:
        self.memories[number] = memory

    def start(self, direction: str, pieces: Sequence[Piece], target: Any) -> FakeTransfer:
        self.starting.release()
        assert self.may_start.acquire(timeout=SECONDS)
        self.started.append(FakeTransfer(direction, self.outcome))
        return self.started[-1]


class FakeTransfer:
    """A transfer that is in progress until the test ends it."""

    def __init__(self, direction: str, outcome: bool | None) -> None:
        self.direction = direction
        self.outcome = outcome

    def poll(self) -> bool | None:
        return self.outcome


class Parent:
    """The parent's end, and the server on a thread."""

    def __init__(self, root: Path, engines: int = 1) -> None:
        self.connection, self.child = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.connection.settimeout(SECONDS)
        self.engines = [FakeEngine() for _ in range(engines)]
        self.engine = self.engines[0]
        storage = FolderStorage(str(root), "writer", create=True)
        self.thread = threading.Thread(target=Server(self.child, storage, self.engines).run)  # type: ignore[arg-type]
        self.thread.start()

    def send(self, number: int, operation: Operation, **fields: Any) -> None:
        self.connection.send(protocol.encode_request(Request(operation, number, **fields)))

    def transfer(self, number: int, operation: Operation = Operation.LOAD, objects: int = 1) -> None:
        self.send(number, operation, items=(Item(NAME, 0, 100),) * objects)

    def answer(self) -> Answer:
        return protocol.decode_answer(self.connection.recv(protocol.MAX_PACKET_BYTES))

    def end(self) -> None:
        """End the server as the parent does, and wait for it."""
        self.connection.close()
        self.thread.join(SECONDS)
        self.child.close()
        assert not self.thread.is_alive(), "the server goes on after the parent's end"

    def started(self, count: int, engine: FakeEngine | None = None) -> FakeTransfer:
        """Wait until so many transfers have started, and return the last."""
        engine = engine or self.engine
        wait_until(lambda: len(engine.started) == count, f"no {count} transfers have started")
        return engine.started[-1]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / NAME
    path.parent.mkdir(parents=True)
    path.write_bytes(b"x" * 100)
    return tmp_path


@pytest.fixture
def parent(folder: Path) -> Iterator[Parent]:
    parent = Parent(folder)
    yield parent
    parent.end()


@pytest.fixture
def parent_of_two(folder: Path) -> Iterator[Parent]:
    parent = Parent(folder, engines=2)
    yield parent
    parent.end()


FAILURE = f"NIXL could not read a file: {{}}/{NAME}"


def moved(number: int, *outcomes: Outcome) -> Answer:
    return Answer(Outcome.MOVED, number, results=tuple(map(Result, outcomes)))


def test_transfers_end_out_of_order(parent: Parent) -> None:
    parent.transfer(1)
    first = parent.started(1)
    parent.transfer(2)
    second = parent.started(2)
    second.outcome = True
    assert parent.answer() == moved(2, Outcome.DONE)
    parent.send(3, Operation.SIZES, names=(NAME, "none"))
    assert parent.answer() == Answer(Outcome.SIZES, 3, sizes=(100, -1)), "a question waits for no transfer"
    first.outcome = True
    assert parent.answer() == moved(1, Outcome.DONE)


def test_a_question_overtakes_transfers_that_have_not_begun(parent: Parent) -> None:
    """A transfer may keep the thread, as the plugin POSIX does."""
    engine = parent.engine
    engine.may_start = threading.Semaphore(0)
    parent.transfer(1)
    assert engine.starting.acquire(timeout=SECONDS)
    parent.transfer(2)
    parent.send(3, Operation.SIZES, names=(NAME,))
    assert parent.answer() == Answer(Outcome.SIZES, 3, sizes=(100,)), "while the thread is in a call of NIXL"
    engine.may_start.release(2)
    parent.started(2)
    for number, transfer in enumerate(engine.started, 1):
        transfer.outcome = True
        assert parent.answer() == moved(number, Outcome.DONE)


def test_a_request_is_answered_when_all_of_its_transfers_have_ended(parent: Parent) -> None:
    """An answer gives the memory back."""
    parent.send(1, Operation.LOAD, items=(Item(NAME, 0, 100), Item("none", 100, 100), Item(NAME, 200, 99)))
    parent.transfer(2)
    parent.started(2)
    first, other = parent.engine.started
    other.outcome = True
    assert parent.answer() == moved(2, Outcome.DONE), "the first request has a transfer in progress"
    first.outcome = True
    assert parent.answer() == moved(1, Outcome.DONE, Outcome.MISS, Outcome.CORRUPT)


def test_one_failure_fails_the_request_after_its_other_transfers(parent: Parent, folder: Path) -> None:
    parent.transfer(1, objects=3)
    parent.started(3)
    parent.engine.started[1].outcome = False
    parent.engine.started[2].outcome = True
    parent.send(2, Operation.SIZES, names=(NAME,))
    assert parent.answer() == Answer(Outcome.SIZES, 2, sizes=(100,)), "a transfer is still in progress"
    parent.engine.started[0].outcome = True
    answer = parent.answer()
    assert (answer.number, answer.outcome, answer.text) == (1, Outcome.FAILED, FAILURE.format(folder))


def test_threads_share_the_transfers(parent_of_two: Parent) -> None:
    """One thread may hang in a call of NIXL, and the other goes on."""
    hung, working = parent_of_two.engines
    for engine in parent_of_two.engines:
        engine.may_start = threading.Semaphore(0)
    parent_of_two.transfer(0, objects=2)
    for engine in parent_of_two.engines:
        assert engine.starting.acquire(timeout=SECONDS), "a thread has no transfer"
    working.may_start.release(1000)
    for number in range(1, 4):
        parent_of_two.transfer(number)
        parent_of_two.started(number + 1, working).outcome = True
        assert parent_of_two.answer() == moved(number, Outcome.DONE)
    working.started[0].outcome = True
    hung.may_start.release()
    parent_of_two.started(1, hung).outcome = True
    assert parent_of_two.answer() == moved(0, Outcome.DONE, Outcome.DONE)


def test_an_agent_that_always_fails_ends_the_process_although_another_works(parent_of_two: Parent) -> None:
    broken, working = parent_of_two.engines
    for engine in parent_of_two.engines:
        engine.may_start = threading.Semaphore(0)
    for number in range(MAX_FAILURES):
        parent_of_two.transfer(number, objects=2)
        for engine in parent_of_two.engines:
            assert engine.starting.acquire(timeout=SECONDS), "a thread has no transfer"
        for engine in parent_of_two.engines:  # only now, or one thread could take both
            engine.may_start.release()
        parent_of_two.started(number + 1, broken).outcome = False
        parent_of_two.started(number + 1, working).outcome = True
        assert parent_of_two.answer().outcome is Outcome.FAILED
    parent_of_two.thread.join(SECONDS)
    assert not parent_of_two.thread.is_alive(), "the server goes on with an agent that fails"


def test_an_answer_is_sent_before_the_process_ends(parent_of_two: Parent, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "_LAST_ANSWERS_SECONDS", SECONDS)
    slow, broken = parent_of_two.engines
    for engine in parent_of_two.engines:
        engine.may_start = threading.Semaphore(0)
    for number in range(2):
        parent_of_two.transfer(number)
    for engine in parent_of_two.engines:
        assert engine.starting.acquire(timeout=SECONDS), "a thread has no transfer"
    broken.may_start.release(1000)
    for count in range(1, MAX_FAILURES + 1):
        parent_of_two.started(count, broken).outcome = False
        assert parent_of_two.answer().outcome is Outcome.FAILED
        if count < MAX_FAILURES:
            parent_of_two.transfer(1 + count)
    parent_of_two.thread.join(0.2)
    assert parent_of_two.thread.is_alive(), "the process ends before its last answer"
    slow.outcome = True
    slow.may_start.release()
    assert parent_of_two.answer().outcome is Outcome.MOVED


def test_the_end_of_one_thread_ends_the_process(parent_of_two: Parent, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> Any:
        raise MemoryError

    for engine in parent_of_two.engines:
        monkeypatch.setattr(engine, "start", fail)
    for number in range(MAX_FAILURES - 1):
        parent_of_two.transfer(number)
        assert parent_of_two.answer().outcome is Outcome.FAILED
    assert parent_of_two.thread.is_alive(), "errors of one request are answered"
    parent_of_two.child.shutdown(socket.SHUT_WR)  # no answer can be sent
    parent_of_two.transfer(9)
    parent_of_two.thread.join(SECONDS)
    assert not parent_of_two.thread.is_alive(), "a server without its threads goes on"


def test_a_digest_is_computed_from_the_memory(parent: Parent) -> None:
    descriptor = os.memfd_create("memory")
    os.ftruncate(descriptor, 4096)
    packet = protocol.encode_request(Request(Operation.MAP, 1, memory=3))
    socket.send_fds(parent.connection, [packet], [descriptor])
    os.close(descriptor)
    assert parent.answer() == Answer(Outcome.DONE, 1)
    hashed = Item(NAME, 0, 100, memory=3, start=1000, hash_start=10)
    parent.send(2, Operation.LOAD, items=(hashed, hashed._replace(hash_start=NO_HASH), hashed._replace(name="none")))
    parent.started(2)
    parent.engine.memories[3][1000:1052] = content = os.urandom(52)  # 100 bytes less the head and the tail
    for transfer in parent.engine.started:
        transfer.outcome = True
    digest = xxhash.xxh3_128_digest(content[10:])
    wanted = (Result(Outcome.DONE, digest), Result(Outcome.DONE), Result(Outcome.MISS))
    assert parent.answer() == Answer(Outcome.MOVED, 2, results=wanted)


def test_loads_and_stores_take_turns(parent: Parent) -> None:
    engine = parent.engine
    engine.may_start = threading.Semaphore(0)
    for number in range(3):
        parent.transfer(number, Operation.STORE)
    assert engine.starting.acquire(timeout=SECONDS)
    for number in range(3, 5):
        parent.transfer(number)
    parent.send(5, Operation.SIZES, names=(NAME,))
    assert parent.answer().number == 5, "all requests before it wait in the queue now"
    for _ in range(5):
        engine.may_start.release()
    parent.started(5)
    assert [transfer.direction for transfer in engine.started] == ["WRITE", "READ", "WRITE", "READ", "WRITE"]
    for transfer in engine.started:
        transfer.outcome = False
    assert {parent.answer().outcome for _ in range(5)} == {Outcome.FAILED}


def test_several_failures_in_a_row_end_the_process(parent: Parent) -> None:
    for number in range(MAX_FAILURES):
        parent.transfer(number)
        parent.started(number + 1).outcome = False
        assert parent.answer().outcome is Outcome.FAILED
    parent.thread.join(SECONDS)
    assert not parent.thread.is_alive(), f"the server goes on after {MAX_FAILURES} failures"


def test_a_success_between_failures_keeps_the_process(parent: Parent) -> None:
    for number in range(3 * MAX_FAILURES):
        parent.transfer(number)
        parent.started(number + 1).outcome = number % MAX_FAILURES == 0
        parent.answer()
    assert parent.thread.is_alive()


def test_a_store_that_failed_leaves_no_file(parent: Parent, tmp_path: Path) -> None:
    parent.transfer(1, Operation.STORE)
    parent.started(1).outcome = False
    answer = parent.answer()
    assert (answer.outcome, answer.text) == (Outcome.FAILED, "NIXL wrote 0 of 100 bytes; is the file system full?")
    assert list((tmp_path / ".tmp-offload-core-nixl").iterdir()) == []


def test_a_write_that_was_cut_is_no_success(parent: Parent, tmp_path: Path) -> None:
    parent.transfer(1, Operation.STORE)
    parent.started(1).outcome = True  # it wrote nothing
    assert parent.answer().outcome is Outcome.FAILED
    assert (tmp_path / NAME).read_bytes() == b"x" * 100, "the object that was there before is still whole"


@pytest.mark.parametrize("reason", ["unreadable", "cut"])
def test_the_end_is_announced_before_the_answer_to_a_load_that_may_still_fill_other_memory(
    parent: Parent, folder: Path, reason: str
) -> None:
    """All other transfers are answered before the process ends."""
    parent.transfer(1)
    parent.started(1)
    parent.send(2, Operation.LOAD, items=(Item(NAME, 0, 100, memory=1),))
    bad = parent.started(2)
    if reason == "cut":
        os.truncate(folder / NAME, 50)
    bad.outcome = False
    assert parent.answer() == Answer(Outcome.ENDING, 2, text=f"NIXL could not read {NAME}")
    failed = Answer(Outcome.FAILED, 2, code=errno.EIO, text=FAILURE.format(folder))
    assert parent.answer() == (moved(2, Outcome.CORRUPT) if reason == "cut" else failed)
    assert parent.thread.is_alive(), "a transfer is in progress"
    parent.engine.started[0].outcome = True
    assert parent.answer() == moved(1, Outcome.DONE)
    parent.thread.join(SECONDS)
    assert not parent.thread.is_alive(), "the process ends"


def test_pieces_follow_each_other() -> None:
    item = Item(NAME, offset=4096, nbytes=148, memory=2, start=70)
    assert pieces_of(item) == [Piece(RING, 4096, 32), Piece(2, 70, 100), Piece(RING, 4128, 16)]
    assert pieces_of(item._replace(memory=RING)) == [Piece(RING, 4096, 148)]
    with pytest.raises(OSError, match="an object of 48 bytes has no content"):
        pieces_of(item._replace(nbytes=48))
