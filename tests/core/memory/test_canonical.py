"""Canonical caches from every tensor layout that engines register."""

from __future__ import annotations

import json
import re

import pytest
import torch

from offload_core.api.errors import UnsupportedLayoutError
from offload_core.memory.canonical import CanonicalKVCaches, LayerPages

BLOCKS = 6


def numbered(nbytes: int) -> torch.Tensor:
    """Memory in which a wrong offset shows."""
    return (torch.arange(nbytes, dtype=torch.int64) * 31 % 251).to(torch.uint8).view(torch.int8)


def layer(tensor: torch.Tensor, page: int, unpadded: int | None = None, name: str = "layer.0") -> LayerPages:
    return LayerPages(name, tensor, BLOCKS, page, page if unpadded is None else unpadded)


def raw(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.contiguous().view(torch.uint8).flatten().tolist())


def pages(caches: CanonicalKVCaches, group: int, position: int = 0) -> list[bytes]:
    """Return the data bytes of each block of one layer, through the canonical tensors only."""
    ref = caches.group_refs[group][position]
    tensor = caches.tensors[ref.tensor_index].tensor
    return [raw(tensor[block, : ref.page_size_bytes]) for block in range(tensor.shape[0])]


def test_a_contiguous_layer_is_one_page_per_block() -> None:
    tensor = numbered(BLOCKS * 64).view(torch.bfloat16).view(BLOCKS, 2, 4, 4)  # blocks, K and V, tokens, head
    caches = CanonicalKVCaches.build([[layer(tensor, 64)]])
    assert caches.tensors[0].tensor.shape == (BLOCKS, 64)
    assert caches.tensors[0].tensor.dtype == torch.int8
    assert pages(caches, 0) == [raw(tensor[block]) for block in range(BLOCKS)]


def test_no_copy_is_made() -> None:
    tensor = torch.zeros(BLOCKS, 64, dtype=torch.int8)
    caches = CanonicalKVCaches.build([[layer(tensor, 64)]])
    caches.tensors[0].tensor[2, 5] = 7
    assert tensor[2, 5] == 7


def test_layers_that_share_address_and_stride_are_registered_once() -> None:
    memory = numbered(BLOCKS * 64)
    attention = memory.view(torch.bfloat16).view(BLOCKS, 32)
    state = memory.view(torch.float32).view(BLOCKS, 16)[:, :12]  # fewer bytes of the same pages
    other = torch.zeros(BLOCKS, 64, dtype=torch.int8)
    caches = CanonicalKVCaches.build(
        [[layer(attention, 64), layer(other, 64, name="layer.1")], [layer(state, 64, 48, name="layer.2")]]
    )
    assert len(caches.tensors) == 2
    assert [[ref.tensor_index for ref in refs] for refs in caches.group_refs] == [[0, 1], [0]]
    assert [[ref.page_size_bytes for ref in refs] for refs in caches.group_refs] == [[64, 64], [48]]
    assert pages(caches, 1) == [raw(state[block]) for block in range(BLOCKS)]


def test_a_shared_tensor_is_as_wide_as_its_widest_layer() -> None:
    memory = numbered(BLOCKS * 64).view(BLOCKS, 64)
    caches = CanonicalKVCaches.build([[layer(memory[:, :16], 16)], [layer(memory, 64, name="layer.1")]])
    assert [tensor.page_size_bytes for tensor in caches.tensors] == [64]
    assert pages(caches, 1) == [raw(memory[block]) for block in range(BLOCKS)]


def test_padding_is_part_of_the_page_and_not_of_the_data() -> None:
    padded = numbered(BLOCKS * 80).view(BLOCKS, 80)
    data = padded[:, :64]
    caches = CanonicalKVCaches.build([[layer(data, 80, 64)]])
    assert (caches.tensors[0].page_size_bytes, caches.tensors[0].block_stride_bytes) == (80, 80)
    assert pages(caches, 0) == [raw(data[block]) for block in range(BLOCKS)]


def test_the_last_pages_padding_may_lie_outside_the_storage() -> None:
    memory = numbered(BLOCKS * 80 - 16)
    data = torch.as_strided(memory, (BLOCKS, 64), (80, 1))
    caches = CanonicalKVCaches.build([[layer(data, 80, 64)]])
    assert (caches.tensors[0].page_size_bytes, caches.tensors[0].block_stride_bytes) == (64, 80)
    assert pages(caches, 0) == [raw(data[block]) for block in range(BLOCKS)]


