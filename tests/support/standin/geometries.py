"""Models by their KV cache: each layer's spec in vLLM's own classes, with real block sizes and tiny heads."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowMLASpec,
    SlidingWindowSpec,
)


@dataclass(frozen=True)
class StandInModel:
    """The properties of a model that the stand-in needs.

    Args:
        layers: each layer's KV cache spec, in the model's order.
        max_model_len: longest sequence in tokens.
        max_num_batched_tokens: tokens per step.
        num_blocks: blocks in the cache; few, so that requests are preempted and cached blocks evicted.
        layout: name of vLLM's ``KVCacheLayout``.
        kernel_block_size: tokens of the attention kernels' blocks if they are smaller than the manager's, else
            ``None``.
        hybrid_chunk_size: the connector's setting; ``None`` for its default.
    """

    name: str
    layers: Mapping[str, KVCacheSpec]
    max_model_len: int
    max_num_batched_tokens: int
    num_blocks: int
    layout: str = "LBNHC"
    kernel_block_size: int | None = None
    hybrid_chunk_size: int | None = None
    chunk_tokens: int = field(default=256, kw_only=True)
    """Tokens between boundaries; a prompt must be longer than this to be found again."""


def _full(block_size: int, **changes: object) -> FullAttentionSpec:
    fields = {"block_size": block_size, "num_kv_heads": 2, "head_size": 4, "dtype": torch.float16, **changes}
    return FullAttentionSpec(**fields)


def _window(block_size: int, window: int, **changes: object) -> SlidingWindowSpec:
    fields = {"block_size": block_size, "num_kv_heads": 2, "head_size": 4, "dtype": torch.float16, **changes}
    return SlidingWindowSpec(**fields, sliding_window=window)


def _state(block_size: int, page_bytes: int, used_bytes: int) -> MambaSpec:
    return MambaSpec(
        block_size=block_size,
        shapes=((used_bytes - 64,), (16,)),
        dtypes=(torch.uint8, torch.float32),
        page_size_padded=page_bytes,
        mamba_cache_mode="align",
    )


def gemma3() -> StandInModel:
    """Five sliding window layers for one full one, twice; blocks of 128, windows longer than a chunk."""
    layers: dict[str, KVCacheSpec] = {
        f"model.layers.{i}": _full(128) if i % 6 == 5 else _window(128, 640) for i in range(12)
    }
    return StandInModel("gemma3", layers, 2048, 512, 100)


def gpt_oss() -> StandInModel:
    """Alternating windows of 128 and full layers, blocks of 16, kernel blocks of 8."""
    layers: dict[str, KVCacheSpec] = {f"model.layers.{i}": _full(16) if i % 2 else _window(16, 128) for i in range(4)}
    return StandInModel("gpt_oss", layers, 1024, 256, 160, kernel_block_size=8)


def qwen3_next() -> StandInModel:
    """Three gated delta nets for one full layer, blocks of 256 for both, padded state pages."""
    full = _full(256)
    page = full.page_size_bytes
    layers: dict[str, KVCacheSpec] = {
        f"model.layers.{i}": full if i % 4 == 3 else _state(256, page, page // 2 + 128) for i in range(4)
    }
    return StandInModel("qwen3_next", layers, 2048, 512, 40)


def qwen3_5() -> StandInModel:
    """Blocks of 1056 tokens for delta nets and full layers alike."""
    full = _full(1056)
    page = full.page_size_bytes
    layers: dict[str, KVCacheSpec] = {
        f"model.layers.{i}": full if i % 4 == 3 else _state(1056, page, page - 640) for i in range(8)
    }
    return StandInModel("qwen3_5", layers, 8448, 4096, 42, chunk_tokens=1056)


def mla() -> StandInModel:
    """DeepSeek-V3: one latent vector per token in every layer, one group."""
    spec = MLAAttentionSpec(block_size=64, num_kv_heads=1, head_size=18, dtype=torch.float16)
    return StandInModel("mla", {f"model.layers.{i}": spec for i in range(4)}, 2048, 512, 60)


def llama4() -> StandInModel:
    """Three chunked local layers for one full one; blocks of 16, attention chunks of 256."""
    local = ChunkedLocalAttentionSpec(
        block_size=16, num_kv_heads=2, head_size=4, dtype=torch.float16, attention_chunk_size=256
    )
    layers: dict[str, KVCacheSpec] = {f"model.layers.{i}": _full(16) if i % 4 == 3 else local for i in range(4)}
    return StandInModel("llama4", layers, 1024, 256, 240)


def deepseek_v4() -> StandInModel:
    """Compressed MLA with blocks of 256, windows with blocks of 64, compressor states with blocks of 4 and 8."""
    layers: dict[str, KVCacheSpec] = {}
    window = SlidingWindowMLASpec(
        block_size=64, num_kv_heads=1, head_size=72, dtype=torch.uint8, sliding_window=128, alignment=576,
        model_version="deepseek_v4", state_content_bytes=72,
    )  # fmt: skip
    for index in range(6):
        name = f"model.layers.{index}.attn"
        layers[f"{name}.swa_cache"] = window
        if index < 2:
            continue
        ratio = 4 if index % 2 == 0 else 128
        layers[f"{name}.mla_attn"] = MLAAttentionSpec(
            block_size=256, num_kv_heads=1, head_size=72, dtype=torch.uint8, tokens_per_state=ratio, alignment=576,
            model_version="deepseek_v4", state_content_bytes=72,
        )  # fmt: skip
        layers[f"{name}.compressor.state_cache"] = SlidingWindowMLASpec(
            block_size=4 if ratio == 4 else 8, num_kv_heads=1, head_size=256 if ratio == 4 else 128,
            dtype=torch.float32, sliding_window=8 if ratio == 4 else 128, alignment=576,
        )  # fmt: skip
        if ratio == 4:
            layers[f"{name}.indexer.k_cache"] = MLAAttentionSpec(
                block_size=256, num_kv_heads=1, head_size=18, dtype=torch.uint8, tokens_per_state=4, alignment=576
            )
            layers[f"{name}.indexer.compressor.state_cache"] = SlidingWindowMLASpec(
                block_size=4, num_kv_heads=1, head_size=64, dtype=torch.float32, sliding_window=8, alignment=576
            )
    return StandInModel(
        "deepseek_v4", layers, 4096, 512, 700, layout="BLNHC", hybrid_chunk_size=1024, chunk_tokens=1024
    )


MODELS: dict[str, Callable[[], StandInModel]] = {
    "gemma3": gemma3,
    "gpt_oss": gpt_oss,
    "qwen3_next": qwen3_next,
    "qwen3_5": qwen3_5,
    "mla": mla,
    "llama4": llama4,
    "deepseek_v4": deepseek_v4,
}
