"""The input and the report of a run of one vLLM engine, with helpers that need no vLLM.

:class:`RunSpec` and :class:`RunResult` are the JSON documents of :mod:`tests.support.engine.engine_run`.
:func:`run_in_process` runs one spec in its own process. :func:`compare` lists the differences of two results.
"""

from __future__ import annotations

import json
import os
import re
import sys
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from pydantic import BaseModel, ConfigDict, Field

from tests.support.processes import Preload, Program, run_program
from tests.support.workload import Workload, WorkloadResult

PROGRESS_KEY = "prompt_finished"
RECORD_FORMAT = "%(levelname)s %(name)s: %(message)s"
"""Format of the log records that a run prints: warnings and errors of all loggers but vLLM's."""
RUN_MODULE = "tests.support.engine.engine_run"
PRELOAD_MODULE = "tests.support.engine.preload"


# vLLM's own lines have a time in place of the logger's name, but for those at its import.
_PROBLEM = re.compile(r"(WARNING|ERROR|CRITICAL) (?!vllm\.)[\w.]+: |.*Traceback \(most recent call last\)")


class RunFailedError(RuntimeError):
    """A run's process failed or ran out of time; the message ends with the last lines it printed."""


class _Model(BaseModel):
    model_config = ConfigDict(extra="forbid", ser_json_inf_nan="constants")


class PromptSpec(_Model):
    """One request: prompt token ids and the exact number of tokens to generate."""

    name: str
    token_ids: list[int]
    max_tokens: int = Field(default=8, ge=1)
    lora: str | None = Field(default=None, description="folder of a LoRA adapter; the engine needs enable_lora")
    kv_transfer_params: dict[str, Any] | None = None
    kv_hints: dict[str, Any] | None = Field(default=None, description="an envelope of vLLM's KV hints")


class Round(_Model):
    """Prompts run one by one (so that each one's time to first token is its own) or all at once."""

    name: str
    prompts: list[PromptSpec]
    reset_prefix_cache_before: bool = False
    reset_connector_before: bool = False
    new_memory_before: bool = Field(
        default=False, description="reset both caches, then give the KV cache other memory, as sleep mode does"
    )
    one_at_a_time: bool = True
    begin_file: str | None = Field(default=None, description="the round begins when this file exists")
    end_file: str | None = Field(default=None, description="gets the result when the round and its stores have ended")


class RunSpec(_Model):
    """An engine and the rounds to run on it; ``None`` leaves vLLM's own default."""

    model: str
    dtype: str = "auto"
    max_model_len: int = 8192
    block_size: int | None = None
    num_gpu_blocks_override: int | None = None
    kv_cache_memory_bytes: int = 256 * 1024 * 1024
    max_num_batched_tokens: int | None = None
    max_num_seqs: int = 8
    enable_prefix_caching: bool = True
    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    logprobs: int = Field(default=1, ge=1, le=5)
    warm_up: bool = Field(default=True, description="run a 16-token request first: it pays for vLLM's compilation")
    kv_transfer_config: dict[str, Any] | None = None
    extra_engine_args: dict[str, Any] = Field(default_factory=dict)
    rounds: list[Round] = Field(default_factory=list)
    workloads: list[Workload] = Field(default_factory=list, description="run after the rounds; in-process only")
    around_workloads: str | None = Field(
        default=None,
        description="module:function, called in the engine's process with each workload and a function that steps the "
        "engine until it is idle; returns a context manager around the workload, whose dict becomes its notes",
    )

    @property
    def ranks(self) -> int:
        """Worker processes."""
        return self.tensor_parallel_size * self.pipeline_parallel_size


class PromptResult(_Model):
    """One finished request; cached token counts are those of the prompt's first scheduling."""

    name: str
    token_ids: list[int]
    logprobs: list[float]
    prompt_tokens: int
    local_cached_tokens: int
    external_cached_tokens: int
    ttft_seconds: float
    total_seconds: float
    kv_transfer_params: dict[str, Any] | None = None


class RoundResult(_Model):
    """The prompts of one round in spec order, and the wall time of the round."""

    name: str
    prompts: list[PromptResult]
    seconds: float
    drain_seconds: float = Field(description="time spent stepping an idle engine so that stores finish")
    drafted_tokens: int = Field(default=0, description="by speculative decoding, in-process only")
    accepted_tokens: int = 0


