"""Retentions against a list of all that was asked for: the limits per tenant and in all, the ends, the touches."""

from __future__ import annotations

import math

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from offload_core.lookup.hints import retentions as module
from offload_core.lookup.hints.retentions import Retentions, TouchRounds
from offload_core.planning.chunk_keys import ChunkRef

PER_TENANT, IN_ALL = 100, 150
SIZES = {"full": 10, "window": 3}


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def refs(salt: str, depth: int) -> list[ChunkRef]:
    """The chunks of a prefix, the deepest first: all of attention, and the last one of the window."""
    window = ChunkRef("window", f"{salt}{depth}".encode())
    return [window, *(ChunkRef("full", f"{salt}{unit}".encode()) for unit in range(depth, 0, -1))]


def size(chunks: set[ChunkRef]) -> int:
    return sum(SIZES[ref.pack] for ref in chunks)


class AgainstAList(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.clock = Clock()
        self.retentions = Retentions(PER_TENANT, IN_ALL, self.clock)
        self.retentions.chunk_bytes = SIZES
        self.asked: list[tuple[str, tuple[str, int], float]] = []

    def live(self, tenant: str | None = None) -> list[tuple[str, tuple[str, int], float]]:
        return [one for one in self.asked if one[2] > self.clock.now and tenant in (None, one[0])]

    def chunks(self, tenant: str) -> set[ChunkRef]:
        return {ref for _, name, _ in self.live(tenant) for ref in refs(*name)}

    def total(self) -> int:
        return sum(size(self.chunks(tenant)) for tenant in "ab" + "c")

    @rule(
        tenant=st.sampled_from("abc"),
        salt=st.sampled_from("xy"),
        depth=st.integers(1, 9),
        seconds=st.sampled_from([1.0, 5.0, math.inf]),
    )
    def add(self, tenant: str, salt: str, depth: int, seconds: float) -> None:
        name, until = (salt, depth), self.clock.now + seconds
        known = next((one for one in self.live(tenant) if one[1] == name), None)
        before = self.chunks(tenant)
        added = size(set(refs(*name)) - before)
        fits = size(before) + added <= PER_TENANT and self.total() + added <= IN_ALL
        refusal = self.retentions.add(tenant, name, refs(*name), until)
        assert (refusal is None) == (known is not None or fits)
        if known is not None:
            self.asked.remove(known)
            until = max(until, known[2])
        if refusal is None:
            self.asked.append((tenant, name, until))

    @rule(tenant=st.sampled_from("abc"), salt=st.sampled_from("xy"), depth=st.integers(1, 9))
    def remove(self, tenant: str, salt: str, depth: int) -> None:
        names = {(salt, shallower) for shallower in range(1, depth + 1)}
        gone = [one for one in self.live(tenant) if one[1] in names]
        self.retentions.expire()
        assert self.retentions.remove(tenant, names) == len(gone)
        self.asked = [one for one in self.asked if one not in gone]

    @rule(seconds=st.sampled_from([0.5, 1.0, 4.0]))
    def time_passes(self, seconds: float) -> None:
        self.clock.now += seconds

    @rule()
    def reset(self) -> None:
        self.retentions.clear()
        self.asked.clear()

    @invariant()
    def it_protects_the_live_prefixes_and_nothing_else(self) -> None:
        self.retentions.expire()
        wanted = {ref for tenant in "abc" for ref in self.chunks(tenant)}
        assert bool(self.retentions) == bool(wanted)
        assert self.retentions.nbytes == self.total() <= IN_ALL
        order = self.retentions.refs()
        assert len(order) == len(set(order))
        assert set(order) == wanted
        for ref in {ref for salt in "xy" for ref in refs(salt, 9)}:
            assert self.retentions.protects(ref) == (ref in wanted)
        for _, name, _ in self.live():
            attention = [order.index(ref) for ref in refs(*name)[1:]]
            assert attention == sorted(attention), "heads are touched after the chunks behind them"


AgainstAList.TestCase.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
TestAgainstAList = AgainstAList.TestCase


def test_the_number_of_chunks_is_bounded_whatever_their_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_CHUNKS", 12)
    held = Retentions(math.inf, math.inf, Clock())
    assert held.add("a", "one", refs("x", 9), math.inf) is None
    assert "try again later" in str(held.add("b", "two", refs("y", 2), math.inf))
    held.remove("a", ["one"])
    assert held.add("b", "two", refs("y", 2), math.inf) is None


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def held(clock: Clock) -> Retentions:
    made = Retentions(1000, 1000, clock)
    made.chunk_bytes = SIZES
    return made


def test_a_round_follows_enough_renewed_bytes_or_enough_seconds(held: Retentions, clock: Clock) -> None:
    rounds = TouchRounds(held, bytes_between=50, seconds_between=5.0, clock=clock)
    held.add("a", 1, refs("x", 2), math.inf)
    assert rounds.take(0) == refs("x", 2)
    assert [rounds.take(20), rounds.take(20)] == [[], []]
    assert rounds.take(10) == refs("x", 2), "in the step that makes it 50 bytes"
    assert rounds.take(39) == []
    assert rounds.take(1) == refs("x", 2), "the 10 bytes came after the touches"
    clock.now = 4.9
    assert rounds.take(0) == []
    clock.now = 5.0
    assert rounds.take(0) == refs("x", 2)


def test_a_round_goes_on_over_several_steps_and_leaves_out_what_is_no_longer_protected(
    held: Retentions, clock: Clock
) -> None:
    rounds = TouchRounds(held, 50, 5.0, touches_per_step=2, clock=clock)
    held.add("a", 1, refs("x", 4), math.inf)
    held.add("a", 2, refs("y", 1), 1.0)
    assert rounds.take(0) == refs("x", 4)[:2]
    assert rounds.take(0) == refs("x", 4)[2:4]
    clock.now = 1.0
    assert rounds.take(0) == refs("x", 4)[4:]
    assert rounds.take(0) == []


def test_a_new_prefix_is_touched_at_once(held: Retentions, clock: Clock) -> None:
    rounds = TouchRounds(held, 50, 5.0, clock=clock)
    held.add("a", 1, refs("x", 1), math.inf)
    rounds.take(0)
    held.add("a", 2, refs("y", 1), math.inf)
    rounds.added(refs("y", 1))
    assert rounds.take(0) == refs("y", 1)
    rounds.added(refs("y", 1))
    held.clear()
    rounds.clear()
    assert rounds.take(100) == []
