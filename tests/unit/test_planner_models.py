"""Geometries of known models: exact numbers."""

from __future__ import annotations

import pytest

from offload_core.planner import GroupGeometry, HitPolicy, HybridOffloadPlanner
from tests.unit.geometries import FULL, STATE, window


def plan(*groups: tuple[int, HitPolicy], hash_block_size: int, chunk: int | None) -> HybridOffloadPlanner:
    geometry = [GroupGeometry(index, block, policy) for index, (block, policy) in enumerate(groups)]
    return HybridOffloadPlanner.build(
        geometry, hash_block_size=hash_block_size, max_model_len=1 << 17, hybrid_chunk_size=chunk
    )


def blocks_per_group(planner: HybridOffloadPlanner, tokens: int) -> list[int]:
    counts = {
        group.index: sum(len(pack.block_range(group, unit)) for unit in range(planner.storable_units(pack, tokens)))
        for pack in planner.packs
        for group in pack.groups
    }
    return [counts[index] for index in sorted(counts)]


def objects(planner: HybridOffloadPlanner, tokens: int) -> int:
    return sum(planner.storable_units(pack, tokens) for pack in planner.packs)


@pytest.mark.parametrize("block", [256, 64, 4, 8])
def test_deepseek_v4_every_token_of_every_block_size_is_stored(block: int) -> None:
    planner = plan((256, FULL), (64, FULL), (64, FULL), (4, FULL), (8, FULL), hash_block_size=4, chunk=1024)
    assert blocks_per_group(planner, 4096) == [16, 64, 64, 1024, 512]
    assert objects(planner, 1024) == 1
    assert planner.packs[0].hash_index(0) == 255
    assert planner.warnings == ()
    groups = {group.block_size_tokens: group for group in planner.packs[0].groups}
    tokens = [
        position * block + offset
        for unit in range(4)
        for position in planner.packs[0].block_range(groups[block], unit)
        for offset in range(block)
    ]
    assert tokens == list(range(4096))


def test_deepseek_v4_with_its_windows_costs_a_handful_of_objects_per_chunk() -> None:
    planner = plan(
        (256, FULL), (64, window(128)), (64, window(128)), (4, window(8)), (8, window(128)),
        hash_block_size=4, chunk=1024,
    )  # fmt: skip
    assert [(pack.name, [g.index for g in pack.groups]) for pack in planner.packs] == [
        ("full-u1024", [0]),
        ("window-u1024-w128", [1, 2, 4]),
        ("window-u1024-w8", [3]),
    ]
    assert objects(planner, 1024) == 3
    assert blocks_per_group(planner, 4096) == [16, 4 * 2, 4 * 2, 4 * 2, 4 * 16]


def test_blocks_of_1056_with_chunk_8192_are_stored_block_by_block_and_warned_about() -> None:
    planner = plan((1056, FULL), (1056, STATE), hash_block_size=1056, chunk=8192)
    assert [pack.unit_tokens for pack in planner.packs] == [1056, 1056]
    assert planner.boundary_tokens == 1056
    assert len(planner.warnings) == 2
    for index, warning in enumerate(planner.warnings):
        assert f"group {index}: hybrid_chunk_size 8192 is not a multiple of its block size 1056" in warning
        assert "8448" in warning


@pytest.mark.parametrize("block", [528, 544, 1056])
def test_a_hybrid_with_aligned_blocks_uses_every_state_by_default(block: int) -> None:
    planner = plan((block, FULL), (block, STATE), hash_block_size=block, chunk=None)
    assert planner.hybrid_chunk_size == planner.boundary_tokens == block
    assert planner.warnings == ()
    assert blocks_per_group(planner, 4 * block) == [4, 4]
    state = planner.packs[1]
    assert list(state.needed_units(0, 3 * block)) == [2]


def test_equal_blocks_of_16_make_chunks_of_256_by_default() -> None:
    planner = plan((16, FULL), (16, window(512)), (16, window(512)), hash_block_size=16, chunk=None)
    assert planner.hybrid_chunk_size == planner.boundary_tokens == 256
    assert [pack.name for pack in planner.packs] == ["full-u256", "window-u256-w512"]
    full, windows = planner.packs
    assert list(full.needed_units(0, 768)) == [0, 1, 2]
    assert list(windows.needed_units(0, 768)) == [1, 2]
    assert list(windows.needed_units(600, 768)) == [2]
    assert blocks_per_group(planner, 1000) == [48, 48, 48]


def test_the_example_of_the_module_docstring() -> None:
    planner = plan((16, FULL), (16, window(512)), hash_block_size=16, chunk=256)
    assert [planner.storable_units(pack, 1000) for pack in planner.packs] == [3, 3]
    present = {"full-u256": [True, True, True], "window-u256-w512": [False, True, True]}
    assert planner.usable_prefix(present, 0, 800) == 768
    assert planner.usable_prefix({**present, "window-u256-w512": [True, False, True]}, 0, 800) == 256
