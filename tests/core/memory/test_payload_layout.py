"""Copies between KV cache blocks and payloads, checked byte by byte, neighbours included."""

from __future__ import annotations

import random
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from offload_core.memory.block_copier import BlockSlice, CpuBlockCopier
from offload_core.memory.canonical import CanonicalKVCaches, LayerPages
from offload_core.memory.copiers import block_copier
from offload_core.memory.payload_layout import PackLayout
from offload_core.planning.planner import GroupGeometry, HitPolicy, Pack

NUM_BLOCKS = 12


@dataclass(frozen=True)
class Case:
    """A pack of groups over random memory: ``layers[group]`` gives (memory index, unpadded page bytes)."""

    memories: list[torch.Tensor]
    """One per unique tensor: (blocks, padded page bytes)."""
    layers: list[list[tuple[int, int]]]
    pack: Pack
    caches: CanonicalKVCaches
    layout: PackLayout
    copier: CpuBlockCopier


def build(
    layers: list[list[tuple[int, int]]],
    paddings: list[int],
    blocks_per_unit: list[int],
    seed: int,
) -> Case:
    widths = [
        max(size for group in layers for position, size in group if position == index) + padding
        for index, padding in enumerate(paddings)
    ]
    generator = torch.Generator().manual_seed(seed)
    memories = [
        torch.randint(-128, 128, (NUM_BLOCKS, width), dtype=torch.int8, generator=generator) for width in widths
    ]
    caches = CanonicalKVCaches.build(
        [
            [LayerPages("layer", memories[index][:, :size], NUM_BLOCKS, widths[index], size) for index, size in group]
            for group in layers
        ]
    )
    unit = 24
    groups = tuple(
        GroupGeometry(index, unit // count, HitPolicy("full")) for index, count in enumerate(blocks_per_unit)
    )
    pack = Pack("full-u24", unit, HitPolicy("full"), unit, groups)
    return Case(
        memories, layers, pack, caches, PackLayout.build(pack, caches, range(len(groups))), CpuBlockCopier(caches)
    )


@st.composite
def cases(draw: st.DrawFn) -> Case:
    num_memories = draw(st.integers(1, 3))
    sizes = st.integers(1, 40)
    groups = draw(st.integers(1, 2))
    # Groups use the same memories, as vLLM lays them out, each with pages of its own size.
    layers = [[(index, draw(sizes)) for index in range(num_memories)] for _ in range(groups)]
    paddings = draw(st.lists(st.integers(0, 9), min_size=num_memories, max_size=num_memories))
    blocks_per_unit = [draw(st.sampled_from((1, 2, 3, 4, 6))) for _ in range(groups)]
    return build(layers, paddings, blocks_per_unit, draw(st.integers(0, 1 << 30)))


def draw_blocks(data: st.DataObject, case: Case, *, whole: bool) -> list[BlockSlice]:
    """Draw distinct blocks for each group: consecutive, scattered or both; whole units or a part of the slots."""
    order = list(range(NUM_BLOCKS))
    if data.draw(st.booleans(), label="scattered"):
        random.Random(data.draw(st.integers(0, 1 << 30))).shuffle(order)
    slices: list[BlockSlice] = []
    for group in case.pack.groups:
        slots = case.pack.stored_blocks(group)
        first = 0 if whole else data.draw(st.integers(0, slots))
        count = slots - first if whole else data.draw(st.integers(0, slots - first))
        slices.append(BlockSlice(first, tuple(order.pop(0) for _ in range(count))))
    return slices


def payload_of(case: Case, blocks: list[BlockSlice]) -> torch.Tensor:
    """The docstring's definition: per group, per layer, the pages of its blocks, oldest first, unpadded."""
    pages = [
        case.memories[index][block, :size]
        for group, part in zip(case.layers, blocks, strict=True)
        for index, size in group
        for block in part.block_ids
    ]
    return torch.cat(pages)


@given(case=cases(), data=st.data())
def test_gather_makes_the_documented_payload_and_leaves_the_cache_alone(case: Case, data: st.DataObject) -> None:
    blocks = draw_blocks(data, case, whole=True)
    before = [memory.clone() for memory in case.memories]
    payload = torch.full((case.layout.payload_bytes,), 99, dtype=torch.int8)
    case.copier.gather(case.layout, blocks, payload)
    assert torch.equal(payload, payload_of(case, blocks))
    assert all(map(torch.equal, case.memories, before))


@given(case=cases(), data=st.data())
def test_a_round_trip_restores_the_blocks_and_touches_nothing_else(case: Case, data: st.DataObject) -> None:
    blocks = draw_blocks(data, case, whole=True)
    before = [memory.clone() for memory in case.memories]
    payload = torch.empty(case.layout.payload_bytes, dtype=torch.int8)
    case.copier.gather(case.layout, blocks, payload)
    for group, part in zip(case.layers, blocks, strict=True):
        for index, size in group:
            case.memories[index][list(part.block_ids), :size] = 55  # the data only: paddings and others are canaries
    case.copier.scatter(case.layout, blocks, payload)
    assert all(map(torch.equal, case.memories, before))


@given(case=cases(), data=st.data())
def test_a_scatter_of_some_slots_fills_exactly_their_blocks(case: Case, data: st.DataObject) -> None:
    blocks = draw_blocks(data, case, whole=False)
    payload = torch.randint(-128, 128, (case.layout.payload_bytes,), dtype=torch.int8)
    expected = [memory.clone() for memory in case.memories]
    offset = 0
    for group, part, layers in zip(case.pack.groups, blocks, case.layers, strict=True):
        for index, size in layers:
            for position, block in enumerate(part.block_ids):
                start = offset + (part.first_slot + position) * size
                expected[index][block, :size] = payload[start : start + size]
            offset += size * case.pack.stored_blocks(group)
    case.copier.scatter(case.layout, blocks, payload)
    assert all(map(torch.equal, case.memories, expected))


@given(case=cases(), data=st.data(), part_bytes=st.integers(1, 200))
def test_copies_in_parts_tell_of_each_byte_once_and_in_order(case: Case, data: st.DataObject, part_bytes: int) -> None:
    copier = CpuBlockCopier(case.caches, part_bytes)
    blocks = draw_blocks(data, case, whole=data.draw(st.booleans(), label="whole"))
    gathered = torch.full((case.layout.payload_bytes,), 99, dtype=torch.int8)
    case.copier.gather(case.layout, blocks, gathered)
    payload = torch.full_like(gathered, 99)
    sizes: list[int] = []

    def is_final(nbytes: int) -> None:
        sizes.append(nbytes)
        assert torch.equal(payload[: sum(sizes)], gathered[: sum(sizes)])

    assert copier.gather_in_parts(case.layout, blocks, payload, is_final)
    assert sum(sizes) == len(payload)
    assert min(sizes) > 0
    assert all(nbytes >= part_bytes // 2 for nbytes in sizes[:-1])
    assert torch.equal(payload, gathered)

    for memory in case.memories:
        memory.add_(1)
    expected = [memory.clone() for memory in case.memories]
    case.copier.scatter(case.layout, blocks, payload)
    scattered = [memory.clone() for memory in case.memories]
    for memory, other in zip(case.memories, expected, strict=True):
        memory.copy_(other)
    told: list[int] = []
    copier.scatter_in_parts(case.layout, blocks, payload, told.append)
    assert told == sizes
    assert all(map(torch.equal, case.memories, scattered))


def test_a_large_page_is_copied_in_parts() -> None:
    case = build([[(0, 1000)]], [24], [1], seed=1)
    copier = CpuBlockCopier(case.caches, part_bytes=300)
    told: list[int] = []
    payload = torch.empty(case.layout.payload_bytes, dtype=torch.int8)
    assert copier.gather_in_parts(case.layout, [BlockSlice(0, (3,))], payload, told.append)
    assert told == [300, 300, 300, 100]
    assert torch.equal(payload, case.memories[0][3, :1000])


@given(case=cases(), data=st.data())
def test_a_gather_of_some_slots_fills_exactly_their_places(case: Case, data: st.DataObject) -> None:
    blocks = draw_blocks(data, case, whole=False)
    payload = torch.full((case.layout.payload_bytes,), 77, dtype=torch.int8)
    case.copier.gather(case.layout, blocks, payload)
    offset = 0
    for group, part, layers in zip(case.pack.groups, blocks, case.layers, strict=True):
        for index, size in layers:
            slots = case.pack.stored_blocks(group)
            expected = torch.full((slots, size), 77, dtype=torch.int8)
            for position, block in enumerate(part.block_ids):
                expected[part.first_slot + position] = case.memories[index][block, :size]
            assert torch.equal(payload[offset : offset + slots * size].view(slots, size), expected)
            offset += slots * size
    assert offset == case.layout.payload_bytes


@pytest.mark.parametrize(
    "block_ids", [(4, 5, 6), (6, 5, 4), (1, 7, 3), (0, 1, 11), (9, 10, 2)], ids=lambda ids: "-".join(map(str, ids))
)
def test_consecutive_descending_and_scattered_ids(block_ids: tuple[int, ...]) -> None:
    case = build([[(0, 8)]], [0], [3], seed=1)
    payload = torch.empty(24, dtype=torch.int8)
    case.copier.gather(case.layout, [BlockSlice(0, block_ids)], payload)
    assert torch.equal(payload.view(3, 8), case.memories[0][list(block_ids)])


def test_more_blocks_than_slots_are_refused() -> None:
    case = build([[(0, 8)]], [0], [3], seed=1)
    before = case.memories[0].clone()
    for blocks in (BlockSlice(0, (1, 2, 3, 4)), BlockSlice(2, (1, 2)), BlockSlice(3, (5,))):
        with pytest.raises(ValueError, match="pack full-u24: slots"):
            case.copier.scatter(case.layout, [blocks], torch.zeros(24, dtype=torch.int8))
    assert torch.equal(case.memories[0], before)


def test_host_memory_is_copied_without_a_thread_pool() -> None:
    memory = torch.zeros(4, 8, dtype=torch.int8)
    caches = CanonicalKVCaches.build([[LayerPages("layer", memory, 4, 8, 8)]])
    assert isinstance(block_copier(caches, 8), CpuBlockCopier)
