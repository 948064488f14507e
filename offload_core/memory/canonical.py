"""``CanonicalKVCaches``: engine tensors of any layout, as unique byte tensors of pages.

An engine registers one tensor per layer, in a shape that depends on the attention backend. Layers of different groups
may share memory. Pages may be padded, blocks interleaved, and keys apart from values. Storage needs less: for each
group, the list of byte pages that make up one block. This module builds that list, and the rest of offload-core sees
nothing else.

Only strides count, not shapes. A tensor's true strides give the bytes of a block, as runs of consecutive bytes. A block
of one run is one page. A block of several runs (keys apart from values, heads outside the block) has one tensor and one
reference per run, in address order. Copies and payloads treat both kinds of block alike.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from typing import NamedTuple

import torch

from offload_core.api.errors import UnsupportedLayoutError
from offload_core.objects.fingerprint import Json

_MAX_RUNS_PER_BLOCK = 1024


@dataclass(frozen=True)
class LayerPages:
    """One layer's registered tensor and the engine's description of its pages.

    Args:
        name: the layer's name, for messages.
        tensor: the registered tensor. It has all of the layer's data and no other bytes.
        num_blocks: number of blocks, as the engine's block tables count them.
        page_size_bytes: bytes of a page, padding included. A block of this layer may use all or some of them.
        unpadded_page_size_bytes: bytes of a page with data.
        block_dim: the dimension of ``tensor`` that counts blocks, or kernel blocks, which are parts of a block.
    """

    name: str
    tensor: torch.Tensor
    num_blocks: int
    page_size_bytes: int
    unpadded_page_size_bytes: int
    block_dim: int = 0


@dataclass(frozen=True)
class CanonicalKVCacheTensor:
    """One unique memory region: an int8 tensor of shape ``(num_blocks, page_size_bytes)``, with its true stride."""

    tensor: torch.Tensor

    @property
    def page_size_bytes(self) -> int:
        """Bytes per page, padding included."""
        return self.tensor.shape[1]

    @property
    def block_stride_bytes(self) -> int:
        """Distance in bytes between the first bytes of consecutive blocks."""
        return self.tensor.stride(0)


@dataclass(frozen=True)
class CanonicalKVCacheRef:
    """A group's use of one tensor: the first ``page_size_bytes`` bytes of its pages carry the group's data."""

    tensor_index: int
    page_size_bytes: int


class MemoryRegion(NamedTuple):
    """``length_bytes`` consecutive bytes at ``address``, on the device that holds the KV cache."""

    address: int
    length_bytes: int


@dataclass(frozen=True)
class CanonicalKVCaches:
    """Unique page tensors, and for each group (by position) its references in layer order.

    Layers of one group that share memory have one common reference. Pages of different groups may overlap, but only
    within one block id, because the engine gives a block to one group at a time.
    """

    tensors: tuple[CanonicalKVCacheTensor, ...]
    group_refs: tuple[tuple[CanonicalKVCacheRef, ...], ...]
    memory_orders: tuple[tuple[tuple[int, ...], ...], ...]
    """Per group and layer: the dimensions of its tensor within a block, from the largest stride to the smallest."""

    @classmethod
    def build(cls, groups: Sequence[Sequence[LayerPages]]) -> CanonicalKVCaches:
        """Build the caches from each group's layers. Pages with the same address and stride share one tensor.

        Raises:
            UnsupportedLayoutError: a layer's blocks do not consist of the same runs of bytes at a constant stride, or
                blocks with different ids share bytes. The message has the layer's name, shape and strides.
        """
        runs_of = [[_block_runs(layer) for layer in layers] for layers in groups]
        pages: dict[tuple[int, int], _PagesDraft] = {}
        group_refs: list[tuple[CanonicalKVCacheRef, ...]] = []
        for layers, group_runs in zip(groups, runs_of, strict=True):
            refs: dict[int, int] = {}
            for layer, runs in zip(layers, group_runs, strict=True):
                for offset in runs.offsets_bytes:
                    page = pages.setdefault(
                        (layer.tensor.data_ptr() + offset, runs.block_stride_bytes),
                        _PagesDraft(len(pages), layer, offset, runs.block_stride_bytes),
                    )
                    page.data_bytes = max(page.data_bytes, runs.run_bytes)
                    page.width_bytes = max(page.width_bytes, runs.width_bytes)
                    refs[page.index] = max(refs.get(page.index, 0), runs.run_bytes)
            group_refs.append(tuple(CanonicalKVCacheRef(index, size) for index, size in refs.items()))
        _refuse_shared_bytes([page for _, page in sorted(pages.items())])
        return cls(
            tuple(CanonicalKVCacheTensor(page.tensor()) for page in pages.values()),
            tuple(group_refs),
            tuple(tuple(runs.memory_order for runs in group_runs) for group_runs in runs_of),
        )

    def describe(self) -> dict[str, Json]:
        """Return the geometry as JSON, without addresses: part of a rank's identity.

        With the shapes and dtypes of the engine's tensors, it decides the meaning of each byte of a payload. It does
        not depend on the number of blocks. It includes memory orders only if some layer's memory order differs from the
        order of its dimensions.
        """
        description: dict[str, Json] = {
            "tensors": [[t.page_size_bytes, t.block_stride_bytes] for t in self.tensors],
            "groups": [[[ref.tensor_index, ref.page_size_bytes] for ref in refs] for refs in self.group_refs],
        }
        if any(list(order) != sorted(order) for orders in self.memory_orders for order in orders):
            description["memory_orders"] = [[list(order) for order in orders] for orders in self.memory_orders]
        return description

    def regions(self) -> tuple[MemoryRegion, ...]:
        """Return the memory to register in order to reach every page: disjoint regions by rising address.

        A region extends from a tensor's first block to the end of its last block, with the bytes between its pages.
        Regions that overlap or touch are merged, but never across two of the engine's allocations.
        """
        spans = sorted(
            (pages.untyped_storage().data_ptr(), pages.data_ptr(), pages.data_ptr() + _extent_bytes(pages))
            for pages in (tensor.tensor for tensor in self.tensors)
        )
        merged: list[tuple[int, int, int]] = []
        for storage, start, end in spans:
            if merged and merged[-1][0] == storage and start <= merged[-1][2]:
                merged[-1] = (storage, merged[-1][1], max(end, merged[-1][2]))
            else:
                merged.append((storage, start, end))
        return tuple(MemoryRegion(start, end - start) for _, start, end in merged)

    def block_descriptors(self, group: int, block_ids: Sequence[int]) -> list[MemoryRegion]:
        """Return the memory of the data of a group's blocks, each piece within one of :meth:`regions`.

        Args:
            group: the group's position in ``group_refs``.
            block_ids: ids from 0 to ``num_blocks - 1``, in any order.

        Returns:
            One region per reference and block: all blocks of the first reference, then all of the second, and so on.
            Their concatenation is the payload of a pack with these blocks of this group.

        Raises:
            IndexError: there is no such group or block.
        """
        if not 0 <= group < len(self.group_refs):
            raise IndexError(f"group {group} does not exist; the groups are 0 to {len(self.group_refs) - 1}")
        descriptors: list[MemoryRegion] = []
        for ref in self.group_refs[group]:
            pages = self.tensors[ref.tensor_index].tensor
            address, stride, num_blocks = pages.data_ptr(), pages.stride(0), pages.shape[0]
            for block_id in block_ids:
                if not 0 <= block_id < num_blocks:
                    raise IndexError(f"group {group} has no block {block_id}; block ids are 0 to {num_blocks - 1}")
                descriptors.append(MemoryRegion(address + block_id * stride, ref.page_size_bytes))
        return descriptors


@dataclass(frozen=True)
class _BlockRuns:
    """The runs of consecutive bytes that make up block 0 of a layer; block ``b`` starts ``b`` strides further."""

    offsets_bytes: tuple[int, ...]
    """Offsets from the tensor's first byte, rising."""
    run_bytes: int
    width_bytes: int
    """Width of the page around a run; it includes the padding if the whole block is one run."""
    block_stride_bytes: int
    memory_order: tuple[int, ...]


