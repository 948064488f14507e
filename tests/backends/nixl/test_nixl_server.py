"""The loop of the child process, with a fake NIXL: transfers that fail, hang, or end out of order."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from offload_backend_nixl import protocol
from offload_backend_nixl.child.engine import Piece
from offload_backend_nixl.child.folder import FolderStorage
from offload_backend_nixl.child.server import MAX_FAILURES, Server, pieces_of
from offload_backend_nixl.protocol import RING, Answer, Operation, Outcome, Request

from tests.support.polling import wait_until

pytestmark = pytest.mark.needs_no_nixl

SECONDS = 20
NAME = f"{'ab' * 32}/full-u16/ab/abcd.kv"


class FakeEngine:
    """An engine whose transfers end as the test says."""

    def __init__(self) -> None:
        self.started: list[FakeTransfer] = []
        self.starting = threading.Semaphore(0)
        self.may_start = threading.Semaphore(1000)

    def start(self, direction: str, pieces: Sequence[Piece], target: Any) -> FakeTransfer:
        self.starting.release()
        assert self.may_start.acquire(timeout=SECONDS)
        self.started.append(FakeTransfer(direction))
        return self.started[-1]


class FakeTransfer:
    """A transfer that is in progress until the test ends it."""

    def __init__(self, direction: str) -> None:
        self.direction = direction
        self.outcome: bool | None = None

    def poll(self) -> bool | None:
        return self.outcome


class Parent:
    """The parent's end, and the server on a thread."""

    def __init__(self, root: Path) -> None:
        self.connection, self.child = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.connection.settimeout(SECONDS)
        self.engine = FakeEngine()
        storage = FolderStorage(str(root), "writer", create=True)
        server = Server(self.child, storage, self.engine)  # type: ignore[arg-type]
        self.thread = threading.Thread(target=server.run)
        self.thread.start()

    def send(self, number: int, operation: Operation, **fields: Any) -> None:
        self.connection.send(protocol.encode_request(Request(operation, number, **fields)))

    def transfer(self, number: int, operation: Operation = Operation.LOAD, offset: int = 0) -> None:
        self.send(number, operation, offset=offset, nbytes=100, names=(NAME,))

    def answer(self) -> Answer:
        return protocol.decode_answer(self.connection.recv(protocol.MAX_PACKET_BYTES))

    def started(self, count: int) -> FakeTransfer:
        """Wait until so many transfers have started, and return the last."""
        wait_until(lambda: len(self.engine.started) == count, f"no {count} transfers have started")
        return self.engine.started[-1]


@pytest.fixture
def parent(tmp_path: Path) -> Iterator[Parent]:
    path = tmp_path / NAME
    path.parent.mkdir(parents=True)
    path.write_bytes(b"x" * 100)
    parent = Parent(tmp_path)
    yield parent
    parent.connection.close()
    parent.thread.join(SECONDS)
    parent.child.close()
    assert not parent.thread.is_alive(), "the server goes on after the parent's end"


def test_transfers_end_out_of_order(parent: Parent) -> None:
    parent.transfer(1)
    first = parent.started(1)
    parent.transfer(2)
    second = parent.started(2)
    second.outcome = True
    assert parent.answer() == Answer(Outcome.DONE, 2)
    parent.send(3, Operation.SIZES, names=(NAME, "none"))
    assert parent.answer() == Answer(Outcome.SIZES, 3, sizes=(100, -1)), "a question waits for no transfer"
    first.outcome = True
    assert parent.answer() == Answer(Outcome.DONE, 1)


def test_a_question_overtakes_transfers_that_have_not_begun(parent: Parent) -> None:
    """A transfer may keep the thread, as the plugin POSIX does."""
    engine = parent.engine
    engine.may_start = threading.Semaphore(0)
    parent.transfer(1)
    assert engine.starting.acquire(timeout=SECONDS)
    parent.transfer(2)
    parent.send(3, Operation.SIZES, names=(NAME,))
    engine.may_start.release()
    assert parent.answer() == Answer(Outcome.SIZES, 3, sizes=(100,))
    engine.may_start.release()
    parent.started(2)
    for number, transfer in enumerate(engine.started, 1):
        transfer.outcome = True
        assert parent.answer() == Answer(Outcome.DONE, number)


def test_loads_and_stores_take_turns(parent: Parent) -> None:
    engine = parent.engine
    engine.may_start = threading.Semaphore(0)
    for number in range(3):
        parent.transfer(number, Operation.STORE)
    assert engine.starting.acquire(timeout=SECONDS)
    for number in range(3, 5):
        parent.transfer(number)
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


def test_no_answer_follows_a_load_that_may_still_fill_other_memory(parent: Parent) -> None:
    parent.send(1, Operation.LOAD, nbytes=100, memory=1, names=(NAME,))
    parent.started(1).outcome = False
    parent.thread.join(SECONDS)
    assert not parent.thread.is_alive(), "the process ends"
    parent.connection.setblocking(False)
    with pytest.raises(BlockingIOError):
        parent.answer()


def test_pieces_follow_each_other() -> None:
    request = Request(Operation.LOAD, 1, offset=4096, nbytes=148, memory=2, start=70, names=(NAME,))
    assert pieces_of(request) == [Piece(RING, 4096, 32), Piece(2, 70, 100), Piece(RING, 4128, 16)]
    assert pieces_of(request._replace(memory=RING)) == [Piece(RING, 4096, 148)]
    with pytest.raises(OSError, match="an object of 48 bytes has no content"):
        pieces_of(request._replace(nbytes=48))
