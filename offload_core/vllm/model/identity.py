"""Reads vLLM's configuration: group geometry for the planner, identity for the fingerprint, and what we must refuse."""

from __future__ import annotations

import dataclasses
import enum
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import vllm
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
from offload_core.objects.fingerprint import Json, weights_identity
from offload_core.objects.format import FORMAT_VERSION
from offload_core.planning.planner import GroupGeometry, HitPolicy, HybridOffloadPlanner
from offload_core.vllm.compat import hisparse_in_use, prefix_replay_tokens

if TYPE_CHECKING:
    from vllm.config import VllmConfig

_CRYPTOGRAPHIC_HASHES = ("sha256", "sha256_cbor")


def build_planner(
    vllm_config: VllmConfig, kv_cache_config: KVCacheConfig, hybrid_chunk_size: int | None
) -> HybridOffloadPlanner:
    """Plan for vLLM's KV cache groups.

    Raises:
        PlanError: the model or the engine's configuration cannot be offloaded, and why.
    """
    _refuse_unsupported(vllm_config, kv_cache_config)
    groups = [
        GroupGeometry(index, spec.block_size, _hit_policy(index, spec))
        for index, spec in (
            (index, kv_cache_config.kv_cache_groups[index].kv_cache_spec)
            for index in kv_cache_config.prefix_cacheable_group_ids
        )
    ]
    scheduler_block_size, hash_block_size = resolve_kv_cache_block_sizes(kv_cache_config, vllm_config)
    return HybridOffloadPlanner.build(
        groups,
        hash_block_size=hash_block_size,
        max_model_len=vllm_config.model_config.max_model_len,
        hybrid_chunk_size=hybrid_chunk_size,
        scheduler_block_size=scheduler_block_size,
    )


