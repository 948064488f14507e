"""The generator of random workloads: the same seed gives the same workload, with all that the engine tests need."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tests.support.workload import (
    RequestResult,
    Sample,
    WorkloadResult,
    compare_workloads,
    random_workload,
)


@given(seed=st.integers(0, 10_000), requests=st.integers(1, 30))
def test_same_seed_same_workload_within_its_limits(seed: int, requests: int) -> None:
    workload = random_workload(seed, requests=requests, max_prompt_tokens=600, max_output_tokens=9)
    assert workload == random_workload(seed, requests=requests, max_prompt_tokens=600, max_output_tokens=9)
    assert len(workload.requests) == requests
    for request in workload.requests:
        assert 1 <= len(request.token_ids) <= 600
        assert 1 <= request.max_tokens <= 9
    arrivals = [request.arrival_step for request in workload.requests]
    assert arrivals == sorted(arrivals)


def test_prompts_share_prefixes_and_some_are_aborted() -> None:
    workloads = [random_workload(seed, requests=30).requests for seed in range(10)]
    for requests in workloads:
        assert len({tuple(request.token_ids) for request in requests}) > 10
    shared = [
        max(_common(request.token_ids, other.token_ids) for other in requests[:index])
        for requests in workloads
        for index, request in enumerate(requests)
        if index
    ]
    assert sum(length > 256 for length in shared) > len(shared) // 4
    aborted = [request for requests in workloads for request in requests if request.abort_after_steps is not None]
    assert 20 < len(aborted) < 100


def _common(a: list[int], b: list[int]) -> int:
    return next((index for index, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def _result(tokens: list[int], logprobs: list[float], *, aborted: bool = False, name: str = "a") -> WorkloadResult:
    request = RequestResult(
        name=name, samples=[Sample(token_ids=tokens, logprobs=logprobs)], scores=[], aborted=aborted,
        prompt_tokens=3, local_cached_tokens=0, external_cached_tokens=0, preemptions=0,
    )  # fmt: skip
    return WorkloadResult(name="w", requests=[request], steps=1, seconds=0.0)


def test_every_difference_is_found() -> None:
    whole = _result([4, 5], [-1.0, -2.0])
    assert compare_workloads(whole, _result([4, 5], [-1.0, -2.00001])) == []
    assert compare_workloads(whole, _result([4], [-1.0], aborted=True)) == []
    assert len(compare_workloads(whole, _result([4], [-1.0]))) == 1
    assert len(compare_workloads(whole, _result([4, 6], [-1.0, -2.0]))) == 1
    assert len(compare_workloads(whole, _result([5], [-1.0], aborted=True))) == 1
    assert len(compare_workloads(whole, _result([4, 5], [-1.0, -2.1]))) == 1
    assert len(compare_workloads(whole, _result([4, 5], [-1.0, float("nan")]))) == 1
    assert len(compare_workloads(whole, _result([4, 5], [-1.0, -2.0], name="b"))) == 1
