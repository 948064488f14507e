"""The pages of each layer: the bytes of vLLM's KV cache tensors that make up a block.

vLLM registers each layer as a view ``(blocks or kernel blocks, heads, states, content)`` of one allocation. The view
has one of six memory orders (``KVCacheLayout``). A recurrent layer's states lie packed in the content, as bytes. A
third-party attention backend may register other shapes, such as ``(2, blocks, ...)`` with keys apart from values. The
strides give the positions of the bytes; the layer's spec gives their number.
"""

from __future__ import annotations

import dataclasses

import torch
from vllm.v1.kv_cache_interface import AttentionSpec, KVCacheConfig, KVCacheSpec, MambaSpec, UniformTypeKVCacheSpecs

from offload_core.api.errors import UnsupportedLayoutError
from offload_core.memory.canonical import LayerPages

_VIEW_DIMENSIONS = 4


def layer_pages(kv_cache_config: KVCacheConfig, group_id: int, kv_caches: dict[str, torch.Tensor]) -> list[LayerPages]:
    """Return one entry per layer of a group, in the group's order, except for layers that reuse another's cache.

    Raises:
        UnsupportedLayoutError: a layer is not registered as one tensor, has no pages, or lives in a separate block
            pool.
    """
    group = kv_cache_config.kv_cache_groups[group_id]
    if group.host_resident:
        raise UnsupportedLayoutError(
            f"layers {', '.join(group.layer_names)} (group {group_id}) live in HiSparse's host pool, which has its "
            "own block numbers; offloading does not support this: run without hisparse_config"
        )
    spec = group.kv_cache_spec
    specs = spec.kv_cache_specs if isinstance(spec, UniformTypeKVCacheSpecs) else dict.fromkeys(group.layer_names, spec)
    owned = {_memory_of(_tensor(name, kv_caches)) for name in group.layer_names if name in specs}
    layers: list[LayerPages] = []
    for name in group.layer_names:
        tensor = _tensor(name, kv_caches)
        if name in specs:
            layers.append(_layer_pages(name, tensor, kv_cache_config.num_blocks, specs[name]))
        elif _memory_of(tensor) not in owned:
            raise UnsupportedLayoutError(
                f"layer {name}: group {group_id} has no spec for it, and no layer of the group shares its tensor "
                f"(shape {tuple(tensor.shape)}, strides {tensor.stride()}); expected one of {', '.join(specs)}"
            )
    return layers


def _layer_pages(name: str, tensor: torch.Tensor, num_blocks: int, spec: KVCacheSpec) -> LayerPages:
    return LayerPages(
        name,
        tensor,
        num_blocks,
        int(spec.page_size_bytes),
        _unpadded_page_size_bytes(name, spec),
        _block_dim(name, tensor, num_blocks),
    )


def _tensor(name: str, kv_caches: dict[str, torch.Tensor]) -> torch.Tensor:
    tensor = kv_caches.get(name)
    if not isinstance(tensor, torch.Tensor):
        raise UnsupportedLayoutError(f"layer {name}: registered as {type(tensor).__name__}, expected one tensor")
    return tensor


def _memory_of(tensor: torch.Tensor) -> tuple[int, torch.dtype, tuple[int, ...], tuple[int, ...]]:
    return tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride()


def _block_dim(name: str, tensor: torch.Tensor, num_blocks: int) -> int:
    """Return the dimension that counts blocks: first in vLLM's views, second in split keys and values."""
    first = tensor.dim() > 0 and tensor.shape[0] % num_blocks == 0
    split = tensor.dim() > 1 and tensor.shape[0] == 2 and tensor.shape[1] % num_blocks == 0
    if first and split and tensor.dim() != _VIEW_DIMENSIONS:
        raise UnsupportedLayoutError(
            f"layer {name}: both of the first two dimensions of its KV cache tensor (shape {tuple(tensor.shape)}, "
            f"strides {tensor.stride()}) could count its {num_blocks} blocks; start the engine with 3 blocks or more"
        )
    return 1 if split and not first else 0


def _unpadded_page_size_bytes(name: str, spec: KVCacheSpec) -> int:
    if isinstance(spec, AttentionSpec):
        return int(spec.unpadded_page_size_bytes)
    if isinstance(spec, MambaSpec):
        return int(dataclasses.replace(spec, page_size_padded=None).page_size_bytes)
    raise UnsupportedLayoutError(
        f"layer {name}: its pages are of kind {type(spec).__name__}; offloading supports AttentionSpec and MambaSpec"
    )
