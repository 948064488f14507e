"""Messages between the processes: what one side writes the other reads, and damage has a name."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from offload_core.api import events
from offload_core.api.backend import LoadOutcome, StoreOutcome
from offload_core.api.errors import BackendError, ConfigError, PluginError
from offload_core.api.keys import ObjectKey
from offload_core.io_process import protocol
from offload_core.io_process.protocol import Kind, Piece, ProtocolError, Reader
from offload_core.io_process.serving.client import _UsedTier
from offload_core.io_process.serving.tier import ServedTier
from offload_core.tiers.calls.lent_objects import WantedObject
from offload_core.tiers.object_io import LoadEnd
from offload_core.tiers.storage import StoreEnd

KEYS = st.builds(
    ObjectKey,
    st.text("0123456789abcdef", min_size=64, max_size=64),
    st.sampled_from(["full-u256", "window-u16", "state"]),
    st.binary(min_size=1, max_size=64),
)
NUMBERS = st.integers(0, 2**63)
PIECES = st.builds(Piece, NUMBERS, NUMBERS, NUMBERS | st.just(protocol.NO_PIECE), st.booleans(), st.booleans(), NUMBERS)
ENDS = st.builds(StoreEnd, st.sampled_from([None, *StoreOutcome]), NUMBERS, st.booleans())
WANTED = st.builds(WantedObject, KEYS, NUMBERS, st.booleans())
LOAD_ENDS = st.builds(LoadEnd, st.lists(st.sampled_from(LoadOutcome)), NUMBERS, st.integers(0, 2**32 - 1))


def read(body: bytes) -> Reader:
    return Reader(memoryview(body))


@given(keys=st.lists(KEYS), pieces=st.lists(PIECES), flags=st.lists(st.booleans()))
def test_the_parts_of_a_request_are_read_as_they_were_written(
    keys: list[ObjectKey], pieces: list[Piece], flags: list[bool]
) -> None:
    body = read(protocol.pack_keys(keys) + protocol.pack_pieces(pieces) + protocol.pack_flags(flags))
    assert body.keys() == keys
    assert body.pieces(len(pieces)) == pieces
    assert body.flags(len(flags)) == flags


@given(end=LOAD_ENDS, ends=st.lists(ENDS), change=st.integers(-(2**31), 2**31 - 1))
def test_the_parts_of_an_answer_are_read_as_they_were_written(
    end: LoadEnd, ends: Sequence[StoreEnd], change: int
) -> None:
    body = read(protocol.pack_loaded(end) + protocol.pack_stored(ends) + protocol.pack_change(change))
    assert body.loaded(len(end.outcomes)) == end
    assert body.stored(len(ends)) == ends
    assert body.change() == change


@given(wanted=st.lists(WANTED), number=NUMBERS)
def test_the_objects_of_a_loan_are_read_as_they_were_written(wanted: list[WantedObject], number: int) -> None:
    body = read(protocol.pack_lending(number) + protocol.pack_wanted(wanted))
    assert body.lending() == number
    assert body.wanted() == wanted


@given(
    borrowed=st.lists(st.tuples(st.sampled_from([None, *LoadOutcome]), NUMBERS)),
    reserved=st.lists(st.tuples(st.sampled_from([None, *StoreOutcome]), NUMBERS)),
)
def test_the_answers_of_loans_and_reservations_are_read_as_they_were_written(
    borrowed: list[tuple[LoadOutcome | None, int]], reserved: list[tuple[StoreOutcome | None, int]]
) -> None:
    loan = [outcome for outcome, _ in borrowed], [offset for _, offset in borrowed]
    grant = [outcome for outcome, _ in reserved], [offset for _, offset in reserved]
    body = read(protocol.pack_borrowed(*loan) + protocol.pack_reserved(*grant))
    assert body.borrowed(len(borrowed)) == loan
    assert body.reserved(len(reserved)) == grant


@pytest.mark.parametrize("answer", ["borrowed", "reserved"])
def test_an_unknown_outcome_of_a_loan_is_an_error(answer: str) -> None:
    with pytest.raises(ProtocolError, match="no such outcome"):
        getattr(read(b"\x09" + bytes(8)), answer)(1)


@given(kind=st.sampled_from(Kind), tier=st.integers(0, 2**16 - 1), call=NUMBERS, body=st.binary())
def test_the_head_of_a_message_names_its_kind_its_tier_and_its_call(
    kind: Kind, tier: int, call: int, body: bytes
) -> None:
    assert protocol.parse(protocol.message(kind, tier, call, body)) == (kind, tier, call, memoryview(body))


@given(keys=st.lists(KEYS, min_size=1), pieces=st.lists(PIECES, min_size=1), data=st.data())
def test_damaged_messages_are_errors_with_a_name_or_other_values(
    keys: list[ObjectKey], pieces: list[Piece], data: st.DataObject
) -> None:
    whole = protocol.message(Kind.LOAD, 1, 2, protocol.pack_keys(keys) + protocol.pack_pieces(pieces))
    length = data.draw(st.integers(0, len(whole)))
    damaged = bytearray(whole[:length])
    for place in data.draw(st.lists(st.integers(0, max(length - 1, 0)), max_size=4)) if length else ():
        damaged[place] = data.draw(st.integers(0, 255))
    try:
        body = Reader(protocol.parse(bytes(damaged)).body)
        body.pieces(len(body.keys()))
    except ProtocolError:
        return
    assert length == len(whole) or len(damaged) < len(whole)


@pytest.mark.parametrize(
    "error",
    [
        FileNotFoundError(2, "No such file or directory"),
        FileNotFoundError(2, "No such file or directory", "/a/file"),
        OSError("the share is gone"),
        TimeoutError("no answer"),
        BackendError("the pool is closed"),
        PluginError("no hook"),
        ConfigError(["path: is a file", "capacity: too small"], "backends"),
        ZeroDivisionError("division by zero"),
    ],
    ids=repr,
)
def test_an_error_has_the_same_name_kind_and_text_on_the_other_side(error: Exception) -> None:
    arrived = read(protocol.pack_error(error)).error()
    assert type(arrived).__name__ == type(error).__name__
    assert str(arrived) == str(error)
    for kind in (OSError, BackendError, ConfigError, PluginError):
        assert isinstance(arrived, kind) == isinstance(error, kind)
    if isinstance(error, OSError) and error.filename is None:
        assert isinstance(arrived, OSError)
        assert arrived.errno == error.errno


def test_an_error_class_of_a_plugin_keeps_its_name_and_its_kind() -> None:
    class ShareError(OSError):
        pass

    arrived = read(protocol.pack_error(ShareError("stale"))).error()
    assert (type(arrived).__name__, str(arrived)) == ("ShareError", "stale")
    assert isinstance(arrived, OSError)


def test_a_long_text_is_cut() -> None:
    assert len(str(read(protocol.pack_error(ValueError("x" * 100_000))).error())) < 5000


@given(keys=st.lists(KEYS), count=st.integers(0, 10), seconds=st.floats(0, 1e6), cause=st.text())
def test_an_event_is_the_same_on_the_other_side(keys: list[ObjectKey], count: int, seconds: float, cause: str) -> None:
    sent: list[events.Event] = [
        events.TierOpened("tier", seconds),
        events.TierClosed("tier"),
        events.TierFailing("tier", "store", cause),
        events.TierRecovered("tier", "load"),
        events.TierUnavailable("tier", cause),
        events.TierAvailable("tier", seconds),
        events.LoadsEnded("tier", count, 1, 2, 3, 4, seconds),
        events.StoresEnded("tier", count, 1, 2, 3, 4, seconds),
        events.ObjectsDamaged("tier", tuple(keys)),
        events.ObjectsEvicted("tier", tuple(keys)),
    ]
    assert {type(event) for event in sent} == set(events.Event.__subclasses__())
    assert [read(protocol.pack_event(event)).event() for event in sent] == sent


@pytest.mark.parametrize(
    "body", [b"", b"[]", b'["TierOpened", {}]', b'["Nothing", {"tier": "x"}]', b'["TierClosed", 3]']
)
def test_a_damaged_event_is_an_error_with_a_name(body: bytes) -> None:
    with pytest.raises(ProtocolError, match="event"):
        read(body).event()


def test_the_evictions_of_one_store_fit_into_messages() -> None:
    class Tier:
        def make_storage(self, user: object, half: str) -> None:
            pass

    evicted = [ObjectKey("ab" * 32, "full-u16", number.to_bytes(32, "big")) for number in range(34_000)]
    told: list[bytes] = []
    used = _UsedTier(0, cast("ServedTier", Tier()), "", lambda lane, kind, body: told.append(body))
    for tell in (used.evicted, used.evicted_by_others):
        tell(evicted)
        parts = [Reader(memoryview(body)).keys() for body in told]
        assert list(chain.from_iterable(parts)) == evicted
        assert max(map(len, told)) < 1_000_000
        told.clear()
