"""Costs of a faulty tier: time to first token, and the throughput of a healthy tier beside it.

    python -m benchmarks.faults [--only first-tokens] [--samples 120] [--batches 60] [--json FILE]

The engines run a tiny Gemma 3 in float32 on one thread. They live at once and take turns request by request, so drift
of the machine cancels. Every engine has host memory as its first tier. The second tier is a folder whose medium is in
one of these states:

- healthy;
- slow: every call starts 50 ms late;
- hung: no call returns, and none can be cancelled. The circuit breaker never opens, so all requests wait as the first
  ones after a failure do;
- breaker open: the medium is hung, and the circuit breaker has opened.

"without it" has no second tier. There are three kinds of requests: new ones, which no tier holds; those that host
memory holds; and those that only the second tier holds.

Ratios compare with "without it" on the same prompts. A second engine without the tier shows the noise of a ratio.
"slices" are the lowest and the highest ratio of medians over quarters of the run.

The part with two tiers has no host memory. A folder serves whole batches of prompts, alone and below a hung tier.
"""

from __future__ import annotations

import argparse
import random
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.faults_setup import (
    NEVER_OPENS,
    PROMPT_TOKENS,
    breaker_is_open,
    check_same,
    fill,
    folder_with,
    prompt,
    run_spec,
    trip,
    victim,
)
from benchmarks.live_engines import LoadBatch, Order, running
from benchmarks.reporting.document import Run, add_json_option
from benchmarks.reporting.rows import BreakerRatio, Faults, FaultyFirstToken, TwoTiers, percentile
from tests.support import tiny_models
from tests.support.engine.spec import PromptResult, RunSpec

SLICES = 4
BATCH = 8
BATCH_PROMPT_TOKENS = 4100
BATCHES_OF_PROMPTS = 3
BREAKER_AIM = 1.05
TWO_TIERS_AIM = 0.9
WITHOUT = "without it"
AGAIN = f"{WITHOUT}, again"
RESAMPLINGS = 1000


@dataclass(frozen=True)
class State:
    """A state of the second tier.

    Args:
        tier: whether the tier is configured at all.
        fault: see :class:`Order`.
        breaker_failures: the tier's key, or ``None`` for the default.
        until_answered: release the hung calls after each request's answer, so that the next request hangs again.
    """

    name: str
    tier: bool = True
    fault: tuple[str, *tuple[float, ...]] = ("none",)
    breaker_failures: int | None = None
    until_answered: bool = False


@dataclass
class Samples:
    """Samples of one state and one kind of request, or of one state of two tiers."""

    state: str
    kind: str
    seconds: list[float] = field(default_factory=list)
    served_tokens: list[int] = field(default_factory=list)


def states(slow_seconds: float) -> list[State]:
    return [
        State(WITHOUT, tier=False),
        State(AGAIN, tier=False),
        State("healthy"),
        State("slow", fault=("slow", slow_seconds)),
        State("hung", fault=("hung",), breaker_failures=NEVER_OPENS, until_answered=True),
        State("breaker open", fault=("hung",)),
    ]


