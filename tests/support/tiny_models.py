"""Tiny random-weight models in the Hugging Face folder layout, for tests, the demo and benchmarks.

No file is downloaded and no model is instantiated. Each writer lists the parameter names and shapes of its
architecture and draws the weights from a generator seeded by ``(seed, parameter name)``. It stores them as
``model.safetensors`` beside ``config.json``, ``generation_config.json`` and a word-level tokenizer. Writing is
deterministic: the same arguments give the same bytes. It is also idempotent: a folder whose marker names the same
arguments is left unchanged.

Token ids 0..3 are the special tokens (pad, eos, bos, unk); id ``n`` from 4 on is the word ``wn``.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tests.support.model_folder import FIRST_WORD_ID, Parameter, write_model_folder

GEMMA3_NORMS = (
    ("input", "norm"),
    ("post_attention", "strong"),
    ("pre_feedforward", "norm"),
    ("post_feedforward", "strong"),
)


@dataclass(frozen=True)
class Gemma3Shape:
    """Sizes of a Gemma 3 text model; every ``full_every``-th layer attends fully, the others slide."""

    hidden_size: int = 128
    num_layers: int = 6
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 32
    intermediate_size: int = 256
    vocab_size: int = 1024
    sliding_window: int = 512
    full_every: int = 6
    max_position_embeddings: int = 8192


@dataclass(frozen=True)
class Qwen3NextShape:
    """Sizes of a Qwen3-Next model; every ``full_every``-th layer attends fully, the rest are delta nets."""

    hidden_size: int = 128
    num_layers: int = 4
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 64
    linear_key_heads: int = 2
    linear_value_heads: int = 4
    linear_head_dim: int = 64
    conv_kernel: int = 4
    num_experts: int = 4
    experts_per_token: int = 2
    expert_size: int = 128
    vocab_size: int = 1024
    full_every: int = 4
    max_position_embeddings: int = 8192


@dataclass(frozen=True)
class MistralShape:
    """Sizes of a Mistral model; every layer slides."""

    hidden_size: int = 128
    num_layers: int = 4
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 32
    intermediate_size: int = 256
    vocab_size: int = 1024
    sliding_window: int = 512
    max_position_embeddings: int = 8192


def write_gemma3(
    folder: Path, *, seed: int = 0, dtype: str = "float32", shape: Gemma3Shape | None = None, **sizes: int
) -> Path:
    """Write a ``Gemma3ForCausalLM`` (sliding window and full attention) and return ``folder``.

    ``sizes`` replaces single fields of ``shape`` (hidden_size, num_layers, vocab_size, ...).
    Raises ValueError for an unknown dtype or impossible sizes, FileExistsError for a foreign folder.
    """
    chosen = Gemma3Shape(**{**asdict(shape or Gemma3Shape()), **sizes})
    if chosen.num_heads % chosen.num_kv_heads or chosen.hidden_size % chosen.num_heads:
        raise ValueError("num_heads must divide hidden_size and be a multiple of num_kv_heads")
    config = _gemma3_config(chosen, dtype)
    return write_model_folder(folder, config, list(_gemma3_parameters(chosen)), seed, dtype, chosen.vocab_size)


def write_gemma3_75m(folder: Path, *, seed: int = 0, dtype: str = "bfloat16", **sizes: int) -> Path:
    """Write a Gemma 3 of about 76 million parameters (12 layers, 2 of them full) for benchmarks."""
    big = Gemma3Shape(
        hidden_size=768, num_layers=12, num_heads=8, num_kv_heads=2, head_dim=128,
        intermediate_size=1792, vocab_size=4096, sliding_window=512,
    )  # fmt: skip
    return write_gemma3(folder, seed=seed, dtype=dtype, shape=big, **sizes)


def write_gemma3_700m(folder: Path, *, seed: int = 0, dtype: str = "bfloat16", **sizes: int) -> Path:
    """Write a Gemma 3 of about 700 million parameters for benchmarks on accelerators.

    Its layers have the sizes of Gemma 3 1B (https://huggingface.co/google/gemma-3-1b-pt). Its vocabulary is small.
    """
    big = Gemma3Shape(
        hidden_size=1152, num_layers=26, num_heads=4, num_kv_heads=1, head_dim=256,
        intermediate_size=6912, vocab_size=4096, sliding_window=512,
    )  # fmt: skip
    return write_gemma3(folder, seed=seed, dtype=dtype, shape=big, **sizes)


def write_gemma3_12b(folder: Path) -> Path:
    """Write a Gemma 3 of about 11 billion parameters for benchmarks on accelerators, without its weights.

    Start it with vLLM's ``load_format="dummy"``. Its layers have the sizes of Gemma 3 12B
    (https://huggingface.co/google/gemma-3-12b-pt). Its vocabulary is small.
    """
    shape = Gemma3Shape(
        hidden_size=3840, num_layers=48, num_heads=16, num_kv_heads=8, head_dim=256,
        intermediate_size=15360, vocab_size=4096, sliding_window=1024,
    )  # fmt: skip
    return write_model_folder(folder, _gemma3_config(shape, "bfloat16"), [], 0, "bfloat16", shape.vocab_size)


def write_mistral(
    folder: Path, *, seed: int = 0, dtype: str = "float32", shape: MistralShape | None = None, **sizes: int
) -> Path:
    """Write a ``MistralForCausalLM`` (sliding windows only) and return ``folder``.

    Raises ValueError for an unknown dtype or impossible sizes, FileExistsError for a foreign folder.
    """
    chosen = MistralShape(**{**asdict(shape or MistralShape()), **sizes})
    if chosen.num_heads % chosen.num_kv_heads:
        raise ValueError("num_heads must be a multiple of num_kv_heads")
    config = mistral_config(chosen, dtype)
    return write_model_folder(folder, config, list(_mistral_parameters(chosen)), seed, dtype, chosen.vocab_size)


def write_qwen3_next(
    folder: Path, *, seed: int = 0, dtype: str = "bfloat16", shape: Qwen3NextShape | None = None, **sizes: int
) -> Path:
    """Write a ``Qwen3NextForCausalLM`` (gated delta net, full attention, experts) and return ``folder``.

    The decay parameters keep the recurrent state alive for some 50 to 800 tokens: outputs depend on it.
    Raises ValueError for an unknown dtype or impossible sizes, FileExistsError for a foreign folder.
    """
    chosen = Qwen3NextShape(**{**asdict(shape or Qwen3NextShape()), **sizes})
    if chosen.num_heads % chosen.num_kv_heads or chosen.linear_value_heads % chosen.linear_key_heads:
        raise ValueError("query heads must be a multiple of key heads")
    config = _qwen3_next_config(chosen, dtype)
    return write_model_folder(folder, config, list(_qwen3_next_parameters(chosen)), seed, dtype, chosen.vocab_size)


def write_phi3(folder: Path, *, original_length: int, seed: int = 0) -> Path:
    """Write a ``Phi3ForCausalLM`` with LongRoPE and return ``folder``.

    An engine with a ``max_model_len`` above ``original_length`` turns the keys of all positions by other factors.
    """
    hidden, layers, heads, kv_heads, head, inner, vocabulary = 128, 2, 4, 2, 32, 256, 1024
    config = {
        "architectures": ["Phi3ForCausalLM"], "model_type": "phi3", "torch_dtype": "float32",
        "hidden_size": hidden, "num_hidden_layers": layers, "num_attention_heads": heads,
        "num_key_value_heads": kv_heads, "intermediate_size": inner, "vocab_size": vocabulary,
        "max_position_embeddings": 8192, "original_max_position_embeddings": original_length, "rope_theta": 10000.0,
        "rope_scaling": {
            "type": "longrope", "short_factor": [1.0] * (head // 2),
            "long_factor": [1.0 + 2 * n for n in range(head // 2)],
        },
        "rms_norm_eps": 1e-5, "hidden_act": "silu", "tie_word_embeddings": False, "sliding_window": None,
        "pad_token_id": 0, "eos_token_id": 1, "bos_token_id": 2,
    }  # fmt: skip
    parameters = [
        Parameter("model.embed_tokens.weight", (vocabulary, hidden)),
        Parameter("model.norm.weight", (hidden,), "strong"),
        Parameter("lm_head.weight", (vocabulary, hidden)),
    ]
    for layer in range(layers):
        name = f"model.layers.{layer}."
        parameters += [
            Parameter(f"{name}self_attn.qkv_proj.weight", ((heads + 2 * kv_heads) * head, hidden)),
            Parameter(f"{name}self_attn.o_proj.weight", (hidden, heads * head)),
            Parameter(f"{name}mlp.gate_up_proj.weight", (2 * inner, hidden)),
            Parameter(f"{name}mlp.down_proj.weight", (hidden, inner)),
            Parameter(f"{name}input_layernorm.weight", (hidden,), "strong"),
            Parameter(f"{name}post_attention_layernorm.weight", (hidden,), "strong"),
        ]
    return write_model_folder(folder, config, parameters, seed, "float32", vocabulary)


def prompt_token_ids(length: int, *, seed: int, vocab_size: int, shared_prefix: int = 0, member: int = 0) -> list[int]:
    """Return ``length`` deterministic random word ids (no special tokens).

    Prompts with one ``seed`` are a family: for any ``length`` and ``member`` they share their first ``shared_prefix``
    ids. The ids behind the prefix depend on ``(seed, member, length)``.
    Raises ValueError for a negative length or a vocabulary without words.
    """
    if length < 0 or shared_prefix < 0 or vocab_size <= FIRST_WORD_ID:
        raise ValueError("length and shared_prefix must not be negative, vocab_size must exceed the special ids")
    family = random.Random(f"family:{seed}:{vocab_size}")
    tail = random.Random(f"tail:{seed}:{vocab_size}:{member}:{length}")
    head_length = min(length, shared_prefix)
    head = [family.randrange(FIRST_WORD_ID, vocab_size) for _ in range(head_length)]
    return head + [tail.randrange(FIRST_WORD_ID, vocab_size) for _ in range(length - head_length)]


def _common_config(dtype: str, vocab_size: int) -> dict[str, Any]:
    return {
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": 2,
        "dtype": dtype,
        "eos_token_id": 1,
        "pad_token_id": 0,
        "rms_norm_eps": 1e-6,
        "use_cache": True,
        "vocab_size": vocab_size,
    }


def _gemma3_config(shape: Gemma3Shape, dtype: str) -> dict[str, Any]:
    return _common_config(dtype, shape.vocab_size) | {
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.intermediate_size,
        "num_hidden_layers": shape.num_layers,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads,
        "head_dim": shape.head_dim,
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": shape.head_dim,
        "sliding_window": shape.sliding_window,
        "max_position_embeddings": shape.max_position_embeddings,
        "layer_types": [_layer_kind(i, shape.full_every, "sliding_attention") for i in range(shape.num_layers)],
        "rope_parameters": {
            "full_attention": {"rope_type": "default", "rope_theta": 1_000_000.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
        },
        "tie_word_embeddings": True,
    }


def mistral_config(shape: MistralShape, dtype: str) -> dict[str, Any]:
    """Return the configuration of a model of this shape."""
    return _common_config(dtype, shape.vocab_size) | {
        "architectures": ["MistralForCausalLM"],
        "model_type": "mistral",
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.intermediate_size,
        "num_hidden_layers": shape.num_layers,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads,
        "head_dim": shape.head_dim,
        "hidden_act": "silu",
        "sliding_window": shape.sliding_window,
        "max_position_embeddings": shape.max_position_embeddings,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0},
        "tie_word_embeddings": False,
    }


def _qwen3_next_config(shape: Qwen3NextShape, dtype: str) -> dict[str, Any]:
    return _common_config(dtype, shape.vocab_size) | {
        "architectures": ["Qwen3NextForCausalLM"],
        "model_type": "qwen3_next",
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.expert_size,
        "num_hidden_layers": shape.num_layers,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads,
        "head_dim": shape.head_dim,
        "hidden_act": "silu",
        "linear_conv_kernel_dim": shape.conv_kernel,
        "linear_key_head_dim": shape.linear_head_dim,
        "linear_value_head_dim": shape.linear_head_dim,
        "linear_num_key_heads": shape.linear_key_heads,
        "linear_num_value_heads": shape.linear_value_heads,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "num_experts": shape.num_experts,
        "num_experts_per_tok": shape.experts_per_token,
        "moe_intermediate_size": shape.expert_size,
        "shared_expert_intermediate_size": shape.expert_size,
        "norm_topk_prob": True,
        "max_position_embeddings": shape.max_position_embeddings,
        "layer_types": [_layer_kind(i, shape.full_every, "linear_attention") for i in range(shape.num_layers)],
        "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0, "partial_rotary_factor": 0.25},
        "partial_rotary_factor": 0.25,
        "tie_word_embeddings": False,
    }


def _layer_kind(index: int, full_every: int, other: str) -> str:
    return "full_attention" if (index + 1) % full_every == 0 else other


def _mlp(prefix: str, hidden: int, inner: int) -> Iterator[Parameter]:
    yield Parameter(f"{prefix}.gate_proj.weight", (inner, hidden))
    yield Parameter(f"{prefix}.up_proj.weight", (inner, hidden))
    yield Parameter(f"{prefix}.down_proj.weight", (hidden, inner))


def _attention(prefix: str, hidden: int, heads: int, kv_heads: int, dim: int, q_factor: int) -> Iterator[Parameter]:
    yield Parameter(f"{prefix}.q_proj.weight", (heads * dim * q_factor, hidden))
    yield Parameter(f"{prefix}.k_proj.weight", (kv_heads * dim, hidden))
    yield Parameter(f"{prefix}.v_proj.weight", (kv_heads * dim, hidden))
    yield Parameter(f"{prefix}.o_proj.weight", (hidden, heads * dim))


def _attention_norms(prefix: str, dim: int) -> Iterator[Parameter]:
    yield Parameter(f"{prefix}.q_norm.weight", (dim,), "norm")
    yield Parameter(f"{prefix}.k_norm.weight", (dim,), "norm")


def _gemma3_parameters(shape: Gemma3Shape) -> Iterator[Parameter]:
    hidden = shape.hidden_size
    yield Parameter("model.embed_tokens.weight", (shape.vocab_size, hidden), "tied")
    yield Parameter("model.norm.weight", (hidden,), "norm")
    for index in range(shape.num_layers):
        layer = f"model.layers.{index}"
        for norm, kind in GEMMA3_NORMS:
            yield Parameter(f"{layer}.{norm}_layernorm.weight", (hidden,), kind)
        attention = f"{layer}.self_attn"
        yield from _attention(attention, hidden, shape.num_heads, shape.num_kv_heads, shape.head_dim, 1)
        yield from _attention_norms(attention, shape.head_dim)
        yield from _mlp(f"{layer}.mlp", hidden, shape.intermediate_size)


def _mistral_parameters(shape: MistralShape) -> Iterator[Parameter]:
    hidden = shape.hidden_size
    yield Parameter("model.embed_tokens.weight", (shape.vocab_size, hidden))
    yield Parameter("lm_head.weight", (shape.vocab_size, hidden))
    yield Parameter("model.norm.weight", (hidden,), "ones")
    for index in range(shape.num_layers):
        layer = f"model.layers.{index}"
        for norm in ("input", "post_attention"):
            yield Parameter(f"{layer}.{norm}_layernorm.weight", (hidden,), "ones")
        yield from llama_layer(layer, shape)


def llama_layer(layer: str, shape: MistralShape) -> Iterator[Parameter]:
    """Yield the matrices of one layer."""
    hidden = shape.hidden_size
    yield from _attention(f"{layer}.self_attn", hidden, shape.num_heads, shape.num_kv_heads, shape.head_dim, 1)
    yield from _mlp(f"{layer}.mlp", hidden, shape.intermediate_size)


def _delta_net(prefix: str, shape: Qwen3NextShape) -> Iterator[Parameter]:
    keys = shape.linear_key_heads * shape.linear_head_dim
    values = shape.linear_value_heads * shape.linear_head_dim
    yield Parameter(f"{prefix}.in_proj_qkvz.weight", (2 * keys + 2 * values, shape.hidden_size))
    yield Parameter(f"{prefix}.in_proj_ba.weight", (2 * shape.linear_value_heads, shape.hidden_size))
    yield Parameter(f"{prefix}.conv1d.weight", (2 * keys + values, 1, shape.conv_kernel))
    yield Parameter(f"{prefix}.out_proj.weight", (shape.hidden_size, values))
    yield Parameter(f"{prefix}.norm.weight", (shape.linear_head_dim,), "ones")
    yield Parameter(f"{prefix}.dt_bias", (shape.linear_value_heads,), "ones")
    yield Parameter(f"{prefix}.A_log", (shape.linear_value_heads,), "decay")


def _qwen3_next_parameters(shape: Qwen3NextShape) -> Iterator[Parameter]:
    hidden = shape.hidden_size
    yield Parameter("model.embed_tokens.weight", (shape.vocab_size, hidden))
    yield Parameter("lm_head.weight", (shape.vocab_size, hidden))
    yield Parameter("model.norm.weight", (hidden,), "norm")
    for index in range(shape.num_layers):
        layer = f"model.layers.{index}"
        yield Parameter(f"{layer}.input_layernorm.weight", (hidden,), "norm")
        yield Parameter(f"{layer}.post_attention_layernorm.weight", (hidden,), "norm")
        if (index + 1) % shape.full_every:
            yield from _delta_net(f"{layer}.linear_attn", shape)
        else:
            attention = f"{layer}.self_attn"
            yield from _attention(attention, hidden, shape.num_heads, shape.num_kv_heads, shape.head_dim, 2)
            yield from _attention_norms(attention, shape.head_dim)
        yield Parameter(f"{layer}.mlp.gate.weight", (shape.num_experts, hidden))
        yield Parameter(f"{layer}.mlp.shared_expert_gate.weight", (1, hidden))
        yield from _mlp(f"{layer}.mlp.shared_expert", hidden, shape.expert_size)
        for expert in range(shape.num_experts):
            yield from _mlp(f"{layer}.mlp.experts.{expert}", hidden, shape.expert_size)
