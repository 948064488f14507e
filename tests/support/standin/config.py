"""The stand-in's configuration: vLLM's own, completed as in vLLM's engine core."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from vllm.config import KVTransferConfig, VllmConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.v1.core.kv_cache_utils import (
    generate_scheduler_kv_cache_config,
    resolve_cache_hit_alignment_tokens,
    resolve_kv_cache_block_sizes,
)
from vllm.v1.kv_cache_interface import KVCacheConfig, MambaSpec

from tests.support.kv_cache_planning import rank_configs
from tests.support.standin.geometries import StandInModel


def make_vllm_config(
    model: StandInModel,
    folder: Path,
    connector: dict[str, Any] | None,
    async_scheduling: bool,
    changes: dict[str, Any],
) -> VllmConfig:
    """Return vLLM's configuration for the model; see :class:`~tests.support.standin.engine.StandInEngine`."""
    transfer = {
        name: changes.pop(name) for name in list(changes) if name.startswith("kv_") and name != "kv_events_config"
    }
    kv_transfer_config = None
    if connector is not None:
        kv_transfer_config = KVTransferConfig(
            **{
                "kv_connector": "HybridOffloadConnector",
                "kv_connector_module_path": "offload_core.vllm",
                "kv_role": "kv_both",
                "kv_connector_extra_config": {"load_when": "always", **connector},
                **transfer,
            }
        )
    arguments: dict[str, Any] = {
        "model": str(folder),
        "dtype": "float32",
        "max_model_len": model.max_model_len,
        "max_num_seqs": 8,
        "max_num_batched_tokens": model.max_num_batched_tokens,
        "enforce_eager": True,
        "disable_hybrid_kv_cache_manager": False,
        "enable_prefix_caching": True,
        "num_gpu_blocks_override": model.num_blocks,
        "kv_transfer_config": kv_transfer_config,
        **changes,
    }
    config = EngineArgs(**arguments).create_engine_config()
    config.cache_config.kv_cache_layout = model.layout
    config.scheduler_config.async_scheduling = async_scheduling
    if any(isinstance(spec, MambaSpec) for spec in model.layers.values()):
        config.cache_config.mamba_cache_mode = "align"
    return config


def plan_caches(
    vllm_config: VllmConfig, model: StandInModel, ranks: int, stages: int = 1
) -> tuple[list[KVCacheConfig], KVCacheConfig, int, int]:
    """Plan every rank's cache and complete the configuration, as vLLM's engine core does at its start.

    Returns:
        Each rank's plan, the scheduler's, the scheduler's block size and the hash block size, both in tokens.
    """
    plans = rank_configs(vllm_config, model.layers, ranks, 1 << 40, stages)
    for plan in plans:
        plan.kv_cache_layout = vllm_config.cache_config.kv_cache_layout
    chosen = generate_scheduler_kv_cache_config(plans)
    vllm_config.cache_config.num_gpu_blocks = chosen.num_blocks
    sizes = [g.kv_cache_spec.block_size for g in chosen.kv_cache_groups if g.kv_cache_spec.prefix_cacheable]
    vllm_config.cache_config.block_size = min(sizes)
    vllm_config.validate_block_size()
    block_size, hash_block_size = resolve_kv_cache_block_sizes(chosen, vllm_config)
    alignment = resolve_cache_hit_alignment_tokens(chosen, vllm_config, block_size, hash_block_size)
    for plan in (*plans, chosen):
        plan.hash_block_size = hash_block_size
        plan.cache_hit_alignment_tokens = alignment
    return plans, chosen, block_size, hash_block_size
