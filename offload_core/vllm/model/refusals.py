"""Settings of vLLM with which stored prefixes are not safe, or rarely found again: refusals and warnings at start."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from vllm.v1.kv_cache_interface import KVCacheConfig, MambaSpec

from offload_core.api.errors import PlanError

if TYPE_CHECKING:
    from vllm.config import VllmConfig

_CRYPTOGRAPHIC_HASHES = ("sha256", "sha256_cbor")


def refuse_unhashed_media(vllm_config: VllmConfig) -> None:
    """Refuse an engine whose block hashes do not contain the content of images, audio and videos.

    With both caches off, vLLM numbers these inputs in place of hashing them. The numbers begin again at each start, and
    on each host. So another image would get the objects of the first one.

    Raises:
        PlanError: the model is multimodal, and both of vLLM's caches are off.
    """
    multimodal = vllm_config.model_config.multimodal_config
    if multimodal is None or multimodal.mm_processor_cache_gb > 0 or vllm_config.cache_config.enable_prefix_caching:
        return
    raise PlanError(
        "mm_processor_cache_gb is 0 and prefix caching is off, so vLLM numbers images in place of hashing them, and "
        "another image would get the KV cache of the first one; start vLLM with --enable-prefix-caching, or leave "
        "--mm-processor-cache-gb out"
    )


def block_hash_problem(vllm_config: VllmConfig) -> str | None:
    """Return a warning if prompts could be made to share a block hash, or hashes differ by process, else ``None``."""
    algorithm = vllm_config.cache_config.prefix_caching_hash_algo
    if algorithm in _CRYPTOGRAPHIC_HASHES:
        return None
    problem = (
        f"prefix_caching_hash_algo is {algorithm!r}, which is not cryptographic: a user can craft a prompt with the "
        "block hashes of another one, and each of the two may then get text made from the other's prompt"
    )
    if os.environ.get("PYTHONHASHSEED") is None:
        problem += (
            "; and PYTHONHASHSEED is not set, so vLLM seeds these hashes at random and no process finds the objects of "
            "another (set PYTHONHASHSEED to any fixed number)"
        )
    return f"{problem}; use --prefix-caching-hash-algo sha256"


def changing_weights_problem(vllm_config: VllmConfig) -> str | None:
    """Return a warning if a trainer may change the weights in place, which no fingerprint shows, else ``None``."""
    if vllm_config.weight_transfer_config is None:
        return None
    return (
        "weight_transfer_config is set, so the weights will differ from the model's files: stored objects serve this "
        "process only. vLLM tells no connector of an update; after each one, call reset_prefix_cache with "
        "reset_connector=True, or the old cache is served to new weights"
    )


def misaligned_states_problem(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> str | None:
    """Return a warning if vLLM rarely ends a step at a recurrent state's boundary, else ``None``.

    vLLM ends a prompt's steps at multiples of ``cache_config.block_size``, the smallest of all groups. It keeps states
    at multiples of the recurrent groups' block size. If the two differ, prompts are rarely found again, in vLLM's own
    prefix cache as well. Seen with vLLM 0.32 when its engine core runs in a separate process.
    """
    step = vllm_config.cache_config.block_size
    for index in kv_cache_config.prefix_cacheable_group_ids:
        spec = kv_cache_config.kv_cache_groups[index].kv_cache_spec
        if isinstance(spec, MambaSpec) and step % spec.block_size:
            return (
                f"cache_config.block_size is {step} but recurrent group {index} keeps its states at multiples of "
                f"{spec.block_size} tokens, so most prompts are not found again, locally or on a tier; start vLLM with "
                f"--block-size {spec.block_size}"
            )
    return None
