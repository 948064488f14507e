"""The size of calls: bounds of large calls, and the sizes that follow from the speed of earlier calls."""

from __future__ import annotations

from hypothesis import example, given
from hypothesis import strategies as st

from offload_core.memory.staging_size import BATCH_BYTES
from offload_core.transfer.call_size import CALL_BYTES, QUICK_SECONDS, CallSize, max_batches

MIB = 1024 * 1024


@given(st.integers(0, 2**40), st.integers(1, 600), st.integers(1, 256 * MIB))
@example(share_bytes=256 * MIB, calls=9, largest=2 * MIB)
def test_all_large_calls_together_leave_half_of_the_share(share_bytes: int, calls: int, largest: int) -> None:
    most = max_batches(share_bytes, calls, largest)
    assert most >= 1, "a call of one batch is possible with every pool"
    if most > 1:
        assert 2 * calls * most * max(BATCH_BYTES, largest) <= share_bytes
        assert most * max(BATCH_BYTES, largest) <= CALL_BYTES


def test_known_sizes() -> None:
    assert max_batches(256 * MIB, 3, 2 * MIB) == 8, "one thread, the default pool, one tier"
    assert max_batches(256 * MIB, 12, 2 * MIB) == 5, "four threads"
    assert max_batches(256 * MIB, 3, 5 * MIB) == 3, "large objects: a batch is one object"
    assert max_batches(256 * MIB, 3, 1024) == 8, "small objects: eight of them are a batch"
    assert max_batches(16 * MIB, 12, 2 * MIB) == 1, "a small pool"


def test_quick_calls_double_the_size_up_to_its_limit() -> None:
    size = CallSize(6)
    sizes = []
    for _ in range(5):
        sizes.append(size.batches)
        size.ended(size.batches, QUICK_SECONDS / 4, worked=True)
    assert sizes == [1, 2, 4, 6, 6]


def test_a_slow_call_halves_the_size() -> None:
    size = grown(CallSize(8))
    size.ended(8, 2 * QUICK_SECONDS, worked=True)
    assert size.batches == 4
    size.ended(2, 2 * QUICK_SECONDS, worked=False)
    assert size.batches == 1, "even two batches were too many"
    size.ended(1, 2 * QUICK_SECONDS, worked=True)
    assert size.batches == 1


def test_calls_that_say_nothing_about_the_speed_change_nothing() -> None:
    size = CallSize(8)
    size.ended(1, 0.0, worked=False)
    assert size.batches == 1, "it failed at once"
    size.ended(1, 0.75 * QUICK_SECONDS, worked=True)
    assert size.batches == 1, "a call of two would be slow"
    size.ended(1, 0.0, worked=True)
    size.ended(1, 0.0, worked=True)
    assert size.batches == 2, "the second one was small"


@given(
    st.integers(1, 8),
    st.lists(st.tuples(st.integers(1, 8), st.sampled_from([0.0, 0.2, 0.3, 9.0]), st.booleans()), max_size=30),
)
def test_the_size_stays_within_its_bounds(most: int, calls: list[tuple[int, float, bool]]) -> None:
    size = CallSize(most)
    for wanted, seconds, worked in calls:
        size.ended(min(wanted, size.batches), seconds, worked=worked)
        assert 1 <= size.batches <= most


def grown(size: CallSize) -> CallSize:
    for _ in range(4):
        size.ended(size.batches, 0.0, worked=True)
    return size