def engine_identity(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> dict[str, Json]:
    """Return what decides the bytes of the KV cache, apart from the rank and its tensors (invariant I7)."""
    model, cache, parallel = vllm_config.model_config, vllm_config.cache_config, vllm_config.parallel_config
    return {
        "format_version": FORMAT_VERSION,
        "engine": ["vllm", vllm.__version__],
        "model": _model_identity(vllm_config),
        "model_config": _jsonable({k: v for k, v in model.hf_config.to_dict().items() if k != "_name_or_path"}),
        "dtype": str(model.dtype),
        "quantization": str(model.quantization),
        "cache_dtype": str(cache.cache_dtype),
        "groups": [
            {"spec": _spec_identity(group.kv_cache_spec), "layers": list(group.layer_names)}
            for group in kv_cache_config.kv_cache_groups
        ],
        "parallel": [
            parallel.world_size,
            parallel.tensor_parallel_size,
            parallel.pipeline_parallel_size,
            parallel.decode_context_parallel_size,
        ],
        "block_hash": [cache.prefix_caching_hash_algo, os.environ.get("PYTHONHASHSEED")],
    }


def worker_identity(vllm_config: VllmConfig, layers: dict[str, torch.Tensor]) -> dict[str, Json]:
    """Return what a worker knows of each layer's tensor: device, attention backend, dtype, block shape and strides.

    A stride longer than a block depends on the number of blocks, which another engine may have more or fewer of; that
    there is one is all that matters (:meth:`CanonicalKVCaches.describe` names the order).
    """
    modules = vllm_config.compilation_config.static_forward_context
    identity: dict[str, Json] = {}
    for name, tensor in sorted(layers.items()):
        module = modules.get(name)
        backend = module.get_attn_backend().get_name() if hasattr(module, "get_attn_backend") else None
        identity[name] = [
            tensor.device.type, backend, str(tensor.dtype), list(tensor.shape[1:]),
            [stride if stride <= tensor.stride(0) else None for stride in tensor.stride()[1:]],
        ]  # fmt: skip
    return identity


def hash_seed_problem(vllm_config: VllmConfig) -> str | None:
    """Return why block hashes will differ from process to process, or ``None`` when they will not."""
    algorithm = vllm_config.cache_config.prefix_caching_hash_algo
    if algorithm in _CRYPTOGRAPHIC_HASHES or os.environ.get("PYTHONHASHSEED") is not None:
        return None
    return (
        f"prefix_caching_hash_algo is {algorithm!r} and PYTHONHASHSEED is not set, so vLLM seeds its block hashes at "
        "random and nothing stored by one process would ever be found by another; set PYTHONHASHSEED to any fixed "
        "number, or use --prefix-caching-hash-algo sha256"
    )


def misaligned_states_problem(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> str | None:
    """Return why few recurrent states will be handed over, or ``None`` when steps end where states are kept.

    vLLM ends a prompt's steps at multiples of ``cache_config.block_size``, the smallest of all groups, but keeps states
    at multiples of the recurrent groups' block size. Where those differ, prompts are rarely found again, in vLLM's own
    prefix cache as well (seen with vLLM 0.32 when its engine core runs in a process of its own).
    """
    step = vllm_config.cache_config.block_size
    for index in kv_cache_config.prefix_cacheable_group_ids:
        spec = kv_cache_config.kv_cache_groups[index].kv_cache_spec
        if isinstance(spec, MambaSpec) and step % spec.block_size:
            return (
                f"cache_config.block_size is {step} but recurrent group {index} keeps its states at multiples of "
                f"{spec.block_size} tokens, so most prompts will not be found again, locally or on a tier; start vLLM "
                f"with --block-size {spec.block_size}"
            )
    return None


def _refuse_unsupported(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> None:
    parallel = vllm_config.parallel_config
    for name in ("pipeline_parallel_size", "decode_context_parallel_size", "prefill_context_parallel_size"):
        if getattr(parallel, name, 1) > 1:
            raise PlanError(f"{name} is {getattr(parallel, name)}; offloading supports only 1 in this version")
    if hisparse_in_use(kv_cache_config):
        raise PlanError(
            "the engine keeps part of its KV cache in HiSparse's host pool, which only vLLM's own HiSparse connector "
            "can fill; run without hisparse_config"
        )
    for index, group in enumerate(kv_cache_config.kv_cache_groups):
        if group.is_eagle_group:
            raise PlanError(
                f"group {index} holds the layers of an EAGLE or MTP draft model ({', '.join(group.layer_names)}); "
                "offloading does not support speculative decoding with a draft model in this version"
            )
        if prefix_replay_tokens(group.kv_cache_spec):
            raise PlanError(f"group {index} replays its window after a hit; this is not supported in this version")


def _hit_policy(index: int, spec: KVCacheSpec) -> HitPolicy:
    if isinstance(spec, UniformTypeKVCacheSpecs):
        policies = {_hit_policy(index, inner) for inner in spec.kv_cache_specs.values()}
        if len(policies) == 1:
            return policies.pop()
        raise PlanError(f"group {index} mixes hit policies: {', '.join(map(str, policies))}")
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
            f"group {index} holds the keys of an encoder (CrossAttentionSpec), which the hashes of the decoder's "
            "tokens do not name; encoder-decoder models cannot be offloaded"
        )
    raise PlanError(f"group {index} has a KV cache of kind {type(spec).__name__}, not supported in this version")


def _model_identity(vllm_config: VllmConfig) -> Json:
    model = vllm_config.model_config
    load_format = str(getattr(vllm_config.load_config, "load_format", "auto"))
    identity: dict[str, Json] = {"load_format": load_format}
    if load_format == "dummy":
        identity["dummy_seed"] = model.seed
    folder = Path(model.model)
    if folder.is_dir():
        identity["files"] = weights_identity(folder)
    else:
        identity["name"] = model.model
        identity["revision"] = model.revision
        identity["commit"] = getattr(model.hf_config, "_commit_hash", None)
    return identity


def _spec_identity(spec: KVCacheSpec) -> Json:
    fields = {f.name: _jsonable(getattr(spec, f.name)) for f in dataclasses.fields(spec)}
    return {"kind": type(spec).__name__, **fields}


def _jsonable(value: Any) -> Json:
    """Spell out ``value``; anything unknown is named by its type only, never by an address."""
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return repr(value)
    if isinstance(value, torch.dtype):
        return str(value)
    if isinstance(value, enum.Enum):
        return value.name
    if isinstance(value, dict):
        return {str(key): _jsonable(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [_jsonable(item) for item in value]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: _jsonable(getattr(value, f.name)) for f in dataclasses.fields(value)}
    return type(value).__qualname__
