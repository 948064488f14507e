"""The rules of ``benchmarks.placement``: its bound is one, and a result is written, shown and drawn."""

from __future__ import annotations

import itertools
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from benchmarks.placement_rules import StockRule, best_possible_hit_tokens
from benchmarks.reporting.document import read
from benchmarks.reporting.reports.placement import RULES, cells, worse
from benchmarks.reporting.rows import Placed, Placement
from offload_core.planning.planner import GroupGeometry, HybridOffloadPlanner
from offload_core.simulation.bounded_tier import BoundedTier
from offload_core.simulation.path_rules import PLACEMENTS
from offload_core.simulation.simulator import Simulation
from offload_core.simulation.tier_stack import TierStack
from tests.core.simulation.test_simulator import hybrid, prompts, simulated
from tests.support.geometries import FULL, STATE, Geometry, geometries, window
from tests.support.paths import ROOT
from tests.support.prompt_traces import Tokens, conversations, trace_of, write_trace
from tests.support.random_examples import examples


@given(
    geometries().filter(lambda model: any(group.policy.kind == "full" for group in model.groups)),
    prompts(), st.integers(1, 40), st.integers(1, 4),
)  # fmt: skip
def test_no_rule_serves_more_than_the_best_possible(
    geometry: Geometry, prompts: list[Tokens], capacity: int, block_tokens: int
) -> None:
    planner = geometry.plan()
    sizes = {pack.name: 1 for pack in planner.packs}
    bound = best_possible_hit_tokens(trace_of(prompts, block_tokens), planner, sizes, capacity)
    for placement in PLACEMENTS:
        found = simulated(planner, prompts, placement, capacity=capacity, block_tokens=block_tokens)
        assert found.hit_tokens <= bound


TINY = HybridOffloadPlanner.build([GroupGeometry(0, 1, FULL)], hash_block_size=1, max_model_len=64, hybrid_chunk_size=1)


def exhaustive(prompts: list[Tokens], slots: int) -> int:
    """The most hits of any choice of kept chunks after each request."""
    hits: dict[frozenset[Tokens], int] = {frozenset(): 0}
    for prompt in prompts:
        path = [prompt[: end + 1] for end in range(len(prompt))]
        after: dict[frozenset[Tokens], int] = {}
        for held, before in hits.items():
            found = sum(1 for _ in itertools.takewhile(held.__contains__, path[:-1]))
            present = sorted(held | set(path))
            for count in range(min(slots, len(present)) + 1):
                for kept in map(frozenset, itertools.combinations(present, count)):
                    after[kept] = max(after.get(kept, 0), before + found)
        hits = after
    return max(hits.values())


@examples(200)
@example([(0, 0), (1,), (1, 0), (0,), (0, 0, 0)], 2)  # a chunk that is computed anew before its next load
@given(
    st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=3).map(tuple), min_size=1, max_size=6), st.integers(0, 3)
)
def test_with_full_attention_alone_the_best_possible_is_the_best_of_all_choices(
    prompts: list[Tokens], slots: int
) -> None:
    found = best_possible_hit_tokens(trace_of(prompts, 1), TINY, {"full-u1": 1}, slots)
    assert found == exhaustive(prompts, slots)


def test_without_full_attention_there_is_no_bound() -> None:
    planner = HybridOffloadPlanner.build([GroupGeometry(0, 16, window(32))], hash_block_size=16, max_model_len=64)
    with pytest.raises(ValueError, match="needs a pack of full attention"):
        best_possible_hit_tokens(trace_of([], 16), planner, {}, None)


def test_stocks_rule_stores_replay_boundaries_and_junctions() -> None:
    planner = hybrid(STATE)
    head = tuple(range(64))
    paths = [head + tuple(range(100 * n, 100 * n + 40)) for n in range(1, 4)]
    sizes = {pack.name: 1 for pack in planner.packs}
    tier = BoundedTier(None, "lru")
    simulation = Simulation(planner, sizes, 1, TierStack.of_one(tier), lambda tokens, names: StockRule(planner, tokens))
    hits = []
    for request in trace_of([*paths, paths[0]], 1).requests:
        simulation.serve(request)
        hits.append(simulation.result.hit_tokens)
    assert hits == [0, 0, 64, 64 + 96]
    assert tier.traffic.written_objects == 6 + 1 + 2 + 2 + 2 + 1


def test_the_benchmark_writes_its_results(tmp_path: Path) -> None:
    trace = write_trace(tmp_path / "small.jsonl", trace_of(conversations(3, 3, 1200), 256), header=False)
    output = tmp_path / "placement.json"
    words = ["-m", "benchmarks.placement", f"{trace}:256", "--geometry", "states", "gpt-oss-20b", "--json", str(output)]
    done = subprocess.run([sys.executable, *words], cwd=ROOT, capture_output=True, text=True, timeout=100, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    results = read(output, Placement).results
    shown = cells(results)
    assert {(trace, geometry) for trace, geometry, _ in shown} == {("small", "states"), ("small", "gpt-oss-20b")}
    assert all(tuple(rules) == RULES for rules in shown.values())
    assert "| states | no limit |" in done.stdout


@pytest.mark.parametrize("module", ["placement", "live_curve"])
def test_a_missing_trace_is_named_without_a_traceback(module: str, tmp_path: Path) -> None:
    there, absent, other = (tmp_path / f"{name}.jsonl" for name in ("there", "absent", "other"))
    write_trace(there, trace_of([(1, 2)], 256))
    words = ["-m", f"benchmarks.{module}", f"{absent}:256", str(there), str(other)]
    done = subprocess.run([sys.executable, *words], cwd=ROOT, capture_output=True, text=True, timeout=100, check=False)
    messages = "".join(f"trace {path} is missing; see docs/benchmarks.md\n" for path in (absent, other))
    assert (done.returncode, done.stdout, done.stderr) == (1, "", messages)


def test_a_cell_in_which_another_placement_serves_more_is_told() -> None:
    rates = dict(zip(RULES, (0.3, 0.4, 0.398, 0.5, 0.6), strict=True))
    rows = [
        Placed(trace="t", geometry="states", capacity_gb=1, rule=rule, hit_rate=rate, written_tb=None)
        for rule, rate in rates.items()
    ]
    assert worse(Placement(runs=rows)) == [("t", "states", 1)]
