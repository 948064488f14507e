"""KV caches that take no part in offloading, and those that are refused with the reason. No engine is started."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from vllm.v1.kv_cache_interface import (
    CircularBufferSpec,
    CrossAttentionSpec,
    FullAttentionSpec,
    HiSparseResidentSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    MLAAttentionSpec,
)
from vllm.v1.kv_cache_layout import KVCacheLayout

from offload_core.api.errors import PlanError, UnsupportedLayoutError
from offload_core.vllm.model.groups import build_planner
from offload_core.vllm.worker.layer_pages import layer_pages
from tests.engine.kv_cache_rig import ATTENTION, Specs, allocate, vllm_config


def _config(*groups: KVCacheGroupSpec, num_blocks: int = 4) -> KVCacheConfig:
    return KVCacheConfig(num_blocks=num_blocks, kv_cache_tensors=[], kv_cache_groups=list(groups))


def test_rings_that_the_engine_rebuilds_take_no_part_and_stay_as_they_are() -> None:
    latent = MLAAttentionSpec(block_size=128, num_kv_heads=1, head_size=64, dtype=torch.bfloat16, tokens_per_state=4)
    ring = CircularBufferSpec(block_size=8, num_kv_heads=1, head_size=64, dtype=torch.float32, head_size_v=0)
    specs: Specs = {f"model.layers.{index}.mla": latent for index in range(2)}
    specs |= {f"model.layers.{index}.ring": ring for index in range(2)}
    caches = allocate(specs, KVCacheLayout.BLHNC)
    kinds = [caches.config.kv_cache_groups[index].kv_cache_spec for index in caches.config.prefix_cacheable_group_ids]
    assert len(caches.config.kv_cache_groups) > len(kinds) > 0
    assert all(spec.prefix_cacheable for spec in kinds)
    caches.check()


def test_whisper_cross_attention_is_refused_with_its_kind() -> None:
    cross = CrossAttentionSpec(**ATTENTION)
    specs: Specs = {}
    for index in range(2):
        specs[f"model.decoder.layers.{index}.self_attn.attn"] = FullAttentionSpec(**ATTENTION)
        specs[f"model.decoder.layers.{index}.encoder_attn.attn"] = cross
    caches = allocate(specs, KVCacheLayout.LBHNC)
    with pytest.raises(PlanError, match=r"group 1 holds an encoder's keys and values \(CrossAttentionSpec\)"):
        build_planner(vllm_config(), caches.config, None)


@pytest.mark.parametrize(
    ("group", "tensors", "reason"),
    [
        pytest.param(
            KVCacheGroupSpec(["a", "b"], FullAttentionSpec(**ATTENTION), host_resident=True),
            {},
            r"layers a, b \(group 0\) live in HiSparse's host pool.*run without hisparse_config",
            id="host pool",
        ),
        pytest.param(
            KVCacheGroupSpec(["a"], FullAttentionSpec(**ATTENTION)),
            {"a": [torch.zeros(4, 2)]},
            "layer a: registered as list, expected one tensor",
            id="a list",
        ),
        pytest.param(
            KVCacheGroupSpec(["a"], FullAttentionSpec(**ATTENTION)), {}, "layer a: registered as NoneType", id="nothing"
        ),
        pytest.param(
            KVCacheGroupSpec(["a"], HiSparseResidentSpec(block_size=16, page_size=64)),
            {"a": torch.zeros(4, 64, dtype=torch.int8)},
            "layer a: its pages are of kind HiSparseResidentSpec; offloading supports",
            id="raw memory",
        ),
    ],
)
def test_what_is_not_one_tensor_of_pages_is_refused(group: KVCacheGroupSpec, tensors: Any, reason: str) -> None:
    with pytest.raises(UnsupportedLayoutError, match=reason):
        layer_pages(_config(group), 0, tensors)


@pytest.mark.parametrize(("blocks", "block_dim"), [(4, 1), (3, 1), (2, None), (1, None)])
def test_split_keys_and_values_from_a_backend_of_ones_own(blocks: int, block_dim: int | None) -> None:
    spec = FullAttentionSpec(**ATTENTION)
    tensor = torch.zeros(2, blocks, 16, 4, 32, dtype=torch.bfloat16)
    config = _config(KVCacheGroupSpec(["a"], spec), num_blocks=blocks)
    if block_dim is None:
        with pytest.raises(UnsupportedLayoutError, match=r"layer a: both of the first two.*\(2, [12], 16, 4, 32\)"):
            layer_pages(config, 0, {"a": tensor})
        return
    (pages,) = layer_pages(config, 0, {"a": tensor})
    assert pages.block_dim == block_dim
