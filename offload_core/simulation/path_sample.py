"""A sample of one path: the few boundaries whose objects a live estimate follows.

The idea is that of SHARDS (Waldspurger et al., "Efficient MRC Construction with SHARDS", FAST'15): follow only names
whose hash lies below a threshold. Such a *sampled* chunk stands for ``1 / rate`` chunks. A name is sampled in all paths
or in none, so the uses of a sampled chunk are all seen.

A prefix is usable up to a few boundaries only, and a sample of those would miss nearly every hit. So the sample has
more *points* than sampled chunks:

* the replay boundary and the end of the path, from which later paths resume;
* the deepest boundary that an earlier path had too, where the two may part;
* the *marked* boundaries, which earlier paths have kept.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Sequence
from typing import NamedTuple

_ALL_NAMES = 1 << 64


class PathSample(NamedTuple):
    """The points of one path, the shallowest first."""

    boundaries: list[int]
    """Of each point, the number of chunks up to it."""
    names: list[int]
    sampled: list[bool]
    """Per point, a flag: the chunk before it is a sampled one."""
    known: list[bool]
    """Per point, a flag: an earlier path had the chunk."""
    prompt_points: int
    """Number of leading points from which the prompt can be resumed."""
    seen_points: int
    """Number of leading points that an earlier path had too."""


class PathSampler:
    """Takes samples of paths.

    Args:
        rate: part of the chunks to sample, above 0 and at most 1.
        max_marks: maximum number of marked boundaries. The ones used longest ago are forgotten first.
    """

    def __init__(self, rate: float, max_marks: int) -> None:
        self._threshold = int(rate * _ALL_NAMES)
        self._max_marks = max_marks
        self._marks: OrderedDict[int, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._marks)

    def sample(self, names: Sequence[int], prompt_chunks: int, seen_chunks: int) -> PathSample:
        """Return the points of a path.

        Args:
            names: of all boundaries of the path, the shallowest first: numbers of 64 bits, evenly distributed.
            prompt_chunks: number of leading boundaries from which the prompt can be resumed.
            seen_chunks: number of leading boundaries that an earlier path had too.
        """
        threshold, marks = self._threshold, self._marks
        chosen = {place for place, name in enumerate(names, 1) if name < threshold or name in marks}
        own = {prompt_chunks, len(names), min(seen_chunks, prompt_chunks)} - {0}
        boundaries = sorted(chosen | own)
        points = [names[boundary - 1] for boundary in boundaries]
        return PathSample(
            boundaries,
            points,
            [name < threshold for name in points],
            [boundary <= seen_chunks or name in marks for boundary, name in zip(boundaries, points, strict=True)],
            bisect_right(boundaries, prompt_chunks),
            bisect_right(boundaries, seen_chunks),
        )

    def mark(self, name: int, *, kept: bool) -> int | None:
        """Note whether any path keeps a boundary. Return the name of a boundary that is forgotten for it, if any."""
        if not kept:
            self._marks.pop(name, None)
            return None
        self._marks[name] = None
        self._marks.move_to_end(name)
        return self._marks.popitem(last=False)[0] if len(self._marks) > self._max_marks else None
