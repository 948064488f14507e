"""The documents that the command and its engine processes exchange as JSON."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict

PROGRESS_LINE = "offload-core prove: a prompt has ended"
"""The line that an engine's process prints after each prompt."""
REFUSED = 3
"""The exit code of a process whose engine cannot run as asked; its last line is the reason."""


class _Document(BaseModel):
    model_config = ConfigDict(extra="forbid", ser_json_inf_nan="constants")


class Pass(_Document):
    """All prompts once.

    Args:
        reset: empty the engine's own prefix cache first.
        together: send all prompts at once, in place of one by one.
    """

    name: str
    reset: bool = False
    together: bool = False


class EngineSpec(_Document):
    """One engine and its passes.

    Args:
        arguments: vLLM's own arguments, without the model.
        offload: the keys for the connector; ``None`` runs the engine without it.
        chunk_size: the ``hybrid_chunk_size`` of the configuration, for the choice of the prompts.
        prompts: the tokens of each prompt; ``None`` lets the engine's process choose them.
    """

    model: str
    arguments: list[str]
    offload: dict[str, Any] | None = None
    chunk_size: int | None = None
    prompts: list[list[int]] | None = None
    passes: list[Pass]


class Answer(_Document):
    """The answer to one prompt.

    Args:
        logprobs: at each place, the log probabilities of the most likely tokens and of the chosen one.
        local_tokens: tokens from the engine's own prefix cache.
        tier_tokens: tokens from a tier.
    """

    tokens: list[int]
    logprobs: list[dict[int, float]]
    local_tokens: int = 0
    tier_tokens: int = 0


class EngineResult(_Document):
    """The answers of one engine by pass.

    Args:
        precision: the distance from 1 to the next number in the model's dtype.
        fingerprints: the fingerprints of the stored objects.
    """

    prompts: list[list[int]]
    answers: dict[str, list[Answer]]
    precision: float
    fingerprints: list[str] = []
