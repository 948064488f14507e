"""Blocks that are not one run of bytes, packed blocks, shared memory: round trips through the engine's own view."""

from __future__ import annotations

import itertools
import json
import random
import re

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from offload_core.api.errors import UnsupportedLayoutError
from offload_core.memory.canonical import CanonicalKVCaches, LayerPages
from tests.support.round_trip import check_regions, check_round_trip

BLOCKS = 12


def layer(tensor: torch.Tensor, name: str = "layer.0", *, page: int | None = None, block_dim: int = 0) -> LayerPages:
    """A layer whose pages have no padding unless ``page`` says so."""
    data = tensor.numel() * tensor.element_size() // BLOCKS
    return LayerPages(name, tensor, BLOCKS, data if page is None else page, data, block_dim)


def by_block(pages: LayerPages) -> torch.Tensor:
    """The layer's tensor with the engine's block id as first dimension."""
    rows = pages.tensor.movedim(pages.block_dim, 0)
    per_block = rows.shape[0] // pages.num_blocks
    shape, strides = (pages.num_blocks, per_block, *rows.shape[1:]), (rows.stride(0) * per_block, *rows.stride())
    return rows.as_strided(shape, strides)


def check(groups: list[list[LayerPages]], *, seed: int = 0) -> CanonicalKVCaches:
    caches = CanonicalKVCaches.build(groups)
    views = [[by_block(pages) for pages in group] for group in groups]
    check_round_trip(caches, views, seed=seed)
    check_regions(caches, views)
    return caches


def sizes(caches: CanonicalKVCaches, group: int = 0) -> list[tuple[int, int]]:
    """``(run bytes, block stride)`` of each of a group's references."""
    return [
        (ref.page_size_bytes, caches.tensors[ref.tensor_index].block_stride_bytes) for ref in caches.group_refs[group]
    ]


def test_keys_apart_from_values_are_two_runs() -> None:
    split = torch.zeros(2, BLOCKS, 4, 8, dtype=torch.bfloat16)
    caches = check([[layer(split, block_dim=1)]])
    assert sizes(caches) == [(64, 64), (64, 64)]
    assert [tensor.page_size_bytes for tensor in caches.tensors] == [64, 64]


def test_keys_beside_values_are_one_run() -> None:
    interleaved = torch.zeros(BLOCKS, 2, 4, 8, dtype=torch.bfloat16)
    assert sizes(check([[layer(interleaved)]])) == [(128, 128)]


def test_split_memory_registered_block_first_is_still_two_runs() -> None:
    split = torch.zeros(2, BLOCKS, 4, 8, dtype=torch.bfloat16).transpose(0, 1)
    assert split.shape[0] == BLOCKS
    assert sizes(check([[layer(split)]])) == [(64, 64), (64, 64)]


def test_split_kernel_blocks_smaller_than_the_managers_blocks() -> None:
    split = torch.zeros(2, BLOCKS * 4, 2, 8, dtype=torch.float16)
    assert sizes(check([[layer(split, block_dim=1)]])) == [(128, 128), (128, 128)]


def test_heads_outside_the_block_are_one_run_each() -> None:
    heads_first = torch.zeros(3, BLOCKS, 4, 8, dtype=torch.float16).transpose(0, 1)
    assert sizes(check([[layer(heads_first)]])) == [(64, 64)] * 3


def test_heads_outside_the_layers_of_a_packed_block_are_one_run_each() -> None:
    packed = torch.zeros(BLOCKS, 3, 2, 4, 8, dtype=torch.float16)  # blocks, heads, layers, tokens, content
    caches = check([[layer(packed[:, :, position], f"layer.{position}") for position in range(2)]])
    assert sizes(caches) == [(64, 384)] * 6
    assert len(caches.tensors) == 6


