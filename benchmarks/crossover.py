"""Time to first token from slow tiers: always load, never load, and the engine's choice by its own measurements.

The model is a Gemma 3 of six layers with seeded random weights; it computes on one thread. Every prompt is on a
``disk`` tier, whose lookups and loads are delayed and whose loads share a link of a stated speed. Four engines live at
once and take turns with each prompt, in random order, so that all see the same machine:

- "compute" and "compute again": no connector. The two are alike, so their difference shows the spread of the machine;
- "load": ``load_when: always``;
- "ours": ``load_when: cheaper``.

Before each prompt, its engine computes a few tokens, so that none is measured after a pause.

The engines begin anew for each tier. Warm-up: two new prompts of each length, then two rounds of the stored prompts.
Prompts of up to 1,000 tokens are measured four times per round, since noise is a larger part of short times. A ratio
compares ours with the better of load and compute, medians of the measured prompts. The aim is 1.05.

    python -m benchmarks.crossover [--latency-ms 1 10 100 500] [--mb-per-second 10 100 1000] [--rounds 6]
"""

from __future__ import annotations

import argparse
import random
import tempfile
from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import chain
from pathlib import Path

from rich.console import Console
from rich.table import Table

from benchmarks.faults_plugin import VICTIM
from benchmarks.faults_setup import folder_with
from benchmarks.live_engines import DISTRIBUTION, LiveEngine, Order, running
from benchmarks.reporting.document import Run, add_json_option
from benchmarks.reporting.rows import Crossing, Crossover, percentile
from tests.support import tiny_models
from tests.support.engine.spec import PromptResult, PromptSpec, Round, RunSpec, disk_transfer_config, run_in_process

ENGINES = ("compute", "compute again", "load", "ours")
LENGTHS = (300, 1000, 3000, 8000)
SHORT = 1000
"""Prompts of up to so many tokens are measured ``TIMES_IF_SHORT`` times per round."""
TIMES_IF_SHORT = 4
VOCABULARY = 1024
SHAPE = tiny_models.Gemma3Shape(hidden_size=256, head_dim=64, intermediate_size=512, vocab_size=VOCABULARY)
CHUNK_TOKENS = 128
DEADLINE_SECONDS = 60
AIM = 1.05
WARM_UP_ROUNDS = 2
WAKE_TOKENS = 32
"""Tokens of the prompt before each measured one, too few for an object. An engine's first step after a pause is slower,
and the turn of a slow load is a pause for the others."""
MAX_LOGPROB_GAP = 1e-3


def prompt(length: int, seed: int) -> PromptSpec:
    tokens = tiny_models.prompt_token_ids(length, seed=seed, vocab_size=VOCABULARY)
    # Two tokens, so that the time to the first one does not hold the end of the request.
    return PromptSpec(name=str(length), token_ids=tokens, max_tokens=2)


def spec(model: Path, folder: Path, load_when: str | None, *plugins: str) -> RunSpec:
    """Return an engine; without ``load_when`` it has no connector."""
    tier = {"name": VICTIM, "type": "disk", "path": str(folder)}
    transfer = disk_transfer_config(
        folder,
        backends=[tier],
        hybrid_chunk_size=CHUNK_TOKENS,
        load_timeout_seconds=DEADLINE_SECONDS,
        load_when=load_when,
        required_plugins=list(plugins),
    )
    return RunSpec(
        model=str(model), dtype="float32", max_model_len=8192, max_num_batched_tokens=2048,
        kv_cache_memory_bytes=1 << 29, kv_transfer_config=transfer if load_when else None,
    )  # fmt: skip


def specs(model: Path, stored: Path, place: Path) -> dict[str, RunSpec]:
    """Return the engines."""
    return {
        "compute": spec(model, place, None),
        "compute again": spec(model, place, None),
        "load": spec(model, folder_with(stored, place / "load"), "always", DISTRIBUTION),
        "ours": spec(model, folder_with(stored, place / "ours"), "cheaper", DISTRIBUTION),
    }


def ask(live: dict[str, LiveEngine], one: PromptSpec, order: Sequence[str] = ENGINES) -> dict[str, PromptResult]:
    """Return each engine's answer to a prompt; stop if one differs, since a fast wrong answer is no result."""
    answers: dict[str, PromptResult] = {}
    for name in order:
        live[name].tell(Order(prompts=[prompt(WAKE_TOKENS, seed=1)]))
        answers[name] = live[name].tell(Order(prompts=[one])).prompts[0]
    computed = answers["compute"]
    for name, answer in answers.items():
        gap = abs(answer.logprobs[0] - computed.logprobs[0])
        if answer.token_ids[0] != computed.token_ids[0] or gap > MAX_LOGPROB_GAP:
            raise SystemExit(f"{name}: a prompt of {one.name} tokens starts with another token or probability")
    return answers


