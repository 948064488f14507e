"""Drive an in-process engine through a :class:`~tests.support.workload.Workload`, step by step."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from tests.support.workload import RequestResult, Sample, Workload, WorkloadRequest, WorkloadResult

_MAX_STEPS = 100_000
_SAMPLING_SEED = 7


class WorkloadDriver:
    """One workload on an idle engine.

    Args:
        engine: vLLM's engine, its core in this process.
        prefill: the first prefill statistics by internal request id, filled as outputs arrive.
        logprobs: the number of log probabilities to ask for.
        drain: steps the idle engine until its connector has no work.
    """

    def __init__(self, engine: Any, prefill: dict[str, Any], logprobs: int, drain: Callable[[], float]) -> None:
        self._engine = engine
        self._core = engine.engine_core.engine_core
        self._prefill = prefill
        self._logprobs = logprobs
        self._drain = drain
        self._followed: dict[str, list[tuple[str, Any]]] = {}
        self._outputs: dict[str, Any] = {}
        self._scores: dict[str, list[float]] = {}
        self._token_seconds: dict[str, list[float]] = {}
        self._started = 0.0

    def run(self, workload: Workload) -> WorkloadResult:
        """Run a workload to its end.

        Raises:
            RuntimeError: the workload takes too many steps.
        """
        started = self._started = time.perf_counter()
        waiting = sorted(workload.requests, key=lambda request: request.arrival_step)
        actions = sorted(workload.actions, key=lambda action: action.step)
        aborts: list[tuple[int, str]] = []
        aborted: set[str] = set()
        step = steps = 0
        while waiting or self._engine.has_unfinished_requests():
            if waiting and not self._engine.has_unfinished_requests():
                self._drain()
                step = max(step, waiting[0].arrival_step)
            while waiting and waiting[0].arrival_step <= step:
                request = waiting.pop(0)
                self._add(request)
                if request.abort_after_steps is not None:
                    aborts.append((step + request.abort_after_steps, request.name))
            while actions and actions[0].step <= step and not self._is_loading():
                actions.pop(0)
                self._engine.reset_prefix_cache(reset_running_requests=True)
            for due, name in aborts:
                if due == step and name not in aborted and not self._is_finished(name):
                    self._engine.abort_request([name])
                    aborted.add(name)
            for output in self._engine.step():
                self._take(output)
            step, steps = step + 1, steps + 1
            if steps > _MAX_STEPS:
                raise RuntimeError(f"workload {workload.name} did not end within {_MAX_STEPS} steps")
        self._drain()
        results = [self._result(request, request.name in aborted) for request in workload.requests]
        return WorkloadResult(name=workload.name, requests=results, steps=steps, seconds=time.perf_counter() - started)

    def _add(self, request: WorkloadRequest) -> None:
        from vllm import SamplingParams

        params = SamplingParams(
            n=request.samples,
            temperature=0.0 if request.samples == 1 else 1.0,
            seed=None if request.samples == 1 else _SAMPLING_SEED,
            max_tokens=request.max_tokens,
            ignore_eos=True,
            logprobs=self._logprobs,
            prompt_logprobs=1 if request.score_tokens else None,
            detokenize=False,
            extra_args={"kv_transfer_params": request.kv_transfer_params} if request.kv_transfer_params else None,
        )
        prompt: dict[str, Any] = {"prompt_token_ids": request.token_ids}
        if request.cache_salt is not None:
            prompt["cache_salt"] = request.cache_salt
        before = set(self._core.scheduler.requests)
        self._engine.add_request(request.name, prompt, params)
        added = self._core.scheduler.requests.keys() - before
        self._followed[request.name] = [(key, self._core.scheduler.requests[key]) for key in sorted(added)]

    def _is_loading(self) -> bool:
        """Return whether a request that does not run holds blocks for a load; then vLLM refuses to preempt all."""
        scheduler = self._core.scheduler
        waiting = scheduler.requests.keys() - {request.request_id for request in scheduler.running}
        return any(any(scheduler.kv_cache_manager.get_block_ids(request_id)) for request_id in waiting)

    def _is_finished(self, name: str) -> bool:
        output = self._outputs.get(name)
        return output is not None and output.finished

    def _take(self, output: Any) -> None:
        """Keep the newest output; samples that it lacks keep their last state."""
        known = self._outputs.get(output.request_id)
        if known is not None:
            present = {completion.index for completion in output.outputs}
            output.outputs.extend(item for item in known.outputs if item.index not in present)
        self._outputs[output.request_id] = output
        if len(output.outputs) == 1:
            seconds = self._token_seconds.setdefault(output.request_id, [])
            new_tokens = len(output.outputs[0].token_ids) - len(seconds)
            seconds += [time.perf_counter() - self._started] * new_tokens
        if output.prompt_logprobs:
            self._scores[output.request_id] = [
                float(entry[token].logprob)
                for token, entry in zip(output.prompt_token_ids[1:], output.prompt_logprobs[1:], strict=True)
            ]

    def _result(self, request: WorkloadRequest, aborted: bool) -> RequestResult:
        output = self._outputs.get(request.name)
        completions = {item.index: item for item in output.outputs} if output is not None else {}
        followed = self._followed.pop(request.name)
        stats = [self._prefill.pop(key) for key, _ in followed if key in self._prefill]
        scores = self._scores.get(request.name, [])
        return RequestResult(
            name=request.name,
            samples=[_sample(completions.get(index)) for index in range(request.samples)],
            scores=scores[len(scores) - request.score_tokens :] if request.score_tokens else [],
            aborted=aborted,
            prompt_tokens=len(request.token_ids),
            local_cached_tokens=sum(item.num_local_cached_tokens for item in stats),
            external_cached_tokens=sum(item.num_external_cached_tokens for item in stats),
            preemptions=sum(item.num_preemptions for _, item in followed),
            token_seconds=self._token_seconds.get(request.name, []) if request.samples == 1 else [],
        )


def _sample(completion: Any) -> Sample:
    if completion is None:  # aborted before its first token
        return Sample(token_ids=[], logprobs=[])
    chosen = zip(completion.token_ids, completion.logprobs, strict=True)
    return Sample(
        token_ids=list(completion.token_ids), logprobs=[float(entry[token].logprob) for token, entry in chosen]
    )
