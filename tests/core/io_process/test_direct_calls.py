"""Calls without an event loop: each has one end, whatever the other side, the rings and the threads do."""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Iterator
from functools import partial

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from offload_core.io_process import protocol
from offload_core.io_process.direct_calls import DirectCalls
from offload_core.io_process.messages import Lane, RingPair, make_rings
from offload_core.io_process.protocol import Kind, Message
from offload_core.runtime.doorbell import Doorbell
from offload_core.tiers.storage import StorageAwayError
from tests.support.random_examples import examples

BIG = 200 * 1024
"""Five of these fill a ring."""


class Border:
    """Both sides of the direct lane."""

    def __init__(self) -> None:
        self.memory = make_rings()
        self.bells = Doorbell(), Doorbell()
        self.damage: list[Exception] = []
        rings = RingPair(self.memory, Lane.DIRECT, to_process=True)
        self.order: list[Message | Exception] = []
        """All messages of the process but answers, and what a test adds."""
        self.calls = DirectCalls(rings, *self.bells, self.order.append, self.damage.append)
        self.process = RingPair(self.memory, Lane.DIRECT, to_process=False)
        self.requests: deque[Message] = deque()
        self.ends: dict[int, list[Message | Exception]] = {}

    def send(self, nbytes: int = 0) -> int:
        number = len(self.ends)
        self.ends[number] = []
        try:
            self.calls.send(Kind.LOAD, 1, number.to_bytes(4, "little") + bytes(nbytes), self.ends[number].append)
        except BaseException:
            del self.ends[number]
            raise
        return number

    def take_requests(self) -> None:
        while (frame := self.process.reader.read()) is not None:
            self.requests.append(protocol.parse(frame))

    def answer(self, request: Message, *, works: bool = True) -> bool:
        body = bytes(request.body[:4]) if works else protocol.pack_error(ValueError("no"))
        kind = Kind.DONE if works else Kind.FAILED
        return self.process.writer.try_write(protocol.message(kind, request.tier, request.call, body))

    def close(self) -> None:
        self.calls.close(OSError("gone"))
        for bell in self.bells:
            bell.close()
        self.memory.close()


@pytest.fixture
def border() -> Iterator[Border]:
    border = Border()
    yield border
    border.close()


def test_an_answer_ends_its_call_and_rings(border: Border) -> None:
    first, second = border.send(), border.send()
    border.take_requests()
    assert border.answer(border.requests[1])
    assert border.answer(border.requests[0], works=False)
    border.calls.receive()
    (loaded,), (failed,) = border.ends[second], border.ends[first]
    assert isinstance(loaded, Message)
    assert int.from_bytes(loaded.body, "little") == second
    assert repr(failed) == "ValueError('no')"
    assert not border.calls.has_calls


def test_a_thread_that_waits_wakes_though_another_takes_the_answers(border: Border) -> None:
    (bell, _), call = border.bells, border.send()
    border.calls.receive_for_another_thread()
    assert not bell.wait(0), "there was nothing"
    border.take_requests()
    assert border.answer(border.requests[0])
    border.calls.clear_bell()  # by the thread that is about to wait
    border.calls.receive_for_another_thread()
    assert border.ends[call]
    assert bell.wait(0)


def test_a_thread_that_waits_wakes_when_the_process_is_gone(border: Border) -> None:
    (bell, _), call = border.bells, border.send()
    border.calls.clear_bell()
    border.calls.close(OSError("gone"))
    assert [str(end) for end in border.ends[call]] == ["gone"]
    assert bell.wait(0)


def test_calls_wait_for_room_in_the_ring(border: Border) -> None:
    for _ in range(12):
        border.send(BIG)
    border.take_requests()
    assert len(border.requests) < 12
    for _ in range(12):
        border.calls.receive()
        border.take_requests()
    assert [int.from_bytes(request.body[:4], "little") for request in border.requests] == list(range(12))


def test_a_call_that_no_ring_can_hold_is_its_senders_error(border: Border) -> None:
    with pytest.raises(ValueError, match="bytes does not fit; a ring takes"):
        border.send(Lane.DIRECT.value)
    assert not border.calls.has_calls
    border.send()
    border.take_requests()
    assert len(border.requests) == 1


def test_a_process_that_will_end_takes_no_calls_and_still_answers(border: Border) -> None:
    border.send()
    border.take_requests()
    border.calls.refuse()
    with pytest.raises(StorageAwayError, match="is being replaced"):
        border.send()
    border.answer(border.requests[0])
    border.calls.receive()
    assert len(border.ends[0]) == 1


def test_damaged_rings_are_reported_once_and_their_calls_end_with_the_process(border: Border) -> None:
    border.send()
    border.process.writer.try_write(b"\xff" * 40)  # no such kind of message
    border.calls.receive()
    border.calls.receive()
    assert len(border.damage) == 1
    assert border.ends[0] == [], "a thread of the process may still write into its memory"
    border.calls.close(OSError("gone"))
    assert [str(end) for end in border.ends[0]] == ["gone"]