def measure_first_tokens(
    model: Path, folder: Path, everything: Sequence[State], samples: int, deadline_seconds: float, console: Console
) -> list[Samples]:
    """Send the same requests to all engines, in a new random order each time, and return samples by kind and state."""
    console.print("storing the objects that only the second tier holds …")
    only_there = [prompt(f"there {number}", PROMPT_TOKENS, 1_000_000 + number) for number in range(samples)]
    fill(model, folder / "objects", only_there)
    in_memory = [prompt(f"memory {number}", PROMPT_TOKENS, 2_000_000 + number) for number in range(8)]
    new = [prompt(f"new {number}", PROMPT_TOKENS, 3_000_000 + number) for number in range(samples)]
    specs: dict[str, RunSpec] = {}
    for state in everything:
        tiers: list[dict[str, Any]] = [{"name": "ram", "type": "cpu", "capacity": "256MiB", "promote": False}]
        if state.tier:
            path = folder_with(folder / "objects", folder / state.name)
            tiers.append(victim(path, deadline_seconds, state.breaker_failures))
        specs[state.name] = run_spec(model, tiers)
    kinds = {"new": new, "in host memory": in_memory, "in that tier only": only_there}
    table = {(kind, state.name): Samples(state.name, kind) for kind in kinds for state in everything}
    shuffled = random.Random(7)
    console.print(f"starting {len(specs)} engines …")
    with running(specs, folder) as engines:
        for state in everything:
            for one in in_memory:
                engines[state.name].tell(Order(prompts=[one]))
            engines[state.name].tell(Order(fault=state.fault))
            if state.name == "breaker open":
                trip(engines[state.name])
        console.print("asking …")
        for number in range(samples):
            for kind, prompts in kinds.items():
                asked = [prompts[number % len(prompts)]]
                answers: dict[str, Sequence[PromptResult]] = {}
                for state in shuffled.sample(everything, len(everything)):
                    answer = engines[state.name].tell(Order(prompts=asked)).prompts
                    answers[state.name] = answer
                    if state.until_answered:
                        engines[state.name].tell(Order(fault=state.fault))
                    table[kind, state.name].seconds += [one.ttft_seconds for one in answer]
                    table[kind, state.name].served_tokens += [one.external_cached_tokens for one in answer]
                for name, answer in answers.items():
                    check_same(f"{name}, {kind}", answer, answers[WITHOUT])
        if not breaker_is_open(engines["breaker open"]):
            raise SystemExit("the circuit breaker did not stay open to the end of the run")
    return list(table.values())


def measure_two_tiers(
    model: Path, folder: Path, batches: int, deadline_seconds: float, console: Console
) -> list[tuple[Samples, list[LoadBatch]]]:
    """Let engines serve the same batches, in a new random order each time; a sample is a whole batch."""
    console.print("two tiers: storing the objects of all batches …")
    sets = [
        [prompt(f"{part}.{one}", BATCH_PROMPT_TOKENS, 4_000_000 + BATCH * part + one) for one in range(BATCH)]
        for part in range(BATCHES_OF_PROMPTS)
    ]
    fill(model, folder / "many", [one for part in sets for one in part])
    good = {"name": "good", "type": "disk", "load_timeout_seconds": 30}
    above: dict[str, Callable[[Path], list[dict[str, Any]]]] = {
        "alone": lambda place: [],
        "alone, again": lambda place: [],
        "hung tier above": lambda place: [victim(place, deadline_seconds, NEVER_OPENS)],
        "breaker open": lambda place: [victim(place, deadline_seconds)],
    }
    specs: dict[str, RunSpec] = {}
    for name, tiers in above.items():
        path = folder_with(folder / "many", folder / "two" / name / "good")
        specs[name] = run_spec(model, [*tiers(path.with_name("bad")), {**good, "path": str(path)}], max_num_seqs=BATCH)
    measured = {name: (Samples(name, "batches"), list[LoadBatch]()) for name in above}
    shuffled = random.Random(7)
    console.print(f"starting {len(specs)} engines …")
    with running(specs, folder / "two") as engines:
        for name, engine in engines.items():
            engine.tell(Order(fault=("hung",), prompts=sets[0]))
            if name == "breaker open":
                trip(engine)
            engine.tell(Order(prompts=sets[0]))
        console.print("asking …")
        for number in range(batches):
            asked = sets[number % len(sets)]
            for name in shuffled.sample(list(engines), len(engines)):
                answer = engines[name].tell(Order(prompts=asked))
                samples, loads = measured[name]
                samples.seconds.append(max(one.total_seconds for one in answer.prompts))
                samples.served_tokens.append(sum(one.external_cached_tokens for one in answer.prompts))
                loads += [load for load in answer.loads if load.tier == "good"]
    return list(measured.values())


