"""KV caches as vLLM allocates them, from the specs of a model's layers: vLLM's own grouping, placement and views."""

from __future__ import annotations

import copy
import functools
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.layers.mamba.abstract import MambaBase
from vllm.v1.kv_cache_interface import (
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowMLASpec,
    UniformTypeKVCacheSpecs,
    group_kernel_blocks,
)
from vllm.v1.kv_cache_layout import KVCacheLayout
from vllm.v1.worker.utils import AttentionGroup, allocate_kv_cache, prepare_kernel_block_sizes

from offload_core.memory.canonical import CanonicalKVCaches
from offload_core.vllm.worker.layer_pages import layer_pages
from tests.support import tiny_models
from tests.support.kv_cache_planning import get_kv_cache_config_from_groups, get_kv_cache_groups
from tests.support.round_trip import check_regions, check_round_trip

Specs = dict[str, KVCacheSpec]
LAYOUTS = tuple(KVCacheLayout)
BLOCK_COMPACT = tuple(layout for layout in LAYOUTS if layout.is_block_compact)
"""Layouts in which pages of several sizes can be placed: each page is one run of bytes."""
BLOCK_OUTERMOST = tuple(layout for layout in BLOCK_COMPACT if layout.is_block_outermost)
"""Layouts in which several layers' pages lie side by side in each block."""
BLOCKS_PER_GROUP = 2

ATTENTION: dict[str, Any] = {"block_size": 16, "num_kv_heads": 4, "head_size": 32, "dtype": torch.bfloat16}


def by_name(layout: KVCacheLayout) -> str:
    """A layout's name as a test id."""
    return str(layout.name)


@functools.cache
def vllm_config() -> Any:
    """A real configuration; only its cache settings matter here."""
    with tempfile.TemporaryDirectory() as folder:
        model = tiny_models.write_gemma3(Path(folder) / "model", num_layers=1, vocab_size=64)
        args = EngineArgs(model=str(model), enforce_eager=True, disable_hybrid_kv_cache_manager=False)
        return args.create_engine_config()


@dataclass(frozen=True)
class EngineCaches:
    """What a worker registers, and how its layers index it."""

    config: KVCacheConfig
    tensors: dict[str, torch.Tensor]

    def canonical(self) -> CanonicalKVCaches:
        """The canonical caches of the groups that are stored."""
        groups = [layer_pages(self.config, index, self.tensors) for index in self.config.prefix_cacheable_group_ids]
        return CanonicalKVCaches.build(groups)

    def views(self) -> list[list[torch.Tensor]]:
        """The stored groups' layers as their attention backends or state updates see them, by block id."""
        views: list[list[torch.Tensor]] = []
        for index in self.config.prefix_cacheable_group_ids:
            group = self.config.kv_cache_groups[index]
            views.append([view for name in group.layer_names for view in self._layer_views(name, _spec(name, group))])
        return views

    def _layer_views(self, name: str, spec: KVCacheSpec) -> list[torch.Tensor]:
        if isinstance(spec, MambaSpec):
            layer = _RecurrentLayer(spec)
            layer.bind_kv_cache(self.tensors[name])
            return list(layer.kv_cache)
        return [group_kernel_blocks(self.tensors[name], self.config.num_blocks)]

    def check(self) -> CanonicalKVCaches:
        """Every byte of every block survives a store and a load into other blocks, and nothing else changes."""
        caches = self.canonical()
        assert [sum(ref.page_size_bytes for ref in refs) for refs in caches.group_refs] == self._bytes_per_block()
        check_round_trip(caches, self.views(), blocks=BLOCKS_PER_GROUP)
        check_regions(caches, self.views())
        return caches

    def _bytes_per_block(self) -> list[int]:
        """Of each stored group, as its layers' specs count them; layers that share a cache count once."""
        totals: list[int] = []
        for index in self.config.prefix_cacheable_group_ids:
            group = self.config.kv_cache_groups[index]
            sizes: dict[int, int] = {}
            for name in group.layer_names:
                sizes.setdefault(self.tensors[name].data_ptr(), _spec(name, group).real_page_size_bytes)
            totals.append(sum(sizes.values()))
        return totals