def test_answers_from_before_the_end_of_the_process_count(border: Border) -> None:
    border.send()
    border.send()
    border.take_requests()
    border.answer(border.requests[0])
    border.calls.close(OSError("gone"))
    assert isinstance(border.ends[0][0], Message)
    assert [str(end) for end in border.ends[1]] == ["gone"]


def test_an_end_that_cannot_be_handled_harms_no_other(border: Border, caplog: pytest.LogCaptureFixture) -> None:
    def raises(_: object) -> None:
        raise ZeroDivisionError("a defect")

    border.calls.send(Kind.LOAD, 1, bytes(4), raises)
    border.send()
    border.take_requests()
    for request in border.requests:
        border.answer(request)
    border.calls.receive()
    assert len(border.ends[0]) == 1
    assert "this is a defect" in caplog.text


def test_threads_share_the_lane() -> None:
    border = Border()
    ended: Counter[int] = Counter()
    stop, lock = threading.Event(), threading.Lock()

    def serve() -> None:
        while not stop.is_set():
            border.take_requests()
            while border.requests and border.answer(border.requests[0]):
                border.requests.popleft()

    def receive() -> None:
        while not stop.is_set():
            border.calls.receive()

    def count_end(number: int, _: object) -> None:
        with lock:
            ended[number] += 1

    def send(first: int) -> None:
        for number in range(first, first + 500):
            border.calls.send(Kind.LOAD, 1, number.to_bytes(4, "little"), partial(count_end, number))

    helpers = [threading.Thread(target=one) for one in (serve, receive, receive)]
    senders = [threading.Thread(target=send, args=(1000 * index,)) for index in range(2)]
    for thread in (*helpers, *senders):
        thread.start()
    for thread in senders:
        thread.join()
    while border.calls.has_calls:
        border.calls.receive()
    stop.set()
    for thread in helpers:
        thread.join()
    border.close()
    assert set(ended.values()) == {1}
    assert len(ended) == 1000


class DirectCallMachine(RuleBasedStateMachine):
    """Sends, answers in any order, and the end of the process. Oracle: a call ends once, in its answer or the error."""

    def __init__(self) -> None:
        super().__init__()
        self.border = Border()
        self.expected: dict[int, bool] = {}
        """Per call that the process has answered, whether it worked."""
        self.is_over = self.refuses = False

    @precondition(lambda self: not self.refuses)
    @rule(nbytes=st.sampled_from([0, 100, BIG]))
    def send(self, nbytes: int) -> None:
        self.border.send(nbytes)

    @precondition(lambda self: self.refuses)
    @rule()
    def send_in_vain(self) -> None:
        with pytest.raises(StorageAwayError):
            self.border.send()

    @precondition(lambda self: not self.is_over)
    @rule(place=st.integers(0, 20), works=st.booleans())
    def answer(self, place: int, works: bool) -> None:
        self.border.take_requests()
        if self.border.requests:
            request = self.border.requests[place % len(self.border.requests)]
            if self.border.answer(request, works=works):
                self.border.requests.remove(request)
                self.expected[int.from_bytes(request.body[:4], "little")] = works

    @rule()
    def receive(self) -> None:
        self.border.calls.receive()

    @rule()
    def refuse(self) -> None:
        self.border.calls.refuse()
        self.refuses = True

    @rule()
    def end(self) -> None:
        self.border.calls.close(OSError("gone"))
        self.refuses = self.is_over = True

    @invariant()
    def each_call_has_its_own_end(self) -> None:
        for number, ends in self.border.ends.items():
            assert len(ends) <= 1
            for end in ends:
                if isinstance(end, Message):
                    assert self.expected[number]
                    assert int.from_bytes(end.body, "little") == number
                else:
                    assert str(end) == ("gone" if self.expected.get(number) is None else "no")
            if self.is_over:
                assert len(ends) == 1

    def teardown(self) -> None:
        self.border.close()
        assert all(len(ends) == 1 for ends in self.border.ends.values())


TestDirectCallMachine = DirectCallMachine.TestCase
TestDirectCallMachine.settings = examples(200)


def test_evictions_are_told_before_the_answer_of_their_store(border: Border) -> None:
    border.calls.send(Kind.STORE, 1, b"", border.order.append)
    border.take_requests()
    (request,) = border.requests
    for message in (
        protocol.message(Kind.EVICTED, 1, body=protocol.pack_keys([])),
        protocol.message(Kind.DONE, 1, request.call),
    ):
        assert border.process.writer.try_write(message)
    border.calls.receive()
    assert [one.kind for one in border.order if isinstance(one, Message)] == [Kind.EVICTED, Kind.DONE]
