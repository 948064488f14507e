"""The messages between the engine's process and the child: all that is sent arrives, and nothing else is accepted."""

from __future__ import annotations

from typing import Any

import hypothesis
import pytest
from hypothesis import strategies as st
from offload_backend_nixl import protocol
from offload_backend_nixl.protocol import (
    NO_HASH,
    RING,
    Answer,
    Entry,
    Item,
    Operation,
    Outcome,
    ProtocolError,
    Request,
    Result,
)

pytestmark = pytest.mark.needs_no_nixl

U64 = st.integers(0, 2**64 - 1)
NAME = st.text(st.characters(exclude_categories=["Cs"]), max_size=150)
NO_NAMES: st.SearchStrategy[tuple[str, ...]] = st.just(())
MEMORY = st.integers(0, protocol.MAX_MEMORIES)
TRANSFERS = st.sampled_from([Operation.LOAD, Operation.STORE])
QUESTIONS = st.sampled_from([Operation.SIZES, Operation.DELETE])


def requests(operations: st.SearchStrategy[Operation], **fields: st.SearchStrategy[Any]) -> st.SearchStrategy[Request]:
    return st.fixed_dictionaries({"operation": operations, "number": U64, **fields}).map(lambda drawn: Request(**drawn))


I63 = st.integers(0, 2**63 - 1)
IN_RING = st.tuples(NAME, U64, U64).map(lambda fields: Item(*fields))
OUTSIDE = st.tuples(NAME, U64, I63, st.integers(1, 2**16 - 1), U64).map(lambda fields: Item(*fields))
HASHED = st.builds(lambda item, part: item._replace(hash_start=int(part * item.nbytes)), OUTSIDE, st.floats(0, 0.5))
ITEMS = st.lists(IN_RING | OUTSIDE | HASHED, min_size=1, max_size=20).map(tuple)

REQUESTS = (
    requests(TRANSFERS, items=ITEMS)
    | requests(QUESTIONS, names=st.lists(NAME, max_size=20).map(tuple))
    | requests(st.just(Operation.LIST), names=NO_NAMES | st.tuples(NAME))
    | requests(st.just(Operation.CONFIGURE), text=NAME)
    | requests(st.just(Operation.MAP), memory=MEMORY)
)

ENTRY = st.tuples(NAME, U64, st.floats(allow_nan=False)).map(lambda fields: Entry(*fields))
SIZES = st.lists(st.integers(-1, 2**63 - 1), max_size=20).map(tuple)
ENTRIES = st.lists(ENTRY, min_size=1, max_size=9).map(tuple)
RESULT = st.builds(
    Result,
    st.sampled_from([Outcome.DONE, Outcome.MISS, Outcome.CORRUPT, Outcome.REJECTED]),
    st.just(b"") | st.binary(min_size=protocol.DIGEST_BYTES, max_size=protocol.DIGEST_BYTES),
)
RESULTS = st.lists(RESULT, max_size=20).map(tuple)
WITH_TEXT = (Outcome.FAILED, Outcome.ENDING)
ANSWERS = (
    U64.map(lambda number: Answer(Outcome.DONE, number))
    | st.tuples(U64, RESULTS).map(lambda drawn: Answer(Outcome.MOVED, drawn[0], results=drawn[1]))
    | st.tuples(U64, st.integers(0, 2**32 - 1), NAME).map(
        lambda drawn: Answer(Outcome.FAILED, drawn[0], code=drawn[1], text=drawn[2])
    )
    | st.tuples(U64, NAME).map(lambda drawn: Answer(Outcome.ENDING, drawn[0], text=drawn[1]))
    | st.tuples(U64, SIZES).map(lambda drawn: Answer(Outcome.SIZES, drawn[0], sizes=drawn[1]))
    | st.tuples(U64, ENTRIES, st.booleans()).map(
        lambda drawn: Answer(Outcome.ENTRIES, drawn[0], entries=drawn[1], more=drawn[2])
    )
)


@hypothesis.given(REQUESTS)
def test_a_request_arrives_as_it_was_sent(request_: Request) -> None:
    assert protocol.decode_request(protocol.encode_request(request_)) == request_


@hypothesis.given(ANSWERS)
def test_an_answer_arrives_as_it_was_sent(answer: Answer) -> None:
    assert protocol.decode_answer(protocol.encode_answer(answer)) == answer


@hypothesis.given(st.binary(max_size=300))
def test_random_packets_are_refused_or_understood(packet: bytes) -> None:
    for decode, encode in (
        (protocol.decode_request, protocol.encode_request),
        (protocol.decode_answer, protocol.encode_answer),
    ):
        try:
            message = decode(packet)
        except ProtocolError:
            continue
        if not (isinstance(message, Answer) and message.outcome in WITH_TEXT):  # its text is mended
            assert encode(message) == packet, "a packet with a second meaning"  # type: ignore[arg-type]


