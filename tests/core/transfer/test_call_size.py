"""The size of calls: bounds of large calls, and the sizes that follow from the speed of earlier calls."""

from __future__ import annotations

from itertools import pairwise
from types import SimpleNamespace
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from offload_core.memory.staging_size import BATCH_BYTES, BATCH_OBJECTS
from offload_core.objects.format import object_bytes
from offload_core.tiers.tier import Tier
from offload_core.transfer.call_size import (
    CALL_BYTES,
    LOAD_MESSAGE_BATCHES,
    QUICK_SECONDS,
    STORE_MESSAGE_BATCHES,
    CallSize,
    large_calls_in,
    load_size_of,
    load_slots_of,
    max_call_bytes,
    slots_of_call,
    store_size_of,
    store_slots_of,
)

MIB = 1024 * 1024
BATCH = object_bytes(2 * MIB)
"""Bytes of a batch of one object of 2 MiB."""


@given(st.integers(0, 2**40), st.integers(1, 600), st.integers(1, 2), st.lists(st.integers(1, 40 * MIB), max_size=20))
def test_all_large_calls_together_hold_no_more_than_they_may(
    bytes_of_calls: int, calls: int, leases: int, sizes: list[int]
) -> None:
    size = grown(CallSize(8, [max_call_bytes(bytes_of_calls, calls, leases)] * 8))
    count = size.take(iter(sizes), 20)
    assert min(1, len(sizes)) <= count <= min(8, len(sizes)), "a call of one batch is possible with every pool"
    if count > 1:
        assert calls * sum(sizes[:count]) <= bytes_of_calls
        assert sum(sizes[:count]) <= leases * CALL_BYTES
    if count < min(8, len(sizes)):
        limit = max_call_bytes(bytes_of_calls, calls, leases)
        assert sum(sizes[: count + 1]) > limit, "no larger call has room"


