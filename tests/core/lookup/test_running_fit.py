"""The running fit: coefficients from recent observations, compared with a search over all of them."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from offload_core.lookup.estimates.running_fit import RunningFit

EVEN = (1e-6, 1e-6)


def fitted(observations: list[tuple[float, float, float]], reluctance: tuple[float, ...] = EVEN) -> RunningFit:
    fit = RunningFit(reluctance)
    for x, y, seconds in observations:
        fit.observe((x, y), seconds, now=0.0)
    return fit


def test_nothing_is_expected_before_the_first_observation() -> None:
    fit = RunningFit(EVEN)
    assert fit.seconds((1.0, 5.0)) == 0.0
    assert fit.observed_at is None


@given(
    latency=st.floats(0, 1), per_byte=st.floats(1e-9, 1e-6),
    sizes=st.lists(st.integers(1, 1 << 24), min_size=2, max_size=12, unique=True),
)  # fmt: skip
def test_a_linear_cost_is_found(latency: float, per_byte: float, sizes: list[int]) -> None:
    fit = fitted([(1.0, size, latency + per_byte * size) for size in sizes])
    for size in sizes:
        assert fit.seconds((1.0, size)) == pytest.approx(latency + per_byte * size, rel=0.02)


@given(
    st.lists(
        st.tuples(st.floats(0.1, 10), st.floats(0.1, 10), st.floats(0.1, 10)), min_size=1, max_size=6
    )
)  # fmt: skip
def test_no_other_coefficients_of_at_least_zero_fit_better(observations: list[tuple[float, float, float]]) -> None:
    fit = fitted(observations)
    found = (fit.seconds((1.0, 0.0)), fit.seconds((0.0, 1.0)))
    assert min(found) >= 0

    # The weights that the fit gives, and the seconds that it counts, computed anew.
    weighted: list[list[float]] = []
    replay = RunningFit(EVEN)
    for x, y, seconds in observations:
        expected = replay.seconds((x, y)) or seconds
        counted = min(seconds, 10 * expected)
        weighted = [[0.9 * weight, *rest] for weight, *rest in weighted]
        weighted.append([1 / (expected * min(expected, counted)), x, y, counted])
        replay.observe((x, y), seconds, now=0.0)
        shrunk = max(1.0, replay.seconds((x, y)) / expected) ** -2
        weighted = [[shrunk * weight, *rest] for weight, *rest in weighted]

    def error(a: float, b: float) -> float:
        return sum(weight * (seconds - a * x - b * y) ** 2 for weight, x, y, seconds in weighted)

    steps = [scale * max(found) for scale in (0, 0.01, 0.1, 0.5, 0.9, 1, 1.1, 1.5, 2)]
    least = min(error(a, b) for a, b in itertools.product(steps, repeat=2))
    assert error(*found) <= least * (1 + 1e-3) + 1e-6


def test_of_one_observation_the_feature_with_less_reluctance_explains_more() -> None:
    fit = fitted([(1.0, 1000.0, 1.0)], reluctance=(1e-3, 1e-2))
    assert fit.seconds((1.0, 0.0)) > 0.9
    assert fit.seconds((1.0, 1000.0)) == pytest.approx(1.0, rel=0.01)


@pytest.mark.parametrize("factor", [10, 0.1])
def test_a_change_is_believed_after_a_few_observations(factor: float) -> None:
    fit = fitted([(1.0, size, 0.001 * size) for size in (100, 200, 300) * 10])
    for _ in range(8):
        fit.observe((1.0, 200.0), factor * 0.2, now=0.0)
    assert fit.seconds((1.0, 200.0)) == pytest.approx(factor * 0.2, rel=0.5)


def test_a_single_stall_does_not_outweigh_what_was_seen_before() -> None:
    fit = fitted([(1.0, 200.0, 0.2)] * 30)
    fit.observe((1.0, 200.0), 1000.0, now=0.0)
    assert 0.2 < fit.seconds((1.0, 200.0)) < 0.5


def test_after_a_long_time_one_observation_outweighs_many_old_ones() -> None:
    fit = fitted([(1.0, 200.0, 0.2)] * 30)
    fit.observe((1.0, 200.0), 2.0, now=3600.0)
    assert fit.seconds((1.0, 200.0)) == pytest.approx(2.0, rel=0.05)
