"""Write policies: the objects that a tier takes, by its usage log."""

from __future__ import annotations

from collections import OrderedDict

from hypothesis import given
from hypothesis import strategies as st

from offload_core.api.keys import ObjectKey
from offload_core.planning.write_policy import WritePolicy, nothing_stored_problem
from tests.support.memory_backend import key

LOG_KEYS = 3


def test_every_takes_offered_and_promoted_objects_and_nothing_else() -> None:
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
    """A model of a tier with a usage log of ``LOG_KEYS`` keys: counts of uses, and a set of stored keys."""

    def __init__(self) -> None:
        self.uses: OrderedDict[ObjectKey, int] = OrderedDict()
        self.stored: set[ObjectKey] = set()

    def use(self, name: ObjectKey) -> int:
        count = self.uses.pop(name, 0) + 1
        if count == 1:
            self.stored.discard(name)
        self.uses[name] = count
        while len(self.uses) > LOG_KEYS:
            self.uses.popitem(last=False)
        return count


STEPS = st.lists(st.tuples(st.sampled_from(["offer", "load", "promote", "stored"]), st.integers(0, 5)), max_size=40)


@given(STEPS)
def test_second_touch_against_a_list(steps: list[tuple[str, int]]) -> None:
    policy, model = WritePolicy("second-touch", LOG_KEYS), SecondTouch()
    for what, number in steps:
        name = key(number)
        if what == "stored":
            policy.has_stored(name)
            if name in model.uses:
                model.stored.add(name)
        elif what == "offer":  # an offer says that no tier has the object
            assert policy.takes_offered(name) == (model.use(name) > 1)
        else:
            expected = model.use(name) > 1 and name not in model.stored
            assert policy.takes_loaded(name, promoted=what == "promote") == expected


def test_only_tiers_that_all_never_store_are_a_problem() -> None:
    assert nothing_stored_problem(["never", "every"]) is None
    assert nothing_stored_problem(["second-touch"]) is None
    problem = nothing_stored_problem(["never", "never"])
    assert problem is not None
    assert "set it to every or second-touch" in problem
