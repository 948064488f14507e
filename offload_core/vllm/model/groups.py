"""The KV cache groups of vLLM as the planner's groups, and the refusal of groups that cannot be offloaded."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from vllm.v1.core.kv_cache_utils import resolve_kv_cache_block_sizes
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    CrossAttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)

from offload_core.api.errors import PlanError
from offload_core.planning.planner import GroupGeometry, HitPolicy, HybridOffloadPlanner
from offload_core.planning.tails import no_tails_warning
from offload_core.vllm.compat import hisparse_in_use, prefix_replay_tokens, version_without_tails
from offload_core.vllm.model.drafts import draft_method, lookahead_tokens

if TYPE_CHECKING:
    from vllm.config import VllmConfig


def build_planner(
    vllm_config: VllmConfig, kv_cache_config: KVCacheConfig, hybrid_chunk_size: int | None
) -> HybridOffloadPlanner:
    """Build the planner for vLLM's KV cache groups.

    Raises:
        PlanError: offloading does not support the model or the engine's configuration; the message says why.
    """
    _refuse_unsupported(vllm_config, kv_cache_config)
    lookahead = lookahead_tokens(vllm_config)
    groups = [
        GroupGeometry(index, spec.block_size, _hit_policy(index, spec))
        for index, spec in (
            (index, kv_cache_config.kv_cache_groups[index].kv_cache_spec)
            for index in kv_cache_config.prefix_cacheable_group_ids
        )
    ]
    method = draft_method(vllm_config)
    stages = vllm_config.parallel_config.pipeline_parallel_size
    if method is not None and stages > 1:
        raise PlanError(
            f"speculative_config: pipeline_parallel_size is {stages}, and drafts beside pipeline stages were never "
            "compared after a load; run without speculative_config, or set pipeline_parallel_size to 1"
        )
    if method == "draft_model" and len(kv_cache_config.kv_cache_groups) > 1:
        raise PlanError(
            f"speculative_config: the KV cache has {len(kv_cache_config.kv_cache_groups)} groups, and vLLM writes the "
            "cache of a draft model into the blocks of the first one, over the target's; run without "
            "speculative_config, or draft by another method"
        )
    recurrent = [group.index for group in groups if group.policy.kind == "state"]
    if recurrent and method is not None:
        raise PlanError(
            f"speculative_config: group {recurrent[0]} is recurrent, and drafts beside recurrent states were never "
            "compared after a load; run without speculative_config"
        )
    scheduler_block_size, hash_block_size = resolve_kv_cache_block_sizes(kv_cache_config, vllm_config)
    finer_hits = getattr(vllm_config.cache_config, "prefix_match_unit", None) is not None
    problem = _tails_problem(kv_cache_config, method) if finer_hits else None
    planner = HybridOffloadPlanner.build(
        groups,
        hash_block_size=hash_block_size,
        max_model_len=vllm_config.model_config.max_model_len,
        hybrid_chunk_size=hybrid_chunk_size,
        scheduler_block_size=scheduler_block_size,
        lookahead_tokens=lookahead,
        tail_tokens=hash_block_size if finer_hits and problem is None else None,
    )
    if problem is None:
        return planner
    return dataclasses.replace(planner, warnings=(*planner.warnings, no_tails_warning(problem)))


def _tails_problem(kv_cache_config: KVCacheConfig, method: str | None) -> str | None:
    """Return the reason why no load ends inside a chunk, although the operator asked for it, or ``None``.

    Of layers that share a group, the first decides, since vLLM's scheduler knows no other.
    """
    if (version := version_without_tails()) is not None:
        return f"vLLM {version} was not tested with such loads; use vLLM 0.32"
    if method is not None and method != "ngram":
        return f"speculative_config: drafts by {method} were never compared after such a load"
    groups = [group.kv_cache_spec for group in kv_cache_config.kv_cache_groups]
    if len(kv_cache_config.prefix_cacheable_group_ids) < len(groups):
        return "a group takes no part in prefix caching, so a prefix may end at whole blocks only"
    specs = [next(iter(getattr(spec, "kv_cache_specs", {"": spec}).values())) for spec in groups]
    for index, spec in enumerate(specs):
        if type(spec) not in (FullAttentionSpec, SlidingWindowSpec, ChunkedLocalAttentionSpec, MambaSpec):
            return f"group {index}: an entry of a {type(spec).__name__} may cover several tokens"
    states = [spec for spec in specs if isinstance(spec, MambaSpec)]
    if any(spec.mamba_cache_mode != "align" for spec in states):
        return "vLLM hands over the recurrent state at the end of a prompt in mamba_cache_mode 'align' only"
    if states and any(type(spec) not in (MambaSpec, FullAttentionSpec) for spec in specs):
        return "vLLM keeps the recurrent state at the end of a prompt beside full attention only"
    return None


def handed_over(vllm_config: VllmConfig, planner: HybridOffloadPlanner) -> str:
    """Return a sentence on the windows and states that vLLM lets a connector store, for the log at the start."""
    kinds = {pack.policy.kind for pack in planner.packs}
    if "state" not in kinds:
        return "vLLM hands over every block of every group"
    interval = getattr(vllm_config.cache_config, "prefix_cache_retention_interval", None)
    if interval is None:
        return "vLLM hands over the recurrent states at all block boundaries where a prefill step ends"
    every = f", every {interval} tokens" if interval else ""
    return f"vLLM hands over the recurrent states at the end of a prompt{every} and at junctions, and drops all others"


def _refuse_unsupported(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> None:
    parallel = vllm_config.parallel_config
    for name in ("decode_context_parallel_size", "prefill_context_parallel_size"):
        if getattr(parallel, name, 1) > 1:
            raise PlanError(
                f"{name} is {getattr(parallel, name)}; set it to 1, the only value that offloading supports"
            )
    if hisparse_in_use(kv_cache_config):
        raise PlanError(
            "part of the KV cache is in HiSparse's host pool, which only vLLM's own HiSparse connector can fill; run "
            "without hisparse_config"
        )
    for index, group in enumerate(kv_cache_config.kv_cache_groups):
        if prefix_replay_tokens(group.kv_cache_spec):
            raise PlanError(f"group {index} replays its window after a hit; offloading does not support this")


def _hit_policy(index: int, spec: KVCacheSpec) -> HitPolicy:
    if isinstance(spec, UniformTypeKVCacheSpecs):
        policies = {_hit_policy(index, inner) for inner in spec.kv_cache_specs.values()}
        if len(policies) == 1:
            return policies.pop()
        raise PlanError(f"group {index} mixes hit policies ({', '.join(map(str, policies))}); each group must have one")
    if isinstance(spec, MambaSpec):
        if spec.mamba_cache_mode == "none":
            raise PlanError(
                f"group {index} is recurrent and mamba_cache_mode is 'none', so no state exists at a block boundary; "
                "start the engine with --enable-prefix-caching (mamba_cache_mode 'align')"
            )
        return HitPolicy("state")
    if isinstance(spec, ChunkedLocalAttentionSpec):
        return HitPolicy("chunked", attention_chunk_tokens=spec.attention_chunk_size)
    if isinstance(spec, SlidingWindowSpec):
        return HitPolicy("window", spec.sliding_window + spec.extra_retained_tokens)
    if type(spec) in (FullAttentionSpec, MLAAttentionSpec):
        return HitPolicy("full")
    if isinstance(spec, CrossAttentionSpec):
        raise PlanError(
            f"group {index} holds an encoder's keys and values (CrossAttentionSpec), but block hashes cover only the "
            "decoder's tokens; encoder-decoder models cannot be offloaded"
        )
    raise PlanError(f"group {index} has a KV cache of kind {type(spec).__name__}, which offloading does not support")
