"""The corrected fit: recent observations of about the same size count more than the line through all."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from offload_core.lookup.estimates.corrected_fit import CorrectedFit

EVEN = (1e-6, 1e-6)
STAIRS = {1e6: 0.010, 8e6: 0.040, 64e6: 0.070}


def fit_of(seconds: dict[float, float], times: int = 5) -> CorrectedFit:
    fit = CorrectedFit(EVEN, half_life_seconds=60.0)
    for _ in range(times):
        for size, cost in seconds.items():
            fit.observe((1.0, size), cost, now=0.0)
    return fit


def test_nothing_is_expected_before_the_first_observation() -> None:
    fit = CorrectedFit(EVEN, half_life_seconds=60.0)
    assert fit.seconds((1.0, 5.0), now=0.0) == 0.0
    assert fit.observed_at is None


def test_each_size_has_its_own_seconds_and_other_sizes_have_the_line() -> None:
    fit = fit_of(STAIRS)
    for size, cost in STAIRS.items():
        assert fit.seconds((1.0, size), now=0.0) == pytest.approx(cost, rel=0.15)
    assert 0.030 < fit.seconds((1.0, 24e6), now=0.0) < 0.080


def test_a_half_life_later_the_line_counts_as_much() -> None:
    fit = fit_of(STAIRS)
    fresh, half, old = (fit.seconds((1.0, 8e6), now) for now in (0.0, 60.0, 1e5))
    assert half == pytest.approx((fresh + old) / 2)
    assert old == pytest.approx(fit_of({8e6: old}).seconds((1.0, 8e6), 0.0))


@given(st.floats(0, 1), st.floats(1e-9, 1e-6), st.lists(st.floats(1, 1e9), min_size=2, max_size=12, unique=True))
def test_a_line_stays_a_line(latency: float, per_byte: float, sizes: list[float]) -> None:
    fit = fit_of({size: latency + per_byte * size for size in sizes})
    for size in sizes:
        assert fit.seconds((1.0, size), now=0.0) == pytest.approx(latency + per_byte * size, rel=0.1)


@given(
    st.lists(st.tuples(st.sampled_from([0.0, 1.0, 1e3, 1e9]), st.floats(1e-6, 1e6), st.floats(0, 1e6)), max_size=20)
)  # fmt: skip
def test_every_expectation_is_finite_and_not_negative(observations: list[tuple[float, float, float]]) -> None:
    fit, now = CorrectedFit(EVEN, half_life_seconds=60.0), 0.0
    for size, seconds, pause in observations:
        now += pause
        fit.observe((1.0, size), seconds, now)
        for asked in (0.0, 1.0, 500.0, 1e9):
            assert 0 <= fit.seconds((1.0, asked), now) < 1e30


def test_a_single_stall_is_not_believed_at_once() -> None:
    fit = fit_of({1e6: 0.010}, times=30)
    fit.observe((1.0, 1e6), 100.0, now=0.0)
    assert fit.seconds((1.0, 1e6), now=0.0) < 0.06
