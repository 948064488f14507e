"""All waits of a request for storage together end at its deadlines, and a failed chunk is not offered again."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest

from offload_core.lookup.waiting_time import WaitingTime
from offload_core.planning.chunk_keys import ChunkRef
from offload_core.vllm.metadata import StepReport
from tests.vllm.test_scheduler_half import Half, request

LOAD_SECONDS = 30.0
LOOKUP_SECONDS = 10.0


class Clock:
    """A clock that the test sets."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class ClockedHalf(Half):
    """A scheduler half whose requests' waits follow the test's clock."""

    def __init__(self) -> None:
        super().__init__(load_timeout_seconds=LOAD_SECONDS, patience_seconds=LOOKUP_SECONDS)
        self.clock = Clock()

    def follow(self, item: Any) -> Any:
        super().follow(item)
        self.half._requests[item.request_id].wait = WaitingTime(self.clock)
        return item

    def asked(self, item: Any, times: int = 20) -> list[int | None]:
        """Return the answers to the engine in ``times`` steps."""
        answers = []
        for _ in range(times):
            answers.append(self.half.matched_tokens(item, 0))
            self.step()
        return answers

    def waits_for_anothers_load(self, item: Any) -> None:
        """Wait for the answer to the request's lookup; then it must ask again because of another load."""
        while (running := self.half._requests[item.request_id].wait._running) is None or running[0] != "load":
            assert self.asked(item, 1) == [None]

    def loads(self, item: Any) -> float:
        """Offer and load; return the seconds that are subtracted from the load's time."""
        self.load(item, self.matched(item))
        (load,) = self.step().loads
        return load.waited_seconds

    def ends(self, item: Any, *not_loaded: int) -> None:
        """End the request's load without some of its chunks; the request is computed, and its stores are rejected."""
        name = item.request_id
        refs = {("memory", self.ref(item, unit)) for unit in not_loaded}
        self.half.take_output(set(), set(), StepReport(failed_chunks=refs, failed_requests={name} if refs else set()))
        self.step()
        self.half.take_output({name}, {name} if refs else set(), None)
        stores = [store.chunk for store in self.step(**{name: 80}).stores]
        self.report(stores, not_stored=set(stores))

    @staticmethod
    def ref(item: Any, unit: int) -> ChunkRef:
        return ChunkRef("full-u16", item.block_hashes[unit], "")


@pytest.fixture
def half() -> Iterator[ClockedHalf]:
    """Two families' prompts are on the tier."""
    made = ClockedHalf()
    for family in range(2):
        made.follow(request(f"stored{family}", family=family))
    made.store(stored0=80, stored1=80)
    yield made
    made.half.shutdown()


def test_a_wait_for_another_requests_load_ends_at_the_deadline_of_a_load(half: ClockedHalf) -> None:
    first, second = half.follow(request("a")), half.follow(request("b"))
    assert half.loads(first) == 0.0
    half.waits_for_anothers_load(second)
    half.clock.now += LOAD_SECONDS - 1
    assert half.asked(second, 1) == [None]
    half.clock.now += 1
    assert half.asked(second, 3) == [0, 0, 0], "it has waited for as long as for a load of its own"


def test_a_wait_for_another_requests_load_is_subtracted_from_its_own_deadline(half: ClockedHalf) -> None:
    first, second = half.follow(request("a")), half.follow(request("b"))
    half.loads(first)
    half.waits_for_anothers_load(second)
    half.clock.now += 7
    half.ends(first)
    assert half.loads(second) == 7.0


def test_a_second_load_gets_what_is_left_of_the_deadline_and_there_is_no_third(half: ClockedHalf) -> None:
    item = half.follow(request("a"))
    assert half.loads(item) == 0.0
    half.clock.now += 4
    half.ends(item, 3)
    assert half.matched(item) == 48, "the damaged chunk is not offered again"
    assert half.loads(item) == 4.0
    half.clock.now += 4
    half.ends(item, 2)
    assert half.asked(item, 3) == [0, 0, 0]


