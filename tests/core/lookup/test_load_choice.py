"""Whether a load pays: expected seconds of loads, lookups and prefills, on a clock of the test's own."""

from __future__ import annotations

import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from offload_core.config.limits import Limits
from offload_core.config.model import LoadPolicy
from offload_core.lookup.estimates.corrected_fit import CorrectedFit
from offload_core.lookup.estimates.load_seconds import LoadSeconds
from offload_core.lookup.estimates.prefill_seconds import PrefillSeconds
from offload_core.lookup.load_choice import LoadChoice
from offload_core.lookup.prefix_query import PrefixQuery
from offload_core.planning.planner import GroupGeometry, HitPolicy, HybridOffloadPlanner

BLOCK = 16
MIB = 1 << 20
FULL = HitPolicy("full")


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class Setup:
    """Tiers ``fast`` and ``slow``, an engine with 1 ms per 16 tokens, and objects of 1 MiB for 16 tokens each.

    Args:
        policies: one group each.
        weights: the tiers' ``load_weight``.
    """

    def __init__(
        self, *policies: HitPolicy, load_when: LoadPolicy = "cheaper", prefill: bool = True, **weights: float
    ) -> None:
        self.clock = Clock()
        groups = [GroupGeometry(index, BLOCK, policy) for index, policy in enumerate(policies or (FULL,))]
        self.planner = HybridOffloadPlanner.build(
            groups, hash_block_size=BLOCK, max_model_len=1 << 16, hybrid_chunk_size=BLOCK
        )
        tiers: Any = [
            SimpleNamespace(name=name, load_weight=weights.get(name, 1.0), limits=Limits()) for name in ("fast", "slow")
        ]
        self.choice = LoadChoice(load_when, self.planner, tiers, step_tokens=1 << 16, clock=self.clock)
        self.choice.object_bytes = {pack.name: MIB for pack in self.planner.packs}
        self._job = 0
        if prefill:
            for tokens in (160, 320, 640):
                self.choice.prefill.observe([(0, tokens)], tokens / BLOCK * 1e-3)

    def query(self, tokens: int = 161, computed: int = 0) -> PrefixQuery:
        return PrefixQuery({}, ("ab",), computed, tokens - 1)

    def load(self, tier: str, boundary: int, seconds: float, computed: int = 0) -> None:
        self._job += 1
        self.choice.load_begins(tier, self._job, computed, boundary)
        self.clock.now += seconds
        assert self.choice.load_ends(tier, self._job, measured=True) == pytest.approx(seconds)

    def measured(self, tier: str, latency: float, per_mib: float) -> None:
        """Let loads of several sizes end as on a tier with this latency and these seconds per MiB."""
        for units in (2, 4, 8, 10):
            self.load(tier, units * BLOCK, latency + per_mib * units)


def test_a_load_pays_until_something_was_measured() -> None:
    setup = Setup(prefill=False)
    assert setup.choice.worth("slow", setup.query(), 160) > setup.choice.worth("slow", setup.query(), 80) > 0
    assert list(setup.choice.tiers_to_ask(setup.query())) == ["fast", "slow"]
    assert setup.choice.tiers_to_ask(setup.query())["fast"] == math.inf


def test_the_first_load_of_a_tier_is_tried() -> None:
    setup = Setup()
    assert setup.choice.worth("slow", setup.query(), 160) == pytest.approx(10e-3, rel=0.05)


def test_a_load_that_takes_longer_than_the_prefill_does_not_pay() -> None:
    setup = Setup()
    setup.measured("fast", 1e-3, 0.2e-3)
    setup.measured("slow", 50e-3, 0.2e-3)
    assert setup.choice.worth("fast", setup.query(), 160) == pytest.approx(7e-3, rel=0.1)
    assert setup.choice.worth("slow", setup.query(), 160) < 0
    assert setup.choice.worth("slow", setup.query(1601), 1600) > 0, "many tokens are worth the latency"
    assert list(setup.choice.tiers_to_ask(setup.query())) == ["fast"]
    assert setup.choice.tiers_to_ask(setup.query())["fast"] == pytest.approx(7e-3, rel=0.1)


@pytest.mark.parametrize(("weight", "best"), [(1.0, "fast"), (3.0, "slow")])
def test_the_seconds_saved_times_the_weight_decide_between_tiers(weight: float, best: str) -> None:
    setup = Setup(slow=weight)
    setup.measured("fast", 1e-3, 0.1e-3)
    setup.measured("slow", 4e-3, 0.1e-3)
    assert max(("fast", "slow"), key=lambda tier: setup.choice.worth(tier, setup.query(), 160)) == best


def test_with_always_the_tokens_times_the_weight_decide() -> None:
    setup = Setup(load_when="always", slow=2.0)
    setup.measured("slow", 5.0, 1.0)
    assert setup.choice.worth("slow", setup.query(), 160) == 320
    assert setup.choice.worth("fast", setup.query(), 160) == 160
    assert list(setup.choice.tiers_to_ask(setup.query())) == ["fast", "slow"]
    assert set(setup.choice.tiers_to_ask(setup.query()).values()) == {math.inf}


