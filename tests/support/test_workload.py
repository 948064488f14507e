"""The generator of random workloads: the same seed gives the same workload, with all that the engine tests need."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tests.support.workload import (
    RequestResult,
    Sample,
    Workload,
    WorkloadResult,
    compare_workloads,
    random_workload,
    rescoring,
    score_gaps,
    treated_alike,
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


def _result(tokens: list[int], logprobs: list[float], *, aborted: bool = False, scores: list[float] | None = None,
            name: str = "a") -> WorkloadResult:  # fmt: skip
    request = RequestResult(
        name=name, samples=[Sample(token_ids=tokens, logprobs=logprobs)], scores=scores or [], aborted=aborted,
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


def test_rescoring_asks_for_prompt_and_output_of_every_sample() -> None:
    asked = random_workload(1, requests=1)
    result = _result([4, 5], [-1.0, -2.0], name=asked.requests[0].name)
    again = rescoring(asked, result)
    assert again.requests[0].token_ids == [*asked.requests[0].token_ids, 4, 5]
    assert again.requests[0].score_tokens == 2
    scores = _result([], [], scores=[-1.0, -2.5], name=again.requests[0].name)
    assert score_gaps(result, scores) == {again.requests[0].name: 0.25}
    assert rescoring(Workload(name="w", requests=[]), WorkloadResult(name="w", requests=[], steps=0, seconds=0)) == (
        Workload(name="scores of w", requests=[])
    )


def test_only_what_was_computed_in_the_same_way_is_treated_alike() -> None:
    plain = _result([4], [-1.0])
    for change in ({"preemptions": 1}, {"external_cached_tokens": 8}, {"local_cached_tokens": 8}):
        other = plain.model_copy(update={"requests": [plain.requests[0].model_copy(update=change)]})
        for one, two in (treated_alike(plain, other), treated_alike(other, plain)):
            assert one.requests == two.requests == []
    assert treated_alike(plain, plain) == (plain, plain)
