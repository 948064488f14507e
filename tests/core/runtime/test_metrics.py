"""Counters: nothing lost between threads, nothing counted under a name that metrics do not know."""

from __future__ import annotations

import threading

import pytest

from offload_core.runtime.metrics import COUNTERS, GAUGES, Counters


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
    with pytest.raises(KeyError, match="there is no counter 'storse'; the counters are lookup_hits, "):
        Counters().add("storse", "disk")


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
    assert all(meaning and not meaning.endswith(".") for meaning in (*COUNTERS.values(), *GAUGES.values()))
