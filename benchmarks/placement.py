"""Placement: hit rate and bytes written of a simulated tier on recorded prompts, by rule and capacity.

The simulator is that of ``offload-core simulate``. The rules:

- "everything", "kept" and "kept and spare": the values of ``placement``;
- "stock's rule": vLLM's OffloadingConnector at its default retention, with our objects and LRU;
- "best possible": an upper bound, which knows all later requests.

The geometries are those of ``examples/geometries`` and two synthetic ones. "windows" has 80 KiB of full attention and
416 KiB of windows per token, with a window of 1,024 tokens. "states" has 64 KiB of full attention per token and 154 MB
of states per boundary of 768 tokens. No prompt is too long for ``max_model_len`` here.

The capacities of the examples are shares of the bytes that "everything" holds without a limit. Those of the synthetic
geometries are fixed.

    python -m benchmarks.placement TRACE[:TOKENS] … [--json FILE]

TOKENS are the tokens per id of the trace, by default those of its header or 512.
"""

from __future__ import annotations

import argparse
import multiprocessing
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import cache
from pathlib import Path
from typing import TypeVar

from benchmarks.placement_rules import StockRule, best_possible_hit_tokens
from benchmarks.reporting.document import ROOT, Run, add_json_option
from benchmarks.reporting.reports.placement import RULES, SYNTHETIC, finding, tables, worse
from benchmarks.reporting.rows import Estimate, Placed, Placement
from offload_core.config.geometry_file import BlockPages, KVCacheGeometry, KVCacheGroup, load_geometry
from offload_core.objects.format import object_bytes
from offload_core.planning.hit_policy import HitPolicy
from offload_core.planning.planner import HybridOffloadPlanner
from offload_core.simulation.bounded_tier import BoundedTier
from offload_core.simulation.path_rules import PLACEMENTS, MakePathRule, path_rules
from offload_core.simulation.simulator import Simulation, SimulationResult
from offload_core.simulation.tier_stack import TierStack
from offload_core.simulation.trace import Trace, read_trace

MAX_MODEL_LEN = 1 << 20
SHARES = (0.05, 0.3)
FIXED_GB = (200, 500, 1000, 3000)
GB, TB = 10**9, 10**12
KIB = 1024
R = TypeVar("R", Placed, Estimate)
"""A row of one trace and one geometry."""
STATE_BYTES = 153_944_064


def geometry(name: str) -> KVCacheGeometry:
    """Return an example or a synthetic geometry."""
    if name in SYNTHETIC:
        return _synthetic(name)
    found = load_geometry(ROOT / "examples" / "geometries" / f"{name}.yaml")
    return found.model_copy(update={"max_model_len": MAX_MODEL_LEN})


def _synthetic(name: str) -> KVCacheGeometry:
    block = 16 if name == "windows" else 768
    full_bytes = block * (80 if name == "windows" else 64) * KIB
    other = (HitPolicy("window", 1024), block * 416 * KIB) if name == "windows" else (HitPolicy("state"), STATE_BYTES)
    groups = [
        KVCacheGroup(block_size_tokens=block, policy=policy, pages=[BlockPages(count=1, page_bytes=nbytes)])
        for policy, nbytes in ((HitPolicy("full"), full_bytes), other)
    ]
    return KVCacheGeometry(hash_block_size_tokens=block, max_model_len=MAX_MODEL_LEN, groups=groups)


def model(name: str) -> tuple[HybridOffloadPlanner, dict[str, int]]:
    """Return the plan of a geometry, and the bytes of one object of each pack."""
    found = geometry(name)
    planner = found.planner(found.hybrid_chunk_size)
    return planner, {pack.name: object_bytes(found.payload_bytes(pack)) for pack in planner.packs}


@cache
def trace_of(written: str) -> Trace:
    """Read a trace, written as ``PATH`` or ``PATH:TOKENS``."""
    path, _, tokens = written.partition(":")
    return read_trace(Path(path), int(tokens) if tokens else None)


def simulated(trace: Trace, name: str, capacity_bytes: int | None, rule: str) -> SimulationResult:
    """Serve a trace from one tier."""
    planner, sizes = model(name)
    tier = BoundedTier(capacity_bytes, "lru")
    simulation = Simulation(planner, sizes, trace.block_tokens, TierStack.of_one(tier), _rules(rule, planner, sizes))
    for request in trace.requests:
        simulation.serve(request)
    return simulation.result


def _rules(rule: str, planner: HybridOffloadPlanner, sizes: dict[str, int]) -> MakePathRule:
    for placement in PLACEMENTS:
        if rule == placement:
            return path_rules(placement, planner, sizes)
    return lambda tokens, names: StockRule(planner, tokens)


def run_all(written: str, name: str) -> list[Placed]:
    """Return the rows of one trace and one geometry."""
    trace = trace_of(written)
    label = Path(written.partition(":")[0]).name.partition(".")[0]
    everything = simulated(trace, name, None, "everything")
    peak = everything.traffic.peak_bytes
    fixed = [*(gb * GB for gb in FIXED_GB), None]
    rows: list[Placed] = []
    for capacity in fixed if name in SYNTHETIC else [round(peak * share) for share in SHARES]:
        capacity_gb = None if capacity is None else capacity / GB
        for rule in RULES:
            written_tb: float | None = None
            if rule == "best possible":
                hits = best_possible_hit_tokens(trace, *model(name), capacity)
            else:
                is_done = (capacity, rule) == (None, "everything")
                result = everything if is_done else simulated(trace, name, capacity, rule)
                hits, written_tb = result.hit_tokens, result.traffic.written_bytes / TB
            rate = hits / trace.input_tokens
            rows.append(
                Placed(
                    trace=label, geometry=name, capacity_gb=capacity_gb, rule=rule, hit_rate=rate, written_tb=written_tb
                )
            )
    return rows


def in_processes(work: Callable[[str, str], list[R]], files: Iterable[str], names: Iterable[str]) -> Iterator[list[R]]:
    """Yield the rows of each trace and geometry, as they come."""
    with ProcessPoolExecutor(mp_context=multiprocessing.get_context("spawn")) as pool:
        for rows in pool.map(work, *zip(*((file, name) for file in files for name in names), strict=True)):
            print(f"{rows[0].trace}, {rows[0].geometry}: done", flush=True)
            yield rows


def traces_and_geometries(description: str | None) -> argparse.Namespace:
    """Parse the command line of a benchmark that runs on traces.

    Raises:
        SystemExit: a trace is missing, or the command line is wrong.
    """
    examples = sorted(path.stem for path in (ROOT / "examples" / "geometries").glob("*.yaml"))
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", metavar="TRACE[:TOKENS]", help="trace, and the tokens per id")
    parser.add_argument("--geometry", nargs="+", choices=(*SYNTHETIC, *examples), default=[*SYNTHETIC, *examples])
    add_json_option(parser)
    arguments = parser.parse_args()
    paths = [written.partition(":")[0] for written in arguments.files]
    if missing := [path for path in paths if not Path(path).exists()]:
        raise SystemExit("\n".join(f"trace {path} is missing; see docs/benchmarks.md" for path in missing))
    return arguments


def main() -> None:
    arguments = traces_and_geometries(__doc__)
    run = Run(arguments)
    rows = [row for found in in_processes(run_all, arguments.files, arguments.geometry) for row in found]
    results = Placement(runs=rows)
    print(tables(results), finding(results), sep="\n\n")
    for cell in worse(results):
        print("kept and spare serves less than everything or kept:", *cell)
    run.write(results)


if __name__ == "__main__":
    main()
