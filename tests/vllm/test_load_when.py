"""``load_when: cheaper`` in the scheduler half: lookups and loads that do not pay are not begun."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from offload_core.vllm.metadata import WorkerIdentity
from tests.vllm.test_scheduler_half import SECONDS, Half, request

MIB = 1 << 20


@pytest.fixture
def half() -> Iterator[Half]:
    """A scheduler half whose tier has the first five chunks of family 0, of 1 MiB each."""
    made = Half(load_when="cheaper")
    made.half.set_workers({0: WorkerIdentity({}, {"full-u16": MIB})})
    made.follow(request("stored"))
    made.store(stored=80)
    yield made
    made.half.shutdown()


def engine_computes(half: Half, seconds_per_token: float) -> None:
    """Let the engine have computed prompts at this speed, so often that it believes it."""
    for before, tokens in ((0, 96), (80, 16)) * 20:
        half.half._choice.prefill.observe([(before, tokens)], tokens * seconds_per_token)


def load(half: Half, name: str) -> None:
    item = half.follow(request(name, tokens=96))
    assert half.matched(item) == 80
    half.load(item, 80)
    half.step()
    half.half.take_output({name}, set(), None)
    half.half.request_finished(item)


def test_a_load_that_pays_is_begun_and_counted(half: Half) -> None:
    engine_computes(half, seconds_per_token=1.0)
    load(half, "a")
    counts = half.half.counters.take()
    assert counts["prefill_seconds_saved", "memory"] == pytest.approx(80, rel=0.05)
    assert 0 < counts["load_wait_seconds", "memory"] < 80
    assert counts["lookup_wait_seconds", "all"] > 0


def test_tokens_behind_the_last_whole_block_count_as_computed_in_any_case(half: Half) -> None:
    prefill = half.half._choice.prefill
    for before, tokens, seconds in (
        (0, 81, 1.0),
        (0, 200, 1.0),
        (80, 120, 0.999),
        (80, 16, 0.001),
        (0, 16, 0.001),
    ) * 40:
        prefill.observe([(before, tokens)], seconds)
    without, rest = prefill.seconds(0, 81), prefill.seconds(80, 81)
    assert without is not None
    assert rest is not None
    assert without - rest > 0.5, "without the tokens behind the last block, a load would seem to pay"
    half.half._choice.load_begins("memory", 1, 0, 80)
    half.half._choice._loads["memory"]._under_way[1] = (time.monotonic() - 0.1, 5 * MIB, 5 * MIB)
    assert 0.1 <= (half.half._choice.load_ends("memory", 1, measured=True) or 0) < 10
    half.half.counters.take()
    item = request("a", tokens=200)
    del item.block_hashes[5:]
    assert half.half.matched_tokens(half.follow(item), 0) == 0, "a load would save one millisecond"
    assert half.half.counters.take() == {("lookups_declined", "all"): 1}


def test_a_lookup_that_cannot_pay_is_not_begun_and_its_request_is_counted_once(half: Half) -> None:
    engine_computes(half, seconds_per_token=1.0)
    load(half, "a")
    engine_computes(half, seconds_per_token=1e-9)
    half.backend.calls.clear()
    half.half.counters.take()
    for name in ("b", "c"):
        item = half.follow(request(name, tokens=96))
        assert [half.half.matched_tokens(item, 0) for _ in range(3)] == [0, 0, 0]
    assert half.half.counters.take() == {("lookups_declined", "all"): 2}
    assert half.backend.calls == []


def test_a_hit_that_does_not_pay_is_computed(half: Half) -> None:
    engine_computes(half, seconds_per_token=1.0)
    load(half, "a")
    half.backend.gates["contains"].shut()
    item = half.follow(request("b", tokens=96))
    assert half.half.matched_tokens(item, 0) is None
    engine_computes(half, seconds_per_token=1e-9)  # while the lookup is under way
    half.backend.gates["contains"].open()
    assert half.matched(item) == 0
    assert half.half.counters.take()["loads_declined", "memory"] == 1


def test_a_lookup_is_waited_for_only_as_long_as_a_hit_would_save(half: Half) -> None:
    engine_computes(half, seconds_per_token=1e-3)
    half.backend.gates["contains"].shut()
    begun = time.monotonic()
    assert half.matched(half.follow(request("a", tokens=96))) == 0
    assert time.monotonic() - begun < SECONDS / 2, "the lookup itself has more time"
    assert half.half.matched_tokens(half.follow(request("b", tokens=96)), 0) == 0, "the lookups are known to be slow"
    assert half.half.counters.take()["lookups_declined", "all"] == 1
    half.backend.gates["contains"].open()