@dataclass
class _PagesDraft:
    """Pages at one address and stride, during the collection of the layers that use them."""

    index: int
    layer: LayerPages
    offset_bytes: int
    stride_bytes: int
    data_bytes: int = 0
    width_bytes: int = 0

    def tensor(self) -> torch.Tensor:
        storage = self.layer.tensor.untyped_storage()
        offset = int(self.layer.tensor.storage_offset()) * self.layer.tensor.element_size() + self.offset_bytes
        # The storage may lack the last page's padding.
        available = int(storage.nbytes()) - offset - (self.layer.num_blocks - 1) * self.stride_bytes
        size = (self.layer.num_blocks, min(self.width_bytes, available))
        pages = torch.empty(0, dtype=torch.int8, device=self.layer.tensor.device)
        return pages.set_(storage, offset, size, (self.stride_bytes, 1))


def _block_runs(layer: LayerPages) -> _BlockRuns:
    tensor, element_bytes = layer.tensor, layer.tensor.element_size()
    if not 0 <= layer.block_dim < tensor.dim():
        raise _unsupported(layer, f"has no dimension {layer.block_dim} to count its blocks")
    rows = tensor.shape[layer.block_dim]
    if rows < layer.num_blocks or rows % layer.num_blocks:
        raise _unsupported(
            layer, f"does not have its {layer.num_blocks} blocks (or a multiple of them) as dimension {layer.block_dim}"
        )
    rows_per_block = rows // layer.num_blocks
    sizes = list(tensor.shape)
    sizes[layer.block_dim] = rows_per_block
    strides = [stride * element_bytes for stride in tensor.stride()]
    block_stride = strides[layer.block_dim] * rows_per_block
    rising = sorted((step, dim) for dim, step in enumerate(strides) if sizes[dim] != 1)
    memory_order = tuple(dim for _, dim in reversed(rising))
    inner = [(step, sizes[dim]) for step, dim in rising]
    _refuse_overlap(layer, sorted([*inner, (block_stride, layer.num_blocks)]))
    run = element_bytes
    while inner and inner[0][0] == run:
        run *= inner.pop(0)[1]
    offsets = [0]
    for step, size in inner:
        if len(offsets) * size > _MAX_RUNS_PER_BLOCK:
            raise _unsupported(layer, f"has blocks in more than {_MAX_RUNS_PER_BLOCK} pieces of {run} bytes")
        offsets = [base + position * step for position, base in product(range(size), offsets)]
    data, page = run * len(offsets), layer.page_size_bytes
    if data != layer.unpadded_page_size_bytes or data > page:
        raise _unsupported(
            layer,
            f"holds {data} bytes per block, but the engine's pages have {page} bytes, of which "
            f"{layer.unpadded_page_size_bytes} are data",
        )
    if len(offsets) > 1:
        return _BlockRuns(tuple(offsets), run, run, block_stride, memory_order)
    if block_stride < page and layer.num_blocks > 1:
        raise _unsupported(layer, f"has blocks {block_stride} bytes apart, less than the {page} bytes of a page")
    return _BlockRuns((0,), run, page, block_stride, memory_order)