def test_groups_whose_packed_pages_differ_in_size_overlap_within_a_block() -> None:
    memory = torch.zeros(BLOCKS, 96, dtype=torch.int8)
    first = [layer(memory[:, :60], "a.0", page=64), layer(memory[:, 64:], "a.1")]
    second = [layer(memory[:, :40], "b.0"), layer(memory[:, 40:80], "b.1")]
    caches = check([first, second])
    assert len(caches.tensors) == 3
    assert [region.length_bytes for region in caches.regions()] == [BLOCKS * 96]


def test_one_memory_under_several_names_is_stored_once() -> None:
    memory = torch.zeros(BLOCKS, 2, 8, dtype=torch.float32)
    caches = check([[layer(memory, "layer.0"), layer(memory, "layer.1")]])
    assert sizes(caches) == [(64, 64)]


def test_a_group_that_shares_a_place_stores_as_much_as_its_largest_layer() -> None:
    memory = torch.zeros(BLOCKS, 64, dtype=torch.int8)
    small, large = layer(memory[:, :16], page=64), layer(memory, "layer.1")
    for group in ([small, large], [large, small]):
        assert sizes(check([group])) == [(64, 64)]


def test_one_block_cannot_overlap_another() -> None:
    memory = torch.zeros(64, dtype=torch.int8)
    layers = [LayerPages(str(size), memory[:size].view(1, size), 1, size, size) for size in (64, 48)]
    assert [tensor.page_size_bytes for tensor in CanonicalKVCaches.build([layers[:1], layers[1:]]).tensors] == [64, 48]


def test_tensors_of_several_allocations() -> None:
    first, second = torch.zeros(BLOCKS, 48, dtype=torch.int8), torch.zeros(2, BLOCKS, 8, dtype=torch.float32)
    caches = check([[layer(first)], [layer(second, "layer.1", block_dim=1)]])
    assert len(caches.regions()) == 2


def test_regions_of_allocations_that_happen_to_touch_stay_apart() -> None:
    memory = np.zeros(2 * BLOCKS * 16, dtype=np.int8)
    first, second = (torch.from_numpy(part).view(BLOCKS, 16) for part in np.split(memory, 2))
    assert first.data_ptr() + BLOCKS * 16 == second.data_ptr()
    regions = CanonicalKVCaches.build([[layer(first), layer(second, "layer.1")]]).regions()
    assert regions == ((first.data_ptr(), BLOCKS * 16), (second.data_ptr(), BLOCKS * 16))


def test_regions_of_one_allocation_that_touch_or_contain_each_other_are_one() -> None:
    memory = torch.zeros(2 * BLOCKS, 32, dtype=torch.int8)
    beside, around, within = memory[:BLOCKS], memory[BLOCKS:], memory[BLOCKS:, 8:24]
    caches = check([[layer(beside, "a"), layer(around, "b")], [layer(within, "c")]])
    assert caches.regions() == ((memory.data_ptr(), 2 * BLOCKS * 32),)


def test_descriptors_are_runs_of_each_block_in_the_order_asked_for() -> None:
    split = torch.zeros(2, BLOCKS, 16, dtype=torch.int8)
    caches = CanonicalKVCaches.build([[layer(split, block_dim=1)]])
    keys, values = split[0].data_ptr(), split[1].data_ptr()
    assert caches.block_descriptors(0, [5, 0]) == [(keys + 80, 16), (keys, 16), (values + 80, 16), (values, 16)]
    assert caches.block_descriptors(0, []) == []


@pytest.mark.parametrize(
    ("group", "block_id", "reason"),
    [
        (1, 0, "group 1 does not exist; the groups are 0 to 0"),
        (-1, 0, "group -1 does not exist; the groups are 0 to 0"),
        (0, BLOCKS, "group 0 has no block 12; block ids are 0 to 11"),
        (0, -1, "group 0 has no block -1; block ids are 0 to 11"),
    ],
)
def test_descriptors_of_missing_groups_and_blocks_are_refused(group: int, block_id: int, reason: str) -> None:
    caches = CanonicalKVCaches.build([[layer(torch.zeros(BLOCKS, 16, dtype=torch.int8))]])
    with pytest.raises(IndexError, match=reason):
        caches.block_descriptors(group, [block_id])


