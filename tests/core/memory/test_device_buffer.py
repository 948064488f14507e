"""Slots of the buffer on a device, beside a brute-force oracle that knows the owner of each byte."""

from __future__ import annotations

from collections import deque

from hypothesis import given
from hypothesis import strategies as st

from offload_core.memory.device.device_buffer import DeviceBuffer

FREE = "free"
ALIGNMENT_BYTES = 256


@given(
    nbytes=st.integers(1, 4000),
    steps=st.lists(st.one_of(st.integers(1, 1500), st.just(FREE)), max_size=60),
)
def test_slots_never_overlap_and_are_freed_in_order(nbytes: int, steps: list[int | str]) -> None:
    buffer = DeviceBuffer(nbytes)
    taken: deque[range] = deque()
    for step in steps:
        if isinstance(step, int):
            start = buffer.try_take(step)
            if start is None:
                assert not fits_behind(taken, step, nbytes), f"{step} bytes were refused beside {taken}"
            else:
                slot = range(start, start + step)
                assert start % ALIGNMENT_BYTES == 0
                assert slot.stop <= nbytes
                assert not any(set(slot) & set(other) for other in taken)
                taken.append(slot)
        elif taken:
            taken.popleft()
            buffer.free_oldest()


def fits_behind(taken: deque[range], nbytes: int, capacity_bytes: int) -> bool:
    """Return whether a slot fits behind the newest one, or at the beginning, before the oldest one."""
    if not taken:
        return nbytes <= capacity_bytes
    used = set[int]().union(*map(set, taken))
    behind = -(-taken[-1].stop // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
    rooms = [range(start, start + nbytes) for start in (behind, 0)]
    if taken[-1].start < taken[0].start:
        rooms = rooms[:1]
    return any(room.stop <= capacity_bytes and not used & set(room) for room in rooms)


def test_a_buffer_that_is_empty_again_is_used_whole() -> None:
    buffer = DeviceBuffer(1000)
    assert buffer.try_take(600) == 0
    assert buffer.try_take(600) is None
    buffer.free_oldest()
    assert buffer.try_take(1000) == 0
    assert buffer.try_take(1) is None


def test_a_slot_that_does_not_fit_before_the_end_is_at_the_beginning() -> None:
    buffer = DeviceBuffer(1000)
    assert [buffer.try_take(500), buffer.try_take(256)] == [0, 512]
    assert buffer.try_take(400) is None
    buffer.free_oldest()
    assert [buffer.try_take(400), buffer.try_take(1)] == [0, None]
    buffer.free_oldest()
    assert buffer.try_take(488) == 512
