"""Rings of messages: each arrives once, whole and in order, or not at all, whatever a peer does to the memory."""

from __future__ import annotations

import mmap
import os
import signal
import struct
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from random import Random
from typing import cast

import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from offload_core.api.memory.shared_memory import SharedMemory
from offload_core.runtime import message_ring
from offload_core.runtime.doorbell import Doorbell
from offload_core.runtime.message_ring import (
    FRAME_OVERHEAD_BYTES,
    OVERHEAD_BYTES,
    RingError,
    RingReader,
    RingWriter,
    format_ring,
)
from tests.support.random_examples import examples

SECONDS = 60
CAPACITIES = st.integers(3, 40).map(lambda words: 8 * words)
WRITE_POSITION, READ_POSITION = 128, 256


class Clock:
    def __init__(self) -> None:
        self.now = 5.0

    def __call__(self) -> float:
        return self.now


def region_of(capacity: int) -> memoryview:
    region = memoryview(mmap.mmap(-1, OVERHEAD_BYTES + capacity))
    format_ring(region)
    return region


def both_ends(region: memoryview, clock: Clock | None = None) -> tuple[RingWriter, RingReader]:
    return RingWriter(region), RingReader(region, 1.0, clock or Clock())


def stored(region: memoryview, offset: int) -> int:
    """Return the position at an offset."""
    (position,) = struct.unpack_from("@Q", region, offset)
    assert isinstance(position, int)
    return position


def frame_bytes(nbytes: int) -> int:
    return (FRAME_OVERHEAD_BYTES + nbytes + 7) // 8 * 8


@examples(500)
@given(CAPACITIES, st.lists(st.sampled_from(["write", "write", "read"]), max_size=60), st.data())
def test_every_message_arrives_once_and_in_order(capacity: int, calls: list[str], data: st.DataObject) -> None:
    region = region_of(capacity)
    writer, reader = both_ends(region)
    assert writer.capacity_bytes == reader.capacity_bytes == capacity
    assert writer.max_payload_bytes == reader.max_payload_bytes == capacity - FRAME_OVERHEAD_BYTES
    oracle: deque[bytes] = deque()
    used = 0
    for call in calls:
        if call == "read":
            payload = oracle.popleft() if oracle else None
            assert reader.read() == payload
            used -= 0 if payload is None else frame_bytes(len(payload))
        else:
            payload = data.draw(st.binary(max_size=writer.max_payload_bytes))
            fits = used + frame_bytes(len(payload)) <= capacity
            assert writer.try_write(payload) is fits
            if fits:
                oracle.append(payload)
                used += frame_bytes(len(payload))
        assert stored(region, WRITE_POSITION) - stored(region, READ_POSITION) == used
    while oracle:
        assert reader.read() == oracle.popleft()
    assert reader.read() is None


@pytest.mark.parametrize("kind", [bytes, bytearray, memoryview, lambda payload: memoryview(payload).cast("H")])
def test_all_kinds_of_payloads(kind: type[bytes]) -> None:
    writer, reader = both_ends(region_of(64))
    assert writer.try_write(kind(b"abcdef"))
    assert reader.read() == b"abcdef"


def test_a_message_that_never_fits_is_refused_at_once_and_changes_nothing() -> None:
    writer, reader = both_ends(region_of(64))
    assert writer.try_write(b"x")
    with pytest.raises(ValueError, match="a message of 41 bytes does not fit; the ring takes 40 bytes"):
        writer.try_write(bytes(41))
    assert reader.read() == b"x"
    assert writer.try_write(bytes(40))
    assert not writer.try_write(b"")
    assert reader.read() == bytes(40)


