"""The identity of an engine and its workers: all facts that decide the bytes of the KV cache (invariant I7)."""

from __future__ import annotations

import dataclasses
import os
from typing import TYPE_CHECKING

import torch
import vllm
from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheSpec

from offload_core.objects.fingerprint import Json
from offload_core.objects.format import FORMAT_VERSION
from offload_core.vllm.model.drafts import drafts_identity
from offload_core.vllm.model.jsonable import jsonable
from offload_core.vllm.model.options import options_identity
from offload_core.vllm.model.source import model_source

if TYPE_CHECKING:
    from vllm.config import VllmConfig


def engine_identity(
    vllm_config: VllmConfig, kv_cache_config: KVCacheConfig, given_name: str | None = None
) -> dict[str, Json]:
    """Return the facts that decide the bytes of the KV cache, except for the rank and its tensors (invariant I7).

    Args:
        given_name: the operator's ``model_identity``, which stands for the model's files.

    Raises:
        ConfigError: a file of the model cannot be read.
    """
    model, cache, parallel = vllm_config.model_config, vllm_config.cache_config, vllm_config.parallel_config
    return {
        "format_version": FORMAT_VERSION,
        "engine": ["vllm", vllm.__version__],
        "model": model_source(vllm_config, given_name),
        "loader": None if given_name else jsonable(getattr(vllm_config.load_config, "model_loader_extra_config", None)),
        "model_config": jsonable({k: v for k, v in model.hf_config.to_dict().items() if k != "_name_or_path"}),
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
        **options_identity(vllm_config),
        **drafts_identity(vllm_config),
    }


def engine_name(vllm_config: VllmConfig) -> str:
    """Return a name that is unique for the engine, and the same in all of its processes.

    A user may give several engines the same ``engine_id``, but vLLM draws the identifier of each instance.
    """
    return f"{vllm_config.kv_transfer_config.engine_id}/{vllm_config.instance_id}"


def worker_identity(vllm_config: VllmConfig, layers: dict[str, torch.Tensor]) -> dict[str, Json]:
    """Return each layer's device, attention backend, dtype, block shape and strides (in elements).

    A stride longer than a block depends on the number of blocks, which may differ between engines. So ``None`` stands
    for each such stride. :meth:`CanonicalKVCaches.describe` gives the order of the dimensions.
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


def _spec_identity(spec: KVCacheSpec) -> Json:
    fields = {f.name: jsonable(getattr(spec, f.name)) for f in dataclasses.fields(spec)}
    return {"kind": type(spec).__name__, **fields}
