"""The order of eviction, compared with the simplest program for it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from offload_core.api import EvictionOrder
from offload_core.api.keys import ObjectKey

CAPACITY = 6


def key(number: int) -> ObjectKey:
    return ObjectKey("ab" * 32, "full-u256", number.to_bytes(4, "big"))


@dataclass
class SimpleOrder:
    """Lists, searched from end to end. The last is the one used last."""

    policy: str
    spare: list[int] = field(default_factory=list)
    probation: list[int] = field(default_factory=list)
    protected: list[int] = field(default_factory=list)
    sizes: dict[int, int] = field(default_factory=dict)

    def add(self, number: int, size: int, *, used_again: bool = False, spare: bool = False) -> None:
        self.sizes[number] = size
        if self.policy == "slru" and used_again:
            self.protected.append(number)
            while sum(self.sizes[n] for n in self.protected) > CAPACITY * 0.8:
                self.probation.append(self.protected.pop(0))
        elif spare:
            self.spare.append(number)
        else:
            self.probation.append(number)

    def touch(self, number: int, spare: bool) -> None:
        of_its_class = self.protected if number in self.protected else self.probation
        self.remove(number)
        (self.spare if spare else of_its_class).append(number)

    def remove(self, number: int) -> None:
        for numbers in (self.spare, self.probation, self.protected):
            if number in numbers:
                numbers.remove(number)

    @property
    def in_order(self) -> list[int]:
        return self.spare + self.probation + self.protected


VERBS = ("add", "add spare", "add again", "use", "touch", "touch as spare", "remove")
STEPS = st.lists(st.tuples(st.sampled_from(VERBS), st.integers(0, 5), st.integers(1, 3)), max_size=60)


@pytest.mark.parametrize("policy", ["lru", "slru"])
@given(steps=STEPS)
def test_the_order_is_that_of_the_simplest_program(
    policy: Literal["lru", "slru"], steps: list[tuple[str, int, int]]
) -> None:
    order: EvictionOrder[ObjectKey] = EvictionOrder(policy, CAPACITY)
    plain = SimpleOrder(policy)
    for verb, number, size in steps:
        there = number in plain.in_order
        assert (key(number) in order) == there
        if verb.startswith("add") and not there:
            options = {"used_again": verb == "add again", "spare": verb == "add spare"}
            order.add(key(number), size, **options)
            plain.add(number, size, **options)
        elif verb == "use" and there:
            order.record_use(key(number))
            plain.remove(number)
            plain.add(number, plain.sizes[number], used_again=True)
        elif verb.startswith("touch") and there:
            order.touch(key(number), spare=verb == "touch as spare")
            plain.touch(number, verb == "touch as spare")
        elif verb == "remove" and there:
            assert order.remove(key(number)) == plain.sizes[number]
            plain.remove(number)
        remaining = plain.in_order
        assert (len(order), order.size) == (len(remaining), sum(plain.sizes[n] for n in remaining))
        if remaining:
            assert order.next_victim() == key(remaining[0])
    victims = []
    while len(order):
        victims.append(order.next_victim())
        order.remove(victims[-1])
    assert victims == [key(number) for number in plain.in_order]


@pytest.mark.parametrize(("policy", "survives"), [("lru", False), ("slru", True)])
def test_a_scan_does_not_evict_used_objects_under_slru(policy: Literal["lru", "slru"], survives: bool) -> None:
    order: EvictionOrder[ObjectKey] = EvictionOrder(policy, CAPACITY)
    order.add(key(0), 1)
    order.record_use(key(0))
    gone = set()
    for number in range(1, 100):
        while order.size >= CAPACITY:
            gone.add(order.next_victim())
            order.remove(order.next_victim())
        order.add(key(number), 1)
    assert (key(0) not in gone) == survives
