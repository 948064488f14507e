"""Random workloads: requests that share prefixes, arrive at random, are aborted and compete for a small cache.

:func:`random_workload` is pure; :mod:`tests.support.engine.workload_run` drives a real engine with its workloads.
"""

from __future__ import annotations

import random
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from tests.support.tiny_models import prompt_token_ids


class _Model(BaseModel):
    model_config = ConfigDict(extra="forbid", ser_json_inf_nan="constants")


class WorkloadRequest(_Model):
    """One request. A single sample is greedy; more samples are drawn with a seed.

    Args:
        arrival_step: the number of the engine step before which the request is added.
        abort_after_steps: the number of steps from the arrival to an abort of the request, if it still runs then.
        score_tokens: the number of tokens at the prompt's end whose log probabilities are reported.
    """

    name: str
    token_ids: list[int]
    max_tokens: int = Field(default=8, ge=1)
    arrival_step: int = Field(default=0, ge=0)
    abort_after_steps: int | None = None
    samples: int = Field(default=1, ge=1)
    cache_salt: str | None = None
    kv_transfer_params: dict[str, Any] | None = None
    score_tokens: int = 0


class WorkloadAction(_Model):
    """Action on the engine before a step.

    ``preempt`` sends all running requests back to the queue and empties the local prefix cache. If a request waits for
    a load at that step, the action happens at the first step without one.
    """

    step: int
    kind: Literal["preempt"]


class Workload(_Model):
    """Requests and actions on one engine, which starts with an empty local prefix cache.

    Args:
        fault_seed: the seed of this workload's faults, for ``RunSpec.around_workloads``; ``None`` for no faults.
    """

    name: str
    requests: list[WorkloadRequest]
    actions: list[WorkloadAction] = Field(default_factory=list)
    fault_seed: int | str | None = None


class Sample(_Model):
    """One generated sequence."""

    token_ids: list[int]
    logprobs: list[float]


class RequestResult(_Model):
    """Result of one request; cached tokens are those of its first scheduling, of all its samples together."""

    name: str
    samples: list[Sample]
    scores: list[float]
    """Log probabilities of the prompt's last ``score_tokens`` tokens."""
    aborted: bool
    prompt_tokens: int
    local_cached_tokens: int
    external_cached_tokens: int
    preemptions: int
    token_seconds: list[float] = Field(default_factory=list)
    """For each token of a single sample, the seconds from the workload's beginning to the token."""

    @property
    def cached_tokens(self) -> int:
        """Prompt tokens that came from a cache, local or external."""
        return self.local_cached_tokens + self.external_cached_tokens


class WorkloadResult(_Model):
    """Results of the requests of one workload, in the workload's order."""

    name: str
    requests: list[RequestResult]
    steps: int
    seconds: float
    notes: dict[str, Any] = Field(default_factory=dict)
    """Notes of the context manager around the workload, see ``RunSpec.around_workloads``."""

    @property
    def preemptions(self) -> int:
        """Number of preemptions of all requests."""
        return sum(request.preemptions for request in self.requests)

    @property
    def cached_tokens(self) -> int:
        """Prompt tokens that came from a cache, local or external."""
        return sum(request.cached_tokens for request in self.requests)


def random_workload(
    seed: int,
    *,
    requests: int = 20,
    segment_tokens: int = 256,
    max_prompt_tokens: int = 1400,
    max_output_tokens: int = 96,
    abort_share: float = 0.15,
    vocab_size: int = 1024,
) -> Workload:
    """Return the workload of ``seed``.

    Prompts are paths in a random tree of token segments. A segment has up to twice ``segment_tokens`` tokens. A prompt
    may end with a tail of its own. Some requests arrive together, others up to 10 steps apart.
    """
    draw = random.Random(f"workload:{seed}")
    nodes: list[list[int]] = [[]]
    for index in range(max(2, requests // 2)):
        parent = draw.choice(nodes)
        length = min(draw.randint(1, 2 * segment_tokens), max_prompt_tokens - len(parent))
        nodes.append(parent + prompt_token_ids(length, seed=seed, member=index, vocab_size=vocab_size))
    made: list[WorkloadRequest] = []
    step = 0
    for index in range(requests):
        prefix = draw.choice(nodes)
        room = max_prompt_tokens - len(prefix)
        tail = draw.choice((0, draw.randint(0, segment_tokens), draw.randint(0, max_prompt_tokens)))
        tail = max(1 - len(prefix), min(tail, room))
        made.append(
            WorkloadRequest(
                name=f"seed{seed}-{index}",
                token_ids=prefix + prompt_token_ids(tail, seed=seed, member=1000 + index, vocab_size=vocab_size),
                max_tokens=draw.randint(1, max_output_tokens),
                arrival_step=step,
                abort_after_steps=draw.randint(0, 20) if draw.random() < abort_share else None,
            )
        )
        step += draw.choice((0, 0, 0, 1, draw.randint(2, 10)))
    return Workload(name=f"seed {seed}", requests=made)


def compare_workloads(a: WorkloadResult, b: WorkloadResult, *, max_logprob_gap: float = 1e-4) -> list[str]:
    """Describe every difference in outputs, one line for each sample; the list is empty if the outputs agree.

    If a request was aborted in either run, only the tokens that both runs have produced are compared.
    """
    lines: list[str] = []
    for one, two in zip(a.requests, b.requests, strict=True):
        if (one.name, len(one.samples)) != (two.name, len(two.samples)):
            return [f"the runs hold different requests: {one.name} and {two.name}"]
        for index, (x, y) in enumerate(zip(one.samples, two.samples, strict=True)):
            common = min(len(x.token_ids), len(y.token_ids))
            if not (one.aborted or two.aborted) and len(x.token_ids) != len(y.token_ids):
                lines.append(f"{one.name}[{index}]: {len(x.token_ids)} and {len(y.token_ids)} tokens")
            elif x.token_ids[:common] != y.token_ids[:common]:
                lines.append(f"{one.name}[{index}]: tokens {x.token_ids} and {y.token_ids}")
            else:
                gap = max(map(logprob_gap, x.logprobs[:common], y.logprobs[:common]), default=0.0)
                if not gap <= max_logprob_gap:
                    lines.append(f"{one.name}[{index}]: log probabilities differ by up to {gap:.3g}")
    return lines


def logprob_gap(x: float, y: float) -> float:
    """Return the difference of two log probabilities, or infinity if one is not a number."""
    gap = abs(x - y)
    return gap if gap == gap else float("inf")
