"""Write policies: what a tier takes, by the touches it remembers."""

from __future__ import annotations

from collections import OrderedDict

from hypothesis import given
from hypothesis import strategies as st

from offload_core.api.keys import ObjectKey
from offload_core.transfer.write_policy import WritePolicy, nothing_stored_problem
from tests.support.memory_backend import key

REMEMBERED = 3


def test_every_takes_what_is_offered_and_promoted_and_asks_for_nothing_else() -> None:
    policy = WritePolicy("every")
    for _ in range(2):
        assert policy.takes_offered(key(1))
        assert policy.takes_loaded(key(1), promoted=True)
        assert not policy.takes_loaded(key(1), promoted=False)


def test_never_takes_nothing() -> None:
    policy = WritePolicy("never")
    for _ in range(3):
        assert not policy.takes_offered(key(1))
        assert not policy.takes_loaded(key(1), promoted=True)


class SecondTouch:
    """What a tier with a record of ``REMEMBERED`` keys should answer: a list of keys, and a set of the stored ones."""

    def __init__(self) -> None:
        self.touched: OrderedDict[ObjectKey, int] = OrderedDict()
        self.stored: set[ObjectKey] = set()

    def touch(self, name: ObjectKey) -> int:
        count = self.touched.pop(name, 0) + 1
        if count == 1:
            self.stored.discard(name)
        self.touched[name] = count
        while len(self.touched) > REMEMBERED:
            self.touched.popitem(last=False)
        return count


STEPS = st.lists(st.tuples(st.sampled_from(["offer", "load", "promote", "stored"]), st.integers(0, 5)), max_size=40)


@given(STEPS)
def test_second_touch_against_a_list(steps: list[tuple[str, int]]) -> None:
    policy, model = WritePolicy("second-touch", REMEMBERED), SecondTouch()
    for what, number in steps:
        name = key(number)
        if what == "stored":
            policy.has_stored(name)
            if name in model.touched:
                model.stored.add(name)
        elif what == "offer":  # an offer says that nobody has it, whatever was known before
            assert policy.takes_offered(name) == (model.touch(name) > 1)
        else:
            expected = model.touch(name) > 1 and name not in model.stored
            assert policy.takes_loaded(name, promoted=what == "promote") == expected


def test_only_tiers_that_all_never_store_are_a_problem() -> None:
    assert nothing_stored_problem(["never", "every"]) is None
    assert nothing_stored_problem(["second-touch"]) is None
    problem = nothing_stored_problem(["never", "never"])
    assert problem is not None
    assert "set it to every or second-touch" in problem