def test_a_load_waits_for_the_bytes_of_those_under_way() -> None:
    setup = Setup()
    setup.measured("fast", 0.1e-3, 0.2e-3)
    alone = setup.choice.worth("fast", setup.query(), 160)
    setup.choice.load_begins("fast", 77, 0, 320)
    assert setup.choice.worth("fast", setup.query(), 160) == pytest.approx(alone - 20 * 0.2e-3, rel=0.1)
    assert setup.choice.load_ends("fast", 77, measured=False) == 0.0
    assert setup.choice.worth("fast", setup.query(), 160) == pytest.approx(alone)
    assert setup.choice.load_ends("fast", 77, measured=True) == 0.0, "it has ended already"


def test_a_load_that_does_not_end_makes_its_tier_dear_at_once() -> None:
    setup = Setup()
    setup.measured("fast", 0.1e-3, 0.1e-3)
    setup.choice.load_begins("fast", 77, 0, 16)
    setup.clock.now += 0.5
    assert setup.choice.worth("fast", setup.query(), 160) == pytest.approx(10e-3 - 0.5, rel=0.05)


def test_a_tier_that_was_too_slow_is_tried_again_the_later_the_slower_it_was() -> None:
    waits = []
    for factor in (1.5, 6.0):
        setup = Setup()
        setup.measured("slow", factor * 10e-3, 0.0)
        began = setup.clock.now
        while setup.choice.worth("slow", setup.query(), 160) <= 0:
            setup.clock.now += 10
        waits.append(setup.clock.now - began)
        setup.load("slow", 160, factor * 10e-3)
        assert setup.choice.worth("slow", setup.query(), 160) < 0, "it is as slow as before"
    assert 120 < waits[0] < 300 < waits[1] < 900


def test_a_tier_that_has_become_fast_is_used_again_after_one_load() -> None:
    setup = Setup()
    setup.measured("slow", 40e-3, 0.0)
    setup.clock.now += 900
    assert setup.choice.worth("slow", setup.query(), 160) > 0
    setup.load("slow", 160, 1e-3)
    assert setup.choice.worth("slow", setup.query(), 160) == pytest.approx(9e-3, rel=0.2)


def test_a_lookup_that_takes_longer_than_a_hit_saves_is_not_begun() -> None:
    setup = Setup()
    setup.choice.lookup_ended("slow", 20e-3, answered=True)
    setup.choice.lookup_ended("fast", 20e-3, answered=False)
    setup.choice.lookup_ended("fast", 1e-3, answered=False)  # says nothing: it may take longer
    assert list(setup.choice.tiers_to_ask(setup.query())) == []
    assert list(setup.choice.tiers_to_ask(setup.query(1601))) == ["fast", "slow"]
    setup.clock.now += 900
    assert list(setup.choice.tiers_to_ask(setup.query())) == ["fast", "slow"], "it may have become fast"


def test_a_lookup_that_was_waited_for_in_vain_is_not_begun_again() -> None:
    setup = Setup()
    worth = setup.choice.tiers_to_ask(setup.query())["slow"]
    setup.choice.lookup_ended("slow", worth, answered=False)
    assert "slow" not in setup.choice.tiers_to_ask(setup.query())


def test_a_load_that_would_miss_its_deadline_does_not_pay() -> None:
    setup = Setup()
    setup.choice.prefill.observe([(0, 160)], 500.0)
    setup.clock.now += 3600
    setup.choice.prefill.observe([(0, 160)], 500.0)
    setup.measured("slow", 40.0, 0.0)
    assert setup.choice.worth("slow", setup.query(), 160) == -math.inf


def test_the_end_of_an_attention_chunk_may_be_cheaper_than_the_deepest_boundary() -> None:
    setup = Setup(FULL, HitPolicy("chunked", attention_chunk_tokens=8 * BLOCK))
    setup.measured("slow", 0.0, 0.9e-3)
    query = setup.query(16 * BLOCK)
    assert setup.choice.boundary("slow", query, 15 * BLOCK) == 8 * BLOCK
    setup.load("fast", 15 * BLOCK, 1e-6)
    assert setup.choice.boundary("fast", query, 15 * BLOCK) == 15 * BLOCK
    assert setup.choice.boundary("slow", setup.query(16 * BLOCK, computed=8 * BLOCK), 15 * BLOCK) == 15 * BLOCK


