"""What the scheduler half costs the engine: lookups and steps, beside vLLM's own ``OffloadingConnector``, in one run.

Both halves get the same requests, interleaved; both have everything present in RAM but for "absent". The questions:

* cold: the first question for a prompt, by a new request;
* again: the same request asks once more, as a request that waits for room does;
* warm: a new request with the same prompt;
* absent: a new request with a prompt of which nothing is there.

"ours" is the time until the answer, with the way to the I/O thread and back; "engine" is the part of it in which the
engine's thread does not wait idly, and so could not do other work; "cpu" is the processor time of all threads, the only
figure that holds on a machine busy with other things. Stock answers on the engine's thread.
A step is the metadata of one decoding step and the report that its stores have ended.

    python -m benchmarks.scheduler [--medium shared|own] [--repeats 40] [--steps 256] [--json FILE]
"""

from __future__ import annotations

import argparse
import gc
import json
import logging
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.scheduler_rig import (
    Answer,
    Decoding,
    Geometry,
    OurHalf,
    Peer,
    Requests,
    StockHalf,
    engine_config,
    full,
    state,
    window,
)

GEOMETRIES = (
    Geometry("5 window + 1 full, blocks 128", (*[window(128, 512)] * 5, full(128)), 128, 1 / 4),
    Geometry("3 recurrent + 1 full, blocks 256", (*[state(256)] * 3, full(256)), 256, 1 / 4),
    Geometry("1 window + 1 full, blocks 16, chunks 256", (window(16, 512), full(16)), 256, 1 / 20),
)
DEEPSEEK_V4 = Geometry(
    "DeepSeek-V4, blocks 256/64/64/4/8, chunks 1024",
    (full(256), window(64, 128), window(64, 128), window(4, 8), window(8, 128)),
    1024,
    1 / 50,
)
PROMPT_TOKENS = (4096, 32768, 131072)
PAST_BOUNDARY_TOKENS = 3  # so that the last token, which is always computed, costs no chunk
QUESTIONS = ("cold", "again", "warm", "absent")
RUNNING = 64


@dataclass(frozen=True)
class Lookup:
    """All answers to one question, in seconds."""

    geometry: str
    aim: float
    tokens: int
    question: str
    stock: list[float]
    ours: list[float]
    engine: list[float]
    stock_cpu: list[float]
    ours_cpu: list[float]


@dataclass(frozen=True)
class Steps:
    """All steps of one geometry, in seconds."""

    geometry: str
    aim: float
    stock: list[float]
    ours: list[float]


@dataclass(frozen=True)
class Counts:
    """What was counted in the measured parts of one geometry's lookups."""

    geometry: str
    hashes: int
    """Block hashes computed."""
    chunks: int
    """Chunks that the answers cover, over all packs."""
    asked: int
    """Objects asked for."""
    asked_twice: int
    """Objects asked for more than once in one lookup."""


def percentile(seconds: list[float], percent: int) -> float:
    """Return a percentile in microseconds."""
    ordered = sorted(seconds)
    return ordered[round(percent / 100 * (len(ordered) - 1))] * 1e6


def p50(seconds: list[float]) -> float:
    return percentile(seconds, 50)


