"""Batched copies cross no border of pinned memory, and copy the same bytes."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from offload_core.memory.device.batched_copy import CopyPieces
from offload_core.memory.device.pinned_pieces import PinnedPieces
from tests.support.recorded_pinning import RecordedPinning

Copy = tuple[int, int, int]
END = 60


def bytes_of(copies: list[Copy]) -> set[tuple[int, int]]:
    """Return the source and the target of each byte."""
    return {(source + offset, target + offset) for source, target, size in copies for offset in range(size)}


def as_copies(pieces: CopyPieces) -> list[Copy]:
    return list(zip(*(part.tolist() for part in pieces), strict=True))


@given(
    borders=st.lists(st.integers(0, END), unique=True).map(sorted),
    copies=st.lists(st.tuples(st.integers(0, END), st.integers(100, 160), st.integers(1, 40)), max_size=6),
    from_host=st.booleans(),
)
def test_they_are_split_where_they_cross_a_border(borders: list[int], copies: list[Copy], from_host: bool) -> None:
    pinned = PinnedPieces(RecordedPinning())
    for start, end in pairwise(borders):
        pinned.register(start, end - start)
    if not from_host:
        copies = [(target, source, size) for source, target, size in copies]
    split = as_copies(pinned.split(CopyPieces.of(copies), from_host=from_host))
    assert bytes_of(split) == bytes_of(copies)
    assert sum(size for *_, size in split) == sum(size for *_, size in copies)
    for source, target, size in split:
        start = source if from_host else target
        assert not any(start < border < start + size for border in (borders if len(borders) > 1 else ()))


def test_a_border_is_gone_with_its_pieces() -> None:
    pinned = PinnedPieces(RecordedPinning())
    pinned.register(0, 10)
    pinned.register(10, 10)
    copies = CopyPieces.of([(5, 100, 10)])
    assert as_copies(pinned.split(copies, from_host=True)) == [(5, 100, 5), (10, 105, 5)]
    asked: list[CopyPieces] = []
    pinned.splitting(lambda pieces, *, from_host: asked.append(pieces))(copies, from_host=True)
    assert as_copies(asked[0]) == [(5, 100, 5), (10, 105, 5)]
    pinned.unregister(0)
    pinned.unregister(10)
    assert pinned.split(copies, from_host=True) is copies
    assert all(part.dtype == np.uint64 for part in asked[0])
