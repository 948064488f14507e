"""The choice among connectors, against an oracle that tries all that an undecided one might still say."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from offload_core.config.connectors import ChoiceLimits
from offload_core.lookup.connector_choice import FAILED, Answer, ConnectorChoice, Decision, Question

MOST = 12
NAMES = ("a", "b", "c")
TIMEOUT, GRACE = 10.0, 3.0
NOTHING = Decision()
AGAIN = Decision(ask_again=True)


def limits(**changes: float) -> ChoiceLimits:
    given = {"lookup_timeout_seconds": TIMEOUT, "lookup_grace_seconds": GRACE, **changes}
    return ChoiceLimits.model_validate(given)


def choice(*weights: float, **changes: float) -> ConnectorChoice:
    return ConnectorChoice(NAMES[: len(weights)], weights, limits(**changes))


def choose(
    made: ConnectorChoice, question: Question, answers: Sequence[Answer], now: float, busy: Sequence[bool] = ()
) -> Decision:
    return made.choose(question, answers, MOST, busy or [False] * len(answers), now)


def winner(tokens: Sequence[int], weights: Sequence[float]) -> int | None:
    """The first of those with the highest product, by going through all of them."""
    best: int | None = None
    for place, (number, weight) in enumerate(zip(tokens, weights, strict=True)):
        if number > 0 and (best is None or number * weight > tokens[best] * weights[best]):
            best = place
    return best


@dataclass
class Oracle:
    """The rules of one question, straight from the words, with closed breakers."""

    weights: Sequence[float]
    began: float | None = None
    offered: float | None = None
    given_up: set[int] = field(default_factory=set)

    def decide(self, answers: Sequence[int | None], now: float) -> Decision:
        tokens = [answer or 0 for answer in answers]
        can_win = [
            place
            for place, answer in enumerate(answers)
            if answer is None
            and place not in self.given_up
            and any(
                winner([*tokens[:place], more, *tokens[place + 1 :]], self.weights) == place
                for more in range(1, MOST + 1)
            )
        ]
        if can_win:
            self.began = now if self.began is None else self.began
            self.offered = None if not any(tokens) else now if self.offered is None else self.offered
            if now < self.began + TIMEOUT and (self.offered is None or now < self.offered + GRACE):
                return AGAIN
            self.given_up.update(can_win)
        self.began = self.offered = None
        return Decision(winner(tokens, self.weights))


answers = st.lists(st.none() | st.integers(0, MOST), min_size=3, max_size=3)
weights = st.lists(st.sampled_from((0.5, 1.0, 2.0, 4.0)), min_size=3, max_size=3)


@given(weights, st.lists(st.tuples(st.sampled_from((0.0, 1.0, 3.0, 4.0, 11.0)), answers), max_size=8))
def test_every_decision_is_the_oracles(weights: list[float], steps: list[tuple[float, list[int | None]]]) -> None:
    made, question, oracle = choice(*weights, breaker_failures=1000), Question(), Oracle(weights)
    now = 100.0
    for seconds, said in steps:
        now += seconds
        assert choose(made, question, said, now) == oracle.decide(said, now), said


@given(weights, answers)
def test_a_request_is_told_something_at_the_deadline(weights: list[float], given: list[int | None]) -> None:
    made, question = choice(*weights), Question()
    choose(made, question, given, 0.0)
    assert not choose(made, question, given, TIMEOUT).ask_again


def test_equal_offers_go_to_the_first() -> None:
    assert choose(choice(2, 1), Question(), [3, 6], 0.0) == Decision(0)
    assert choose(choice(1, 2), Question(), [6, 3], 0.0) == Decision(0)
    assert choose(choice(1, 2), Question(), [6, 4], 0.0) == Decision(1)


def test_an_undecided_one_that_cannot_win_is_not_waited_for() -> None:
    assert choose(choice(4, 1), Question(), [3, None], 0.0) == Decision(0)
    assert choose(choice(4, 1.1), Question(), [3, None], 0.0) == AGAIN


def test_an_offer_waits_for_others_for_the_grace_only() -> None:
    made, question = choice(1, 9), Question()
    assert choose(made, question, [0, None], 0.0) == AGAIN
    assert choose(made, question, [5, None], 5.0) == AGAIN
    assert choose(made, question, [5, None], 5.0 + GRACE) == Decision(0)
    assert choose(made, question, [5, None], 5.0 + GRACE) == Decision(0), "it found no blocks and is asked again"
    assert choose(made, question, [5, 2], 9.0) == Decision(1), "the late answer is taken all the same"
    assert not question.late, "the connector had no chance to miss its deadline"


def test_one_that_never_decides_costs_few_requests_their_deadline(caplog: pytest.LogCaptureFixture) -> None:
    made = choice(1, 1, breaker_failures=2, breaker_pause_seconds=60.0)
    now = 0.0
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            question = Question()
            assert choose(made, question, [0, None], now) == AGAIN
            now += TIMEOUT
            assert choose(made, question, [0, None], now) == NOTHING
            assert question.late == {1}
    assert "connector 'b' gave no answer within 10 s; for 60 s its answers count as misses" in caplog.text
    for _ in range(9):
        assert choose(made, Question(), [0, None], now + 59.0) == NOTHING
        assert choose(made, Question(), [2, None], now + 59.0) == Decision(0)


def _paused(caplog: pytest.LogCaptureFixture) -> ConnectorChoice:
    made = choice(1, 1, breaker_failures=2, breaker_pause_seconds=60.0, breaker_max_pause_seconds=600.0)
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            assert choose(made, Question(), [0, FAILED], 0.0) == NOTHING
    assert "connector 'b' keeps raising errors; for 60 s" in caplog.text
    caplog.clear()
    assert choose(made, Question(), [0, 7], 59.0) == NOTHING, "an offer in the pause counts as a miss"
    return made


def test_one_request_tries_a_paused_one_again(caplog: pytest.LogCaptureFixture) -> None:
    made = _paused(caplog)
    probe = Question()
    assert choose(made, probe, [0, None], 60.0) == AGAIN
    assert choose(made, Question(), [0, None], 61.0) == NOTHING, "one request at a time"
    with caplog.at_level(logging.WARNING):
        assert choose(made, probe, [0, 7], 62.0) == Decision(1)
    assert "connector 'b' answers again and is used again" in caplog.text
    assert choose(made, Question(), [0, 7], 62.0) == Decision(1)


@pytest.mark.parametrize("end", ["late", "error", "aborted"])
def test_a_failed_probe_makes_the_pause_longer(caplog: pytest.LogCaptureFixture, end: str) -> None:
    made = _paused(caplog)
    probe = Question()
    assert choose(made, probe, [0, None], 60.0) == AGAIN
    if end == "aborted":
        made.ended(probe, 70.0)
    else:
        assert choose(made, probe, [0, FAILED if end == "error" else None], 70.0) == NOTHING
    assert choose(made, Question(), [0, 7], 189.0) == NOTHING
    assert choose(made, Question(), [0, 7], 190.0) == Decision(1)


def test_a_wait_for_a_load_under_way_is_no_failure(caplog: pytest.LogCaptureFixture) -> None:
    made = choice(1, 1, breaker_failures=1)
    question = Question()
    with caplog.at_level(logging.WARNING):
        assert choose(made, question, [0, None], 0.0, busy=[False, True]) == AGAIN
        assert choose(made, question, [0, None], TIMEOUT, busy=[False, True]) == NOTHING
    assert question.late == {1}
    assert caplog.text == ""
    assert choose(made, Question(), [0, 7], TIMEOUT) == Decision(1)
