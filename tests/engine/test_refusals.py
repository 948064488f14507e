"""What cannot be offloaded is refused, or warned about, with the reason: vLLM's own spec classes, no engine started."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.v1.kv_cache_interface import (
    CrossAttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpec,
    MambaSpec,
    SlidingWindowSpec,
)

from offload_core.api.errors import PlanError
from offload_core.vllm.model.groups import build_planner
from offload_core.vllm.model.refusals import misaligned_states_problem

pytestmark = pytest.mark.every_version

ATTENTION = {"block_size": 16, "num_kv_heads": 1, "head_size": 8, "dtype": torch.float32}
STATE = {"block_size": 256, "shapes": ((4,),), "dtypes": (torch.float32,)}


def _groups(*specs: KVCacheSpec) -> KVCacheConfig:
    groups = [KVCacheGroupSpec([f"layer{index}"], spec) for index, spec in enumerate(specs)]
    return KVCacheConfig(num_blocks=4, kv_cache_tensors=[], kv_cache_groups=groups)


def _engine(drafts: str | None = None, **parallel: int) -> Any:
    sizes = {"pipeline_parallel_size": 1, "decode_context_parallel_size": 1, "prefill_context_parallel_size": 1}
    draft = SimpleNamespace(max_model_len=1024, architectures=[])
    speculation = SimpleNamespace(method=drafts, draft_model_config=draft) if drafts else None
    return SimpleNamespace(
        parallel_config=SimpleNamespace(**{**sizes, **parallel}),
        speculative_config=speculation,
        model_config=SimpleNamespace(max_model_len=1024),
    )


@pytest.mark.parametrize(
    ("engine", "groups", "reason"),
    [
        (
            _engine("ngram", pipeline_parallel_size=2),
            _groups(FullAttentionSpec(**ATTENTION)),
            r"pipeline_parallel_size is 2, and drafts beside pipeline stages .*; run without speculative_config",
        ),
        (
            _engine(decode_context_parallel_size=4),
            _groups(FullAttentionSpec(**ATTENTION)),
            "context_parallel_size is 4",
        ),
        (
            _engine("dspark"),
            _groups(FullAttentionSpec(**ATTENTION)),
            r"method 'dspark' .*; run without speculative_config",
        ),
        (
            _engine("draft_model"),
            _groups(FullAttentionSpec(**ATTENTION), SlidingWindowSpec(**ATTENTION, sliding_window=32)),
            r"the KV cache has 2 groups, and vLLM writes the cache of a draft model .*; run without speculative_config",
        ),
        (
            _engine("ngram"),
            _groups(FullAttentionSpec(**ATTENTION), MambaSpec(**STATE, mamba_cache_mode="align")),
            r"group 1 is recurrent, and drafts beside recurrent states .*; run without speculative_config",
        ),
        (
            _engine(),
            _groups(FullAttentionSpec(**ATTENTION), CrossAttentionSpec(**ATTENTION)),
            r"group 1 holds an encoder's keys and values \(CrossAttentionSpec\)",
        ),
        (
            _engine(),
            _groups(MambaSpec(**STATE, mamba_cache_mode="none")),
            r"group 0 is recurrent and mamba_cache_mode is 'none'.*--enable-prefix-caching",
        ),
    ],
)
def test_refused_at_start_with_the_reason(engine: Any, groups: KVCacheConfig, reason: str) -> None:
    with pytest.raises(PlanError, match=reason):
        build_planner(engine, groups, None)


@pytest.mark.parametrize(("step", "cure"), [(256, None), (512, None), (128, "--block-size 256")])
def test_states_that_are_kept_where_no_step_ends(step: int, cure: str | None) -> None:
    engine: Any = SimpleNamespace(cache_config=SimpleNamespace(block_size=step))
    groups = _groups(FullAttentionSpec(**ATTENTION), MambaSpec(**STATE, mamba_cache_mode="align"))
    problem = misaligned_states_problem(engine, groups)
    assert problem is None if cure is None else problem is not None and cure in problem
