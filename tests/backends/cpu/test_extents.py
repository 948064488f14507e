"""Which pages the cpu backend hands out."""

from __future__ import annotations

import random
import sys

from hypothesis import given
from hypothesis import strategies as st
from offload_backend_cpu.extents import FreePages, Run

PAGES = 24


def longest_free_run(free: set[int]) -> int:
    longest = run = 0
    for page in range(PAGES):
        run = run + 1 if page in free else 0
        longest = max(longest, run)
    return longest


@given(st.lists(st.tuples(st.booleans(), st.integers(1, PAGES)), max_size=60))
def test_every_page_has_one_holder_and_what_fits_in_one_piece_is_in_one(steps: list[tuple[bool, int]]) -> None:
    pages = FreePages(PAGES)
    held: list[tuple[Run, ...]] = []
    free = set(range(PAGES))
    used: set[int] = set()
    for take, number in steps:
        if take and number <= pages.free_pages:
            runs = pages.take(number)
            taken = [page for start, count in runs for page in range(start, start + count)]
            assert len(taken) == len(set(taken)) == number
            assert free.issuperset(taken)
            # Free pages on both sides of the first untouched one count as two runs.
            whole = max(longest_free_run(free & used), longest_free_run(free - used)) >= number
            assert (len(runs) == 1) == whole, "it is pieced together only where it must be"
            if longest_free_run(free & used) >= number:
                assert used.issuperset(taken), "memory that the system has given already comes first"
            free -= set(taken)
            used |= set(taken)
            held.append(runs)
        elif held:
            runs = held.pop(number % len(held))
            pages.give_back(runs)
            free |= {page for start, count in runs for page in range(start, start + count)}
        assert pages.free_pages == len(free)


def steps_of(num_objects: int) -> int:
    """Return how many lines run in the module while 1,000 objects are replaced, at random, among ``num_objects``."""
    chooser = random.Random(7)
    pages = FreePages(num_objects * 3)
    held = [pages.take(chooser.choice((1, 2, 5))) for _ in range(num_objects)]
    lines = 0

    def count(frame: object, event: str, _: object) -> object:
        nonlocal lines
        lines += event == "line"
        return count

    sys.settrace(count)  # type: ignore[arg-type]  # its types name themselves
    try:
        for _ in range(1000):
            index = chooser.randrange(len(held))
            pages.give_back(held[index])
            held[index] = pages.take(sum(count for _, count in held[index]))
    finally:
        sys.settrace(None)
    return lines


def test_a_hundred_times_the_objects_cost_no_more_per_object() -> None:
    assert steps_of(20_000) < 2 * steps_of(200)
