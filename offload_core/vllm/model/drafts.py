"""The methods of speculative decoding: those proved with offloading, and the refusal of all others by name."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from offload_core.api.errors import PlanError
from offload_core.objects.fingerprint import Json

if TYPE_CHECKING:
    from vllm.config import VllmConfig


@dataclass(frozen=True)
class Proved:
    """A method that works with offloading.

    Args:
        text: the proof in short, for the documents.
        has_cache: whether the drafts have layers in the KV cache.
        lookahead_tokens: the drafts' entry at a position depends on this many further tokens.
    """

    text: str
    has_cache: bool = False
    lookahead_tokens: int = 0


@dataclass(frozen=True)
class Refused:
    """A method that the engine does not start with.

    Args:
        reason: the rest of a sentence that begins with the method's name.
    """

    reason: str


_READS_AHEAD = Proved(
    "on the real engine; a hit ends one block earlier",
    has_cache=True,
    lookahead_tokens=1,
)
_NOT_COMPARED = Refused("has drafts that were never compared after a load")
_NOT_COMPARED_MTP = Refused("has layers whose drafts were never compared after a load")

DRAFT_METHODS: dict[str, Proved | Refused] = {
    "ngram": Proved("on the real engine, by random work; it has no cache of its own"),
    "ngram_gpu": _NOT_COMPARED,
    "suffix": _NOT_COMPARED,
    "medusa": _NOT_COMPARED,
    "mlp_speculator": _NOT_COMPARED,
    "custom_class": Refused("runs a class of the user's, whose drafts nobody has compared after a load"),
    "extract_hidden_states": Refused("keeps hidden states in the KV cache, which only vLLM's own connector reads"),
    "draft_model": Proved("on the real engine, with one KV cache group", has_cache=True),
    "dflash": Proved("on the real engine", has_cache=True),
    "eagle": _READS_AHEAD,
    "eagle3": _READS_AHEAD,
    "dspark": _NOT_COMPARED,
    "mtp": Refused("is proved for some kinds of draft layers only, and this model's are of another kind"),
    "bailing_hybrid_mtp": _NOT_COMPARED_MTP,
    "bailing_hybrid_v3_mtp": _NOT_COMPARED_MTP,
    "deepseek_mtp": _NOT_COMPARED_MTP,
    "dots3_note_mtp": _NOT_COMPARED_MTP,
    "ernie_mtp": _NOT_COMPARED_MTP,
    "exaone4_5_mtp": _NOT_COMPARED_MTP,
    "exaone_moe_mtp": _NOT_COMPARED_MTP,
    "gemma4_mtp": _NOT_COMPARED_MTP,
    "glm4_moe_lite_mtp": _NOT_COMPARED_MTP,
    "glm4_moe_mtp": _NOT_COMPARED_MTP,
    "glm5_next_mtp": _NOT_COMPARED_MTP,
    "glm_ocr_mtp": _NOT_COMPARED_MTP,
    "hy_v3_mtp": _NOT_COMPARED_MTP,
    "hy_v4_mtp": _NOT_COMPARED_MTP,
    "inkling_mtp": _NOT_COMPARED_MTP,
    "kimi_k3_mtp": _NOT_COMPARED_MTP,
    "longcat_flash_mtp": _NOT_COMPARED_MTP,
    "mimo_mtp": _READS_AHEAD,
    "mimo_v2_mtp": _NOT_COMPARED_MTP,
    "minimax_m3_mtp": _NOT_COMPARED_MTP,
    "nemotron_h_mtp": _NOT_COMPARED_MTP,
    "pangu_ultra_moe_mtp": _NOT_COMPARED_MTP,
    "qwen3_5_mtp": _NOT_COMPARED_MTP,
    "qwen3_next_mtp": _NOT_COMPARED_MTP,
    "qwen4_exp_mtp": _NOT_COMPARED_MTP,
    "step3p5_mtp": _NOT_COMPARED_MTP,
    "step5_mtp": _NOT_COMPARED_MTP,
}
"""Every method in the lists of the supported vLLM versions. A method without a row is refused too."""

_NOT_PROVED = "which is not proved with offloading"
_UNPROVED_SETTINGS = {
    "disable_eagle_block_drop": "so the engine takes drafts of other prompts for those of a prompt",
    "parallel_drafting": _NOT_PROVED,
    "use_heterogeneous_vocab": _NOT_PROVED,
    "num_speculative_tokens_per_batch_size": _NOT_PROVED,
}
"""Settings of drafts with a cache, each with the reason for its refusal."""

_PROVED_DFLASH = "DFlashDraftModel"
"""The proved architecture of DFlash. vLLM runs further ones by code of their own."""

_UNKNOWN = Refused("is not known to this version of offload-core")


def lookahead_tokens(vllm_config: VllmConfig) -> int:
    """Return the number of tokens behind a position on which the drafts' entry there depends.

    Raises:
        PlanError: the engine drafts by a method, or with a setting, that is not proved with offloading. The message
            has its name, the reason and the cure.
    """
    method = draft_method(vllm_config)
    if method is None:
        return 0
    verdict = DRAFT_METHODS.get(method, _UNKNOWN)
    if isinstance(verdict, Refused):
        proved = ", ".join(name for name, row in DRAFT_METHODS.items() if isinstance(row, Proved))
        raise PlanError(
            f"speculative_config: the method {method!r} {verdict.reason}; run without speculative_config, or with one "
            f"of the proved methods: {proved}"
        )
    if verdict.has_cache:
        _refuse_unproved_settings(vllm_config)
    return verdict.lookahead_tokens


def drafts_identity(vllm_config: VllmConfig) -> dict[str, Json]:
    """Return the facts on drafts that decide the bytes of the KV cache. It is empty if they have no part in it."""
    method = draft_method(vllm_config)
    verdict = DRAFT_METHODS.get(method or "")
    if not isinstance(verdict, Proved) or not verdict.has_cache:
        return {}
    return {"drafts": {"method": method, "lookahead_tokens": verdict.lookahead_tokens}}


def draft_method(vllm_config: VllmConfig) -> str | None:
    """Return the method of the engine's drafts, by its name in vLLM's list; ``None`` without drafts.

    vLLM calls all kinds of multi-token prediction "mtp". The kind is in the configuration of its layers.
    """
    speculation: Any = vllm_config.speculative_config
    if speculation is None:
        return None
    method = str(speculation.method)
    if method != "mtp":
        return method
    return str(getattr(speculation.draft_model_config.hf_config, "model_type", method))


def _refuse_unproved_settings(vllm_config: VllmConfig) -> None:
    speculation: Any = vllm_config.speculative_config
    for name, problem in _UNPROVED_SETTINGS.items():
        if speculation.method == "dflash" and name == "parallel_drafting":
            continue  # vLLM sets it itself: all drafts of DFlash are made at once
        if value := getattr(speculation, name, None):
            raise PlanError(f"speculative_config: {name} is {value!r}, {problem}; leave it out")
    if getattr(speculation, "use_multi_module_mtp", bool)():
        raise PlanError(
            f"speculative_config: num_speculative_tokens is {speculation.num_speculative_tokens}, so several draft "
            "layers follow each other, which is not proved with offloading; set it to 1"
        )
    architecture = next(iter(getattr(speculation.draft_model_config, "architectures", None) or ()), None)
    if speculation.method == "dflash" and architecture != _PROVED_DFLASH:
        raise PlanError(
            f"speculative_config: the draft model is a {architecture}, whose drafts were never compared after a load; "
            f"take a {_PROVED_DFLASH}, or run without speculative_config"
        )
    longest, drafted = vllm_config.model_config.max_model_len, speculation.draft_model_config.max_model_len
    if drafted < longest:
        raise PlanError(
            f"speculative_config: drafts end at {drafted} tokens, but max_model_len is {longest}; the drafts' cache "
            f"would be stored with gaps behind them; set max_model_len to {drafted}, or take another draft model"
        )
