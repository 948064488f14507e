"""The checks of a process after a long time."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.steadiness import MemorySample, counter_problems, memory_trend, wait_problems


@given(slope=st.integers(-1000, 1000), start=st.integers(0, 1 << 40), peaks=st.sets(st.integers(0, 19), max_size=2))
def test_the_trend_is_that_of_most_samples(slope: int, start: int, peaks: set[int]) -> None:
    samples = [MemorySample(second, start + slope * second + (1 << 20) * (second in peaks)) for second in range(20)]
    trend = memory_trend(samples, 0)
    assert trend.bytes_per_second == pytest.approx(slope, abs=1)
    assert trend.seconds == 19
    assert trend.growth_bytes == pytest.approx(19 * slope, abs=19)


def test_what_grows_in_the_warm_up_is_no_trend() -> None:
    samples = [MemorySample(second, min(second, 10) * 1000) for second in range(30)]
    assert memory_trend(samples, 10).growth_bytes == 0
    with pytest.raises(ValueError, match="2 samples after 28 s"):
        memory_trend(samples, 28)


def test_a_request_may_wait_for_its_deadlines_and_a_step_after_each() -> None:
    wait = {"lookups": 0.7, "loads": 0.6, "kept_back": 0.1, "longest_step": 0.1}
    assert wait_problems({"a": wait}, 1.0, 0.001) == []
    (line,) = wait_problems({"a": wait, "b": {**wait, "kept_back": 0.2}}, 1.0, 0.001)
    assert line.startswith("b waited 1.500 s, more than 1.400 s (lookups 0.7, ")
    (line,) = wait_problems({"b": {**wait, "lookups": 1.3, "loads": 0.0, "kept_back": 0.0}}, 1.0, 0.001)
    assert line.startswith("b waited 1.300 s, more than 1.200 s"), "two deadlines end what is counted as lookups"
    (line,) = wait_problems({"c": {**wait, "lookups": 0.0, "kept_back": 0.0, "loads": 1.2}}, 1.0, 0.001)
    assert line.startswith("c waited 1.200 s, more than 1.100 s")


def _metrics(**counts: int) -> dict[str, float]:
    return {f'vllm:hybrid_offload_{name}{{tier="disk"}}': count for name, count in counts.items()}


COUNTS = {"jobs_total": 9, "jobs_done_total": 4, "jobs_failed_total": 3, "jobs_timed_out_total": 2} | {
    "jobs_retired_total": 9, "draining_leases": 0, "stores_total": 5,
}  # fmt: skip


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({}, None),
        ({"jobs_total": 10}, "10 jobs, 9 retired"),
        ({"jobs_retired_total": 8}, "9 jobs, 8 retired"),
        ({"jobs_cancelled_total": 1}, "'jobs_cancelled': 1"),
        ({"draining_leases": 1}, "draining_leases is 1"),
        ({"breaker_open": 2}, "breaker_open is 2"),
    ],
)
def test_jobs_that_do_not_add_up_are_told(wrong: dict[str, int], said: str | None) -> None:
    problems = counter_problems(_metrics(**COUNTS | wrong) | {"vllm:other": 3.0})
    assert len(problems) == (said is not None)
    if said is not None:
        assert problems[0].startswith("tier 'disk': ")
        assert said in problems[0]
