"""Time to first token of prompts in an LMCache server: our tier beside LMCache's own connector.

Both engines use one server at the same time: ours the module of offload-core, LMCache's connector the ports of its own.
Two models run, a Gemma 3 of some 76 million parameters as it is, and one whose layers all attend fully. LMCache's
connector serves the second in its default way on CPUs, in which the engine's process copies. The first has several
groups, so the server copies, from KV caches in shared memory. The prompts have 3,900 tokens and run one at a time. The
engines take turns with each prompt, in random order. A load is the time beyond that of the engine's own prefix cache.
Loads are not compared if ours is within the spread of that cache, from p50 to p90.

    python -m benchmarks.lmcache_connector [--prompts 8] [--repeats 3] [--dtype float32] [--json FILE]
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from rich.console import Console
from rich.table import Table

from benchmarks.first_tokens import (
    LOCAL,
    PROMPT_TOKENS,
    WARM_UP_ROUNDS,
    Turns,
    add_options,
    prepare,
    prompts_of,
    row_of,
    run_spec,
)
from benchmarks.live_engines import running
from benchmarks.reporting.document import Run
from benchmarks.reporting.rows import FirstToken, FirstTokenFromLMCache, LMCacheConnector
from tests.support import tiny_models
from tests.support.clusters.lmcache import FOR_OWN_CONNECTOR, LMCacheCluster, why_not
from tests.support.engine.spec import LMCacheMode, PromptSpec, disk_transfer_config, lmcache_transfer_config

OURS = "offload-core's tier"
THEIRS = "LMCache's connector"
L1_GIB = 4.0


class Subject(NamedTuple):
    """A model, and the way in which LMCache's connector serves it."""

    name: str
    full_every: int
    mode: LMCacheMode


SUBJECTS = (
    Subject("full attention", 1, "engine_driven"),
    Subject("sliding windows and full attention", 6, "lmcache_driven"),
)


def measure(
    subject: Subject, folder: Path, prompts: Sequence[PromptSpec], repeats: int, dtype: str, console: Console
) -> list[FirstTokenFromLMCache]:
    """Measure one model, and return a row for each way to the first token."""
    console.print(f"{subject.name}: computing and storing …")
    folder.mkdir()
    model = tiny_models.write_gemma3_75m(folder / "model", dtype=dtype, full_every=subject.full_every)
    cluster = LMCacheCluster(folder / "lmcache.log", l1_gib=L1_GIB, flags=FOR_OWN_CONNECTOR)
    cluster.start()
    try:
        specs = {
            LOCAL: run_spec(model, dtype, None),
            OURS: run_spec(model, dtype, disk_transfer_config(folder, backends=[cluster.tier(name="lmcache")])),
            THEIRS: run_spec(model, dtype, lmcache_transfer_config(cluster.zmq_port, subject.mode)),
        }
        with running(specs, folder) as live:
            turns = Turns(live)
            for prompt in prompts:
                turns.ask(LOCAL, "recompute", prompt)
            for _ in range(WARM_UP_ROUNDS):  # the engines compute and store in the first round
                turns.ask_all(dict.fromkeys(specs, "warm-up"), prompts)
            console.print("loads, in turns …")
            for _ in range(repeats):
                turns.ask_all({name: name for name in specs}, prompts)
    finally:
        cluster.stop()
    local = row_of(LOCAL, turns.answers[LOCAL])
    rows = [row_of(name, turns.answers[name], local.p50_ms) for name in (LOCAL, OURS, THEIRS, "recompute")]
    theirs = next(row for row in rows if row.name == THEIRS)
    return [
        FirstTokenFromLMCache(
            **row.model_dump(),
            model=subject.name,
            transfer_mode=subject.mode if row.name == THEIRS else None,
            load_ms=row.p50_ms - local.p50_ms if row.name in (OURS, THEIRS) else None,
            speed_beside_lmcache=speed(row, theirs, local) if row.name == OURS else None,
        )
        for row in rows
    ]


def speed(ours: FirstToken, theirs: FirstToken, local: FirstToken) -> float | None:
    """Return the time of their load in relation to ours; ``None`` if ours is within the spread of the local cache."""
    load_ms = ours.p50_ms - local.p50_ms
    return (theirs.p50_ms - local.p50_ms) / load_ms if load_ms > local.p90_ms - local.p50_ms else None


def table_of(rows: Sequence[FirstTokenFromLMCache]) -> Table:
    table = Table(title=f"Time to first token, prompts of {PROMPT_TOKENS} tokens in an LMCache server")
    for index, column in enumerate(
        ("model", "", "served", "samples", "p50 ms", "p90 ms", "p99 ms", "load ms", "LMCache's load / ours")
    ):
        table.add_column(column, justify="right" if index > 1 else "left")
    for row in rows:
        figures = [f"{figure:.1f}" for figure in (row.p50_ms, row.p90_ms, row.p99_ms)]
        load = "" if row.load_ms is None else f"{row.load_ms:.1f}"
        compared = "-" if row.is_ours else ""
        if row.speed_beside_lmcache is not None:
            compared = f"{row.speed_beside_lmcache:.1f} (aim 2)"
        name = row.name if row.transfer_mode is None else f"{row.name}, {row.transfer_mode}"
        table.add_row(row.model, name, str(row.served_tokens), str(row.samples), *figures, load, compared)
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_options(parser)
    arguments = parser.parse_args()
    if reason := why_not():
        raise SystemExit(f"LMCache cannot run here: {reason}")
    run = Run(arguments)
    console = Console(width=160)
    prompts = prompts_of(arguments.prompts)
    rows: list[FirstTokenFromLMCache] = []
    prepare()
    with tempfile.TemporaryDirectory(prefix="offload-core-bench-") as folder:
        for number, subject in enumerate(SUBJECTS):
            own = Path(folder, str(number))
            rows += measure(subject, own, prompts, arguments.repeats, arguments.dtype, console)
    console.print(table_of(rows))
    run.write(LMCacheConnector(prompt_tokens=PROMPT_TOKENS, first_tokens=rows))


if __name__ == "__main__":
    main()