def test_frames_that_are_not_visible_yet_are_waited_for_and_not_for_ever() -> None:
    region, clock = region_of(64), Clock()
    writer, reader = both_ends(region, clock)
    for payload in (b"first", b"the second, which wraps round the end"):
        before = bytes(region[OVERHEAD_BYTES:])
        assert writer.try_write(payload)
        after = bytes(region[OVERHEAD_BYTES:])
        changed = [offset for offset in range(0, len(after), 8) if before[offset:][:8] != after[offset:][:8]]
        region[OVERHEAD_BYTES:] = before  # as on a processor that has stored the position first
        assert reader.read() is None
        clock.now += 0.99
        for offset in changed:
            assert reader.read() is None
            region[OVERHEAD_BYTES + offset :][:8] = after[offset:][:8]
        assert reader.read() == payload
        assert reader.read() is None
    assert writer.try_write(b"third")
    region[OVERHEAD_BYTES:] = bytes(64)
    clock.now += 100  # it was not damaged in this time
    assert reader.read() is None
    clock.now += 1
    with pytest.raises(RingError, match=r"the sequence number is 0 in frame 2 at position 96, for 1\.0 s"):
        reader.read()
    with pytest.raises(RingError):
        reader.read()


def test_an_older_frame_at_the_same_place_is_not_the_next_one() -> None:
    region, clock = region_of(64), Clock()
    writer, reader = both_ends(region, clock)
    for payload in (b"same", b"same"):
        assert writer.try_write(payload)
        assert reader.read() == payload
    struct.pack_into("@Q", region, WRITE_POSITION, 96)  # the third frame would be where the first one is
    assert reader.read() is None
    clock.now += 1
    with pytest.raises(RingError, match="the sequence number is 0 in frame 2"):
        reader.read()


@pytest.mark.parametrize("length", [9, 33, 2**63, 2**64 - 1])
def test_an_impossible_length_is_named(length: int) -> None:
    region, clock = region_of(64), Clock()
    writer, reader = both_ends(region, clock)
    assert writer.try_write(b"12345678")
    struct.pack_into("@Q", region, OVERHEAD_BYTES, length)
    assert reader.read() is None
    clock.now += 1
    with pytest.raises(RingError, match=f"the length is {length} bytes in frame 0"):
        reader.read()


@pytest.mark.parametrize("position", [8, 24, 33, 104, 2**63, 2**64 - 8])
def test_an_impossible_write_position_is_named(position: int) -> None:
    region = region_of(64)
    writer, reader = both_ends(region)
    assert writer.try_write(b"12345678")
    assert reader.read() == b"12345678"
    struct.pack_into("@Q", region, WRITE_POSITION, position)
    with pytest.raises(RingError, match=f"the write position is {position}; it must be a multiple of 8 from 32 to 96"):
        reader.read()


@pytest.mark.parametrize("position", [0, 24, 33, 104, 2**63, 2**64 - 8])
def test_an_impossible_read_position_is_named(position: int) -> None:
    region = region_of(64)
    writer, reader = both_ends(region)
    assert writer.try_write(bytes(8))
    assert writer.try_write(bytes(8))
    assert reader.read() == bytes(8)
    assert writer.try_write(bytes(8))
    struct.pack_into("@Q", region, READ_POSITION, position)
    with pytest.raises(RingError, match=f"the read position is {position}; it must be a multiple of 8 from 32 to 96"):
        writer.try_write(bytes(8))


def check_that_nothing_wrong_is_read(reader: RingReader, expected: deque[bytes], clock: Clock) -> None:
    """Read until the ring is empty or known to be damaged."""
    try:
        for _ in range(2 * len(expected) + 2):
            payload = reader.read()
            clock.now += 1
            assert payload is None or (expected and payload == expected.popleft())
    except RingError:
        pass


@pytest.mark.parametrize("change", [0x01, 0x08, 0x80, 0xFF])
def test_no_changed_byte_makes_a_wrong_message(change: int) -> None:
    """Change each byte of a ring whose second frame wraps round the end, and whose third is an older one."""
    capacity = 104
    for offset in range(OVERHEAD_BYTES + capacity):
        region, clock = region_of(capacity), Clock()
        writer, reader = both_ends(region, clock)
        for _ in range(2):
            assert writer.try_write(b"older")
            assert reader.read() == b"older"
        expected = deque((b"12345678", b"abcdefghijk"))
        assert all(map(writer.try_write, expected))
        region[offset] ^= change
        check_that_nothing_wrong_is_read(reader, expected, clock)


