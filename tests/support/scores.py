"""Judgement of outputs that rounding may change: by scores, against the spread of an engine without offloading.

In bfloat16 the same tokens get other log probabilities where other requests are computed beside them, where a request
is preempted, or where its prompt is computed in other pieces. How far they differ depends on the processor. No two
runs under pressure can therefore be compared token by token, and no constant separates rounding from damage.

So one engine without offloading scores the outputs of two runs: it computes prompt and output of every sample, one
request at a time. One run is the run to judge. The other is the reference: the same requests on an engine without
offloading, under the same pressure, on the same machine. The reference's gaps between reported and scored log
probabilities are the spread that rounding makes. The run to judge may show the same spread and a margin.

Three rules:

- A log probability that is not a finite number fails. Blocks that were filled with a pattern and not loaded give such.
- The gap of each sample is the median over its tokens. It may be twice the widest of the reference and a quarter of a
  nat. Rounding makes one token in a hundred differ by a nat and more, where another expert takes part. It leaves the
  others as they are. A chunk that is missing changes nearly all of them. So the median tells damage from rounding
  better than the mean does. A sample of fewer than five tokens has no median worth the name: the first rule is for it.
- The median over the gaps of all samples may be twice that of the reference and a twentieth of a nat. A small error of
  every request is seen here.

Measured with a tiny Qwen3-Next and random workloads of some 18 samples each: two with a processor's own rounding
(AVX-512 without bfloat16), and twelve with that of :mod:`tests.support.engine.batch_rounding`, which is harsher.

- Single tokens were off by up to 4 and 7 nats, with and without offloading.
- The widest gap of a sample was between 0.1 and 0.32 nats in each workload, with and without offloading.
- The median over the samples was 0.04 to 0.05 nats, and 0.06 to 0.10 with the harsher rounding.
- With the harsher rounding, any of ten workloads passed by the spread of any other. So twenty samples are enough.
- A first chunk that was left out, without a pattern, made gaps of up to 5.3 nats in eleven of twelve workloads, and the
  widest of each was 3 or more. In the twelfth no output differed by more than rounding. A pattern in its place was seen
  in both workloads that had one.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence

from tests.support.workload import Workload, WorkloadRequest, WorkloadResult, logprob_gap

MIN_TOKENS = 5
"""Samples of fewer tokens have no gap of their own."""
FACTOR = 2.0
SAMPLE_MARGIN = 0.25
TYPICAL_MARGIN = 0.05

TokenGaps = Mapping[str, Sequence[float]]
"""By sample, the gap between each token's reported and scored log probability, in nats."""


def rescoring(workload: Workload, result: WorkloadResult) -> Workload:
    """Return a workload that lets a model score what ``result`` holds, one request at a time: prompt and output."""
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
    """Return the gaps of all samples, infinite where a log probability is not a number.

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
    """Describe, one line each, where ``gaps`` are wider than the spread of ``alone``; empty when they are not.

    Args:
        gaps: of the run to judge.
        alone: of an engine without offloading, from at least one sample of :data:`MIN_TOKENS` finite gaps.
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
        f"be rounding, which makes {widest:.3f} without offloading"
        for name, gap in medians.items()
        if gap > sample_limit
    ]
    if medians and (middle := statistics.median(medians.values())) > typical_limit:
        lines.append(
            f"half of {len(medians)} samples are off by {middle:.3f} nats or more; at most {typical_limit:.3f} may be "
            f"rounding, which makes {typical:.3f} without offloading"
        )
    return lines


def _medians(gaps: TokenGaps) -> dict[str, float]:
    return {name: statistics.median(sample) for name, sample in gaps.items() if len(sample) >= MIN_TOKENS}