@hypothesis.given(ANSWERS, st.data())
def test_answers_that_are_cut_or_longer_are_refused(answer: Answer, data: st.DataObject) -> None:
    packet = protocol.encode_answer(answer)
    hypothesis.assume(answer.outcome not in WITH_TEXT)  # a reason may end anywhere
    with pytest.raises(ProtocolError):
        protocol.decode_answer(packet[: data.draw(st.integers(0, len(packet) - 1))])
    with pytest.raises(ProtocolError):
        protocol.decode_answer(packet + b"\0")


@hypothesis.given(ANSWERS, st.data())
def test_answers_with_changed_bits_are_refused_or_understood(answer: Answer, data: st.DataObject) -> None:
    packet = bytearray(protocol.encode_answer(answer))
    for _ in range(data.draw(st.integers(1, 4))):
        packet[data.draw(st.integers(0, len(packet) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    try:
        changed = protocol.decode_answer(bytes(packet))
    except ProtocolError:
        return
    assert all(size >= protocol.ABSENT for size in changed.sizes)


@pytest.mark.parametrize(
    "request_",
    [
        Request(Operation.SIZES, 1, names=("x" * 601,)),
        Request(Operation.CONFIGURE, 1, text="x" * protocol.MAX_PACKET_BYTES),
        Request(Operation.SIZES, 1, names=("x" * 600,) * 200),
    ],
)
def test_a_request_that_is_too_long_is_not_sent(request_: Request) -> None:
    with pytest.raises(ProtocolError, match="at most"):
        protocol.encode_request(request_)


def test_the_largest_request_and_answer_fit_into_a_packet() -> None:
    names = ("x" * protocol.MAX_NAME_BYTES,) * protocol.MAX_NAMES
    items = tuple(Item(name, 2**64 - 1, 2**63 - 1, 1, 2**64 - 1, 5) for name in names)
    for request in (Request(Operation.DELETE, 1, names=names), Request(Operation.LOAD, 1, items=items)):
        assert protocol.decode_request(protocol.encode_request(request)) == request
    entries = tuple(Entry(name, 1, 0.0) for name in names[: protocol.MAX_ENTRIES])
    answer = Answer(Outcome.ENTRIES, 1, entries=entries, more=True)
    assert protocol.decode_answer(protocol.encode_answer(answer)) == answer


def test_a_long_reason_is_cut() -> None:
    answer = protocol.decode_answer(protocol.encode_answer(Answer(Outcome.FAILED, 1, code=5, text="é" * 5000)))
    assert answer.text.startswith("éé")
    assert len(answer.text.encode()) <= protocol.MAX_TEXT_BYTES + 2  # a cut letter is replaced


@pytest.mark.parametrize("operation", [Operation.LOAD, Operation.STORE])
def test_a_transfer_has_objects(operation: Operation) -> None:
    with pytest.raises(ProtocolError, match=f"{operation.name} of no objects"):
        protocol.decode_request(protocol.encode_request(Request(operation, 1)))


@pytest.mark.parametrize(("memory", "hash_start"), [(RING, 0), (1, NO_HASH - 1), (1, 101)])
def test_a_digest_is_one_of_bytes_in_other_memory_than_the_ring(memory: int, hash_start: int) -> None:
    item = Item("a", 0, 100, memory, 0, hash_start)
    with pytest.raises(ProtocolError, match=f"a digest from byte {hash_start} on, of an object of 100 bytes"):
        protocol.decode_request(protocol.encode_request(Request(Operation.LOAD, 1, items=(item,))))


@pytest.mark.parametrize("result", [Result(Outcome.FAILED), Result(Outcome.DONE, b"short"), Result(Outcome.MOVED)])
def test_a_transfer_ends_with_an_outcome_and_a_whole_digest(result: Result) -> None:
    packet = protocol.encode_answer(Answer(Outcome.MOVED, 1, results=(result,)))
    with pytest.raises(ProtocolError, match=f"ended with {result.outcome.name} and a digest of {len(result.digest)}"):
        protocol.decode_answer(packet)


@pytest.mark.parametrize("outcome", [Outcome.MISS, Outcome.CORRUPT])
def test_the_end_of_one_transfer_is_no_answer(outcome: Outcome) -> None:
    with pytest.raises(ProtocolError, match=outcome.name):
        protocol.decode_answer(protocol.encode_answer(Answer(outcome, 1)))


def test_a_listing_without_entries_cannot_go_on() -> None:
    packet = protocol.encode_answer(Answer(Outcome.ENTRIES, 1, more=True))
    with pytest.raises(ProtocolError, match="goes on"):
        protocol.decode_answer(packet)