@given(
    st.integers(0, 2**36),
    st.integers(1, 64),
    st.booleans(),
    st.booleans(),
    st.sampled_from(["disk", "remote"]),
    st.lists(st.integers(1, 40 * MIB), min_size=2, max_size=20),
)
def test_large_calls_leave_half_of_the_share_unless_they_load_by_messages(
    share_bytes: int, threads: int, encodes: bool, is_elsewhere: bool, medium: str, sizes: list[int]
) -> None:
    tier = tier_of(medium, threads=threads, encodes=encodes, is_elsewhere=is_elsewhere)
    load, store = grown(load_size_of(tier, share_bytes)), grown(store_size_of(tier, share_bytes))
    loaded, stored = (size.take(iter(sizes), 20) for size in (load, store))
    if loaded > 1:
        calls = _most_calls_of(loaded, tier, load_slots_of(tier))
        assert calls * sum(sizes[:loaded]) <= (share_bytes if is_elsewhere else share_bytes // 2)
    if stored > 1:
        calls = _most_calls_of(stored, tier, store_slots_of(tier))
        assert calls * sum(sizes[:stored]) <= share_bytes // 2
    if medium == "disk" and not is_elsewhere:
        assert loaded == stored == 1


@given(st.integers(2, 64), st.integers(1, 64), st.integers(2, 20), st.integers(1, 40).map(lambda mib: mib * MIB))
def test_middling_calls_of_many_threads_hold_no_more_than_large_ones(
    pool_mib: int, threads: int, batches: int, nbytes: int
) -> None:
    tier, share_bytes = tier_of("disk", threads=threads, is_elsewhere=True), 8 * pool_mib * MIB
    count = grown(load_size_of(tier, share_bytes)).take([nbytes] * batches, 20)
    if count > 1:
        assert _most_calls_of(count, tier, load_slots_of(tier)) * count * nbytes <= share_bytes


@pytest.mark.parametrize("medium", ["host", "disk", "remote"])
def test_messages_are_equally_large_on_every_medium(medium: str) -> None:
    tier = tier_of(medium, threads=4, is_elsewhere=True)
    assert grown(load_size_of(tier, 1024 * MIB)).batches == LOAD_MESSAGE_BATCHES
    assert grown(store_size_of(tier, 1024 * MIB)).batches == STORE_MESSAGE_BATCHES


@pytest.mark.parametrize(
    ("tier_options", "loads", "stores"),
    [
        ({"medium": "disk"}, 2, 3),
        ({"medium": "disk", "parallel": True}, 4, 5),
        ({"medium": "disk", "parallel": True, "encodes": True}, 2, 3),
        ({"medium": "remote"}, 4, 5),
        ({"medium": "disk", "is_elsewhere": False}, 8, 5),
    ],
)
def test_few_large_calls_at_a_time_if_each_is_the_work_of_several_threads(
    tier_options: dict[str, Any], loads: int, stores: int
) -> None:
    tier = tier_of(**{"is_elsewhere": True} | tier_options, threads=4)
    assert large_calls_in(tier, load_slots_of(tier)) == loads
    assert large_calls_in(tier, store_slots_of(tier)) == stores


@pytest.mark.parametrize("threads", range(1, 9))
def test_two_large_loads_have_work_for_all_threads_and_a_small_call_takes_one_slot(threads: int) -> None:
    tier = tier_of("disk", threads=threads, is_elsewhere=True)
    assert large_calls_in(tier, load_slots_of(tier)) == 2
    assert 2 * slots_of_call(tier, 31) >= threads
    assert slots_of_call(tier, 1) == 1
    assert slots_of_call(tier_of("remote", threads=threads, is_elsewhere=True), 31) == 1


def test_sizes_of_messages_with_the_default_memory() -> None:
    tier = tier_of("disk", threads=4, is_elsewhere=True)
    load, store = grown(load_size_of(tier, 256 * MIB)), grown(store_size_of(tier, 256 * MIB))
    assert load.take([BATCH] * 40, 40) == 28, "two loads and two overdue ones, and room for a small one"
    assert store.take([BATCH] * 40, 40) == 12, "half of the memory for three stores, and two overdue ones"


@given(st.integers(1, 8), st.lists(st.integers(1, 4 * MIB), min_size=1, max_size=20))
def test_a_call_takes_no_more_than_its_fair_part(most: int, sizes: list[int]) -> None:
    counts = [grown(CallSize(8, [CALL_BYTES] * 8)).take(sizes, limit) for limit in range(1, most + 1)]
    assert counts[0] == 1
    assert all(count <= limit for limit, count in enumerate(counts, start=1))
    assert all(after - before in (0, 1) for before, after in pairwise(counts))


def test_known_sizes() -> None:
    assert taken(128 * MIB, 3, BATCH) == 8, "one thread, the default pool, one tier"
    assert taken(128 * MIB, 12, BATCH) == 5, "four threads"
    assert taken(128 * MIB, 3, object_bytes(5 * MIB)) == 3, "large objects: a batch is one object"
    assert taken(128 * MIB, 3, BATCH_OBJECTS * object_bytes(256 * 1024)) == 8, "eight small objects are a batch"
    assert taken(128 * MIB, 3, 2 * object_bytes(BATCH_BYTES - 1)) == 4, "two objects that end beyond a batch's bytes"
    assert taken(8 * MIB, 12, BATCH) == 1, "a small pool"


def test_quick_calls_double_the_size_up_to_its_limit() -> None:
    size = CallSize(6, [CALL_BYTES] * 6)
    sizes = []
    for _ in range(5):
        sizes.append(size.batches)
        size.ended(size.batches, QUICK_SECONDS / 4, worked=True)
    assert sizes == [1, 2, 4, 6, 6]


def test_a_slow_call_halves_the_size() -> None:
    size = grown(CallSize(8, [CALL_BYTES] * 8))
    size.ended(8, 2 * QUICK_SECONDS, worked=True)
    assert size.batches == 4
    size.ended(2, 2 * QUICK_SECONDS, worked=False)
    assert size.batches == 1, "even two batches were too many"
    size.ended(1, 2 * QUICK_SECONDS, worked=True)
    assert size.batches == 1


def test_after_a_failed_call_calls_are_small_again() -> None:
    size = grown(CallSize(8, [CALL_BYTES] * 8))
    size.ended(8, 0.0, worked=False, failed=True)
    assert size.batches == 1
    size.ended(1, 0.0, worked=True)
    assert size.batches == 2


def test_calls_that_say_nothing_about_the_speed_change_nothing() -> None:
    size = CallSize(8, [CALL_BYTES] * 8)
    size.ended(1, 0.0, worked=False)
    assert size.batches == 1, "it found nothing"
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
    size = CallSize(most, [CALL_BYTES] * most)
    for wanted, seconds, worked in calls:
        size.ended(min(wanted, size.batches), seconds, worked=worked)
        assert 1 <= size.batches <= most


def _most_calls_of(batches: int, tier: Tier, slots: int) -> int:
    """Return how many calls of so many batches can run at once, overdue ones included, one started after another."""
    calls = taken = 0
    while taken < slots + tier.config.io_threads:
        calls += 1
        taken += slots_of_call(tier, batches)
    return calls


def tier_of(medium: str, *, threads: int, encodes: bool = False, is_elsewhere: bool, parallel: bool = False) -> Tier:
    """Return the part of a tier that the sizes of its calls depend on."""
    config, capabilities = SimpleNamespace(io_threads=threads), SimpleNamespace(medium=medium, parallel=parallel)
    fake = SimpleNamespace(config=config, capabilities=capabilities, encodes=encodes, is_elsewhere=is_elsewhere)
    return cast("Tier", fake)


def grown(size: CallSize) -> CallSize:
    for _ in range(5):
        size.ended(size.batches, 0.0, worked=True)
    return size


def taken(bytes_of_calls: int, calls: int, batch_bytes: int) -> int:
    """Return the batches of the largest call."""
    return grown(CallSize(8, [max_call_bytes(bytes_of_calls, calls)] * 8)).take([batch_bytes] * 20, 20)
