"""The engines and models whose local attention may be reported alone."""

from __future__ import annotations

import pytest
import torch
import vllm
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, KVCacheSpec, MambaSpec

from offload_core.planning.planner import GroupGeometry, HitPolicy, HybridOffloadPlanner
from offload_core.vllm.compat import can_report_attention_alone
from offload_core.vllm.scheduler.local_cache import has_only_attention_and_states

FULL, STATE, WINDOW = HitPolicy("full"), HitPolicy("state"), HitPolicy("window", window_tokens=64)


def attention(heads: int) -> KVCacheSpec:
    return FullAttentionSpec(block_size=16, num_kv_heads=heads, head_size=8, dtype=torch.float16)


def states(width: int) -> KVCacheSpec:
    return MambaSpec(block_size=16, shapes=((width,),), dtypes=(torch.float32,), mamba_cache_mode="align")


def caches(*specs: KVCacheSpec) -> KVCacheConfig:
    groups = [KVCacheGroupSpec([f"layer {index}"], spec) for index, spec in enumerate(specs)]
    return KVCacheConfig(num_blocks=8, kv_cache_tensors=[], kv_cache_groups=groups)


@pytest.mark.parametrize(
    ("specs", "works"),
    [
        ((attention(1), states(64)), True),
        ((attention(1), attention(1), states(64), states(64)), True),
        ((attention(1), attention(2), states(64)), False),
        ((attention(1), states(64), states(32)), False),
    ],
)
def test_groups_of_one_kind_must_be_alike(specs: tuple[KVCacheSpec, ...], works: bool) -> None:
    assert can_report_attention_alone(caches(*specs)) == works


@pytest.mark.parametrize("version", ["0.30.1", "0.31.0"])
def test_older_engines_cannot(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    monkeypatch.setattr(vllm, "__version__", version)
    assert not can_report_attention_alone(caches(attention(1), states(64)))


@pytest.mark.parametrize(
    ("groups", "works"),
    [
        (((16, FULL), (16, STATE), (16, STATE)), True),
        (((16, FULL), (16, FULL)), False),
        (((16, STATE), (16, STATE)), False),
        (((16, FULL), (16, STATE), (16, WINDOW)), False),
        (((16, FULL), (32, STATE)), False),
    ],
)
def test_a_model_has_attention_and_states_in_blocks_of_one_size(
    groups: tuple[tuple[int, HitPolicy], ...], works: bool
) -> None:
    geometry = [GroupGeometry(index, block, policy) for index, (block, policy) in enumerate(groups)]
    planner = HybridOffloadPlanner.build(geometry, hash_block_size=16, max_model_len=4096)
    assert has_only_attention_and_states(planner) == works
