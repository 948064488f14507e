"""Run one workload through one vLLM engine and report outputs, cache service and timings as JSON.

    python -m tests.support.engine.engine_run SPEC.json RESULT.json

``SPEC.json`` holds a :class:`RunSpec`, and ``RESULT.json`` receives a :class:`RunResult`. Decoding is greedy. One JSON
line for each finished prompt goes to stderr. The caller sets the environment variables that vLLM needs on a CPU
(:func:`tests.support.engine.spec.run_environment`). ``VLLM_ENABLE_V1_MULTIPROCESSING=1`` moves the engine core to a
process of its own.
"""

from __future__ import annotations

import contextlib
import json
import logging
import pkgutil
import resource
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from tests.support.engine.new_memory import give_new_memory
from tests.support.engine.spec import (
    PROGRESS_KEY,
    RECORD_FORMAT,
    PromptResult,
    PromptSpec,
    Round,
    RoundResult,
    RunResult,
    RunSpec,
)
from tests.support.engine.workload_run import WorkloadDriver
from tests.support.second_host import enter_network
from tests.support.workload import Workload, WorkloadResult

_BEGIN_SECONDS = 600.0
_DRAIN_SECONDS = 60.0
_SHUTDOWN_SECONDS = 30.0


def run(spec: RunSpec) -> RunResult:
    """Run ``spec`` in this process; call this at most once in a process, since vLLM keeps global state."""
    started = time.perf_counter()
    engine = start_engine(spec)
    start_seconds = time.perf_counter() - started
    try:
        session = Session(engine, spec.logprobs, spec.around_workloads)
        warm_up_seconds = session.warm_up() if spec.warm_up else 0.0
        rounds = [session.run_round(index, item) for index, item in enumerate(spec.rounds)]
        workloads = [session.run_workload(item) for item in spec.workloads]
        metrics, facts = engine_metrics(), _engine_facts(engine)
    finally:
        stopping = time.perf_counter()
        stop_engine(engine)
        shutdown_seconds = time.perf_counter() - stopping
    return RunResult(
        rounds=rounds,
        workloads=workloads,
        metrics=metrics,
        engine=facts,
        start_seconds=start_seconds,
        warm_up_seconds=warm_up_seconds,
        shutdown_seconds=shutdown_seconds,
        peak_rss_bytes=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        children_peak_rss_bytes=resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024,
    )


def start_engine(spec: RunSpec) -> Any:
    """Start vLLM's engine for ``spec``, at most one in a process; :func:`stop_engine` ends it."""
    from vllm.engine.arg_utils import EngineArgs
    from vllm.v1.engine.llm_engine import LLMEngine

    optional = {
        "block_size": spec.block_size,
        "num_gpu_blocks_override": spec.num_gpu_blocks_override,
        "max_num_batched_tokens": spec.max_num_batched_tokens,
        "distributed_executor_backend": "mp" if spec.ranks > 1 else None,
        "kv_transfer_config": _transfer_config(spec.kv_transfer_config),
    }
    arguments: dict[str, Any] = {
        "model": spec.model,
        "dtype": spec.dtype,
        "max_model_len": spec.max_model_len,
        "max_num_seqs": spec.max_num_seqs,
        "kv_cache_memory_bytes": spec.kv_cache_memory_bytes,
        "enable_prefix_caching": spec.enable_prefix_caching,
        "tensor_parallel_size": spec.tensor_parallel_size,
        "pipeline_parallel_size": spec.pipeline_parallel_size,
        "enforce_eager": True,
        # By default vLLM chooses this by the processor (float32 with AVX-512 BF16). It decides the size of all blocks.
        "mamba_ssm_cache_dtype": "float32",
        "disable_hybrid_kv_cache_manager": False,
        "disable_log_stats": False,
        "shutdown_timeout": int(_SHUTDOWN_SECONDS),
    }
    arguments |= {name: value for name, value in optional.items() if value is not None}
    return LLMEngine.from_engine_args(EngineArgs(**(arguments | spec.extra_engine_args)))


def stop_engine(engine: Any) -> None:
    """Shut an engine down and wait until it has ended."""
    engine.engine_core.shutdown(timeout=_SHUTDOWN_SECONDS)
    engine.renderer.shutdown()


def _transfer_config(settings: dict[str, Any] | None) -> Any:
    from vllm.config import KVTransferConfig

    return None if settings is None else KVTransferConfig(**settings)