@contextmanager
def no_collection() -> Iterator[None]:
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def measure_lookups(
    requests: Requests, stock: StockHalf, ours: OurHalf, geometry: Geometry, repeats: int
) -> tuple[list[Lookup], Counts]:
    """Ask both halves everything about prompts of every length."""
    lookups: list[Lookup] = []
    hashes = chunks = asked = asked_twice = 0
    for tokens in PROMPT_TOKENS:
        answers: dict[str, list[tuple[Answer, Answer]]] = {question: [] for question in QUESTIONS}
        for repeat in range(repeats + 1):
            length, seed = tokens + PAST_BOUNDARY_TOKENS, 2 * repeat
            kept, first, second = (requests.make(length, seed) for _ in range(3))
            absent = requests.make(length, seed + 1)
            peers: tuple[Peer, Peer] = (stock, ours)
            for peer in peers:
                peer.keep(kept)
            order = peers if repeat % 2 else peers[::-1]
            hashes -= requests.hashes
            for question, request in zip(QUESTIONS, (first, first, second, absent), strict=True):
                ours.backend.asked.clear()
                with no_collection():
                    got = {peer: peer.ask(request, new=question != "again") for peer in order}
                if got[stock].tokens != got[ours].tokens:
                    raise SystemExit(
                        f"{geometry.name}: {question}: stock found {got[stock].tokens} tokens, ours "
                        f"{got[ours].tokens}; a fast wrong answer is no result"
                    )
                if repeat:  # the first round warms up
                    answers[question].append((got[stock], got[ours]))
                if question != "absent":
                    keys = [key for batch in ours.backend.asked for key in batch]
                    asked += len(keys)
                    asked_twice += len(keys) - len(set(keys))
                    chunks += sum(tokens // pack.unit_tokens for pack in ours.planner.packs) if keys else 0
            hashes += requests.hashes
            for request in (first, second, absent):
                for peer in peers:
                    peer.finish(request)
        for question, pairs in answers.items():
            lookups.append(
                Lookup(
                    geometry.name, geometry.aim, tokens, question,
                    stock=[theirs.wall_seconds for theirs, _ in pairs],
                    ours=[mine.wall_seconds for _, mine in pairs],
                    engine=[mine.engine_seconds for _, mine in pairs],
                    stock_cpu=[theirs.cpu_seconds for theirs, _ in pairs],
                    ours_cpu=[mine.cpu_seconds for _, mine in pairs],
                )
            )  # fmt: skip
    return lookups, Counts(geometry.name, hashes, chunks, asked, asked_twice)


def measure_steps(requests: Requests, stock: StockHalf, ours: OurHalf, geometry: Geometry, steps: int) -> Steps:
    """Decode with requests whose chunks end in different steps."""
    running = [requests.make(PROMPT_TOKENS[0] + 4 * index, seed=10**6 + index) for index in range(RUNNING)]
    peers: tuple[Peer, Peer] = (stock, ours)
    for peer in peers:
        for request in running:
            peer.ask(request, new=True)
    decoding = Decoding(geometry, running)
    prefill = decoding.prefill()
    for peer in peers:
        peer.step(prefill)
    decoding.computed(prefill)
    seconds: dict[Peer, list[float]] = {peer: [] for peer in peers}
    for index in range(steps):
        output = decoding.decode()
        with no_collection():
            for peer in peers if index % 2 else peers[::-1]:
                seconds[peer].append(peer.step(output))
        decoding.computed(output)
    for request in running:
        for peer in peers:
            peer.finish(request)
    return Steps(geometry.name, geometry.aim, seconds[stock], seconds[ours])


def verdict(ratio: float, aim: float) -> str:
    """Return a ratio as a fraction, green where it is within the aim."""
    return f"[{'green' if ratio <= aim else 'red'}]1/{1 / ratio:.1f}[/]"


def table(title: str, *columns: str) -> Table:
    made = Table(title=title, title_justify="left")
    for index, column in enumerate(columns):
        made.add_column(column, justify="right" if index else "left", no_wrap=True)
    return made


def lookup_table(title: str, lookups: list[Lookup]) -> Table:
    made = table(
        f"Lookup, µs: {title}",
        "prompt", "question", "stock p50", "p90", "cpu", "ours p50", "p90", "engine", "cpu",
        "ours/stock", "engine/stock", "cpu/cpu", "aim",
    )  # fmt: skip
    for row in lookups:
        stock = [percentile(row.stock, 50), percentile(row.stock, 90), p50(row.stock_cpu)]
        ours = [percentile(row.ours, 50), percentile(row.ours, 90), p50(row.engine), p50(row.ours_cpu)]
        ratios = [
            p50(row.ours) / p50(row.stock),
            p50(row.engine) / p50(row.stock),
            p50(row.ours_cpu) / p50(row.stock_cpu),
        ]
        made.add_row(
            f"{row.tokens // 1024}k", row.question, *(f"{figure:.0f}" for figure in (*stock, *ours)),
            *(verdict(ratio, row.aim) for ratio in ratios), f"1/{1 / row.aim:.0f}",
        )  # fmt: skip
    return made


def step_table(rows: list[Steps]) -> Table:
    made = table(
        f"Step, µs: {RUNNING} requests decode, {len(rows[0].ours)} steps",
        "", "stock p50", "p90", "max", "ours p50", "p90", "max", "ours/stock", "aim",
    )  # fmt: skip
    for row in rows:
        figures = [percentile(part, percent) for part in (row.stock, row.ours) for percent in (50, 90, 100)]
        ratio = verdict(p50(row.ours) / p50(row.stock), row.aim)
        made.add_row(row.geometry, *(f"{figure:.0f}" for figure in figures), ratio, f"1/{1 / row.aim:.0f}")
    return made


def growth_table(lookups: list[Lookup], counts: list[Counts]) -> Table:
    """Show whether the time grows with the chunks, and whether anything is hashed or asked twice."""
    made = table(
        f"Ours, cold: {PROMPT_TOKENS[-1] // 1024}k beside {PROMPT_TOKENS[-2] // 1024}k tokens; counts of all lookups",
        "", "chunks", "cpu", "hashes computed", "chunks covered", "objects asked", "asked twice",
    )  # fmt: skip
    for count in counts:
        short, long = (
            next(row for row in lookups if (row.geometry, row.tokens, row.question) == (count.geometry, tokens, "cold"))
            for tokens in PROMPT_TOKENS[-2:]
        )
        made.add_row(
            count.geometry, f"x {long.tokens / short.tokens:.1f}", f"x {p50(long.ours_cpu) / p50(short.ours_cpu):.1f}",
            *(str(figure) for figure in (count.hashes, count.chunks, count.asked, count.asked_twice)),
        )  # fmt: skip
    return made


def object_table(stock: StockHalf, ours: OurHalf) -> Table:
    made = table("Stored per 1,024 tokens", "", "stock's keys", "our objects", "ours/stock", "aim")
    keys, objects = stock.keys_per_1024_tokens, ours.objects_per_1024_tokens
    made.add_row(
        DEEPSEEK_V4.name, f"{keys:.0f}", f"{objects:.0f}", verdict(objects / keys, DEEPSEEK_V4.aim),
        f"1/{1 / DEEPSEEK_V4.aim:.0f}",
    )  # fmt: skip
    return made


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--medium",
        choices=("shared", "own"),
        default="shared",
        help="a medium that is asked, on the I/O thread, or one that only a worker sees, of which an index is kept",
    )
    parser.add_argument("--repeats", type=int, default=40, help="different prompts of each length")
    parser.add_argument("--steps", type=int, default=256, help="decoding steps")
    parser.add_argument("--json", type=Path, help="also write the samples to this file")
    arguments = parser.parse_args()
    shared = arguments.medium == "shared"
    console = Console(width=150)
    logging.getLogger("vllm").setLevel(logging.ERROR)
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    lookups: list[Lookup] = []
    steps: list[Steps] = []
    counts: list[Counts] = []
    with tempfile.TemporaryDirectory(prefix="offload-core-bench-") as folder:
        vllm_config = engine_config(Path(folder))
        for geometry in GEOMETRIES:
            stock, ours = StockHalf(vllm_config, geometry), OurHalf(vllm_config, geometry, shared=shared)
            requests = Requests(vllm_config, geometry)
            rows, count = measure_lookups(requests, stock, ours, geometry, arguments.repeats)
            lookups += rows
            counts.append(count)
            steps.append(measure_steps(requests, stock, ours, geometry, arguments.steps))
            ours.shutdown()
            console.print(lookup_table(geometry.name, rows))
        stock, ours = StockHalf(vllm_config, DEEPSEEK_V4), OurHalf(vllm_config, DEEPSEEK_V4, shared=shared)
        ours.shutdown()
    for made in (growth_table(lookups, counts), step_table(steps), object_table(stock, ours)):
        console.print(made)
    if arguments.json:
        samples: dict[str, Any] = {
            name: [asdict(row) for row in rows]
            for name, rows in (("lookups", lookups), ("steps", steps), ("counts", counts))
        }
        arguments.json.write_text(json.dumps(samples, indent=1) + "\n")


if __name__ == "__main__":
    main()
