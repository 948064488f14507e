"""Long run of the fault workload on one engine, with checks of memory, leaks, waits, counters and outputs.

    python -m tests.support.engine.soak_run SPEC.json SECONDS

``SPEC.json`` holds a :class:`~tests.support.engine.spec.RunSpec` without rounds and workloads, with the fields that
:mod:`.fault_run` asks for. In each round a new random workload runs under a new script of faults. Now and then a
workload runs once more without offloading and without a prefix in the cache, to compare the outputs.

If the model rounds, an engine without offloading scores some outputs of both runs instead, one request at a time. The
scores are judged at the end, see :mod:`tests.support.scores`.

Prints its measurements and the failed checks, and returns 1 if a check has failed. See ``benchmarks/soak.py``.
"""

from __future__ import annotations

import ctypes
import gc
import logging
import sys
import time
from collections import defaultdict
from collections.abc import Collection, Sequence
from pathlib import Path

from offload_core.testing.faults.plugin import ALLOWANCE_SECONDS, DEADLINE_SECONDS
from tests.support.engine.engine_run import Session, engine_metrics, start_engine, stop_engine
from tests.support.engine.spec import RECORD_FORMAT, RunSpec
from tests.support.process_state import io_process_ids
from tests.support.scores import rescoring, score_problems, token_gaps
from tests.support.steadiness import MemorySample, MemoryTrend, counter_problems, memory_trend, wait_problems
from tests.support.workload import Workload, WorkloadResult, compare_workloads, random_workload

_LIBC = ctypes.CDLL(None)
_MIB = 1024 * 1024
_COMPARED_ROUNDS = 5
_SCORED_REQUESTS = 8
_WORKLOADS = 30
_PRINT_SECONDS = 10.0
_WARM_UP_SHARE = 0.3
_PROBLEMS_SHOWN = 20
_ENGINE = "engine's process"

# Limits for the growth of the fitted line from the end of the warm-up to the end: the noise of the allocators, and
# nearly nothing per minute. A leak of one object's bytes per round would be some 3 MiB per minute.
GROWTH_LIMIT_BYTES = 8 * _MIB
GROWTH_LIMIT_BYTES_PER_MINUTE = 0.1 * _MIB


class Soak:
    """One soak on one engine.

    Args:
        exact: compare outputs token by token; if false, score some of them.
    """

    def __init__(self, session: Session, *, exact: bool) -> None:
        self.problems = 0
        self.samples: defaultdict[str, list[MemorySample]] = defaultdict(list)
        """Per process: the engine's, and each I/O process by its id."""
        self.injected: dict[str, dict[str, int]] = {}
        self.rounds = self.served_tokens = self.compared_outputs = 0
        self._session = session
        self._exact = exact
        self._gaps: dict[str, list[float]] = {}
        self._gaps_alone: dict[str, list[float]] = {}
        self._started = time.monotonic()

    def run(self, seconds: float) -> None:
        """Run rounds until ``seconds`` are over, then one without faults, which takes in the last reports."""
        self._round(_well(0))
        self._started = time.monotonic()
        printed = 0.0
        while (elapsed := time.monotonic() - self._started) < seconds:
            self.rounds += 1
            # Each workload runs twice in a row, the second time over a tier that holds its objects. All workloads
            # repeat, so that the engine's bounded memory of chunks fills during the warm-up. Later growth is a leak.
            seed = (self.rounds + 1) // 2 % _WORKLOADS
            workload = random_workload(seed).model_copy(update={"fault_seed": self.rounds})
            result = self._round(workload)
            if self.rounds % _COMPARED_ROUNDS == 0:
                self._compare(workload, result)
            self._sample()
            if elapsed - printed >= _PRINT_SECONDS or not printed:
                printed = elapsed
                self._print()
        self._round(_well(1))
        self._sample()
        self._print()
        self.failed(counter_problems(engine_metrics()))
        if self._gaps:
            self.failed(score_problems(self._gaps, self._gaps_alone))

    def failed(self, problems: Sequence[str]) -> None:
        """Count the problems and print the first ones, one line each."""
        for problem in problems[: max(0, _PROBLEMS_SHOWN - self.problems)]:
            print(f"FAILED: round {self.rounds}: {problem}", flush=True)
        self.problems += len(problems)

    def _round(self, workload: Workload) -> WorkloadResult:
        result = self._session.run_workload(workload)
        notes = result.notes
        self.injected = notes["injected"]
        self.served_tokens += sum(request.external_cached_tokens for request in result.requests)
        found = wait_problems(notes["waits"], 2 * DEADLINE_SECONDS, ALLOWANCE_SECONDS)
        if notes["left"]:
            found.append(f"left after {notes['settle_seconds']:.1f} s: {notes['left']}")
        self.failed(found)
        return result

    def _compare(self, workload: Workload, result: WorkloadResult) -> None:
        """Compare the outputs with those of a run without offloading."""
        alone = self._round(_opted_out(workload))
        if self._exact:
            self.failed(compare_workloads(result, alone))
            self.compared_outputs += len(result.requests)
        else:
            scored = _most_offloaded(result)
            self._gaps |= self._score(workload, result, scored)
            self._gaps_alone |= self._score(workload, alone, scored)
            self.compared_outputs += len(scored)

    def _score(self, workload: Workload, result: WorkloadResult, names: Collection[str]) -> dict[str, list[float]]:
        """Score some of the outputs without offloading, one request at a time."""
        asked = [request for request in workload.requests if request.name in names]
        got = result.model_copy(update={"requests": [item for item in result.requests if item.name in names]})
        questions = rescoring(workload.model_copy(update={"requests": asked}), got)
        gaps = token_gaps(got, self._round(_opted_out(questions)))
        return {f"round {self.rounds}: {name}": values for name, values in gaps.items()}

    def _sample(self) -> None:
        """Measure the memory in use. The engine's process first collects garbage and trims its allocator's memory."""
        gc.collect()
        _LIBC.malloc_trim(0)
        now = time.monotonic() - self._started
        processes = {_ENGINE: "self"} | {f"I/O process {pid}": str(pid) for pid in io_process_ids()}
        for name, process in processes.items():
            rss_bytes = sum(_resident_bytes(kind, process) for kind in ("RssAnon", "RssShmem"))
            self.samples[name].append(MemorySample(now, rss_bytes))

    def _print(self) -> None:
        seconds, rss_bytes = self.samples[_ENGINE][-1]
        files_mib = _resident_bytes("RssFile", "self") / _MIB
        threads, files = (len(list(Path("/proc/self", kind).iterdir())) for kind in ("task", "fd"))
        others = [samples[-1] for name, samples in self.samples.items() if name != _ENGINE]
        others_mib = sum(sample.rss_bytes for sample in others if sample.seconds == seconds) / _MIB
        print(
            f"{seconds:7.0f} s  round {self.rounds:4}  RSS {rss_bytes / _MIB:7.1f} + {files_mib:.1f} MiB of files, "
            f"I/O process {others_mib:.1f} MiB  {threads} threads  {files} files  "
            f"{self.served_tokens} tokens served  {self.problems} problems",
            flush=True,
        )