class Session:
    """Sends rounds and workloads to an engine and gathers the results."""

    def __init__(self, engine: Any, logprobs: int, around_workloads: str | None = None) -> None:
        self._engine = engine
        self._logprobs = logprobs
        self._around = _nothing if around_workloads is None else pkgutil.resolve_name(around_workloads)
        from offload_core.vllm.prefill_stats import keep_prefill_stats  # imports vLLM

        self._prefill = keep_prefill_stats(engine.engine_core)
        self._adapters: dict[str, int] = {}

    def warm_up(self) -> float:
        """Run one request shorter than any block and return the seconds it took."""
        prompt = PromptSpec(name="warm-up", token_ids=[5] * 16, max_tokens=4)
        return self.run_round(-1, Round(name="warm-up", prompts=[prompt])).seconds

    def run_round(self, index: int, item: Round) -> RoundResult:
        """Run one round.

        Raises:
            RuntimeError: the round does not begin in time, or vLLM refuses a requested reset of the prefix cache.
        """
        if item.begin_file is not None:
            _wait_for(Path(item.begin_file))
        started = time.perf_counter()
        if item.reset_prefix_cache_before or item.reset_connector_before or item.new_memory_before:
            self._reset_prefix_cache(item.reset_connector_before or item.new_memory_before)
        if item.new_memory_before:
            self._engine.collective_rpc(give_new_memory)
        batches = [[prompt] for prompt in item.prompts] if item.one_at_a_time else [item.prompts]
        results: list[PromptResult] = []
        drained = 0.0
        drafts_before = _draft_counts()
        for number, batch in enumerate(batches):
            results += self._run_batch(f"{index}.{number}", item.name, batch)
            drained += self._drain()
        seconds = time.perf_counter() - started
        drafted, accepted = (now - before for now, before in zip(_draft_counts(), drafts_before, strict=True))
        result = RoundResult(
            name=item.name,
            prompts=results,
            seconds=seconds,
            drain_seconds=drained,
            drafted_tokens=drafted,
            accepted_tokens=accepted,
        )
        if item.end_file is not None:
            unfinished = Path(f"{item.end_file}.part")
            unfinished.write_text(result.model_dump_json())
            unfinished.replace(item.end_file)
        return result

    def run_workload(self, workload: Workload) -> WorkloadResult:
        """Run one workload, starting with an empty local prefix cache."""
        self._reset_prefix_cache(reset_connector=False)
        with self._around(workload, self._drain) as notes:
            result = WorkloadDriver(self._engine, self._prefill, self._logprobs, self._drain).run(workload)
        return result.model_copy(update={"notes": notes})

    def _run_batch(self, prefix: str, round_name: str, prompts: list[PromptSpec]) -> list[PromptResult]:
        submitted = time.perf_counter()
        internal = [self._submit(f"{prefix}.{place}", prompt) for place, prompt in enumerate(prompts)]
        first: dict[int, float] = {}
        done: dict[int, PromptResult] = {}
        while len(done) < len(prompts):
            for output in self._engine.step():
                place = int(output.request_id.rsplit(".", 1)[1])
                elapsed = time.perf_counter() - submitted
                if output.outputs[0].token_ids:
                    first.setdefault(place, elapsed)
                if output.finished:
                    stats = self._prefill.pop(internal[place])
                    done[place] = _prompt_result(prompts[place].name, output, stats, first[place], elapsed)
                    _report_progress(round_name, done[place])
        return [done[place] for place in range(len(prompts))]

    def _submit(self, request_id: str, prompt: PromptSpec) -> str:
        from vllm import SamplingParams

        params = SamplingParams(
            temperature=0.0,
            max_tokens=prompt.max_tokens,
            ignore_eos=True,
            logprobs=self._logprobs,
            detokenize=False,
            extra_args=prompt.kv_transfer_params and {"kv_transfer_params": prompt.kv_transfer_params},
        )
        lora = self._lora(prompt.lora) if prompt.lora else None
        more: dict[str, Any] = {"lora_request": lora}
        if prompt.kv_hints is not None:  # vLLM has the parameter from 0.32 on
            more["kv_hints"] = _envelope(prompt.kv_hints)
        return str(self._engine.add_request(request_id, {"prompt_token_ids": prompt.token_ids}, params, **more))

    def _lora(self, folder: str) -> Any:
        """Return the adapter of a folder; folders are numbered in the order of their first use."""
        from vllm.lora.request import LoRARequest

        number = self._adapters.setdefault(folder, len(self._adapters) + 1)
        return LoRARequest(Path(folder).name, number, folder)

    def _drain(self) -> float:
        """Step the idle in-process engine while it or its connector has work, and return the seconds spent.

        If the engine core has its own process, it steps by itself, and this does nothing.
        """
        core = getattr(self._engine.engine_core, "engine_core", None)
        started = time.perf_counter()
        while core is not None and (core.scheduler.has_requests() or core.batch_queue):
            self._engine.step()
            if time.perf_counter() - started > _DRAIN_SECONDS:
                raise RuntimeError(
                    f"the KV connector still has work after {_DRAIN_SECONDS:g} s of steps of the idle engine"
                )
        return time.perf_counter() - started

    def _reset_prefix_cache(self, reset_connector: bool) -> None:
        """Empty the engine's own prefix cache, and the connector's on demand; wait while blocks are in use."""
        pause, deadline = threading.Event(), time.perf_counter() + _DRAIN_SECONDS
        while not self._engine.reset_prefix_cache(reset_connector=reset_connector):
            self._drain()
            pause.wait(0.01)
            if time.perf_counter() > deadline:
                raise RuntimeError("vLLM refused to reset the prefix cache: blocks are still in use")


