"""Counters: nothing lost between threads, nothing counted under a name that metrics do not know."""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections import defaultdict

import pytest
from hypothesis import given
from hypothesis import strategies as st

from offload_core.runtime.metrics import (
    BUCKET_SECONDS,
    COUNTERS,
    GAUGES,
    HISTOGRAMS,
    Counters,
    value_in_bucket,
)

SECONDS = st.floats(0, 1e6, allow_nan=False) | st.sampled_from(BUCKET_SECONDS)


def test_take_hands_over_what_came_since_the_last_call() -> None:
    counters = Counters()
    counters.add("stores", "disk")
    counters.add("stores", "disk", 2)
    counters.add("stores", "ram")
    counters.add("load_bytes", "disk", 0)
    assert counters.take() == {("stores", "disk"): 3, ("stores", "ram"): 1}
    assert counters.take() == {}


def test_a_gauge_goes_up_and_down_and_hands_over_its_change() -> None:
    counters = Counters()
    counters.add("draining_leases", "disk", 3)
    counters.add("draining_leases", "disk", -1)
    assert counters.take() == {("draining_leases", "disk"): 2}
    counters.add("draining_leases", "disk", -2)
    counters.add("draining_leases", "ram", 1)
    counters.add("draining_leases", "ram", -1)
    assert counters.take() == {("draining_leases", "disk"): -2}


def test_an_unknown_counter_is_a_defect() -> None:
    with pytest.raises(KeyError, match="there is no counter 'storse'; the counters are queries, "):
        Counters().add("storse", "disk")


def test_a_counter_never_goes_down() -> None:
    counters = Counters()
    with pytest.raises(ValueError, match="counter 'stores' of tier 'disk' cannot go down by 2; only a gauge can"):
        counters.add("stores", "disk", -2)
    assert counters.take() == {}


def test_an_unknown_histogram_or_a_negative_time_is_a_defect() -> None:
    counters = Counters()
    with pytest.raises(KeyError, match="there is no histogram 'stores'; the histograms are lookup_seconds, "):
        counters.observe("stores", "disk", 1.0)
    for seconds in (-0.1, float("nan"), float("inf")):
        with pytest.raises(ValueError, match=r"load_seconds of tier 'disk' cannot be .*; it must be 0 or more"):
            counters.observe("load_seconds", "disk", seconds)
    assert counters.take_histograms() == {}


@given(reports=st.lists(st.lists(SECONDS)))
def test_reports_of_a_histogram_add_up_to_its_values(reports: list[list[float]]) -> None:
    counters, sums = Counters(), defaultdict[tuple[str, str], float](float)
    for report in reports:
        for seconds in report:
            counters.observe("load_seconds", "disk", seconds)
        for name, count in counters.take_histograms().items():
            sums[name] += count
    values = [seconds for report in reports for seconds in report]
    assert sum(total for (name, _), total in sums.items() if name.endswith(":sum")) == pytest.approx(sum(values))
    for bucket in range(len(BUCKET_SECONDS) + 1):
        expected = [seconds for seconds in values if bisect_left(BUCKET_SECONDS, seconds) == bucket]
        assert sums.get((f"load_seconds:{bucket}", "disk"), 0) == len(expected)
    assert len(sums) <= 2 * (len(BUCKET_SECONDS) + 1), "bounded, however many values there are"


@given(values=st.lists(SECONDS, min_size=1))
def test_the_mean_of_a_bucket_is_inside_it(values: list[float]) -> None:
    for bucket in range(len(BUCKET_SECONDS) + 1):
        inside = [seconds for seconds in values if bisect_left(BUCKET_SECONDS, seconds) == bucket]
        if inside:
            mean = value_in_bucket(bucket, len(inside), sum(inside))
            assert bisect_left(BUCKET_SECONDS, mean) == bucket
            assert mean == pytest.approx(sum(inside) / len(inside))


def test_no_count_is_lost_while_others_take() -> None:
    counters = Counters()
    taken = 0.0

    def count() -> None:
        for _ in range(5000):
            counters.add("stores", "disk")

    threads = [threading.Thread(target=count) for _ in range(3)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        taken += counters.take().get(("stores", "disk"), 0)
    taken += counters.take().get(("stores", "disk"), 0)
    assert taken == 15_000


def test_every_counter_says_what_it_counts() -> None:
    meanings = (*COUNTERS.values(), *GAUGES.values(), *HISTOGRAMS.values())
    assert all(meaning and not meaning.endswith(".") for meaning in meanings)