@st.composite
def allocations(draw: st.DrawFn) -> list[list[LayerPages]]:
    """Layers of one allocation in any order of (layers, blocks, heads, tokens, content), as several groups."""
    dimensions = {
        "layers": draw(st.integers(1, 3)),
        "blocks": BLOCKS * draw(st.sampled_from((1, 1, 2, 3))),
        "heads": draw(st.integers(1, 3)),
        "tokens": draw(st.integers(1, 4)),
        "content": draw(st.integers(1, 5)),
    }
    order = [*draw(st.permutations(["layers", "blocks", "heads", "tokens"])), "content"]
    if order.index("layers") > order.index("blocks") and dimensions["blocks"] > BLOCKS:
        dimensions["blocks"] = BLOCKS  # kernel blocks do not lie evenly among other layers' pages
    dtype = draw(st.sampled_from((torch.int8, torch.bfloat16, torch.float32)))
    before, after = draw(st.integers(0, 9)), draw(st.integers(0, 9))
    shape = [dimensions[name] for name in order]
    padding = draw(st.integers(0, 3))
    padded = [*shape[:-1], shape[-1] + padding] if draw(st.booleans()) else shape
    memory = torch.zeros(before + torch.Size(padded).numel() + after, dtype=dtype)
    view = memory[before : before + torch.Size(padded).numel()].view(padded)[..., : shape[-1]]
    wanted = ("layers", "blocks", "heads", "tokens", "content")
    view = view.permute([order.index(name) for name in wanted])
    block_dim = draw(st.integers(0, 3))
    layers = [
        layer(view[index].movedim(0, block_dim), f"layer.{index}", block_dim=block_dim)
        for index in range(dimensions["layers"])
    ]
    groups = draw(st.integers(1, 2))
    return [layers for _ in range(groups)]


@given(groups=allocations(), seed=st.integers(0, 1 << 30))
def test_any_memory_order_keeps_every_byte(groups: list[list[LayerPages]], seed: int) -> None:
    check(groups, seed=seed)


def test_every_memory_order_of_one_shape_has_its_own_description() -> None:
    descriptions = set()
    for order in itertools.permutations(range(4)):  # of blocks, heads, tokens, content
        tensor = torch.zeros([(BLOCKS, 5, 7, 3)[position] for position in order], dtype=torch.int8)
        tensor = tensor.permute([order.index(position) for position in range(4)])
        descriptions.add(json.dumps(CanonicalKVCaches.build([[layer(tensor)]]).describe()))
    assert len(descriptions) == 24


def test_the_description_does_not_depend_on_the_number_of_blocks() -> None:
    def describe(blocks: int) -> str:
        heads_first = torch.zeros(3, blocks, 4, 8, dtype=torch.int8).transpose(0, 1)
        return json.dumps(CanonicalKVCaches.build([[LayerPages("layer.0", heads_first, blocks, 96, 96)]]).describe())

    assert describe(5) == describe(50)