def test_kernel_blocks_smaller_than_the_managers_blocks() -> None:
    tensor = numbered(BLOCKS * 3 * 32).view(torch.bfloat16).view(BLOCKS * 3, 2, 8)
    caches = CanonicalKVCaches.build([[layer(tensor, 96)]])
    assert (caches.tensors[0].page_size_bytes, caches.tensors[0].block_stride_bytes) == (96, 96)
    assert pages(caches, 0) == [raw(tensor[3 * block : 3 * block + 3]) for block in range(BLOCKS)]


def test_packed_blocks_of_several_layers_keep_their_true_stride() -> None:
    memory = numbered(BLOCKS * 3 * 32).view(BLOCKS, 3, 32)
    layers = [layer(memory[:, position], 32, name=f"layer.{position}") for position in range(3)]
    caches = CanonicalKVCaches.build([layers])
    assert [tensor.block_stride_bytes for tensor in caches.tensors] == [96, 96, 96]
    assert [tensor.page_size_bytes for tensor in caches.tensors] == [32, 32, 32]
    for position in range(3):
        assert pages(caches, 0, position) == [raw(memory[block, position]) for block in range(BLOCKS)]


def test_tensors_of_unequal_sizes_and_dtypes() -> None:
    mla = numbered(BLOCKS * 36).view(BLOCKS, 36)
    attention = numbered(BLOCKS * 128).view(torch.float32).view(BLOCKS, 32)
    caches = CanonicalKVCaches.build([[layer(mla, 36)], [layer(attention, 128, name="layer.1")]])
    assert [tensor.page_size_bytes for tensor in caches.tensors] == [36, 128]
    assert pages(caches, 0) == [raw(mla[block]) for block in range(BLOCKS)]
    assert pages(caches, 1) == [raw(attention[block]) for block in range(BLOCKS)]


def test_a_block_whose_inner_dimensions_are_permuted_is_still_one_page() -> None:
    tensor = numbered(BLOCKS * 64).view(BLOCKS, 4, 16).permute(0, 2, 1)
    caches = CanonicalKVCaches.build([[layer(tensor, 64)]])
    assert pages(caches, 0) == [raw(tensor[block].permute(1, 0)) for block in range(BLOCKS)]


def _split() -> torch.Tensor:
    return torch.zeros(2, BLOCKS, 32, dtype=torch.int8)


@pytest.mark.parametrize(
    ("tensor", "page", "unpadded"),
    [
        pytest.param(_split()[:, :5], 64, 64, id="the first dimension is not the blocks"),
        pytest.param(torch.zeros(BLOCKS - 1, 64, dtype=torch.int8), 64, 64, id="too few blocks"),
        pytest.param(torch.zeros(BLOCKS + 1, 64, dtype=torch.int8), 64, 64, id="not a multiple of the blocks"),
        pytest.param(torch.zeros(BLOCKS, 64, dtype=torch.int8), 63, 63, id="a block larger than its page"),
        pytest.param(torch.zeros(BLOCKS, 64, dtype=torch.int8), 64, 65, id="more data than page"),
        pytest.param(torch.zeros(BLOCKS, 64, dtype=torch.int8), 60, 64, id="more data than its page holds"),
        pytest.param(torch.zeros(1, 64, dtype=torch.int8).expand(BLOCKS, 64), 64, 64, id="blocks on top of each other"),
        pytest.param(
            torch.as_strided(torch.zeros(1000, dtype=torch.int8), (BLOCKS, 32), (48, 1)), 64, 64, id="pages overlap"
        ),
        pytest.param(
            torch.as_strided(torch.zeros(1000, dtype=torch.int8), (BLOCKS, 32), (48, 1)), 64, 32, id="paddings overlap"
        ),
        pytest.param(
            torch.as_strided(torch.zeros(5 * 64 + 32, dtype=torch.int8), (BLOCKS, 32), (64, 1)),
            64,
            64,
            id="the last page ends outside the storage",
        ),
    ],
)
def test_blocks_without_a_constant_stride_are_refused_with_name_shape_and_strides(
    tensor: torch.Tensor, page: int, unpadded: int
) -> None:
    shape = re.escape(str(tuple(tensor.shape)))
    with pytest.raises(UnsupportedLayoutError, match=rf"layer model\.7\.attn: .*{shape}.*strides.*not supported"):
        CanonicalKVCaches.build([[layer(tensor, page, unpadded, name="model.7.attn")]])


def test_the_description_is_the_geometry_without_addresses() -> None:
    def build(padding: int) -> CanonicalKVCaches:
        memory = torch.zeros(BLOCKS, 64 + padding, dtype=torch.int8)
        return CanonicalKVCaches.build([[layer(memory[:, :64], 64 + padding, 64)]])

    first, second = build(0), build(0)
    assert first.tensors[0].tensor.data_ptr() != second.tensors[0].tensor.data_ptr()
    assert json.dumps(first.describe()) == json.dumps(second.describe())
    assert first.describe() != build(16).describe()
