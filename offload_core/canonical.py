"""``CanonicalKVCaches``: every engine tensor, whatever its layout, as unique byte tensors of pages.

An engine registers one tensor per layer, in shapes that depend on the attention backend; layers of different groups may
share memory, pages may be padded, blocks may be interleaved. What storage needs is simpler: for each group, the list of
byte pages that make up one block. That is what this module builds and all that the rest of offload-core sees.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from offload_core.errors import UnsupportedLayoutError
from offload_core.fingerprint import Json


@dataclass(frozen=True)
class LayerPages:
    """One layer's registered tensor and what the engine says about its pages.

    Args:
        name: the layer's name, for messages.
        tensor: the tensor the engine registered; its first dimension counts blocks, or kernel blocks that divide them.
        num_blocks: blocks in the engine's block table numbering.
        page_size_bytes: bytes from which one block of this layer may use some (padding included).
        unpadded_page_size_bytes: bytes of a page that carry data.
    """

    name: str
    tensor: torch.Tensor
    num_blocks: int
    page_size_bytes: int
    unpadded_page_size_bytes: int


@dataclass(frozen=True)
class CanonicalKVCacheTensor:
    """One unique memory region as int8 pages of shape ``(num_blocks, page_size_bytes)``, with its true stride."""

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


@dataclass(frozen=True)
class CanonicalKVCaches:
    """Unique page tensors, and for each group (by position) its references in layer order."""

    tensors: tuple[CanonicalKVCacheTensor, ...]
    group_refs: tuple[tuple[CanonicalKVCacheRef, ...], ...]

    @classmethod
    def build(cls, groups: Sequence[Sequence[LayerPages]]) -> CanonicalKVCaches:
        """Build from each group's layers; layers that share address and stride share one tensor.

        Raises:
            UnsupportedLayoutError: a layer's blocks are not pages at a constant stride, with its name and shape.
        """
        widths: dict[tuple[int, int], int] = {}
        for layers in groups:
            for layer in layers:
                key = (layer.tensor.data_ptr(), _block_stride_bytes(layer))
                widths[key] = max(widths.get(key, 0), layer.page_size_bytes)
        tensors: list[CanonicalKVCacheTensor] = []
        index_of: dict[tuple[int, int], int] = {}
        group_refs: list[tuple[CanonicalKVCacheRef, ...]] = []
        for layers in groups:
            refs: list[CanonicalKVCacheRef] = []
            for layer in layers:
                key = (layer.tensor.data_ptr(), _block_stride_bytes(layer))
                if key not in index_of:
                    index_of[key] = len(tensors)
                    tensors.append(CanonicalKVCacheTensor(_page_tensor(layer, widths[key], key[1])))
                refs.append(CanonicalKVCacheRef(index_of[key], layer.unpadded_page_size_bytes))
            group_refs.append(tuple(refs))
        return cls(tuple(tensors), tuple(group_refs))

    def describe(self) -> dict[str, Json]:
        """Return the geometry as JSON, without addresses: part of a rank's identity."""
        return {
            "tensors": [[t.page_size_bytes, t.block_stride_bytes] for t in self.tensors],
            "groups": [[[ref.tensor_index, ref.page_size_bytes] for ref in refs] for refs in self.group_refs],
        }


def _block_stride_bytes(layer: LayerPages) -> int:
    """Return the distance between blocks, counting ``kernel blocks per block`` rows of the registered tensor."""
    tensor = layer.tensor
    if tensor.dim() < 2 or tensor.shape[0] % layer.num_blocks or tensor.shape[0] < layer.num_blocks:
        raise UnsupportedLayoutError(
            f"layer {layer.name}: a KV cache tensor of shape {tuple(tensor.shape)} does not have its "
            f"{layer.num_blocks} blocks (or a multiple of them) as first dimension; this layout is not supported"
        )
    rows_per_block = tensor.shape[0] // layer.num_blocks
    stride = tensor.stride(0) * tensor.element_size() * rows_per_block
    inner = sum((size - 1) * step for size, step in zip(tensor.shape[1:], tensor.stride()[1:], strict=True))
    span = (inner + 1 + tensor.stride(0) * (rows_per_block - 1)) * tensor.element_size()
    if span > layer.page_size_bytes or layer.unpadded_page_size_bytes > layer.page_size_bytes:
        raise UnsupportedLayoutError(
            f"layer {layer.name}: a block of its KV cache tensor (shape {tuple(tensor.shape)}, strides "
            f"{tensor.stride()}, {tensor.dtype}) spans {span} bytes, but the engine gives pages of "
            f"{layer.page_size_bytes} bytes with {layer.unpadded_page_size_bytes} in use; this layout is not supported"
        )
    if stride < layer.unpadded_page_size_bytes and layer.num_blocks > 1:
        raise UnsupportedLayoutError(
            f"layer {layer.name}: blocks of its KV cache tensor (shape {tuple(tensor.shape)}, strides "
            f"{tensor.stride()}) lie {stride} bytes apart, less than the {layer.unpadded_page_size_bytes} bytes of a "
            "page; this layout is not supported"
        )
    return stride


def _page_tensor(layer: LayerPages, width_bytes: int, stride_bytes: int) -> torch.Tensor:
    storage = layer.tensor.untyped_storage()
    storage_bytes = int(storage.nbytes())
    offset = int(layer.tensor.storage_offset()) * layer.tensor.element_size()
    end = offset + (layer.num_blocks - 1) * stride_bytes + width_bytes
    if end > storage_bytes:
        # The last page's padding may be missing from the storage; the data itself must not be.
        width_bytes -= end - storage_bytes
    if width_bytes < layer.unpadded_page_size_bytes:
        raise UnsupportedLayoutError(
            f"layer {layer.name}: its last block's page of {layer.unpadded_page_size_bytes} bytes ends outside its "
            f"storage of {storage_bytes} bytes (shape {tuple(layer.tensor.shape)}); this layout is not supported"
        )
    return torch.empty(0, dtype=torch.int8, device=layer.tensor.device).set_(
        storage, offset, (layer.num_blocks, width_bytes), (stride_bytes, 1)
    )
