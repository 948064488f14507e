"""The order of eviction, compared with the simplest program for it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st
from offload_backend_cpu.eviction import EvictionOrder

from offload_core.api.keys import ObjectKey

CAPACITY = 6


def key(number: int) -> ObjectKey:
    return ObjectKey("ab" * 32, "full-u256", number.to_bytes(4, "big"))


@dataclass
class SimpleOrder:
    """Lists, searched from end to end. The last is the one used last."""

    policy: str
    probation: list[int] = field(default_factory=list)
    protected: list[int] = field(default_factory=list)
    sizes: dict[int, int] = field(default_factory=dict)

    def add(self, number: int, size: int, used_again: bool) -> None:
        self.sizes[number] = size
        if self.policy == "slru" and used_again:
            self.protected.append(number)
            while sum(self.sizes[n] for n in self.protected) > CAPACITY * 0.8:
                self.probation.append(self.protected.pop(0))
        else:
            self.probation.append(number)

    def remove(self, number: int) -> None:
        (self.probation if number in self.probation else self.protected).remove(number)


Step = tuple[Literal["add", "add again", "use", "remove"], int, int]
STEPS = st.lists(
    st.tuples(st.sampled_from(["add", "add again", "use", "remove"]), st.integers(0, 5), st.integers(1, 3)), max_size=60
)


@pytest.mark.parametrize("policy", ["lru", "slru"])
@given(steps=STEPS)
def test_the_order_is_that_of_the_simplest_program(policy: Literal["lru", "slru"], steps: list[Step]) -> None:
    order, plain = EvictionOrder(policy, CAPACITY), SimpleOrder(policy)
    for verb, number, size in steps:
        there = number in plain.probation + plain.protected
        if verb.startswith("add") and not there:
            order.add(key(number), size, used_again=verb == "add again")
            plain.add(number, size, verb == "add again")
        elif verb == "use" and there:
            order.record_use(key(number))
            plain.remove(number)
            plain.add(number, plain.sizes[number], True)
        elif verb == "remove" and there:
            assert order.remove(key(number)) == plain.sizes[number]
            plain.remove(number)
        remaining = plain.probation + plain.protected
        assert (len(order), order.size) == (len(remaining), sum(plain.sizes[n] for n in remaining))
        if remaining:
            assert order.next_victim() == key(remaining[0])
    victims = []
    while len(order):
        victims.append(order.next_victim())
        order.remove(victims[-1])
    assert victims == [key(number) for number in plain.probation + plain.protected]


@pytest.mark.parametrize(("policy", "survives"), [("lru", False), ("slru", True)])
def test_a_scan_does_not_evict_used_objects_under_slru(policy: Literal["lru", "slru"], survives: bool) -> None:
    order = EvictionOrder(policy, CAPACITY)
    order.add(key(0), 1)
    order.record_use(key(0))
    gone = set()
    for number in range(1, 100):
        while order.size >= CAPACITY:
            gone.add(order.next_victim())
            order.remove(order.next_victim())
        order.add(key(number), 1)
    assert (key(0) not in gone) == survives