def allocate(
    specs: Mapping[str, KVCacheSpec], layout: KVCacheLayout, *, backend: Any = None, extra_blocks: int = 0
) -> EngineCaches:
    """Group, place and allocate as the engine does; ``backend`` serves all attention layers, if given."""
    engine = copy.copy(vllm_config())
    engine.cache_config = copy.copy(engine.cache_config)
    engine.cache_config.kv_cache_layout = layout.name
    groups: list[KVCacheGroupSpec] = get_kv_cache_groups(engine, dict(specs))
    blocks = 2 * len(groups) * BLOCKS_PER_GROUP + 3 + extra_blocks
    engine.cache_config.num_gpu_blocks_override = blocks
    config = get_kv_cache_config_from_groups(engine, groups, 1 << 40)
    assert config.num_blocks == blocks
    kernel_block_sizes = None
    if backend is not None:
        attention_groups = [_attention_groups(backend, index, group) for index, group in enumerate(groups)]
        kernel_block_sizes = prepare_kernel_block_sizes(config, attention_groups)
    return EngineCaches(config, allocate_kv_cache(config, torch.device("cpu"), layout, kernel_block_sizes))


def _spec(name: str, group: KVCacheGroupSpec) -> Any:
    spec = group.kv_cache_spec
    return spec.kv_cache_specs.get(name, spec.first_spec) if isinstance(spec, UniformTypeKVCacheSpecs) else spec


def _attention_groups(backend: Any, index: int, group: KVCacheGroupSpec) -> list[AttentionGroup]:
    return [AttentionGroup(backend, [name], _spec(name, group), index) for name in group.layer_names]


class _RecurrentLayer(MambaBase):  # type: ignore[misc]  # untyped to us
    """Nothing but the shapes and dtypes from which vLLM's own code makes the views of the states."""

    mamba_type = None

    def __init__(self, spec: MambaSpec) -> None:
        self._spec = spec

    def get_state_shape(self) -> Any:
        return self._spec.shapes

    def get_state_dtype(self) -> Any:
        return self._spec.dtypes


def every(period: int, count: int, regular: KVCacheSpec, other: KVCacheSpec) -> Specs:
    """``count`` layers of which each ``period``-th is ``other``, the rest ``regular``."""
    return {
        f"model.layers.{index}.self_attn.attn": other if (index + 1) % period == 0 else regular
        for index in range(count)
    }


def deepseek_v4(layers: int, *, content: int | None = 584, alignment: int = 576) -> Specs:
    """The caches of DeepSeek-V4's layers: block sizes 256, 64, 4 and 8; compression 4 and 128 in turn."""
    common: dict[str, Any] = {"num_kv_heads": 1, "max_tp_shards": 1, "alignment": alignment}
    latent = {"head_size": 512, "dtype": torch.uint8, "state_content_bytes": content, "model_version": "deepseek_v4"}
    specs: Specs = {}
    for index in range(layers):
        name, ratio = f"model.layers.{index}.attn", (4, 128)[index % 2]
        overlap = 2 if ratio == 4 else 1
        specs[f"{name}.swa_cache"] = SlidingWindowMLASpec(block_size=64, sliding_window=128, **common, **latent)
        specs[f"{name}.mla"] = MLAAttentionSpec(block_size=256, tokens_per_state=ratio, **common, **latent)
        specs[f"{name}.compressor.state_cache"] = SlidingWindowMLASpec(
            block_size=4 if ratio == 4 else 8,
            sliding_window=overlap * ratio,
            head_size=2 * overlap * 512,
            dtype=torch.float32,
            **common,
        )
        if ratio == 4:
            specs[f"{name}.indexer.k_cache"] = MLAAttentionSpec(
                block_size=256, tokens_per_state=4, head_size=132, dtype=torch.uint8, **common
            )
            specs[f"{name}.indexer.compressor.state_cache"] = SlidingWindowMLASpec(
                block_size=4, sliding_window=8, head_size=512, dtype=torch.float32, **common
            )
    return specs
