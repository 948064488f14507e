"""Judgement of outputs that rounding may change: by scores, against the spread of an engine without offloading.

In bfloat16 the same tokens can get different log probabilities. The causes are other requests in the same batch, a
preemption, or a prompt computed in other pieces. The size of the difference depends on the processor. Therefore no two
runs under pressure can be compared token by token, and no constant separates rounding from damage.

So one engine without offloading scores the outputs of two runs. It computes prompt and output of every sample, one
request at a time. One run is the run to judge. The other is the reference: the same requests on an engine without
offloading, under the same pressure, on the same machine. The reference's gaps between reported and scored log
probabilities show the spread of rounding. The run to judge may show the same spread and a margin.

Three rules:

- A log probability that is not a finite number fails. Blocks that hold a test pattern instead of a load give such.
- The gap of each sample is the median over its tokens. It may be twice the widest gap of the reference and 0.4
  nats. Rounding changes one token in a hundred by a nat and more, where another expert takes part. The other
  tokens stay nearly the same. A missing chunk changes nearly all tokens. So the median tells damage from rounding
  better than the mean does. A sample of fewer than five tokens is too short for a median; only the first rule holds
  for it.
- The median over the gaps of all samples may be twice that of the reference and 0.05 nats. This rule finds a
  small error in every request.

These figures were measured with a tiny Qwen3-Next and random workloads of some 18 samples each. Two workloads had a
processor's own rounding (AVX-512 without bfloat16). Twelve had that of :mod:`tests.support.engine.batch_rounding`,
which is harsher.

- Single tokens were off by up to 4 and 8 nats, with and without offloading.
- The widest gap of a sample was between 0.10 and 0.45 nats in each workload, with and without offloading.
- The median over the samples was 0.04 to 0.05 nats, and 0.06 to 0.11 with the harsher rounding.
- With the harsher rounding, any of ten workloads passed by the spread of any other. So twenty samples are enough.
- Twelve workloads lacked a first chunk, without a test pattern in its place. In eleven of them the widest gap was
  between 2.9 and 5.9 nats, in the twelfth 0.54. Ten were judged by the spread of each of ten others: all failed.
- A test pattern in place of the chunk was found in both workloads that had one.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence

from tests.support.workload import Workload, WorkloadRequest, WorkloadResult, logprob_gap

MIN_TOKENS = 5
"""Fewest tokens of a sample that has a gap of its own."""
FACTOR = 2.0
SAMPLE_MARGIN = 0.4
TYPICAL_MARGIN = 0.05

TokenGaps = Mapping[str, Sequence[float]]
"""Gaps between each token's reported and scored log probability, in nats, by sample."""


def rescoring(workload: Workload, result: WorkloadResult) -> Workload:
    """Return a workload that lets a model score the prompts and outputs of ``result``, one request at a time."""
    requests = [
        WorkloadRequest(
            name=f"{asked.name}[{index}]",
            token_ids=asked.token_ids + sample.token_ids,
            max_tokens=1,
            arrival_step=1_000_000 * place,
            score_tokens=len(sample.token_ids),
        )
        for place, (asked, got) in enumerate(zip(workload.requests, result.requests, strict=True))
        for index, sample in enumerate(got.samples)
        if sample.token_ids
    ]
    return Workload(name=f"scores of {workload.name}", requests=requests)


def token_gaps(result: WorkloadResult, scores: WorkloadResult) -> dict[str, list[float]]:
    """Return the gaps of all samples; a gap is infinite if a log probability is not a number.

    Args:
        result: the outputs of a run.
        scores: the result of their :func:`rescoring`.
    """
    scored = {request.name: request.scores for request in scores.requests}
    return {
        name: [logprob_gap(x, y) for x, y in zip(sample.logprobs, scored[name], strict=True)]
        for request in result.requests
        for index, sample in enumerate(request.samples)
        if (name := f"{request.name}[{index}]") in scored
    }


def score_problems(gaps: TokenGaps, alone: TokenGaps) -> list[str]:
    """Describe, one line each, the ``gaps`` that are wider than the spread of ``alone``; the list is empty if none are.

    Args:
        gaps: the gaps of the run to judge.
        alone: the gaps of an engine without offloading, all finite, with at least one sample of :data:`MIN_TOKENS`.
    """
    spread = _medians(alone)
    if not spread or not all(math.isfinite(gap) for sample in alone.values() for gap in sample):
        return [f"the engine without offloading shows no spread to judge by: {dict(alone)}"]
    widest, typical = max(spread.values()), statistics.median(spread.values())
    lines = [f"{name}: not a number" for name, sample in gaps.items() if not all(map(math.isfinite, sample))]
    medians = {name: gap for name, gap in _medians(gaps).items() if math.isfinite(gap)}
    sample_limit, typical_limit = FACTOR * widest + SAMPLE_MARGIN, FACTOR * typical + TYPICAL_MARGIN
    lines += [
        f"{name}: half of {len(gaps[name])} tokens are off by {gap:.3f} nats or more; at most {sample_limit:.3f} may "
        f"come from rounding, which gives {widest:.3f} without offloading"
        for name, gap in medians.items()
        if gap > sample_limit
    ]
    if medians and (middle := statistics.median(medians.values())) > typical_limit:
        lines.append(
            f"half of {len(medians)} samples are off by {middle:.3f} nats or more; at most {typical_limit:.3f} may "
            f"come from rounding, which gives {typical:.3f} without offloading"
        )
    return lines


def _medians(gaps: TokenGaps) -> dict[str, float]:
    return {name: statistics.median(sample) for name, sample in gaps.items() if len(sample) >= MIN_TOKENS}