def _nothing(workload: Workload, drain: Callable[[], float]) -> contextlib.AbstractContextManager[dict[str, Any]]:
    return contextlib.nullcontext({})


def _wait_for(file: Path) -> None:
    pause, deadline = threading.Event(), time.perf_counter() + _BEGIN_SECONDS
    while not file.exists():
        if time.perf_counter() > deadline:
            raise RuntimeError(f"the round cannot begin: nothing made {file} within {_BEGIN_SECONDS:g} s")
        pause.wait(0.005)


def _prompt_result(name: str, output: Any, stats: Any, ttft: float, total: float) -> PromptResult:
    completion = output.outputs[0]
    chosen = zip(completion.token_ids, completion.logprobs, strict=True)
    return PromptResult(
        name=name,
        token_ids=list(completion.token_ids),
        logprobs=[float(entry[token].logprob) for token, entry in chosen],
        prompt_tokens=len(output.prompt_token_ids),
        local_cached_tokens=stats.num_local_cached_tokens,
        external_cached_tokens=stats.num_external_cached_tokens,
        ttft_seconds=ttft,
        total_seconds=total,
        kv_transfer_params=output.kv_transfer_params,
    )


def _envelope(hints: dict[str, Any]) -> Any:
    from vllm.v1.kv_hints import KvHintAction, KvHintsEnvelope

    actions = [KvHintAction(**action) for action in hints["actions"]]
    return KvHintsEnvelope(hints["protocol_version"], hints["message_id"], actions)


def _report_progress(round_name: str, result: PromptResult) -> None:
    fields = result.model_dump(exclude={"token_ids", "logprobs"})
    sys.stderr.write(json.dumps({PROGRESS_KEY: {"round": round_name, **fields}}) + "\n")
    sys.stderr.flush()


def _draft_counts() -> tuple[int, int]:
    """Return the tokens that were drafted and accepted so far."""
    metrics = engine_metrics()
    drafted, accepted = (f"vllm:spec_decode_num_{kind}_tokens_total" for kind in ("draft", "accepted"))
    return int(metrics.get(drafted, 0)), int(metrics.get(accepted, 0))


def engine_metrics() -> dict[str, float]:
    """Return the process's metrics in the form of ``RunResult.metrics``."""
    from prometheus_client import REGISTRY

    values: dict[str, float] = {}
    for family in REGISTRY.collect():
        for sample in family.samples:
            if not sample.name.endswith(("_bucket", "_created")):
                kept = {key: text for key, text in sample.labels.items() if key not in ("model_name", "engine")}
                labels = ",".join(f'{key}="{text}"' for key, text in sorted(kept.items()))
                key = f"{sample.name}{{{labels}}}" if labels else sample.name
                values[key] = values.get(key, 0.0) + float(sample.value)
    return values


def _engine_facts(engine: Any) -> dict[str, Any]:
    config = engine.vllm_config
    facts: dict[str, Any] = {
        "block_size": config.cache_config.block_size,
        "num_gpu_blocks": config.cache_config.num_gpu_blocks,
        "async_scheduling": config.scheduler_config.async_scheduling,
        "max_num_batched_tokens": config.scheduler_config.max_num_batched_tokens,
        "executor": str(config.parallel_config.distributed_executor_backend),
    }
    core = getattr(engine.engine_core, "engine_core", None)
    if core is not None:
        facts["kv_cache_groups"] = list(_group_facts(core.scheduler.kv_cache_config))
    return facts


def _group_facts(kv_cache_config: Any) -> Iterator[dict[str, Any]]:
    for group in kv_cache_config.kv_cache_groups:
        spec = group.kv_cache_spec
        yield {
            "kind": type(spec).__name__,
            "block_size": spec.block_size,
            "page_size_bytes": spec.page_size_bytes,
            "sliding_window": getattr(spec, "sliding_window", None),
            "layers": list(group.layer_names),
        }


def main(arguments: list[str]) -> int:
    """Run the spec file ``arguments[0]``, write the result file ``arguments[1]``, return the exit code."""
    if len(arguments) != 2:
        print("usage: engine_run SPEC.json RESULT.json", file=sys.stderr)
        return 2
    enter_network()
    # vLLM prints its own records. All other records name their logger, so that callers know the source.
    logging.basicConfig(format=RECORD_FORMAT, level=logging.WARNING)
    spec = RunSpec.model_validate_json(Path(arguments[0]).read_text())
    Path(arguments[1]).write_text(run(spec).model_dump_json(indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
