"""Costs of the scheduler half for the engine: lookups and steps, beside vLLM's own ``OffloadingConnector``, in one run.

Both halves get the same requests in turns. Every object is present in RAM, except for "absent". The questions:

* cold: the first question for a prompt, by a new request;
* again: the same request asks once more, as a request does that waits for room;
* warm: a new request with the same prompt;
* absent: a new request with a prompt that has no objects.

The times of an answer:

* ours: until the answer, with the way to the I/O thread and back;
* engine: the part of it in which the engine's thread works and cannot do other work;
* cpu: the processor time of all threads, the only figure that holds on a busy machine.

Stock answers on the engine's thread. A step is the metadata of one decoding step and the report that its stores have
ended.

    python -m benchmarks.scheduler [--medium shared|own] [--repeats 40] [--steps 256] [--json FILE]
"""

from __future__ import annotations

import argparse
import gc
import logging
import os
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console
from rich.table import Table

from benchmarks.reporting import rows
from benchmarks.reporting.document import Run, add_json_option
from benchmarks.reporting.rows import percentile
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
PAST_BOUNDARY_TOKENS = 3  # the engine always computes the last token; past a boundary this costs no chunk
QUESTIONS = ("cold", "again", "warm", "absent")
RUNNING = 64


def microseconds(seconds: Sequence[float], percent: int = 50) -> float:
    """Return a percentile in microseconds."""
    return percentile(seconds, percent) * 1e6


@contextmanager
def no_collection() -> Iterator[None]:
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def measure_lookups(
    requests: Requests, stock: StockHalf, ours: OurHalf, geometry: Geometry, repeats: int
) -> tuple[list[rows.Lookup], rows.Growth]:
    """Ask both halves every question about prompts of every length."""
    lookups: list[rows.Lookup] = []
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
                        f"{geometry.name}: {question}: stock found {got[stock].tokens} tokens, but ours found "
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
        lookups += [lookup_row(geometry, tokens, question, pairs) for question, pairs in answers.items()]
    short, long = (
        next(row for row in lookups if (row.tokens, row.question) == (tokens, "cold")) for tokens in PROMPT_TOKENS[-2:]
    )
    growth = rows.Growth(
        geometry=geometry.name,
        chunks_factor=long.tokens / short.tokens,
        cpu_factor=long.ours_cpu_us / short.ours_cpu_us,
        hashes=hashes,
        chunks=chunks,
        asked=asked,
        asked_twice=asked_twice,
    )
    return lookups, growth


def lookup_row(geometry: Geometry, tokens: int, question: str, pairs: Sequence[tuple[Answer, Answer]]) -> rows.Lookup:
    """Return the row of one question from pairs of stock's answer and ours."""
    stock = [theirs.wall_seconds for theirs, _ in pairs]
    ours = [mine.wall_seconds for _, mine in pairs]
    engine = microseconds([mine.engine_seconds for _, mine in pairs])
    stock_cpu = microseconds([theirs.cpu_seconds for theirs, _ in pairs])
    ours_cpu = microseconds([mine.cpu_seconds for _, mine in pairs])
    return rows.Lookup(
        geometry=geometry.name,
        tokens=tokens,
        question=question,
        samples=len(pairs),
        aim=geometry.aim,
        stock_p50_us=microseconds(stock),
        stock_p90_us=microseconds(stock, 90),
        stock_cpu_us=stock_cpu,
        ours_p50_us=microseconds(ours),
        ours_p90_us=microseconds(ours, 90),
        engine_p50_us=engine,
        ours_cpu_us=ours_cpu,
        ratio=microseconds(ours) / microseconds(stock),
        engine_ratio=engine / microseconds(stock),
        cpu_ratio=ours_cpu / stock_cpu,
    )


def measure_steps(requests: Requests, stock: StockHalf, ours: OurHalf, geometry: Geometry, steps: int) -> rows.Steps:
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
    theirs, mine = ([microseconds(seconds[peer], percent) for percent in (50, 90, 100)] for peer in peers)
    return rows.Steps(
        geometry=geometry.name,
        samples=steps,
        aim=geometry.aim,
        stock_p50_us=theirs[0],
        stock_p90_us=theirs[1],
        stock_max_us=theirs[2],
        ours_p50_us=mine[0],
        ours_p90_us=mine[1],
        ours_max_us=mine[2],
        ratio=mine[0] / theirs[0],
    )


def verdict(ratio: float, aim: float) -> str:
    """Return a ratio as a fraction, green if it is within the aim, else red."""
    return f"[{'green' if ratio <= aim else 'red'}]1/{1 / ratio:.1f}[/]"


def table(title: str, *columns: str) -> Table:
    made = Table(title=title, title_justify="left")
    for index, column in enumerate(columns):
        made.add_column(column, justify="right" if index else "left", no_wrap=True)
    return made


