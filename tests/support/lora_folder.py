"""Write a tiny LoRA adapter in the PEFT folder layout for a tiny model's folder."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from tests.support.model_folder import Parameter, draw

RANK = 8


def write_lora(folder: Path, model: Path, *, seed: int = 0) -> Path:
    """Write an adapter of rank 8 on queries and values of every layer of the Gemma 3 in ``model``; returns ``folder``.

    Raises OSError where ``model`` has no config.json or ``folder`` cannot be written.
    """
    from safetensors.torch import save_file

    config = json.loads((model / "config.json").read_text())
    folder.mkdir(parents=True, exist_ok=True)
    save_file(
        {parameter.name: draw(parameter, seed, "float32") for parameter in _parameters(config)},
        folder / "adapter_model.safetensors",
    )
    adapter = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": model.name,
        "r": RANK,
        "lora_alpha": 2 * RANK,
        "target_modules": ["q_proj", "v_proj"],
        "bias": "none",
    }
    (folder / "adapter_config.json").write_text(json.dumps(adapter, indent=2) + "\n")
    return folder


def _parameters(config: dict[str, int]) -> Iterator[Parameter]:
    outputs = {"q_proj": config["num_attention_heads"], "v_proj": config["num_key_value_heads"]}
    for layer in range(config["num_hidden_layers"]):
        for name, heads in outputs.items():
            prefix = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            yield Parameter(f"{prefix}.lora_A.weight", (RANK, config["hidden_size"]))
            yield Parameter(f"{prefix}.lora_B.weight", (heads * config["head_dim"], RANK))
