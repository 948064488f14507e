"""Tiny random-weight models that draft tokens, beside those of :mod:`tests.support.tiny_models`.

Their vocabulary should be small: then a draft of random weights is right now and then.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from tests.support import tiny_models
from tests.support.model_folder import Parameter, write_model_folder
from tests.support.tiny_models import MistralShape

HeadMethod = Literal["eagle", "eagle3", "dflash"]

_HEAD_ARCHITECTURES = {
    "eagle": "LlamaForCausalLM",
    "eagle3": "LlamaForCausalLM",
    "dflash": "DFlashDraftModel",
}


def write_head(folder: Path, method: HeadMethod, target: MistralShape, *, seed: int = 0) -> Path:
    """Write a head of one layer that drafts for a Mistral model of this shape, and return ``folder``.

    Raises FileExistsError for a foreign folder.
    """
    config = _llama_config(target) | {
        "architectures": [_HEAD_ARCHITECTURES[method]],
        "model_type": "qwen3" if method == "dflash" else "llama",
        "num_hidden_layers": 1,
        "draft_vocab_size": target.vocab_size,
    }
    if method == "eagle3":
        config["eagle_aux_hidden_state_layer_ids"] = [1, 2, 3]
    if method == "dflash":
        config["dflash_config"] = {"target_layer_ids": [0, 1, 2], "mask_token_id": 3}
        config["is_causal"] = True
    parameters = list(_head_parameters(method, target))
    return write_model_folder(folder, config, parameters, seed, "float32", target.vocab_size)


def write_mimo(folder: Path, shape: MistralShape, *, seed: int = 0) -> Path:
    """Write a ``MiMoForCausalLM`` (full attention) with one layer that drafts, and return ``folder``.

    Raises FileExistsError for a foreign folder.
    """
    config = _llama_config(shape) | {
        "architectures": ["MiMoForCausalLM"],
        "model_type": "qwen2",
        "num_nextn_predict_layers": 1,
        "use_sliding_window": False,
    }
    return write_model_folder(folder, config, list(_mimo_parameters(shape)), seed, "float32", shape.vocab_size)


def _llama_config(shape: MistralShape) -> dict[str, Any]:
    config = tiny_models.mistral_config(shape, "float32")
    del config["sliding_window"]
    return config


def _head_parameters(method: HeadMethod, target: MistralShape) -> Iterator[Parameter]:
    """Yield the head's own parameters; it shares the target's embedding, and usually its output head."""
    hidden = target.hidden_size
    layer = "midlayer" if method == "eagle3" else "layers.0"
    norms = [f"{layer}.post_attention_layernorm"]
    read = {"eagle": 2, "eagle3": 3, "dflash": 3}[method]
    yield Parameter("fc.weight", (hidden, read * hidden))
    if method == "eagle3":
        norms += [f"{layer}.input_layernorm", f"{layer}.hidden_norm", "norm"]
        yield Parameter("lm_head.weight", (target.vocab_size, hidden))
    if method == "dflash":
        norms += [f"{layer}.input_layernorm", "hidden_norm", "norm"]
        for norm in ("q_norm", "k_norm"):
            yield Parameter(f"{layer}.self_attn.{norm}.weight", (target.head_dim,), "ones")
    for norm in norms:
        yield Parameter(f"{norm}.weight", (hidden,), "ones")
    for parameter in tiny_models.llama_layer(layer, target):
        if method == "eagle3" and parameter.name.endswith(("q_proj.weight", "k_proj.weight", "v_proj.weight")):
            rows, columns = parameter.shape  # they read the embedding and the hidden state
            yield replace(parameter, shape=(rows, 2 * columns))
        else:
            yield parameter


def _mimo_parameters(shape: MistralShape) -> Iterator[Parameter]:
    hidden = shape.hidden_size
    yield Parameter("model.embed_tokens.weight", (shape.vocab_size, hidden))
    yield Parameter("lm_head.weight", (shape.vocab_size, hidden))
    yield Parameter("model.norm.weight", (hidden,), "ones")
    draft_layer = "model.mtp_layers.0"
    yield Parameter(f"{draft_layer}.input_proj.weight", (hidden, 2 * hidden))
    for norm in ("token", "hidden", "final"):
        yield Parameter(f"{draft_layer}.{norm}_layernorm.weight", (hidden,), "ones")
    for layer in (*(f"model.layers.{index}" for index in range(shape.num_layers)), draft_layer):
        for norm in ("input", "post_attention"):
            yield Parameter(f"{layer}.{norm}_layernorm.weight", (hidden,), "ones")
        yield from tiny_models.llama_layer(layer, shape)
        for name, heads in (("q", shape.num_heads), ("k", shape.num_kv_heads), ("v", shape.num_kv_heads)):
            yield Parameter(f"{layer}.self_attn.{name}_proj.bias", (heads * shape.head_dim,))
