"""The pieces of a batched copy bring the bytes that a copy of single pages brings."""

from __future__ import annotations

import ctypes

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from offload_core.memory.block_copier import BlockSlice
from offload_core.memory.device.batched_copy import CacheAddresses, pieces_to_blocks
from offload_core.memory.payload_layout import PackLayout, PageRun

NUM_BLOCKS = 9


@st.composite
def cases(draw: st.DrawFn) -> tuple[PackLayout, list[torch.Tensor], list[BlockSlice]]:
    """Draw a payload's layout, a tensor for each of its references, and blocks of each group."""
    runs: list[PageRun] = []
    tensors: list[torch.Tensor] = []
    blocks: list[BlockSlice] = []
    offset = 0
    for group in range(draw(st.integers(1, 3))):
        slots = draw(st.integers(1, NUM_BLOCKS))
        for page_bytes in draw(st.lists(st.integers(1, 24), min_size=1, max_size=4)):
            padding = draw(st.sampled_from((0, 0, 3, 16)))
            runs.append(PageRun(group, len(tensors), page_bytes, slots, offset))
            tensors.append(torch.zeros((NUM_BLOCKS, page_bytes + padding), dtype=torch.int8))
            offset += page_bytes * slots
        first_slot = draw(st.integers(0, slots))
        ids = draw(st.one_of(st.just(list(range(NUM_BLOCKS))), st.permutations(range(NUM_BLOCKS))))
        start = draw(st.integers(0, NUM_BLOCKS))
        blocks.append(BlockSlice(first_slot, tuple(ids[start : start + draw(st.integers(0, slots - first_slot))])))
    return PackLayout("pack", tuple(runs), offset), tensors, blocks


@given(cases(), st.integers(0, 2**31))
def test_pieces_bring_the_bytes_of_single_pages(
    case: tuple[PackLayout, list[torch.Tensor], list[BlockSlice]], seed: int
) -> None:
    layout, tensors, blocks = case
    generator = torch.Generator().manual_seed(seed)
    payload = torch.randint(-128, 128, (layout.payload_bytes,), dtype=torch.int8, generator=generator)
    expected = [tensor.clone() for tensor in tensors]
    for run in layout.runs:
        part = blocks[run.group]
        for slot, block in enumerate(part.block_ids, part.first_slot):
            page = payload[run.offset_bytes + slot * run.page_bytes :][: run.page_bytes]
            expected[run.tensor_index][block, : run.page_bytes] = page

    pieces = pieces_to_blocks(layout, blocks, payload.data_ptr(), CacheAddresses.of(tensors))
    for source, target, nbytes in zip(*(array.tolist() for array in pieces), strict=True):
        ctypes.memmove(target, source, nbytes)
    assert all(map(torch.equal, tensors, expected))


def test_consecutive_blocks_are_one_piece_unless_there_is_padding() -> None:
    tensors = [torch.zeros((NUM_BLOCKS, 8), dtype=torch.int8), torch.zeros((NUM_BLOCKS, 9), dtype=torch.int8)]
    runs = (PageRun(0, 0, 8, 4, 0), PageRun(0, 1, 8, 4, 32))
    layout = PackLayout("pack", runs, 64)
    pieces = pieces_to_blocks(layout, [BlockSlice(0, (3, 4, 5, 7))], 0, CacheAddresses.of(tensors))
    assert sorted(pieces.sizes.tolist()) == [8, 8, 8, 8, 8, 24]


def test_blocks_without_a_slot_are_refused() -> None:
    tensors = [torch.zeros((NUM_BLOCKS, 8), dtype=torch.int8)]
    layout = PackLayout("full-u2", (PageRun(0, 0, 8, 2, 0),), 16)
    with pytest.raises(ValueError, match="pack full-u2: slots 1 to 2 do not all exist; slots are 0 to 1"):
        pieces_to_blocks(layout, [BlockSlice(1, (4, 5))], 0, CacheAddresses.of(tensors))