def check_sources(answers: Mapping[str, PromptResult]) -> None:
    """Stop if "load" has computed, or if an engine without a connector has loaded. Its time would be another's."""
    for name, must_load in (("load", True), ("compute", False), ("compute again", False)):
        answer, served = answers[name], answers[name].external_cached_tokens
        if (served > 0) != must_load:
            raise SystemExit(f"{name}: tiers served {served} tokens of a prompt of {answer.name} tokens")


def measure(live: dict[str, LiveEngine], latency_ms: float, mb_per_second: float, rounds: int) -> list[Crossing]:
    """Return a row for each length of prompt."""
    for name in ("load", "ours"):
        live[name].tell(Order(fault=("far", latency_ms / 1e3, mb_per_second * 1e6)))
    for length in LENGTHS:
        for seed in range(2):
            ask(live, prompt(length, seed=1000 * length + 1 + seed))
    for _ in range(WARM_UP_ROUNDS):
        for length in LENGTHS:
            ask(live, prompt(length, seed=length))
    times: dict[tuple[int, str], list[float]] = defaultdict(list)
    served: dict[int, list[int]] = defaultdict(list)
    chance = random.Random(1)
    for _ in range(rounds):
        for length in chain.from_iterable([one] * (TIMES_IF_SHORT if one <= SHORT else 1) for one in LENGTHS):
            order = chance.sample(ENGINES, len(ENGINES))
            answers = ask(live, prompt(length, seed=length), order)
            check_sources(answers)
            for name, answer in answers.items():
                times[length, name].append(1e3 * answer.ttft_seconds)
                if name == "ours":
                    served[length].append(answer.external_cached_tokens)
    rows = []
    for length in LENGTHS:
        one, other, load, ours = (percentile(times[length, name], 50) for name in ENGINES)
        compute = percentile(times[length, "compute"] + times[length, "compute again"], 50)
        rows.append(
            Crossing(
                latency_ms=latency_ms,
                mb_per_second=mb_per_second,
                tokens=length,
                compute_p50_ms=compute,
                compute_spread=max(one, other) / min(one, other),
                load_p50_ms=load,
                ours_p50_ms=ours,
                ours_p90_ms=percentile(times[length, "ours"], 90),
                loaded=sum(tokens > 0 for tokens in served[length]) / len(served[length]),
                ratio=ours / min(compute, load),
            )
        )
    return rows


def table_of(rows: Sequence[Crossing]) -> Table:
    table = Table(title="Time to first token of stored prompts, ms")
    for column in ("tier", "tokens", "compute p50", "spread", "load p50", "ours p50", "ours p90", "loaded", "ratio"):
        table.add_column(column, justify="right", no_wrap=True)
    for row in rows:
        tier = f"{row.latency_ms:g} ms, {row.mb_per_second:g} MB/s"
        cells = [f"{figure:.1f}" for figure in (row.load_p50_ms, row.ours_p50_ms, row.ours_p90_ms)]
        compute = (f"{row.compute_p50_ms:.1f}", f"{row.compute_spread:.2f}")
        table.add_row(tier, str(row.tokens), *compute, *cells, f"{row.loaded:.0%}", f"{row.ratio:.2f}")
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--latency-ms", type=float, nargs="+", default=[1, 10, 100, 500])
    parser.add_argument("--mb-per-second", type=float, nargs="+", default=[10, 100, 1000])
    parser.add_argument("--rounds", type=int, default=6, help="measured rounds per tier")
    add_json_option(parser)
    arguments = parser.parse_args()
    run = Run(arguments)
    console = Console(width=120)
    rows: list[Crossing] = []
    with tempfile.TemporaryDirectory(prefix="offload-core-bench-") as name:
        folder = Path(name)
        model = tiny_models.write_gemma3(folder / "model", dtype="float32", shape=SHAPE)
        fill = spec(model, folder / "stored", "always")
        fill.rounds = [Round(name="fill", prompts=[prompt(length, seed=length) for length in LENGTHS])]
        assert fill.kv_transfer_config is not None
        run_in_process(fill, timeout_seconds=600, fresh_interpreter=True)
        for latency in arguments.latency_ms:
            for speed in arguments.mb_per_second:
                place = folder / f"{latency:g}-{speed:g}"
                with running(specs(model, folder / "stored", place), place) as live:
                    rows += measure(live, latency, speed, arguments.rounds)
                console.print(table_of(rows[-len(LENGTHS) :]))
    console.print(table_of(rows))
    worst = max(row.ratio for row in rows)
    within = sum(row.ratio <= AIM for row in rows)
    spread = percentile([row.compute_spread for row in rows], 90)
    console.print(f"{within} of {len(rows)} within {AIM} (aim: all); worst {worst:.2f}; p90 of the spread {spread:.2f}")
    run.write(Crossover(rows=rows))


if __name__ == "__main__":
    main()
