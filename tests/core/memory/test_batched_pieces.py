"""The pieces of a batched copy bring the bytes that a copy of single pages brings."""

from __future__ import annotations

import ctypes

import torch
from hypothesis import given
from hypothesis import strategies as st

from offload_core.memory.block_copier import BlockSlice
from offload_core.memory.device.batched_copy import CacheAddresses, Scatter, pieces_to_blocks
from offload_core.memory.payload_layout import PackLayout, PageRun

NUM_BLOCKS = 9


Case = tuple[list[PackLayout], list[torch.Tensor], list[tuple[PackLayout, list[BlockSlice]]]]


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Draw the layouts of payloads, a tensor for each of their references, and objects with blocks of each group."""
    tensors: list[torch.Tensor] = []
    layouts = [draw(layout_of(str(number), tensors)) for number in range(draw(st.integers(1, 2)))]
    objects = []
    for layout in draw(st.lists(st.sampled_from(layouts), max_size=4)):
        blocks = []
        for _, slots in layout.group_slots:
            first_slot = draw(st.integers(0, slots))
            ids = draw(st.one_of(st.just(list(range(NUM_BLOCKS))), st.permutations(range(NUM_BLOCKS))))
            start = draw(st.integers(0, NUM_BLOCKS))
            blocks.append(BlockSlice(first_slot, tuple(ids[start : start + draw(st.integers(0, slots - first_slot))])))
        objects.append((layout, blocks))
    return layouts, tensors, objects


@st.composite
def layout_of(draw: st.DrawFn, name: str, tensors: list[torch.Tensor]) -> PackLayout:
    """Draw a layout, and add the tensors of its references."""
    runs: list[PageRun] = []
    offset = 0
    for group in range(draw(st.integers(1, 3))):
        slots = draw(st.integers(1, NUM_BLOCKS))
        for page_bytes in draw(st.lists(st.integers(1, 24), min_size=1, max_size=4)):
            padding = draw(st.sampled_from((0, 0, 3, 16)))
            runs.append(PageRun(group, len(tensors), page_bytes, slots, offset))
            tensors.append(torch.zeros((NUM_BLOCKS, page_bytes + padding), dtype=torch.int8))
            offset += page_bytes * slots
    return PackLayout(name, tuple(runs), offset)


@given(cases(), st.integers(0, 2**31))
def test_pieces_bring_the_bytes_of_single_pages(case: Case, seed: int) -> None:
    _, tensors, objects = case
    generator = torch.Generator().manual_seed(seed)
    payloads = [
        torch.randint(-128, 128, (layout.payload_bytes,), dtype=torch.int8, generator=generator)
        for layout, _ in objects
    ]
    expected = [tensor.clone() for tensor in tensors]
    for (layout, blocks), payload in zip(objects, payloads, strict=True):
        for run in layout.runs:
            part = blocks[run.group]
            for slot, block in enumerate(part.block_ids, part.first_slot):
                page = payload[run.offset_bytes + slot * run.page_bytes :][: run.page_bytes]
                expected[run.tensor_index][block, : run.page_bytes] = page

    scatters = [Scatter(layout, blocks, payload) for (layout, blocks), payload in zip(objects, payloads, strict=True)]
    pieces = pieces_to_blocks(scatters, CacheAddresses.of(tensors))
    for source, target, nbytes in zip(*(array.tolist() for array in pieces), strict=True):
        ctypes.memmove(target, source, nbytes)
    assert all(map(torch.equal, tensors, expected))


def test_consecutive_blocks_are_one_piece_unless_there_is_padding() -> None:
    tensors = [torch.zeros((NUM_BLOCKS, 8), dtype=torch.int8), torch.zeros((NUM_BLOCKS, 9), dtype=torch.int8)]
    runs = (PageRun(0, 0, 8, 4, 0), PageRun(0, 1, 8, 4, 32))
    layout = PackLayout("pack", runs, 64)
    payload = torch.zeros(layout.payload_bytes, dtype=torch.int8)
    scatters = [
        Scatter(layout, [BlockSlice(0, (3, 4, 5, 7))], payload),
        Scatter(layout, [BlockSlice(2, (8,))], payload),
    ]
    pieces = pieces_to_blocks(scatters, CacheAddresses.of(tensors))
    assert sorted(pieces.sizes.tolist()) == [8, 8, 8, 8, 8, 8, 8, 24]
