"""The methods of speculative decoding: those proved with offloading, and the refusal of all others by name."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from offload_core.api.errors import PlanError

if TYPE_CHECKING:
    from vllm.config import VllmConfig


@dataclass(frozen=True)
class Proved:
    """A method that works with offloading.

    Args:
        text: the proof in short, for the documents.
    """

    text: str


@dataclass(frozen=True)
class Refused:
    """A method that the engine does not start with.

    Args:
        reason: the rest of a sentence that begins with the method's name.
    """

    reason: str


_NOT_COMPARED = Refused("has drafts that were never compared after a load")
_NOT_COMPARED_MTP = Refused("has layers whose drafts were never compared after a load")

DRAFT_METHODS: dict[str, Proved | Refused] = {
    "ngram": Proved("no cache of its own; random work on the real engine"),
    "ngram_gpu": _NOT_COMPARED,
    "suffix": _NOT_COMPARED,
    "medusa": _NOT_COMPARED,
    "mlp_speculator": _NOT_COMPARED,
    "custom_class": Refused("runs a class of the user's, whose drafts nobody has compared after a load"),
    "extract_hidden_states": Refused("keeps hidden states in the KV cache, which only vLLM's own connector reads"),
    "draft_model": _NOT_COMPARED,
    "eagle": _NOT_COMPARED,
    "eagle3": _NOT_COMPARED,
    "dflash": _NOT_COMPARED,
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
    "mimo_mtp": _NOT_COMPARED_MTP,
    "mimo_v2_mtp": _NOT_COMPARED_MTP,
    "minimax_m3_mtp": _NOT_COMPARED_MTP,
    "nemotron_h_mtp": _NOT_COMPARED_MTP,
    "pangu_ultra_moe_mtp": _NOT_COMPARED_MTP,
    "qwen3_5_mtp": _NOT_COMPARED_MTP,
    "qwen3_next_mtp": _NOT_COMPARED_MTP,
    "qwen4_exp_mtp": _NOT_COMPARED_MTP,
    "step3p5_mtp": _NOT_COMPARED_MTP,
}
"""Every method in the lists of the supported vLLM versions. A method without a row is refused too."""

_UNKNOWN = Refused("is not known to this version of offload-core")


def refuse_unproved_drafts(vllm_config: VllmConfig) -> None:
    """Raise if the engine drafts by a method that is not proved with offloading.

    Raises:
        PlanError: the message has the method, the reason and the proved methods.
    """
    method = draft_method(vllm_config)
    if method is None:
        return
    verdict = DRAFT_METHODS.get(method, _UNKNOWN)
    if isinstance(verdict, Refused):
        proved = ", ".join(name for name, row in DRAFT_METHODS.items() if isinstance(row, Proved))
        raise PlanError(
            f"speculative_config: the method {method!r} {verdict.reason}; run without speculative_config, or with one "
            f"of the proved methods: {proved}"
        )


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
