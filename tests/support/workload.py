"""Random workloads: requests that share prefixes, arrive at random, are aborted and compete for a small cache.

:func:`random_workload` is pure; :mod:`tests.support.engine.workload_run` drives a real engine with what it makes.
"""

from __future__ import annotations

import random
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from tests.support.tiny_models import prompt_token_ids


class _Model(BaseModel):
    model_config = ConfigDict(extra="forbid", ser_json_inf_nan="constants")


class WorkloadRequest(_Model):
    """One request; ``samples`` above one are drawn with a seed, a single one is greedy.

    Args:
        arrival_step: added before the engine step of this number.
        abort_after_steps: aborted that many steps later, if it still runs.
        score_tokens: how many tokens at the prompt's end to report the log probabilities of.
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
    """Something done to the engine before a step.

    ``preempt`` sends all running requests back to the queue and empties the local prefix cache, at the first step from
    then on in which no request waits for a load.
    """

    step: int
    kind: Literal["preempt"]


class Workload(_Model):
    """Requests and actions on one engine; the local prefix cache is emptied before.

    Args:
        fault_seed: for what is done around workloads (see ``RunSpec.around_workloads``): which faults happen in this
            one; ``None`` for none.
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
    """One request as it ended; cached tokens are those of its first scheduling, of all its samples together."""

    name: str
    samples: list[Sample]
    scores: list[float]
    """Log probabilities of the prompt's last ``score_tokens`` tokens."""
    aborted: bool
    prompt_tokens: int
    local_cached_tokens: int
    external_cached_tokens: int
    preemptions: int


class WorkloadResult(_Model):
    """The requests of one workload in its order."""

    name: str
    requests: list[RequestResult]
    steps: int
    seconds: float
    notes: dict[str, Any] = Field(default_factory=dict)
    """What was written down around the workload, see ``RunSpec.around_workloads``."""

    @property
    def preemptions(self) -> int:
        """How often requests were preempted."""
        return sum(request.preemptions for request in self.requests)

    @property
    def cached_tokens(self) -> int:
        """Prompt tokens that came from a cache, local or external."""
        return sum(request.local_cached_tokens + request.external_cached_tokens for request in self.requests)


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

    Prompts are paths in a random tree of token segments of up to twice ``segment_tokens``, each with a tail of its own
    or none; some arrive together, others up to 10 steps apart.
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
    """Describe every difference in outputs, one line per sample; empty when they agree.

    Of a request that was aborted in either run, what both have produced is compared.
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
    """Return how far two log probabilities differ: infinitely where one is not a number."""
    gap = abs(x - y)
    return gap if gap == gap else float("inf")
