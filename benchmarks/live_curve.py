"""The live curve: its estimates, compared with the simulation of each capacity on recorded prompts.

A curve sees each request once and estimates the hit rate at half, one, two and four times a capacity. The simulation
serves the whole trace once for each capacity. Placement is "kept and spare", eviction is LRU. The geometries and the
capacities are those of ``benchmarks.placement``.

The memory is that of one curve after requests that fill it: random paths, more than it can hold.

    python -m benchmarks.live_curve TRACE[:TOKENS] … [--json FILE]

TOKENS are the tokens per id of the trace, by default those of its header or 512.
"""

from __future__ import annotations

import random
import time
import tracemalloc
from functools import cache
from hashlib import blake2b
from pathlib import Path

from benchmarks.placement import (
    FIXED_GB,
    GB,
    SHARES,
    in_processes,
    model,
    simulated,
    trace_of,
    traces_and_geometries,
)
from benchmarks.reporting.document import Run
from benchmarks.reporting.reports.live_curve import finding, tables
from benchmarks.reporting.reports.placement import SYNTHETIC
from benchmarks.reporting.rows import Estimate, LiveCurve
from offload_core.planning.placement import BoundaryHistory, PlacementPolicy
from offload_core.planning.planner import HybridOffloadPlanner
from offload_core.simulation.hit_curve import FACTORS, MAX_KEPT, HitCurve
from offload_core.simulation.object_names import ObjectNames
from offload_core.simulation.trace import Trace

PLACEMENT: PlacementPolicy = "kept and spare"
MIB = 1 << 20


@cache
def spread(name: int) -> int:
    """Return an evenly distributed number of 64 bits for a name, as the engine's hashes are."""
    return int.from_bytes(blake2b(name.to_bytes(16, "little"), digest_size=8).digest(), "little")


def serve(curve: HitCurve, trace: Trace, planner: HybridOffloadPlanner) -> float:
    """Let a curve see a trace, and return the seconds of processor time that it took per request."""
    names, block, step = ObjectNames(planner.packs, trace.block_tokens), trace.block_tokens, planner.boundary_tokens
    history = BoundaryHistory()
    seconds = 0.0
    for request in trace.requests:
        path = list(map(spread, names.boundaries(request.ids, step, request.named_tokens(block))))
        seen, prompt_chunks = history.see(path), request.loadable_tokens(block) // step
        began = time.process_time()
        curve.serve(path, request.input_tokens, prompt_chunks, seen)
        seconds += time.process_time() - began
    return seconds / len(trace.requests)


def run_all(written: str, name: str) -> list[Estimate]:
    """Return the rows of one trace and one geometry."""
    trace, (planner, sizes) = trace_of(written), model(name)
    peak = simulated(trace, name, None, "everything").traffic.peak_bytes
    capacities = [gb * GB for gb in FIXED_GB] if name in SYNTHETIC else [round(peak * share) for share in SHARES]
    rates = {
        capacity: simulated(trace, name, capacity, PLACEMENT).hit_rate
        for capacity in sorted({int(base * factor) for base in capacities for factor in FACTORS})
    }
    rows: list[Estimate] = []
    for base in capacities:
        curve = HitCurve(planner, sizes, base, PLACEMENT, "lru")
        seconds = serve(curve, trace, planner)
        rows.append(
            Estimate(
                trace=Path(written.partition(":")[0]).name.partition(".")[0],
                geometry=name,
                capacity_gb=base / GB,
                sampled_share=curve.rate,
                simulated=[rates[int(base * factor)] for factor in FACTORS],
                estimated=curve.hit_ratios(),
                us_per_request=seconds * 1e6,
            )
        )
    return rows


def memory_bytes() -> int:
    """Return the most bytes that a curve takes."""
    planner, sizes = model("windows")
    chance = random.Random(1)
    tracemalloc.start()
    curve = HitCurve(planner, sizes, 10**5 * GB, PLACEMENT, "lru")
    for _ in range(3 * MAX_KEPT):
        path = [chance.getrandbits(64) for _ in range(8)]
        curve.serve(path, 1, len(path), 0)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return peak


def main() -> None:
    arguments = traces_and_geometries(__doc__)
    run = Run(arguments)
    rows = [row for found in in_processes(run_all, arguments.files, arguments.geometry) for row in found]
    results = LiveCurve(runs=rows, memory_mib=memory_bytes() / MIB)
    print(tables(results), finding(results), sep="\n\n")
    run.write(results)


if __name__ == "__main__":
    main()
