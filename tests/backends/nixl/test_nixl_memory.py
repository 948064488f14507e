"""The shared memory and the frame of an object in it."""

from __future__ import annotations

import os
import threading
import time

import hypothesis
import pytest
from hypothesis import strategies as st
from offload_backend_nixl import frame
from offload_backend_nixl.naming import key_of, name_of
from offload_backend_nixl.parent.ring import PAGE_BYTES, Ring, Slot

from offload_core.api.keys import ObjectKey
from offload_core.testing import strategies
from tests.backends.nixl.conftest import key
from tests.support.polling import wait_until

pytestmark = pytest.mark.needs_no_nixl

NUM_PAGES = 16


def make_ring() -> Ring:
    descriptor = os.memfd_create("ring")
    os.ftruncate(descriptor, NUM_PAGES * PAGE_BYTES)
    ring = Ring(descriptor, NUM_PAGES * PAGE_BYTES)
    os.close(descriptor)
    return ring


@pytest.fixture
def ring() -> Ring:
    return make_ring()


@hypothesis.given(st.lists(st.integers(0, 6 * PAGE_BYTES), max_size=40), st.randoms(use_true_random=False))
def test_slots_never_overlap_and_all_room_comes_back(sizes: list[int], random: object) -> None:
    ring = make_ring()
    held: list[Slot] = []
    for size in sizes:
        slot = ring.reserve(max(size, 1), 0.0)
        if slot is None:
            if held:
                ring.release(held.pop(random.randrange(len(held))))  # type: ignore[attr-defined]
            continue
        assert slot.offset + slot.nbytes <= ring.nbytes, "a slot ends behind the memory"
        for other in held:
            apart = slot.offset >= other.offset + other.nbytes or other.offset >= slot.offset + slot.nbytes
            assert apart, f"{slot} overlaps {other}"
        held.append(slot)
    for slot in held:
        ring.release(slot)
    whole = ring.reserve(ring.nbytes, 0.0)
    assert whole == Slot(0, ring.nbytes), "released room was lost"


def test_a_large_request_is_not_passed_by_small_ones(ring: Ring) -> None:
    first = ring.reserve(ring.nbytes // 2, 0.0)
    assert first is not None
    got: list[str] = []

    def reserve(name: str, nbytes: int) -> None:
        slot = ring.reserve(nbytes, time.monotonic() + 20)
        got.append(name)
        assert slot is not None, f"{name} got no room"
        ring.release(slot)

    large = threading.Thread(target=reserve, args=("large", ring.nbytes))
    large.start()
    wait_until(lambda: bool(ring._waiting), "the large request does not wait")
    assert ring.reserve(PAGE_BYTES, 0.0) is None, "a small request overtook the large one"
    small = threading.Thread(target=reserve, args=("small", PAGE_BYTES))
    small.start()
    ring.release(first)
    large.join()
    small.join()
    assert got == ["large", "small"]


def test_a_reservation_ends_at_its_time(ring: Ring) -> None:
    assert ring.reserve(ring.nbytes, 0.0) is not None
    began = time.monotonic()
    assert ring.reserve(1, began + 0.05) is None
    assert time.monotonic() - began < 5


@hypothesis.given(strategies.keys(), st.binary(max_size=100))
def test_a_frame_is_found_again(one: ObjectKey, content: bytes) -> None:
    memory = memoryview(bytearray(frame.HEAD_BYTES) + content + bytes(frame.OVERHEAD_BYTES - frame.HEAD_BYTES))
    frame.write_frame(memory, one, len(content))
    assert frame.is_whole(memory, one, len(content))
    assert memory[frame.HEAD_BYTES : frame.HEAD_BYTES + len(content)] == content
    other = one._replace(pack=one.pack + "x")
    assert not frame.is_whole(memory, other, len(content)), "an object of another key was taken for this one"
    longer = memoryview(bytes(memory) + b"\0")
    assert not frame.is_whole(longer, one, len(content) + 1), "an object of another size was taken for this one"
    frame.clear_frame(memory)
    assert not frame.is_whole(memory, one, len(content))


@hypothesis.given(st.integers(0, 147), st.binary(min_size=100, max_size=100))
def test_a_load_that_fills_only_a_part_is_seen(filled: int, content: bytes) -> None:
    stored = memoryview(bytearray(frame.HEAD_BYTES) + content + bytes(frame.OVERHEAD_BYTES - frame.HEAD_BYTES))
    frame.write_frame(stored, key(1), len(content))
    target = memoryview(bytearray(b"\xa5" * len(stored)))
    frame.clear_frame(target)
    target[:filled] = stored[:filled]
    assert not frame.is_whole(target, key(1), len(content)), f"only {filled} of {len(stored)} bytes arrived"


@hypothesis.given(strategies.keys())
def test_names_lead_back_to_their_keys(one: ObjectKey) -> None:
    assert key_of(name_of(one)) == one


@pytest.mark.parametrize(
    "name", ["", "x", f"{'ab' * 32}/full/ab/cdcd.kv", f"{'ab' * 32}/full/ab/abc.kv", f"{'ab' * 32}/full/ab/ab.tmp"]
)
def test_foreign_names_have_no_key(name: str) -> None:
    assert key_of(name) is None
