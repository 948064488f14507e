"""Durations of the engine's steps, for the estimate of prefill seconds."""

from __future__ import annotations

import time
from collections import deque
from typing import TYPE_CHECKING, NamedTuple

from offload_core.lookup.estimates.prefill_seconds import MIN_PREFILL_TOKENS, PrefillSeconds

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput


class _Step(NamedTuple):
    begun: float
    tokens: int
    parts: list[tuple[int, int]]
    """Per request, the tokens before the step and those that it computes; empty for a step without a prefill."""


class StepTimes:
    """Pairs the begin of each step with its end. All methods run on the engine thread.

    The engine reports the end of every step that computes tokens, in order. It may leave out the end of a step without
    tokens. So the step after one of these is not measured, if the engine is pipelined.

    Args:
        pipelined: whether the engine begins a step before the one before it has ended.
    """

    def __init__(self, prefill: PrefillSeconds, *, pipelined: bool) -> None:
        self._prefill = prefill
        self._pipelined = pipelined
        self._under_way: deque[_Step] = deque()
        self._last_end = 0.0

    def begin(self, output: SchedulerOutput) -> None:
        """Note the begin of a step."""
        if not self._pipelined:
            self._under_way.clear()
        tokens = output.total_num_scheduled_tokens
        prefills = tokens >= MIN_PREFILL_TOKENS and max(output.num_scheduled_tokens.values()) >= MIN_PREFILL_TOKENS
        self._under_way.append(_Step(time.monotonic(), tokens, _parts(output) if prefills else []))

    def end(self) -> None:
        """Note the end of the first step under way."""
        now = time.monotonic()
        without_tokens = False
        while self._under_way and not self._under_way[0].tokens:
            without_tokens = True
            self._under_way.popleft()
        if self._under_way:
            step = self._under_way.popleft()
            if step.parts and not without_tokens:
                self._prefill.observe(step.parts, now - max(step.begun, self._last_end))
        self._last_end = now


def _parts(output: SchedulerOutput) -> list[tuple[int, int]]:
    before = {new.req_id: new.num_computed_tokens for new in output.scheduled_new_reqs}
    running = output.scheduled_cached_reqs
    before.update(zip(running.req_ids, running.num_computed_tokens, strict=True))
    scheduled = output.num_scheduled_tokens
    return [(before[request_id], tokens) for request_id, tokens in scheduled.items() if request_id in before]
