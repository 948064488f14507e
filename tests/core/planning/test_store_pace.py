"""The pace of stores, beside an oracle that knows the bytes of every object on its way."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from offload_core.planning.store_pace import StorePace

SIZES = {"small": 3, "large": 10}

steps = st.lists(
    st.tuples(
        st.lists(st.tuples(st.sampled_from(("take", "admit")), st.sampled_from(sorted(SIZES))), max_size=6),
        st.integers(0, 6),  # stores that end after the step
    ),
    max_size=12,
)


@given(steps=steps, room_bytes=st.integers(1, 60))
def test_objects_are_admitted_while_they_fit_and_one_alone_always(
    steps: list[tuple[list[tuple[str, str]], int]], room_bytes: int
) -> None:
    pending: list[str] = []
    pace = StorePace(lambda: list(pending))
    pace.set_room(SIZES, room_bytes)
    for objects, ended in steps:
        pace.begin_step()
        begun: list[str] = []
        for way, pack in objects:
            held = sum(SIZES[one] for one in (*pending, *begun))
            fits = held + SIZES[pack] <= room_bytes
            if way == "admit":
                assert pace.admits(pack) == (fits or not (pending or begun))
            if way == "take" or pace.admits(pack):
                pace.take(pack)
                begun.append(pack)
        pending = (pending + begun)[ended:]


def test_without_limits_every_object_is_admitted_and_nobody_counts() -> None:
    def unasked() -> list[str]:
        raise AssertionError("the stores on their way do not matter")

    pace = StorePace(unasked)
    for _ in range(2):
        pace.begin_step()
        assert all(pace.admits("any") for _ in range(1000))
    pace.set_room({"any": 1}, math.inf)
    pace.begin_step()
    assert pace.admits("any")