@examples(1000)
@given(
    CAPACITIES,
    st.lists(
        st.sampled_from(["read", "tick"])
        | st.tuples(st.just("write"), st.integers(0, 60))
        | st.tuples(st.sampled_from([128, 256, 384]), st.integers(0, 47), st.integers(1, 255)),
        max_size=40,
    ),
)
def test_no_damage_at_any_moment_makes_a_wrong_message(capacity: int, events: list[tuple[object, ...] | str]) -> None:
    region, clock = region_of(capacity), Clock()
    writer, reader = both_ends(region, clock)
    expected: deque[bytes] = deque()
    content = Random(capacity)
    try:
        for event in events:
            match event:
                case "read":
                    payload = reader.read()
                    assert payload is None or (expected and payload == expected.popleft())
                case "tick":
                    clock.now += 0.6
                case "write", int(nbytes):
                    payload = content.randbytes(min(nbytes, writer.max_payload_bytes))
                    if writer.try_write(payload):
                        expected.append(payload)
                case int(begin), int(offset), int(change):
                    nbytes = 8 if begin < OVERHEAD_BYTES else capacity
                    region[begin + offset % nbytes] ^= change
    except RingError:
        pass
    check_that_nothing_wrong_is_read(reader, expected, clock)


class Hooked:
    """The words of a ring, with a call at each store."""

    def __init__(self, words: memoryview, on_store: Callable[[], object]) -> None:
        self._words = words
        self._on_store = on_store

    def __getitem__(self, word: int) -> int:
        return self._words[word]

    def __setitem__(self, word: int, value: int) -> None:
        self._words[word] = value
        self._on_store()


def test_a_frame_is_complete_before_its_position_is_published() -> None:
    writer, reader = both_ends(region_of(64))
    received: list[bytes | None] = []
    writer._words = cast(memoryview, Hooked(writer._words, lambda: received.append(reader.read())))
    sent = [b"first", b"the second, which wraps round the end"]
    assert all(map(writer.try_write, sent))
    assert received == sent


def test_a_message_is_copied_before_its_room_is_given_back() -> None:
    region = region_of(64)
    writer, reader = both_ends(region)

    def overwrite() -> None:
        region[OVERHEAD_BYTES:] = bytes(64)

    reader._words = cast(memoryview, Hooked(reader._words, overwrite))
    for payload in (b"first", b"the second, which wraps round the end"):
        assert writer.try_write(payload)
        assert reader.read() == payload


def test_a_message_is_checked_after_it_has_been_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    region = region_of(64)
    writer, reader = both_ends(region)

    def overwrite_after(payload: bytes, seed: int) -> int:
        checksum = xxhash.xxh3_64_intdigest(payload, seed)
        region[OVERHEAD_BYTES + FRAME_OVERHEAD_BYTES :] = bytes(64 - FRAME_OVERHEAD_BYTES)
        return checksum

    assert writer.try_write(b"right")
    monkeypatch.setattr(message_ring, "_checksum", overwrite_after)
    assert reader.read() == b"right"


def test_an_attaching_side_checks_the_ring() -> None:
    for end in (RingWriter, RingReader):
        unformatted = memoryview(mmap.mmap(-1, 4096))
        with pytest.raises(RingError, match=r"the region begins with 0x0, and a ring with 0x1[0-9a-f]+$"):
            end(unformatted)
        format_ring(unformatted)
        with pytest.raises(RingError, match="the ring is for 3712 bytes of frames, and the region for 3704"):
            end(unformatted[:-8])
        unformatted[7] += 1
        with pytest.raises(RingError, match="the region begins with 0x2"):
            end(unformatted)


def test_a_ring_has_one_writer_and_one_reader_in_its_life() -> None:
    region = region_of(64)
    writer, reader = both_ends(region)
    assert writer.try_write(b"x")
    with pytest.raises(RingError, match="the ring has had a writer, up to position 32"):
        RingWriter(region)
    assert reader.read() == b"x"
    with pytest.raises(RingError, match="the ring has had a reader, up to position 32"):
        RingReader(region)
    format_ring(region)
    writer, reader = both_ends(region)
    assert writer.try_write(b"y")
    assert reader.read() == b"y"


