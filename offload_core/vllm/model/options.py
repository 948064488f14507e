"""Options of the engine that decide the bytes of the KV cache, beside the model's files (invariant I7)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import MISSING, fields, is_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from offload_core.objects.fingerprint import Json
from offload_core.vllm.model.jsonable import jsonable

if TYPE_CHECKING:
    from vllm.config import VllmConfig

_ROPES_OF_ANY_LENGTH = frozenset(
    {
        "default", "linear", "llama3", "yarn", "deepseek_yarn", "deepseek_llama_scaling",
        "mllama4", "mrope", "proportional",
    }
)  # fmt: skip
"""Rotary embeddings that do not depend on ``max_model_len``, by vLLM's names.

With ``longrope``, vLLM takes other factors for all positions if ``max_model_len`` is above the original length.
"""
_MULTIMODAL_OPTIONS = (
    "media_io_kwargs", "mm_processor_kwargs", "mm_device_do_normalize", "mm_encoder_attn_dtype",
    "video_pruning_rate", "video_pruning_method",
)  # fmt: skip
"""vLLM hashes the content of an image or video, and the kwargs of a request, but none of these."""
_LORA_OPTIONS = ("target_modules", "enable_tower_connector_lora")
_TUNED_FROM_TOKENS = 32768
"""Llama 4 scales its queries at large positions if ``max_model_len`` is above this (vLLM's ``llama4.py``)."""


def options_identity(vllm_config: VllmConfig) -> dict[str, Json]:
    """Return the options that are set and decide the bytes.

    An option that is not set adds nothing. So an engine keeps its objects when this function learns of a further one.
    """
    model = vllm_config.model_config
    facts = {
        "quantization_config": getattr(model, "quantization_config", None),
        "model_class_overrides": getattr(model, "model_class_overrides", None),
        "use_non_causal": getattr(getattr(vllm_config, "attention_config", None), "use_non_causal", None) or None,
        "additional_config": _additional(vllm_config),
        "multimodal": _fields(getattr(model, "multimodal_config", None), _MULTIMODAL_OPTIONS),
        "mm_encoder_fp8_scales": _encoder_scales(getattr(model, "multimodal_config", None)),
        "lora": _fields(getattr(vllm_config, "lora_config", None), _LORA_OPTIONS),
        "max_model_len": _deciding_length(model),
        "attn_temperature_tuning": _temperature_tuning(model),
    }
    return {name: jsonable(value) for name, value in facts.items() if value is not None and value not in ({}, [])}


def _fields(config: Any, names: tuple[str, ...]) -> dict[str, Json]:
    """Return those fields of a part of vLLM's configuration that have another value than vLLM's default."""
    defaults = {one.name: one.default for one in fields(config)} if is_dataclass(config) else {}
    values = {name: getattr(config, name, None) for name in names}
    unset: tuple[Any, ...] = (None, {}, [])
    return {
        name: jsonable(value)
        for name, value in values.items()
        if value not in unset and value != defaults.get(name, MISSING)
    }


def _encoder_scales(multimodal: Any) -> str | None:
    """Return the content of the file with the scales of a multimodal encoder in fp8."""
    path = getattr(multimodal, "mm_encoder_fp8_scale_path", None)
    return None if path is None else Path(path).read_text(errors="replace")


def _additional(vllm_config: VllmConfig) -> Any:
    """Return the options of a platform's plugin, which may do anything with them."""
    given: Any = getattr(vllm_config, "additional_config", None)
    return given if given is None or isinstance(given, dict) else given.compute_hash()


def _deciding_length(model: Any) -> int | None:
    """Return ``max_model_len`` if a rotary embedding may depend on it, else ``None``."""
    types = set(_rope_types(model.hf_config.to_dict()))
    return None if types <= _ROPES_OF_ANY_LENGTH else int(model.max_model_len)


def _rope_types(config: Any, within: str = "") -> Iterator[str]:
    """Yield each type of a rotary embedding in a model's configuration, at any depth.

    Args:
        within: the key that leads to ``config``, or one above it that begins with ``rope``.
    """
    if isinstance(config, list | tuple):
        for item in config:
            yield from _rope_types(item, within)
    if not isinstance(config, dict):
        return
    for key, value in config.items():
        name = str(key)
        if isinstance(value, str):
            if name == "rope_type" or (name == "type" and within.startswith("rope")):
                yield value
        else:
            yield from _rope_types(value, within if within.startswith("rope") else name)


def _temperature_tuning(model: Any) -> Any:
    """Return Llama 4's switch as vLLM decides it, ``None`` for other models."""
    if not any(name.startswith("Llama4") for name in getattr(model, "architectures", None) or ()):
        return None
    sampling = {**(model.try_get_generation_config() or {}), **(model.override_generation_config or {})}
    return sampling.get("attn_temperature_tuning", model.max_model_len > _TUNED_FROM_TOKENS)
