"""The layout of a pack's payload.

A payload is a sequence of *page runs*, one per reference. A page run has the unpadded pages of one reference's stored
blocks, oldest block first. The runs are in the order of the pack's groups, then of each group's references. References
are layers, or the runs of bytes that make up their blocks. With two layers A and B and two stored blocks, the payload
is ``A0 A1 B0 B1``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from operator import attrgetter
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from offload_core.memory.canonical import CanonicalKVCaches
from offload_core.planning.planner import Pack


@dataclass(frozen=True)
class PageRun:
    """A reference's pages in a payload: ``blocks`` pages of ``page_bytes`` bytes, from ``offset_bytes`` on."""

    group: int
    """Position of the reference's group in the pack."""
    tensor_index: int
    page_bytes: int
    blocks: int
    offset_bytes: int


class GroupRuns(NamedTuple):
    """The page runs of one group, as arrays with one value per run."""

    group: int
    tensor_indices: npt.NDArray[np.intp]
    page_bytes: npt.NDArray[np.uint64]
    offsets: npt.NDArray[np.uint64]


@dataclass(frozen=True)
class PackLayout:
    """The layout of the payloads of one pack's objects.

    Args:
        name: the pack's name.
        payload_bytes: size of a payload.
    """

    name: str
    runs: tuple[PageRun, ...]
    payload_bytes: int

    @classmethod
    def build(cls, pack: Pack, caches: CanonicalKVCaches, group_positions: Sequence[int]) -> PackLayout:
        """Lay out ``pack``.

        Args:
            group_positions: for each of its groups, the position in ``caches``.
        """
        runs: list[PageRun] = []
        offset = 0
        for position, (group, cache_position) in enumerate(zip(pack.groups, group_positions, strict=True)):
            blocks = pack.stored_blocks(group)
            for ref in caches.group_refs[cache_position]:
                runs.append(PageRun(position, ref.tensor_index, ref.page_size_bytes, blocks, offset))
                offset += ref.page_size_bytes * blocks
        return cls(pack.name, tuple(runs), offset)

    @cached_property
    def group_slots(self) -> tuple[tuple[int, int], ...]:
        """Each group with the number of its slots, if it has references."""
        return tuple({run.group: run.blocks for run in self.runs}.items())

    @cached_property
    def group_runs(self) -> tuple[GroupRuns, ...]:
        """The page runs of each group as arrays, for the arithmetic of many copies at once."""
        groups: list[GroupRuns] = []
        for group, grouped in groupby(self.runs, key=attrgetter("group")):
            runs = list(grouped)
            groups.append(
                GroupRuns(
                    group,
                    np.array([run.tensor_index for run in runs], dtype=np.intp),
                    np.array([run.page_bytes for run in runs], dtype=np.uint64),
                    np.array([run.offset_bytes for run in runs], dtype=np.uint64),
                )
            )
        return tuple(groups)
