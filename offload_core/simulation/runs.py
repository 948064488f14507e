"""Several simulations of one trace, in as many processes as the machine has cores."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Callable, MutableSequence, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, wait
from dataclasses import dataclass
from typing import NamedTuple

from offload_core.api.eviction_order import EvictionPolicy
from offload_core.planning.placement import PlacementPolicy
from offload_core.planning.planner import HybridOffloadPlanner
from offload_core.planning.write_policy import WritePolicy, WritePolicyName
from offload_core.simulation.bounded_tier import BoundedTier
from offload_core.simulation.path_rules import path_rules
from offload_core.simulation.simulator import Simulation, SimulationResult
from offload_core.simulation.tier_stack import StackedTier, TierStack
from offload_core.simulation.trace import Trace

_POLL_SECONDS = 0.1


class TierRules(NamedTuple):
    """One tier of a simulation, as in a configuration; see :class:`StackedTier`."""

    name: str = "tier"
    capacity_bytes: int | None = None
    """``None`` for no limit."""
    eviction: EvictionPolicy = "lru"
    write_policy: WritePolicyName = "every"
    promote: bool = True
    load_weight: float = 1.0
    low_watermark: float = 1.0
    high_watermark: float = 1.0

    def empty_tier(self) -> StackedTier:
        """Return the tier, without objects."""
        objects = BoundedTier(
            self.capacity_bytes,
            self.eviction,
            low_watermark=self.low_watermark,
            high_watermark=self.high_watermark,
        )
        return StackedTier(objects, self.name, WritePolicy(self.write_policy), self.promote, self.load_weight)


class Run(NamedTuple):
    """One simulation: tiers without objects, which serve the whole trace. The fastest tier comes first."""

    placement: PlacementPolicy
    tiers: tuple[TierRules, ...]


@dataclass(frozen=True)
class Subject:
    """The parts that all runs have in common.

    Args:
        object_bytes: of one object, by the name of its pack, on all ranks together.
    """

    trace: Trace
    planner: HybridOffloadPlanner
    object_bytes: dict[str, int]

    def simulate(self, run: Run, on_request: Callable[[int], bool]) -> SimulationResult:
        """Serve the trace. ``on_request`` gets the number of requests so far; if it returns ``True``, the run stops."""
        stack = TierStack([tier.empty_tier() for tier in run.tiers])
        rules = path_rules(run.placement, self.planner, self.object_bytes)
        simulation = Simulation(self.planner, self.object_bytes, self.trace.block_tokens, stack, rules)
        for number, request in enumerate(self.trace.requests, 1):
            simulation.serve(request)
            if on_request(number):
                break
        return simulation.result


def simulate_all(subject: Subject, runs: Sequence[Run], on_progress: Callable[[int], None]) -> list[SimulationResult]:
    """Return the results of all runs, in order.

    Args:
        on_progress: called now and then with the number of requests that were served, in all runs together.
    """
    workers = min(len(runs), len(os.sched_getaffinity(0)))
    if workers > 1:
        return _in_processes(subject, runs, on_progress, workers)
    return [
        subject.simulate(run, _progress_of_run(on_progress, place * len(subject.trace.requests)))
        for place, run in enumerate(runs)
    ]


def _progress_of_run(on_progress: Callable[[int], None], before: int) -> Callable[[int], bool]:
    def on_request(number: int) -> bool:
        on_progress(before + number)
        return False

    return on_request


def _in_processes(
    subject: Subject, runs: Sequence[Run], on_progress: Callable[[int], None], workers: int
) -> list[SimulationResult]:
    context = multiprocessing.get_context("spawn")  # a fork would copy the thread that draws a progress bar
    shared: MutableSequence[int] = context.RawArray("q", len(runs) + 1)
    """The requests that each run has served, and 1 in the last place if all runs must stop."""
    with ProcessPoolExecutor(workers, context, _start_worker, (subject, shared)) as pool:
        futures: list[Future[SimulationResult]] = [pool.submit(_work, index, run) for index, run in enumerate(runs)]
        try:
            while wait(futures, _POLL_SECONDS).not_done:
                on_progress(sum(shared))
            return [future.result() for future in futures]
        except BaseException:
            shared[-1] = 1
            pool.shutdown(cancel_futures=True)
            raise


class _Worker(NamedTuple):
    subject: Subject
    shared: MutableSequence[int]


_worker: _Worker | None = None
"""The state of a worker process."""


def _start_worker(subject: Subject, shared: MutableSequence[int]) -> None:
    global _worker
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all processes; the parent stops the workers
    _worker = _Worker(subject, shared)


def _work(index: int, run: Run) -> SimulationResult:
    assert _worker is not None
    shared = _worker.shared

    def on_request(number: int) -> bool:
        shared[index] = number
        return bool(shared[-1])

    return _worker.subject.simulate(run, on_request)