class RunResult(_Model):
    """The whole report of one run.

    ``metrics`` maps ``name{label="value",...}``, as on /metrics, to final values; the labels for model and engine are
    left out. It has every counter and gauge, and the count and sum of every histogram. ``engine`` describes the engine:
    block size, blocks, async scheduling, and the KV cache groups if the engine runs in-process.
    """

    rounds: list[RoundResult]
    workloads: list[WorkloadResult]
    metrics: dict[str, float]
    engine: dict[str, Any]
    start_seconds: float
    warm_up_seconds: float
    shutdown_seconds: float
    peak_rss_bytes: int
    children_peak_rss_bytes: int


def compare(a: RunResult, b: RunResult, *, max_logprob_gap: float = 1e-4) -> list[str]:
    """Return every difference in outputs between two runs, one line per prompt; empty if they agree.

    Rounds and prompts are paired by position and must carry the same names.  Tokens must be equal; the
    log probability of each chosen token may differ by at most ``max_logprob_gap``.  Timings and cache counts
    are ignored.
    """
    names_a, names_b = ([(r.name, p.name) for r in run.rounds for p in r.prompts] for run in (a, b))
    if names_a != names_b:
        return [f"the runs hold different prompts: {names_a} and {names_b}"]
    pairs = zip(
        names_a,
        (prompt for item in a.rounds for prompt in item.prompts),
        (prompt for item in b.rounds for prompt in item.prompts),
        strict=True,
    )
    found = (_difference(f"{names[0]}/{names[1]}", one, two, max_logprob_gap) for names, one, two in pairs)
    return [line for line in found if line is not None]


def _difference(name: str, a: PromptResult, b: PromptResult, max_gap: float) -> str | None:
    if a.token_ids != b.token_ids:
        return f"{name}: tokens {a.token_ids} and {b.token_ids}"
    gaps = [abs(x - y) for x, y in zip(a.logprobs, b.logprobs, strict=True)]
    if all(gap <= max_gap for gap in gaps):
        return None
    return f"{name}: log probabilities differ by up to {max(gaps):.3g} (allowed {max_gap:.3g})"


def logged_problems(lines: Iterable[str]) -> list[str]:
    """Return the lines of a run that are a traceback's head, or a warning or an error that is not vLLM's."""
    return [line for line in lines if _PROBLEM.match(line)]


def logged_tracebacks(lines: Sequence[str], lines_each: int = 60) -> list[str]:
    """Return each traceback of a run as one text, with the lines around its head: two before and up to 60 after."""
    heads = [number for number, line in enumerate(lines) if "Traceback" in line]
    return ["\n".join(lines[max(0, head - 2) : head + lines_each]) for head in heads]


IO_PROCESS = os.environ.get("OFFLOAD_TEST_IO_PROCESS", "engine")
"""The configuration key ``io_process`` of runs that do not choose."""


def disk_transfer_config(folder: Path, **extra_config: Any) -> dict[str, Any]:
    """Return a ``kv_transfer_config`` of our connector with one ``disk`` tier on ``folder``; more keys are added.

    A lookup may take 30 seconds and a load as long as it wants, so that a test sees no miss on a busy machine.
    """
    return {
        "kv_connector": "HybridOffloadConnector",
        "kv_connector_module_path": "offload_core.vllm",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {
            "lookup_timeout_seconds": 30,
            "load_when": "always",
            "io_process": IO_PROCESS,
            "backends": [{"name": "disk", "type": "disk", "path": str(folder)}],
            **extra_config,
        },
    }


def install_plugin(folder: Path, name: str, module: str) -> Path:
    """Make ``folder`` hold a distribution with one ``offload_core`` entry point, and return it for the search path.

    Args:
        folder: made with its parents.
        module: full name of an importable module that holds a plugin's hooks.
    """
    info = folder / f"{name.replace('-', '_')}-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[offload_core]\n{name} = {module}\n")
    return folder


def stock_transfer_config() -> dict[str, Any]:
    """Return a ``kv_transfer_config`` of vLLM's own connector with an unlimited in-RAM spec: oracle and peer."""
    return {
        "kv_connector": "OffloadingConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {
            "spec_name": "RamOffloadingSpec",
            "spec_module_path": "tests.support.engine.stock_ram_spec",
        },
    }