def test_the_region_is_writable_large_enough_and_aligned() -> None:
    region = memoryview(mmap.mmap(-1, 4096))
    with pytest.raises(ValueError, match="must be writable"):
        format_ring(region.toreadonly())
    with pytest.raises(ValueError, match="a region of 407 bytes is too small for a ring; the smallest has 408"):
        format_ring(region[:407])
    for offset in (1, 8, 64):
        with pytest.raises(ValueError, match="must begin at a multiple of 128 bytes"):
            format_ring(region[offset:])
    format_ring(region[128 : 128 + 408])
    writer, reader = both_ends(region[128 : 128 + 408])
    assert (writer.max_payload_bytes, reader.max_payload_bytes) == (0, 0)
    assert writer.try_write(b"")
    assert reader.read() == b""


# Two processes.

CHILD = """
import sys
from offload_core.runtime import message_ring
from offload_core.runtime.doorbell import Doorbell
from offload_core.runtime.message_ring import RingReader, RingWriter
from offload_core.api.memory.shared_memory import SharedMemory
memory, *bells = map(int, sys.argv[2:])
memory = SharedMemory.from_descriptor(memory)
here, there = map(Doorbell.from_descriptor, bells)
reader, writer = RingReader(memory.view[:4096]), RingWriter(memory.view[4096:])
"""
ECHO = """
frames = int(sys.argv[1])
while frames:
    here.clear()
    payload = reader.read()
    if payload is None:
        assert here.wait(60)
        continue
    answer = bytes(reversed(payload))
    while not writer.try_write(answer):
        assert here.wait(60)
        here.clear()
    there.ring()
    frames -= 1
"""
FLOOD = """
count = 0
there.ring()
while True:
    count += writer.try_write(b"%d " % count * (count % 50))
"""


@contextmanager
def child(program: str, frames: int) -> Iterator[tuple[subprocess.Popen[bytes], memoryview, Doorbell, Doorbell]]:
    """Start a process with the other ends of two rings; yield it, their memory, its doorbell and that of the test."""
    with closing(SharedMemory.create("rings", 8192)) as memory, closing(Doorbell()) as its, closing(Doorbell()) as ours:
        format_ring(memory.view[:4096])
        format_ring(memory.view[4096:])
        numbers = [memory.descriptor, its.fileno(), ours.fileno()]
        command = [sys.executable, "-c", CHILD + program, str(frames), *map(str, numbers)]
        process = subprocess.Popen(command, pass_fds=numbers)
        try:
            yield process, memory.view, its, ours
        finally:
            process.kill()
            process.wait()


def test_20_000_messages_to_another_process_and_back() -> None:
    frames, random = 20_000, Random(7)
    messages = [random.randbytes(random.choice((0, 1, 8, 200, 200, 1500))) for _ in range(frames)]
    unsent, unanswered = deque(messages), deque(messages)
    with child(ECHO, frames) as (process, view, its, ours):
        writer, reader = RingWriter(view[:4096]), RingReader(view[4096:])
        deadline = time.monotonic() + SECONDS
        while unanswered:
            ours.clear()
            while unsent and writer.try_write(unsent[0]):
                unsent.popleft()
            before = len(unanswered)
            while (answer := reader.read()) is not None:
                assert answer == unanswered.popleft()[::-1]
            its.ring()
            if len(unanswered) == before:
                assert ours.wait(SECONDS)
            assert time.monotonic() < deadline
        assert process.wait(SECONDS) == 0
        assert reader.read() is None


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_writer_that_ends_or_stops_at_any_moment_leaves_whole_messages(number: signal.Signals) -> None:
    with child(FLOOD, 0) as (process, view, _, ours):
        assert ours.wait(SECONDS)
        reader, count = RingReader(view[4096:]), 0
        while count < 2000:
            payload = reader.read()
            assert payload in (None, b"%d " % count * (count % 50))
            count += payload is not None
        os.kill(process.pid, number)
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WSTOPPED | os.WNOWAIT)
        while (payload := reader.read()) is not None:
            assert payload == b"%d " % count * (count % 50)
            count += 1
        assert stored(view[4096:], WRITE_POSITION) == stored(view[4096:], READ_POSITION)