def test_after_a_load_that_timed_out_there_is_no_second_one(half: ClockedHalf) -> None:
    item, other = half.follow(request("a")), half.follow(request("b"))
    half.loads(item)
    half.clock.now += LOAD_SECONDS
    half.ends(item, 1, 2, 3)
    assert half.asked(item, 3) == [0, 0, 0]
    assert half.matched(other) == 16, "what did arrive is offered to others, and what did not is mistrusted"


def test_a_chunk_that_a_load_did_not_get_is_never_offered_to_the_request_again(half: ClockedHalf) -> None:
    item, other = half.follow(request("a")), half.follow(request("b"))
    half.loads(item)
    half.ends(item, 2)
    half.report([half.ref(item, 2)])  # stored anew, so that it is trusted again
    assert half.matched(other) == 64
    assert half.matched(item) == 32


def test_a_part_that_is_used_counts_as_loaded_and_the_rest_is_stored_again(half: ClockedHalf) -> None:
    item = half.follow(request("a"))
    half.loads(item)
    missing = [half.ref(item, unit) for unit in (2, 3)]
    half.half.take_output(
        {"a"}, set(), StepReport(failed_chunks={("memory", ref) for ref in missing}, partial_requests={"a"})
    )
    assert half.stored(a=80) == [ref.chunk_hash for ref in missing]
    assert ("recomputed_requests", "all") not in half.half.counters.take()


def test_a_chunk_on_its_way_is_awaited_within_the_lookup_deadline_and_stored_chunks_are_used(
    half: ClockedHalf,
) -> None:
    half.follow(request("c", tokens=32, family=3))
    half.store(c=32)
    half.follow(request("d", family=3))
    half.step(d=80)  # the rest is on its way, for ever
    item = half.follow(request("e", family=3))
    assert set(half.asked(item)) == {None}
    half.clock.now += LOOKUP_SECONDS
    assert 32 in half.asked(item, 100)


def test_no_lookup_begins_after_the_lookup_deadline(half: ClockedHalf) -> None:
    item = half.follow(request("a"))
    half.half._requests["a"].wait.begin("lookup")
    half.clock.now += LOOKUP_SECONDS
    assert half.asked(item, 3) == [0, 0, 0]


def test_a_late_lookup_gets_only_the_rest_of_the_lookup_deadline(half: ClockedHalf) -> None:
    half.backend.gates["contains"].shut()
    item = half.follow(request("a"))
    wait = half.half._requests["a"].wait
    wait.begin("lookup")
    half.clock.now += LOOKUP_SECONDS - 0.1
    began = time.monotonic()
    try:
        assert half.matched(item) == 0
        assert time.monotonic() - began < LOOKUP_SECONDS
    finally:
        half.backend.gates["contains"].open()


def test_time_without_free_blocks_is_no_wait_for_a_lookup(half: ClockedHalf, monkeypatch: Any) -> None:
    monkeypatch.setattr("offload_core.vllm.scheduler.load_offers._OFFER_LIFE_SECONDS", 0.0)
    item = half.follow(request("a"))
    for _ in range(5):
        half.half._requests["a"].wait.begin("lookup")
        half.clock.now += 0.9 * LOOKUP_SECONDS
        assert half.matched(item) == 64, "an offer that the engine has no room for expires, and is made again"


def test_an_offer_that_expires_during_a_wait_for_storage_gives_no_more_time_for_lookups(
    half: ClockedHalf, monkeypatch: Any
) -> None:
    monkeypatch.setattr("offload_core.vllm.scheduler.load_offers._OFFER_LIFE_SECONDS", 0.0)
    first, second = half.follow(request("a")), half.follow(request("b"))
    half.loads(first)
    half.waits_for_anothers_load(second)
    for _ in range(2):
        half.half._requests["b"].wait.begin("lookup")
        half.clock.now += 0.6 * LOOKUP_SECONDS
        answers = half.asked(second, 200)
    assert 0 in answers, "its time for lookups is over"