LMCacheMode = Literal["engine_driven", "lmcache_driven"]


def lmcache_transfer_config(port: int, mode: LMCacheMode) -> dict[str, Any]:
    """Return a ``kv_transfer_config`` of LMCache's own connector: a peer.

    Args:
        port: that of the LMCache server's own protocol, on the loopback address.
        mode: the process that copies. The engine's is LMCache's default on CPUs, and serves models of one group. The
            server copies from and to KV caches in shared memory.
    """
    return {
        "kv_connector": "LMCacheMPConnector",
        "kv_connector_module_path": "lmcache.integration.vllm.lmcache_mp_connector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {
            "lmcache.mp.host": "tcp://127.0.0.1",
            "lmcache.mp.port": port,
            "lmcache.mp.mp_transfer_mode": mode,
        },
    }


def run_environment(spec: RunSpec) -> dict[str, str]:
    """Return the environment variables that vLLM needs for ``spec`` on a CPU; the engine core runs in-process.

    No code is compiled, not even the sampler's few operations, because that costs each process seconds. A rank
    computes with one thread: two threads would busily wait for each other on a machine with other work.
    """
    variables = {
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "TORCHDYNAMO_DISABLE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_NO_USAGE_STATS": "1",
    }
    if spec.ranks > 1:
        variables["VLLM_CPU_OMP_THREADS_BIND"] = "|".join(map(str, range(spec.ranks)))
    return variables


def fork_server() -> Preload:
    """Return the server from which usual runs are forked: of one rank, with this process's variables.

    The first run may have more ranks or variables of its own. If it started the server with these, all other runs would
    need a fresh interpreter.
    """
    search_path = os.pathsep.join(entry for entry in sys.path if entry)
    usual = {**run_environment(RunSpec(model="", rounds=[])), **os.environ, "PYTHONPATH": search_path}
    return Preload(PRELOAD_MODULE, usual)


def run_in_process(
    spec: RunSpec,
    *,
    timeout_seconds: float,
    env: Mapping[str, str] | None = None,
    on_progress: Callable[[dict[str, Any]], None] | None = None,
    on_line: Callable[[str], None] | None = None,
    fresh_interpreter: bool = False,
) -> RunResult:
    """Run ``spec`` in its own process and return its report.

    The child's environment is :func:`run_environment`, overridden by this process's environment and then by ``env``.
    The child has this process's module search path. It is usually forked from a server that has vLLM imported, which
    saves seconds. It starts from a fresh interpreter with ``fresh_interpreter``, or if a variable other than the search
    path differs from :func:`fork_server`'s. A calling script needs an ``if __name__ == "__main__"`` guard.

    Args:
        spec: the engine and its rounds.
        timeout_seconds: the longest time that the run may take.
        env: environment variables of the child.
        on_progress: called from another thread with the fields of each finished prompt.
        on_line: called from another thread with every other line that is printed or logged.
        fresh_interpreter: start a fresh interpreter in place of a fork.

    Raises:
        RunFailedError: the child failed or took longer than ``timeout_seconds``; with its last 200 lines of output. No
            process of the run is left.
    """
    search_path = os.pathsep.join(entry for entry in sys.path if entry)
    environment = {**run_environment(spec), **os.environ, "PYTHONPATH": search_path, **(env or {})}

    def is_progress(line: str) -> bool:
        if on_progress is not None and line.startswith(f'{{"{PROGRESS_KEY}"'):
            on_progress(json.loads(line)[PROGRESS_KEY])
            return True
        if on_line is not None:
            on_line(line.rstrip("\n"))
        return False

    with tempfile.TemporaryDirectory(prefix="engine-run-") as folder:
        spec_file, result_file = Path(folder, "spec.json"), Path(folder, "result.json")
        spec_file.write_text(spec.model_dump_json())
        # CUDA does not work in a fork of a process that has vLLM's CUDA build imported.
        preload = None if fresh_interpreter or torch.accelerator.is_available() else fork_server()
        program = Program(RUN_MODULE, (str(spec_file), str(result_file)), environment, preload)
        failure = run_program(program, timeout_seconds, is_progress)
        if failure is not None:
            raise RunFailedError(failure)
        return RunResult.model_validate_json(result_file.read_text())
