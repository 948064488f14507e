"""The oracle for KV cache layouts: it copies blocks to other ids and compares them through the engine's own views."""

from __future__ import annotations

import ctypes
import random
from collections.abc import Sequence
from itertools import pairwise

import torch

from offload_core.memory.block_copier import BlockSlice, CpuBlockCopier
from offload_core.memory.canonical import CanonicalKVCaches
from offload_core.memory.payload_layout import PackLayout
from offload_core.planning.planner import GroupGeometry, HitPolicy, Pack

POISON = 0xA5

Views = Sequence[Sequence[torch.Tensor]]
"""For each group, its layers as the engine indexes them: the first dimension is the block id."""


def pack_of(groups: int, blocks: int) -> Pack:
    """One pack of ``groups`` groups, each with ``blocks`` blocks per object."""
    geometry = tuple(GroupGeometry(index, 1, HitPolicy("full")) for index in range(groups))
    return Pack(f"full-u{blocks}", blocks, HitPolicy("full"), blocks, geometry)


def memories(views: Views) -> dict[int, torch.Tensor]:
    """All bytes of each allocation that the views lie in, by its address."""
    storages = {view.untyped_storage().data_ptr(): view.untyped_storage() for group in views for view in group}
    return {address: torch.empty(0, dtype=torch.uint8).set_(storage) for address, storage in storages.items()}


def moved(view: torch.Tensor, copies: dict[int, torch.Tensor]) -> torch.Tensor:
    """The same view of a copy of its allocation."""
    storage = copies[view.untyped_storage().data_ptr()].untyped_storage()
    return torch.empty(0, dtype=view.dtype).set_(storage, view.storage_offset(), view.shape, view.stride())


def draw_ids(num_blocks: int, groups: int, blocks: int, chance: random.Random) -> list[tuple[int, ...]]:
    """Distinct blocks for each group, as an allocator gives them; some consecutive, some not."""
    ids = list(range(num_blocks))
    if chance.random() < 0.5:
        chance.shuffle(ids)
    else:
        ids = ids[(start := chance.randrange(num_blocks)) :] + ids[:start]
    return [tuple(ids[index * blocks : (index + 1) * blocks]) for index in range(groups)]


def check_round_trip(caches: CanonicalKVCaches, views: Views, *, seed: int = 0, blocks: int = 2) -> None:
    """Gather random blocks of random bytes, poison everything, scatter to other ids; compare every byte there is."""
    chance = random.Random(seed)
    copier = CpuBlockCopier(caches)
    num_blocks = views[0][0].shape[0]
    assert num_blocks >= 2 * len(views) * blocks, "too few blocks to copy each group's to other ids"
    ids = draw_ids(num_blocks, 2 * len(views), blocks, chance)
    sources, targets = ids[: len(views)], ids[len(views) :]
    memory = memories(views)
    for part in memory.values():
        generator = torch.Generator().manual_seed(chance.randrange(1 << 30))
        part.copy_(torch.randint(0, 256, part.shape, dtype=torch.uint8, generator=generator))
    originals = {address: part.clone() for address, part in memory.items()}
    expected = {address: torch.full_like(part, POISON) for address, part in memory.items()}
    for group, source, target in zip(views, sources, targets, strict=True):
        for view in group:
            for old, new in zip(source, target, strict=True):
                moved(view, expected)[new] = view[old]

    layout = PackLayout.build(pack_of(len(views), blocks), caches, range(len(views)))
    payload = torch.full((layout.payload_bytes,), 0x33, dtype=torch.int8)
    copier.gather(layout, [BlockSlice(0, part) for part in sources], payload)
    assert all(torch.equal(part, originals[address]) for address, part in memory.items()), "a gather wrote"
    for part in memory.values():
        part.fill_(POISON)
    copier.scatter(layout, [BlockSlice(0, part) for part in targets], payload)
    for address, part in memory.items():
        wrong = torch.nonzero(part != expected[address]).flatten()
        assert not len(wrong), f"{len(wrong)} wrong bytes, the first at {int(wrong[0])}"


def check_regions(caches: CanonicalKVCaches, views: Views) -> None:
    """Regions are disjoint, within the allocations, and reach every byte of every block; descriptors are payloads."""
    regions = caches.regions()
    assert all(first.address + first.length_bytes <= second.address for first, second in pairwise(regions))
    bounds = [(address, address + len(part)) for address, part in memories(views).items()]
    for region in regions:
        assert any(low <= region.address and region.address + region.length_bytes <= high for low, high in bounds)
    num_blocks = views[0][0].shape[0]
    block_ids = tuple(random.Random(num_blocks).sample(range(num_blocks), min(num_blocks, 3)))
    layout_of = [PackLayout.build(pack_of(1, len(block_ids)), caches, [index]) for index in range(len(views))]
    for index, layout in enumerate(layout_of):
        payload = torch.empty(layout.payload_bytes, dtype=torch.int8)
        CpuBlockCopier(caches).gather(layout, [BlockSlice(0, block_ids)], payload)
        descriptors = caches.block_descriptors(index, block_ids)
        read = b"".join(ctypes.string_at(place.address, place.length_bytes) for place in descriptors)
        assert read == payload.numpy().tobytes()
        for place in descriptors:
            assert any(
                region.address <= place.address
                and place.address + place.length_bytes <= region.address + region.length_bytes
                for region in regions
            )
