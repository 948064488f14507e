"""The choice of pages by the cpu backend."""

from __future__ import annotations

import random
import sys

from hypothesis import given
from hypothesis import strategies as st
from offload_backend_cpu.free_pages import FreePages, Run

PAGES = 24


def free_runs(free: set[int]) -> dict[int, int]:
    """Return the length of each run of free pages by its first page."""
    runs: dict[int, int] = {}
    start = 0
    for page in sorted(free):
        start = start if page - 1 in free else page
        runs[start] = page + 1 - start
    return runs


@given(st.lists(st.tuples(st.booleans(), st.integers(1, PAGES)), max_size=60))
def test_every_page_has_one_holder_and_what_fits_in_one_piece_is_in_one(steps: list[tuple[bool, int]]) -> None:
    pages = FreePages(PAGES)
    held: list[tuple[Run, ...]] = []
    free = set(range(PAGES))
    used: set[int] = set()
    for take, number in steps:
        if take and number <= pages.num_free:
            runs = pages.take(number)
            taken = [page for start, count in runs for page in range(start, start + count)]
            assert len(taken) == len(set(taken)) == number
            assert free.issuperset(taken)
            # Free pages on both sides of the first untouched one count as two runs.
            touched, untouched = free_runs(free & used), free_runs(free - used)
            fitting = [length for length in touched.values() if length >= number]
            if fitting:
                assert len(runs) == 1
                assert touched.get(runs[0][0]) == min(fitting), "the best fit among touched runs"
            else:
                whole = any(length >= number for length in untouched.values())
                assert (len(runs) == 1) == whole, "pieced together only if no run is long enough"
            free -= set(taken)
            used |= set(taken)
            held.append(runs)
        elif held:
            runs = held.pop(number % len(held))
            pages.release(runs)
            free |= {page for start, count in runs for page in range(start, start + count)}
        assert pages.num_free == len(free)


def test_the_shortest_hole_that_is_long_enough_is_filled() -> None:
    pages = FreePages(PAGES)
    holes = [(pages.take(length), pages.take(1)) for length in (5, 2, 7, 3)]
    for hole, _ in holes:
        pages.release(hole)
    assert [pages.take(length) for length in (3, 2, 6)] == [holes[3][0], holes[1][0], ((holes[2][0][0][0], 6),)]


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
            pages.release(held[index])
            held[index] = pages.take(sum(count for _, count in held[index]))
    finally:
        sys.settrace(None)
    return lines


def test_a_hundred_times_the_objects_cost_no_more_per_object() -> None:
    assert steps_of(20_000) < 2 * steps_of(200)