@given(
    kinds=st.sampled_from(
        [(FULL,), (FULL, HitPolicy("window", window_tokens=100)), (FULL, HitPolicy("state")), (HitPolicy("state"),)]
    ),
    latency=st.floats(0, 0.05), per_mib=st.floats(0, 0.005), computed=st.integers(0, 20), units=st.integers(1, 40),
    alike=st.booleans(),
)  # fmt: skip
def test_if_any_boundary_pays_none_is_better_than_the_deepest(
    kinds: tuple[HitPolicy, ...], latency: float, per_mib: float, computed: int, units: int, alike: bool
) -> None:
    setup = Setup(*kinds, prefill=False)
    scale = 1 if alike else 1000  # far from the sizes of the query, all expectations are on lines
    for tokens in (160, 320, 640):
        setup.choice.prefill.observe([(0, scale * tokens)], scale * tokens / BLOCK * 1e-3)
    setup.choice.prefill.observe([(0, scale * 6400)], scale * 1.0)  # far more than proportional: attention
    for sizes in (2, 4, 8, 10):
        setup.load("slow", scale * sizes * BLOCK, latency + 1e-6 + per_mib * scale * sizes)
    deepest = (computed + units) * BLOCK
    query = setup.query(deepest + 1, computed * BLOCK)
    worths = [
        setup.choice.worth("slow", query, boundary * BLOCK) for boundary in range(computed + 1, computed + units + 1)
    ]
    if max(worths) > 0:
        saved = setup.choice.prefill_seconds_saved(computed * BLOCK, deepest, deepest + 1)
        assert worths[-1] >= max(worths) - (0.05 * saved if alike else 1e-9)


def test_tokens_behind_the_last_boundary_are_computed_in_any_case() -> None:
    setup = Setup(prefill=False)
    for before, tokens, seconds in ((0, 160, 0.010), (0, 300, 0.020), (160, 140, 0.018), (160, 1, 0.001)) * 20:
        setup.choice.prefill.observe([(before, tokens)], seconds)
    query = PrefixQuery({}, ("ab",), 0, 160, total_tokens=300)
    assert setup.choice.worth("fast", query, 160) == pytest.approx(0.002, rel=0.3)


def test_local_attention_needs_no_bytes_but_its_last_unit() -> None:
    setup = Setup(FULL, HitPolicy("state"))
    setup.measured("slow", 0.0, 0.9e-3)
    whole = setup.choice.worth("slow", setup.query(), 160)
    backfill = PrefixQuery({}, ("ab",), 0, 160, local_attention_tokens=160)
    assert setup.choice.worth("slow", backfill, 160) == pytest.approx(whole + 9 * 0.9e-3, rel=0.25)


def test_prefill_seconds_grow_with_steps_tokens_and_attention() -> None:
    clock = Clock()
    prefill = PrefillSeconds(512, clock)

    def cost(before: int, tokens: int) -> float:
        return 2e-3 + 1e-5 * tokens + 1e-8 * ((before + tokens) ** 2 - before**2) / 2

    for before in range(0, 8192, 512):
        for tokens in (64, 256, 512):
            prefill.observe([(before, tokens)], cost(before, tokens))
    whole = sum(cost(before, 512) for before in range(0, 8192, 512))
    assert prefill.seconds(0, 8192) == pytest.approx(whole, rel=0.05)
    assert prefill.seconds(8192 - 512, 8192) == pytest.approx(cost(8192 - 512, 512), rel=0.05)


def test_a_prompt_of_many_steps_is_estimated_in_parts() -> None:
    prefill = PrefillSeconds(512, Clock())
    for before in (0, 1000, 8000, 64000):
        for tokens in (64, 256, 512):
            prefill.observe([(before, tokens)], 2e-3 + 1e-5 * tokens + 1e-9 * ((before + tokens) ** 2 - before**2) / 2)
    for stop in (512 * 16, 512 * 16 + 1, 512 * 17, 512 * 33 + 100, 512 * 128):
        steps = ((before, min(before + 512, stop)) for before in range(0, stop, 512))
        whole = sum(2e-3 + 1e-5 * (end - before) + 1e-9 * (end**2 - before**2) / 2 for before, end in steps)
        assert prefill.seconds(0, stop) == pytest.approx(whole, rel=0.1)


def test_of_steps_as_expected_few_are_added(monkeypatch: pytest.MonkeyPatch) -> None:
    added: list[float] = []
    observe = CorrectedFit.observe

    def counted(self: CorrectedFit, features: Any, seconds: float, now: float) -> None:
        added.append(seconds)
        observe(self, features, seconds, now)

    monkeypatch.setattr(CorrectedFit, "observe", counted)
    prefill = PrefillSeconds(512, Clock())
    for _ in range(40):
        prefill.observe([(0, 512)], 0.1)
    assert 4 <= len(added) <= 8
    prefill.observe([(0, 512)], 0.2)
    assert added[-1] == 0.2, "each step that was not expected is added"


def test_steps_that_only_decode_say_nothing_about_prefills() -> None:
    prefill = PrefillSeconds(512)
    prefill.observe([(100, 1), (3000, 1)], 5.0)
    prefill.observe([], 5.0)
    assert prefill.seconds(0, 100) is None


@pytest.mark.parametrize("call", [LoadSeconds.lookup_seconds, lambda seconds: seconds.seconds(MIB)])
def test_nothing_is_expected_of_a_tier_that_was_never_used(call: Callable[[LoadSeconds], float]) -> None:
    assert call(LoadSeconds()) == 0.0