def _resident_bytes(kind: str, process: str) -> int:
    """Return a process's resident memory of one of the kinds that ``proc_pid_status(5)`` lists in kB."""
    status = Path("/proc", process, "status").read_text()
    return int(status.partition(f"\n{kind}:")[2].split(maxsplit=1)[0]) * 1024


def _opted_out(workload: Workload) -> Workload:
    """Return the workload without offloading and without faults."""
    params = {"kv_transfer_params": {"hybrid_offload": {"load": False, "store": False}}}
    requests = [request.model_copy(update=params) for request in workload.requests]
    return workload.model_copy(update={"requests": requests, "fault_seed": None})


def _most_offloaded(result: WorkloadResult) -> set[str]:
    """Name the requests to score: those with the most tokens from the tiers; among equals, the most preemptions."""
    by_use = sorted(result.requests, key=lambda item: (item.external_cached_tokens, item.preemptions), reverse=True)
    return {request.name for request in by_use[:_SCORED_REQUESTS]}


def _well(number: int) -> Workload:
    return random_workload(-1 - number, requests=6)


def _memory_problem(name: str, trend: MemoryTrend) -> str | None:
    limit_bytes = GROWTH_LIMIT_BYTES + GROWTH_LIMIT_BYTES_PER_MINUTE * trend.seconds / 60
    print(
        f"memory of the {name}: {trend.bytes_per_second * 60 / _MIB:+.3f} MiB per minute after the warm-up, "
        f"{trend.growth_bytes / _MIB:+.1f} MiB in {trend.seconds:.0f} s (limit {limit_bytes / _MIB:.1f} MiB)"
    )
    return f"the memory of the {name} grows" if trend.growth_bytes > limit_bytes else None


def soak(spec: RunSpec, seconds: float) -> int:
    """Soak an engine, print the problems and return their number; call this at most once in a process."""
    engine = start_engine(spec)
    try:
        session = Session(engine, spec.logprobs, spec.around_workloads)
        session.warm_up()
        gc.collect()
        gc.freeze()
        run = Soak(session, exact=spec.dtype == "float32")
        run.run(seconds)
        metrics = engine_metrics()
    finally:
        stop_engine(engine)
    print("faults:", *(f"{kind} {sum(calls.values())}" for kind, calls in run.injected.items()), sep="  ")
    ours = {name.partition("hybrid_offload_")[2]: value for name, value in metrics.items() if value}
    print("counters:", *(f"{name} {value:g}" for name, value in sorted(ours.items()) if name), sep="  ")
    print(f"{run.compared_outputs} outputs compared with those without offloading")
    for name, samples in run.samples.items():
        if name != _ENGINE and len(samples) < len(run.samples[_ENGINE]):
            run.failed([f"the {name} served for a part of the time only"])
        elif (memory := _memory_problem(name, memory_trend(samples, seconds * _WARM_UP_SHARE))) is not None:
            run.failed([memory])
    if not any(run.injected.values()):
        run.failed(["no fault happened"])
    if not run.served_tokens:
        run.failed(["no token was served from the tier"])
    return run.problems


def main(arguments: list[str]) -> int:
    """Soak by the spec file ``arguments[0]`` for ``arguments[1]`` seconds and return the exit code."""
    if len(arguments) != 2:
        print("usage: soak_run SPEC.json SECONDS", file=sys.stderr)
        return 2
    logging.basicConfig(format=RECORD_FORMAT, level=logging.ERROR)
    spec = RunSpec.model_validate_json(Path(arguments[0]).read_text())
    problems = soak(spec, float(arguments[1]))
    print(f"soak failed: {problems} problems" if problems else "soak passed", flush=True)
    return bool(problems)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
