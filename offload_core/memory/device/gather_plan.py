"""The gathers of one step as few calls of the device: one for each reference of all objects that are alike.

Objects are alike if they have the same layout, and as many blocks of each group at the same slots of it. Their payloads
are neighbours in the device buffer, so one call fills the pages of a reference in all of them. Pure arithmetic.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from offload_core.memory.block_copier import BlockSlice
from offload_core.memory.device.device_buffer import slot_bytes
from offload_core.memory.payload_layout import PackLayout, PageRun


@dataclass(frozen=True)
class Gather:
    """One object on its way out.

    Args:
        blocks: one slice per group of the pack.
        payload: its host memory.
        start: the first byte of its slot in the device buffer.
    """

    layout: PackLayout
    blocks: Sequence[BlockSlice]
    payload: torch.Tensor
    start: int

    @property
    def end(self) -> int:
        """The byte after its slot."""
        return self.start + slot_bytes(len(self.payload))

    @property
    def kind(self) -> tuple[str, tuple[tuple[int, int], ...]]:
        """Equal for gathers that are alike."""
        return self.layout.name, tuple((part.first_slot, len(part.block_ids)) for part in self.blocks)


class Selection(NamedTuple):
    """The pages of one reference in objects that are alike.

    Args:
        first_id: position of their first block id in the plan.
        objects: number of objects.
        pages: pages of each.
        start: the first page's first byte in the device buffer.
        stride: bytes from an object to the next one.
    """

    run: PageRun
    first_id: int
    objects: int
    pages: int
    start: int
    stride: int


@dataclass
class GatherPlan:
    """The selections of some gathers, the block ids that they use, and the slot of each payload."""

    block_ids: list[int] = field(default_factory=list)
    selections: list[Selection] = field(default_factory=list)
    slots: list[tuple[int, torch.Tensor]] = field(default_factory=list)
    """Per object, the first byte of its slot, and its payload."""

    @classmethod
    def of(cls, gathers: Sequence[Gather]) -> GatherPlan:
        """Plan gathers, which exchange their slots with each other where that makes neighbours of objects alike."""
        plan = cls()
        for some in _neighbours(gathers):
            kinds: dict[object, list[Gather]] = {}
            for gather in some:
                kinds.setdefault(gather.kind, []).append(gather)
            start = some[0].start
            for alike in kinds.values():
                start = plan._add(alike, start)
        return plan

    def _add(self, alike: Sequence[Gather], start: int) -> int:
        """Add objects that are alike from a byte on; return the byte after their slots."""
        first = alike[0]
        stride = slot_bytes(len(first.payload))
        first_ids = []
        for group in range(len(first.blocks)):
            first_ids.append(len(self.block_ids))
            for gather in alike:
                self.block_ids += gather.blocks[group].block_ids
        for run in first.layout.runs:
            part = first.blocks[run.group]
            if part.block_ids:
                page = start + run.offset_bytes + part.first_slot * run.page_bytes
                counts = len(alike), len(part.block_ids)
                self.selections.append(Selection(run, first_ids[run.group], *counts, page, stride))
        self.slots += ((start + index * stride, gather.payload) for index, gather in enumerate(alike))
        return start + len(alike) * stride


def _neighbours(gathers: Sequence[Gather]) -> Iterator[list[Gather]]:
    """Yield gathers whose slots follow each other in the device buffer."""
    some: list[Gather] = []
    for gather in gathers:
        if some and gather.start != some[-1].end:
            yield some
            some = []
        some.append(gather)
    if some:
        yield some