def slice_ratios(one: Sequence[float], base: Sequence[float]) -> tuple[float, float]:
    """Return the lowest and the highest ratio of medians over slices of the run."""
    size = max(1, len(base) // SLICES)
    ratios = [
        percentile(one[start : start + size], 50) / percentile(base[start : start + size], 50)
        for start in range(0, size * (len(base) // size), size)
    ]
    return min(ratios), max(ratios)


def first_token_rows(measured: Sequence[Samples]) -> Iterator[FaultyFirstToken]:
    """Yield a row for every kind and state."""
    bases = {row.kind: row.seconds for row in measured if row.state == WITHOUT}
    for row in measured:
        base = bases[row.kind]
        p50, p90, p99 = (percentile(row.seconds, percent) for percent in (50, 90, 99))
        low, high = slice_ratios(row.seconds, base)
        yield FaultyFirstToken(
            state=row.state,
            kind=row.kind,
            samples=len(row.seconds),
            served_tokens_min=min(row.served_tokens),
            served_tokens_max=max(row.served_tokens),
            p50_ms=p50 * 1000,
            p90_ms=p90 * 1000,
            p99_ms=p99 * 1000,
            p50_ratio=p50 / percentile(base, 50),
            slice_ratio_min=low,
            slice_ratio_max=high,
            p99_ratio=p99 / percentile(base, 99),
        )


def first_token_table(rows: Sequence[FaultyFirstToken], kind: str) -> Table:
    mine = [row for row in rows if row.kind == kind]
    table = _table(
        f"Time to first token, {PROMPT_TOKENS} tokens, {kind}, {mine[0].samples} samples each",
        ("served", "p50 ms", "p90 ms", "p99 ms", "p50 ratio", "slices", "p99 ratio"),
    )
    for row in mine:
        table.add_row(
            row.state,
            _span(row),
            *(f"{figure:.1f}" for figure in (row.p50_ms, row.p90_ms, row.p99_ms)),
            f"{row.p50_ratio:.2f}",
            f"{row.slice_ratio_min:.2f} to {row.slice_ratio_max:.2f}",
            f"{row.p99_ratio:.2f}",
        )
    return table


def two_tiers_rows(measured: Sequence[tuple[Samples, list[LoadBatch]]]) -> Iterator[TwoTiers]:
    """Yield a row for every state; in the first two the healthy tier is alone."""
    base = _speeds(measured[0][0])
    for index, (samples, loads) in enumerate(measured):
        speeds = _speeds(samples)
        low, high = slice_ratios(speeds, base)
        p50, p99 = (percentile([load.seconds for load in loads], percent) for percent in (50, 99))
        yield TwoTiers(
            state=samples.state,
            batches=len(speeds),
            served_tokens_min=min(samples.served_tokens),
            served_tokens_max=max(samples.served_tokens),
            tokens_per_second=percentile(speeds, 50),
            ratio=percentile(speeds, 50) / percentile(base, 50),
            slice_ratio_min=low,
            slice_ratio_max=high,
            load_p50_ms=p50 * 1000,
            load_p99_ms=p99 * 1000,
            aim=TWO_TIERS_AIM if index >= 2 else None,
        )


def two_tiers_table(rows: Sequence[TwoTiers]) -> Table:
    table = _table(
        f"One healthy tier, {rows[0].batches} batches of {BATCH} prompts of {BATCH_PROMPT_TOKENS} tokens",
        ("served", "tokens/s", "ratio", "slices", "load p50 ms", "p99 ms"),
    )
    for row in rows:
        table.add_row(
            row.state,
            _span(row),
            f"{row.tokens_per_second:,.0f}",
            f"{row.ratio:.2f}",
            f"{row.slice_ratio_min:.2f} to {row.slice_ratio_max:.2f}",
            f"{row.load_p50_ms:.2f}",
            f"{row.load_p99_ms:.2f}",
        )
    return table


def _table(title: str, columns: Sequence[str]) -> Table:
    table = Table(title=title)
    table.add_column("", no_wrap=True)
    for column in columns:
        table.add_column(column, justify="right", no_wrap=True)
    return table


def _speeds(samples: Samples) -> list[float]:
    return [tokens / seconds for tokens, seconds in zip(samples.served_tokens, samples.seconds, strict=True)]


def _span(row: FaultyFirstToken | TwoTiers) -> str:
    low, high = row.served_tokens_min, row.served_tokens_max
    return str(low) if low == high else f"{low} to {high}"


def breaker_rows(measured: Sequence[Samples]) -> Iterator[BreakerRatio]:
    """Yield the ratios of the open breaker to both engines without the tier together."""
    for kind in dict.fromkeys(row.kind for row in measured):
        seconds = {row.state: row.seconds for row in measured if row.kind == kind}
        base = seconds[WITHOUT] + seconds[AGAIN]
        for percent in (50, 90, 99):
            ratio, low, high = _ratio(seconds["breaker open"], base, percent)
            yield BreakerRatio(kind=kind, percent=percent, ratio=ratio, low=low, high=high, aim=BREAKER_AIM)


def verdicts(breaker: Sequence[BreakerRatio], two: Sequence[TwoTiers]) -> Iterator[str]:
    """Yield a sentence for every aim: reached or not."""
    for row in breaker:
        reached = "reached" if row.ratio <= row.aim else "not reached"
        said = f"{reached}, within the noise" if row.low <= row.aim <= row.high else reached
        yield (
            f"breaker open, {row.kind}: p{row.percent} {row.ratio:.2f} of {WITHOUT} ({row.low:.2f} to {row.high:.2f} "
            f"in 95 % of resamplings); aim at most {row.aim}: {said}"
        )
    for tiers in two:
        if tiers.aim is not None:
            reached = "reached" if tiers.ratio >= tiers.aim else "not reached"
            yield f"{tiers.state}: {tiers.ratio:.2f} of alone; aim at least {tiers.aim}: {reached}"


def _ratio(one: Sequence[float], base: Sequence[float], percent: int) -> tuple[float, float, float]:
    """Return a ratio of percentiles, and the bounds of 95 % of such ratios when the samples are drawn again."""
    again = random.Random(7)
    drawn = sorted(
        percentile(again.choices(one, k=len(one)), percent) / percentile(again.choices(base, k=len(base)), percent)
        for _ in range(RESAMPLINGS)
    )
    return percentile(one, percent) / percentile(base, percent), percentile(drawn, 2.5), percentile(drawn, 97.5)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=120, help="requests per state and kind")
    parser.add_argument("--batches", type=int, default=60, help="batches per state of two tiers")
    parser.add_argument(
        "--only",
        choices=["first-tokens", "breaker", "two-tiers"],
        help="run only this part; breaker measures first tokens with an open breaker and without the tier",
    )
    parser.add_argument("--slow-seconds", type=float, default=0.05, help="delay of every call of the slow tier")
    parser.add_argument(
        "--deadline-seconds", type=float, default=0.25, help="deadline of the tier's lookups, loads and stores"
    )
    add_json_option(parser)
    arguments = parser.parse_args()
    run = Run(arguments)
    console = Console(width=120)
    with tempfile.TemporaryDirectory(prefix="offload-core-bench-") as name:
        folder = Path(name)
        model = tiny_models.write_gemma3(folder / "model")
        first_tokens: list[FaultyFirstToken] = []
        breaker: list[BreakerRatio] = []
        if arguments.only != "two-tiers":
            everything = states(arguments.slow_seconds)
            if arguments.only == "breaker":
                everything = [state for state in everything if not state.tier or state.name == "breaker open"]
            measured = measure_first_tokens(
                model, folder, everything, arguments.samples, arguments.deadline_seconds, console
            )
            first_tokens, breaker = list(first_token_rows(measured)), list(breaker_rows(measured))
            for kind in dict.fromkeys(row.kind for row in first_tokens):
                console.print(first_token_table(first_tokens, kind))
        two: list[TwoTiers] = []
        if arguments.only in (None, "two-tiers"):
            batches = measure_two_tiers(model, folder, arguments.batches, arguments.deadline_seconds, console)
            two = list(two_tiers_rows(batches))
            console.print(two_tiers_table(two))
    for line in verdicts(breaker, two):
        console.print(line)
    run.write(
        Faults(
            prompt_tokens=PROMPT_TOKENS,
            batch_prompts=BATCH,
            batch_prompt_tokens=BATCH_PROMPT_TOKENS,
            first_tokens=first_tokens,
            breaker=breaker,
            two_tiers=two,
        )
    )


if __name__ == "__main__":
    main()
