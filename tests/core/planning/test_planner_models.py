"""Geometries of known models: exact numbers."""

from __future__ import annotations

import pytest

from offload_core.planning.planner import GroupGeometry, HitPolicy, HybridOffloadPlanner
from tests.support.geometries import FULL, STATE, chunked, window


def plan(*groups: tuple[int, HitPolicy], hash_block_size: int, chunk: int | None) -> HybridOffloadPlanner:
    geometry = [GroupGeometry(index, block, policy) for index, (block, policy) in enumerate(groups)]
    return HybridOffloadPlanner.build(
        geometry, hash_block_size=hash_block_size, max_model_len=1 << 17, hybrid_chunk_size=chunk
    )


def blocks_per_group(planner: HybridOffloadPlanner, tokens: int) -> list[int]:
    counts = {
        group.index: sum(len(pack.block_range(group, unit)) for unit in range(pack.units_in(tokens)))
        for pack in planner.packs
        for group in pack.groups
    }
    return [counts[index] for index in sorted(counts)]


def objects(planner: HybridOffloadPlanner, tokens: int) -> int:
    return sum(pack.units_in(tokens) for pack in planner.packs)


def test_vector_deepseek_v4_256_64_64_4_8_with_chunk_1024() -> None:
    planner = plan((256, FULL), (64, FULL), (64, FULL), (4, FULL), (8, FULL), hash_block_size=4, chunk=1024)
    assert blocks_per_group(planner, 4096) == [16, 64, 64, 1024, 512]
    assert objects(planner, 1024) == 1
    assert planner.group_hash_factors == dict.fromkeys(range(5), 256)
    assert planner.packs[0].hash_index(0) == 255
    assert planner.first_hashable_chunk_idx == 0
    assert (planner.chunk_count(4095), planner.storable_prefix(4095)) == (3, 3072)
    assert planner.warnings == ()


@pytest.mark.parametrize("block", [256, 64, 4, 8])
def test_deepseek_v4_every_token_of_every_block_size_is_stored(block: int) -> None:
    planner = plan((256, FULL), (64, FULL), (64, FULL), (4, FULL), (8, FULL), hash_block_size=4, chunk=1024)
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


def test_vector_1056_with_chunk_8192_is_stored_block_by_block_and_warned_about() -> None:
    planner = plan((1056, FULL), (1056, STATE), hash_block_size=1056, chunk=8192)
    assert [pack.unit_tokens for pack in planner.packs] == [1056, 1056]
    assert planner.boundary_tokens == 1056
    assert planner.first_hashable_chunk_idx == 0
    assert planner.group_hash_factors == {0: 1, 1: 1}
    assert (planner.chunk_count(8192), planner.storable_prefix(8192)) == (7, 7392)
    assert len(planner.warnings) == 2
    for index, warning in enumerate(planner.warnings):
        assert f"group {index}: hybrid_chunk_size 8192 is not a multiple of its block size 1056" in warning
        assert "8448" in warning


def test_vector_544() -> None:
    a_hybrid_with_aligned_blocks_uses_every_state_by_default(544)


def test_vector_528() -> None:
    a_hybrid_with_aligned_blocks_uses_every_state_by_default(528)


def test_vector_1056_with_the_default_chunk() -> None:
    a_hybrid_with_aligned_blocks_uses_every_state_by_default(1056)


def a_hybrid_with_aligned_blocks_uses_every_state_by_default(block: int) -> None:
    planner = plan((block, FULL), (block, STATE), hash_block_size=block, chunk=None)
    assert planner.hybrid_chunk_size == planner.boundary_tokens == block
    assert planner.warnings == ()
    assert blocks_per_group(planner, 4 * block) == [4, 4]
    state = planner.packs[1]
    assert list(state.needed_units(0, 3 * block)) == [2]


def test_vector_equal_blocks_of_16_make_chunks_of_256_by_default() -> None:
    planner = plan((16, FULL), (16, window(512)), (16, window(512)), hash_block_size=16, chunk=None)
    assert planner.hybrid_chunk_size == planner.boundary_tokens == 256
    assert planner.first_hashable_chunk_idx == 0
    assert planner.group_hash_factors == {0: 16, 1: 16, 2: 16}
    assert [pack.name for pack in planner.packs] == ["full-u256", "window-u256-w512"]
    full, windows = planner.packs
    assert list(full.needed_units(0, 768)) == [0, 1, 2]
    assert list(windows.needed_units(0, 768)) == [1, 2]
    assert list(windows.needed_units(600, 768)) == [2]
    assert blocks_per_group(planner, 1000) == [48, 48, 48]


def test_vector_50000_16384_1056_with_chunk_16384_is_first_hashable_in_chunk_3() -> None:
    groups = [GroupGeometry(index, block, FULL) for index, block in enumerate((50000, 16384, 1056))]
    planner = HybridOffloadPlanner.build(groups, hash_block_size=16, max_model_len=1 << 31, hybrid_chunk_size=16384)
    assert planner.first_hashable_chunk_idx == 3
    assert planner.group_hash_factors == {0: 3125, 1: 1024, 2: 66}
    assert planner.boundary_tokens == 1_689_600_000


def test_llama_4_stores_whole_attention_chunks_but_loads_only_the_one_at_the_boundary() -> None:
    planner = plan((16, FULL), (16, chunked(8192)), hash_block_size=16, chunk=None)
    full, local = planner.packs
    assert (full.name, local.name) == ("full-u256", "chunked-u256-a8192")
    assert planner.groups_without_objects == ()
    assert len(full.needed_units(0, 10240)) == 40
    assert list(local.needed_units(0, 10240)) == list(range(32, 40))
    assert list(local.needed_units(9000, 10240)) == list(range(35, 40))
    assert not local.needed_units(0, 8192)


def test_of_attention_chunks_that_end_at_every_boundary_nothing_is_stored() -> None:
    planner = plan((16, FULL), (16, chunked(8192)), hash_block_size=16, chunk=16384)
    assert [pack.name for pack in planner.packs] == ["full-u16384"]
    assert planner.groups_without_objects == (GroupGeometry(1, 16, chunked(8192)),)
    assert planner.boundary_tokens == 16384


def test_a_group_without_objects_still_bounds_where_prefixes_end() -> None:
    planner = plan((16, FULL), (64, window(1)), hash_block_size=16, chunk=16)
    assert [group.index for group in planner.groups_without_objects] == [1]
    assert planner.boundary_tokens == 64
    assert planner.usable_prefix({"full-u16": [True] * 7}, 0, 1000) == 64