@pytest.mark.parametrize(
    ("groups", "reason"),
    [
        pytest.param([[layer(torch.zeros(BLOCKS, 4), block_dim=2)]], "no dimension 2", id="no such dimension"),
        pytest.param(
            [[layer(torch.zeros(BLOCKS, 1, 4).expand(BLOCKS, 3, 4))]], "elements that share", id="overlapping elements"
        ),
        pytest.param(
            [[layer(torch.as_strided(torch.zeros(99), (BLOCKS, 4, 3), (8, 2, 1)))]], "elements that", id="rows overlap"
        ),
        pytest.param(
            [[layer(torch.zeros(2048, BLOCKS, 1, dtype=torch.int8).transpose(0, 1))]],
            "more than 1024 pieces of 1 bytes",
            id="too many runs",
        ),
        pytest.param(
            [[LayerPages("layer.0", torch.zeros(BLOCKS, 4, dtype=torch.int8), BLOCKS, 8, 6)]],
            "holds 4 bytes per block, but the engine's pages have 8 bytes, of which 6 are data",
            id="less data than the engine says",
        ),
    ],
)
def test_layouts_that_cannot_be_copied_whole_are_refused(groups: list[list[LayerPages]], reason: str) -> None:
    shape = re.escape(str(tuple(groups[0][0].tensor.shape)))
    with pytest.raises(UnsupportedLayoutError, match=rf"layer layer\.0: .*{shape}.*strides.*{reason}"):
        CanonicalKVCaches.build(groups)


MEMORY = torch.zeros(4 * BLOCKS * 64, dtype=torch.int8)


def shifted(start: int, stride: int, size: int, name: str) -> LayerPages:
    return LayerPages(name, torch.as_strided(MEMORY, (BLOCKS, size), (stride, 1), start), BLOCKS, size, size)


@pytest.mark.parametrize(
    ("first", "second"),
    [
        pytest.param(shifted(0, 128, 128, "a"), shifted(0, 64, 64, "b"), id="one address with two strides"),
        pytest.param(shifted(0, 128, 64, "a"), shifted(96, 128, 64, "b"), id="the end of one block"),
        pytest.param(shifted(0, 64, 64, "a"), shifted(BLOCKS * 64 - 1, 64, 64, "b"), id="the last block's last byte"),
    ],
)
def test_blocks_of_different_ids_that_share_bytes_are_refused(first: LayerPages, second: LayerPages) -> None:
    for groups in ([[first], [second]], [[first, second]], [[second], [first]]):
        with pytest.raises(
            UnsupportedLayoutError, match=r"layer [ab]: .*shares memory with that of layer [ab] .*overlaps"
        ):
            CanonicalKVCaches.build(groups)


def test_a_block_that_overlaps_only_the_larger_of_two_layers_at_one_place_is_refused() -> None:
    large, small, other = shifted(0, 64, 64, "a"), shifted(0, 64, 16, "b"), shifted(BLOCKS * 64 - 1, 64, 64, "c")
    for groups in ([[large], [small], [other]], [[small], [large], [other]]):
        with pytest.raises(UnsupportedLayoutError, match="overlaps"):
            CanonicalKVCaches.build(groups)


def test_a_block_that_overlaps_the_second_of_two_interleaved_layers_is_refused() -> None:
    first, second = shifted(0, 64, 16, "a"), shifted(32, 64, 16, "b")
    third = shifted((BLOCKS - 1) * 64 + 32, 64, 16, "c")
    CanonicalKVCaches.build([[first, second]])
    with pytest.raises(UnsupportedLayoutError, match="overlaps"):
        CanonicalKVCaches.build([[first, second], [third]])


def test_a_random_pair_of_page_rows_is_refused_exactly_when_two_ids_share_a_byte() -> None:
    chance = random.Random(5)
    outcomes = set()
    for _ in range(400):
        rows = [(chance.randrange(64), stride := chance.choice((16, 24)), chance.randint(1, stride)) for _ in range(2)]
        owners = [
            {start + block * stride + byte: block for block in range(BLOCKS) for byte in range(size)}
            for start, stride, size in rows
        ]
        shares = any(owners[0][byte] != owners[1][byte] for byte in owners[0].keys() & owners[1].keys())
        layers = [shifted(*row, name) for row, name in zip(rows, "ab", strict=True)]
        try:
            CanonicalKVCaches.build([layers[:1], layers[1:]])
        except UnsupportedLayoutError:
            outcomes.add((shares, "refused"))
        else:
            outcomes.add((shares, "accepted"))
    assert (True, "accepted") not in outcomes
    assert {(True, "refused"), (False, "accepted")} <= outcomes