def _refuse_overlap(layer: LayerPages, dimensions: list[tuple[int, int]]) -> None:
    """Refuse strides with which two elements share a byte.

    Args:
        dimensions: (stride in bytes, size) of each dimension, by rising stride.
    """
    extent = layer.tensor.element_size()
    for step, size in dimensions:
        if size > 1 and step < extent:
            raise _unsupported(layer, "has elements that share memory")
        extent += (size - 1) * step


def _refuse_shared_bytes(pages: list[_PagesDraft]) -> None:
    """Refuse pages (by rising address) if blocks with different ids share bytes.

    Pages that overlap must fit into one row of memory per block id: they have the same stride, and all lie within it.
    """
    first: _PagesDraft | None = None
    start = end = 0
    for page in pages:
        address = page.layer.tensor.data_ptr() + page.offset_bytes
        page_end = address + (page.layer.num_blocks - 1) * page.stride_bytes + page.data_bytes
        if first is None or address >= end:
            first, start, end = page, address, page_end
            continue
        end = max(end, page_end)
        fits = page.stride_bytes == first.stride_bytes and address - start + page.data_bytes <= page.stride_bytes
        if not fits and page.layer.num_blocks > 1:
            raise _unsupported(
                page.layer,
                f"shares memory with that of layer {first.layer.name} (shape {tuple(first.layer.tensor.shape)}, "
                f"strides {first.layer.tensor.stride()}), and one block overlaps blocks with other ids",
            )


def _extent_bytes(pages: torch.Tensor) -> int:
    return (pages.shape[0] - 1) * pages.stride(0) + pages.shape[1]


def _unsupported(layer: LayerPages, problem: str) -> UnsupportedLayoutError:
    return UnsupportedLayoutError(
        f"layer {layer.name}: its KV cache tensor (shape {tuple(layer.tensor.shape)}, strides {layer.tensor.stride()}, "
        f"{layer.tensor.dtype}) {problem}; this layout is not supported"
    )