def lookup_table(title: str, lookups: list[rows.Lookup]) -> Table:
    made = table(
        f"Lookup, µs: {title}",
        "prompt", "question", "stock p50", "p90", "cpu", "ours p50", "p90", "engine", "cpu",
        "ours/stock", "engine/stock", "cpu/cpu", "aim",
    )  # fmt: skip
    for row in lookups:
        stock = (row.stock_p50_us, row.stock_p90_us, row.stock_cpu_us)
        ours = (row.ours_p50_us, row.ours_p90_us, row.engine_p50_us, row.ours_cpu_us)
        ratios = (row.ratio, row.engine_ratio, row.cpu_ratio)
        made.add_row(
            f"{row.tokens // 1024}k", row.question, *(f"{figure:.0f}" for figure in (*stock, *ours)),
            *(verdict(ratio, row.aim) for ratio in ratios), f"1/{1 / row.aim:.0f}",
        )  # fmt: skip
    return made


def step_table(steps: list[rows.Steps]) -> Table:
    made = table(
        f"Step, µs: {RUNNING} requests decode, {steps[0].samples} steps",
        "", "stock p50", "p90", "max", "ours p50", "p90", "max", "ours/stock", "aim",
    )  # fmt: skip
    for row in steps:
        figures = (
            *(row.stock_p50_us, row.stock_p90_us, row.stock_max_us),
            *(row.ours_p50_us, row.ours_p90_us, row.ours_max_us),
        )
        ratio = verdict(row.ratio, row.aim)
        made.add_row(row.geometry, *(f"{figure:.0f}" for figure in figures), ratio, f"1/{1 / row.aim:.0f}")
    return made


def growth_table(growth: list[rows.Growth]) -> Table:
    """Return the table of the time's growth with the chunks, and of the counts of hashes and objects."""
    made = table(
        f"Ours, cold: {PROMPT_TOKENS[-1] // 1024}k beside {PROMPT_TOKENS[-2] // 1024}k tokens; counts of all lookups",
        "", "chunks", "cpu", "hashes computed", "chunks covered", "objects asked", "asked twice",
    )  # fmt: skip
    for row in growth:
        made.add_row(
            row.geometry, f"x {row.chunks_factor:.1f}", f"x {row.cpu_factor:.1f}",
            *(str(figure) for figure in (row.hashes, row.chunks, row.asked, row.asked_twice)),
        )  # fmt: skip
    return made


def object_row(stock: StockHalf, ours: OurHalf) -> rows.Objects:
    keys, objects = stock.keys_per_1024_tokens, ours.objects_per_1024_tokens
    return rows.Objects(
        geometry=DEEPSEEK_V4.name, aim=DEEPSEEK_V4.aim, stock_keys=keys, our_objects=objects, ratio=objects / keys
    )


def object_table(row: rows.Objects) -> Table:
    made = table("Stored per 1,024 tokens", "", "stock's keys", "our objects", "ours/stock", "aim")
    made.add_row(
        row.geometry, f"{row.stock_keys:.0f}", f"{row.our_objects:.0f}", verdict(row.ratio, row.aim),
        f"1/{1 / row.aim:.0f}",
    )  # fmt: skip
    return made


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--medium",
        choices=("shared", "own"),
        default="shared",
        help="shared: the I/O thread asks the medium; own: only a worker sees the medium, and the half keeps an index",
    )
    parser.add_argument("--repeats", type=int, default=40, help="different prompts of each length")
    parser.add_argument("--steps", type=int, default=256, help="decoding steps")
    add_json_option(parser)
    arguments = parser.parse_args()
    run = Run(arguments)
    shared = arguments.medium == "shared"
    console = Console(width=150)
    logging.getLogger("vllm").setLevel(logging.ERROR)
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    lookups: list[rows.Lookup] = []
    steps: list[rows.Steps] = []
    growth: list[rows.Growth] = []
    with tempfile.TemporaryDirectory(prefix="offload-core-bench-") as folder:
        vllm_config = engine_config(Path(folder))
        for geometry in GEOMETRIES:
            stock, ours = StockHalf(vllm_config, geometry), OurHalf(vllm_config, geometry, shared=shared)
            requests = Requests(vllm_config, geometry)
            asked, grown = measure_lookups(requests, stock, ours, geometry, arguments.repeats)
            lookups += asked
            growth.append(grown)
            steps.append(measure_steps(requests, stock, ours, geometry, arguments.steps))
            ours.shutdown()
            console.print(lookup_table(geometry.name, asked))
        stock, ours = StockHalf(vllm_config, DEEPSEEK_V4), OurHalf(vllm_config, DEEPSEEK_V4, shared=shared)
        ours.shutdown()
        objects = object_row(stock, ours)
    for made in (growth_table(growth), step_table(steps), object_table(objects)):
        console.print(made)
    run.write(rows.Scheduler(medium=arguments.medium, lookups=lookups, growth=growth, steps=steps, objects=[objects]))


if __name__ == "__main__":
    main()
