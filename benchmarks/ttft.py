"""Time to first token of long prompts: recompute, local prefix cache, our tiers, the stock connector from RAM.

The model is a Gemma 3 of some 76 million parameters with seeded random weights. The prompts have 3,900 tokens and run
one at a time. Four engines live at once and take turns with each prompt, in random order, so that all see the same
machine. Before each turn the machine rests, and the engine computes a few tokens. The objects of the disk tier were
stored by an engine that has ended. "page cache" reads objects that the operating system still holds in memory. "cold"
asks the operating system to drop them first. A ratio compares the median with that of the local prefix cache.

    python -m benchmarks.ttft [--prompts 8] [--repeats 3] [--dtype float32] [--json FILE]
"""

from __future__ import annotations

import argparse
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path

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
from benchmarks.reporting.rows import FirstToken, Ttft
from tests.support import tiny_models
from tests.support.engine.spec import PromptSpec, Round, disk_transfer_config, run_in_process, stock_transfer_config

RUN_TIMEOUT_SECONDS = 1800.0
CPU_TIER = {"name": "cpu", "type": "cpu", "capacity": "2GiB"}
DISK = "disk, page cache"


def drop_from_page_cache(folder: Path) -> None:
    """Write the objects' dirty pages, then ask the operating system to drop all pages of objects."""
    for path in folder.rglob("*.kv"):
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def measure(
    folder: Path, prompts: Sequence[PromptSpec], repeats: int, dtype: str, console: Console
) -> list[FirstToken]:
    """Run every variant and return a row for each."""
    model = tiny_models.write_gemma3_75m(folder / "model", dtype=dtype)
    disk = disk_transfer_config(folder / "kv")

    prepare()
    console.print("our connector, storing …")
    stores = run_spec(model, dtype, disk).model_copy(update={"rounds": [Round(name="stores", prompts=list(prompts))]})
    stored = run_in_process(stores, timeout_seconds=RUN_TIMEOUT_SECONDS, fresh_interpreter=True).rounds[0].prompts
    specs = {
        name: run_spec(model, dtype, transfer)
        for name, transfer in {
            LOCAL: None,
            "cpu": disk_transfer_config(folder, backends=[CPU_TIER]),
            DISK: disk,
            "stock connector, RAM": stock_transfer_config(),
        }.items()
    }
    with running(specs, folder) as live:
        turns = Turns(live)
        console.print("recompute, and a first load that is not measured …")
        for prompt in prompts:
            turns.ask(LOCAL, "recompute", prompt)
        for answer in stored:
            turns.add("recompute while storing", answer)
        for _ in range(WARM_UP_ROUNDS):  # the cpu tier and the stock connector compute and store in the first round
            turns.ask_all(dict.fromkeys(specs, "warm-up"), prompts)
        console.print("loads from memory and from the page cache, in turns …")
        for _ in range(repeats):
            turns.ask_all({name: name for name in specs}, prompts)
        console.print("loads from a cold disk …")
        for prompt in prompts:
            drop_from_page_cache(folder / "kv")
            turns.ask(DISK, "disk, cold", prompt)
    local = row_of(LOCAL, turns.answers[LOCAL])
    rest = ("cpu", DISK, "disk, cold", "stock connector, RAM", "recompute", "recompute while storing")
    return [local, *(row_of(name, turns.answers[name], local.p50_ms) for name in rest)]


def table_of(rows: list[FirstToken]) -> Table:
    table = Table(title=f"Time to first token, prompts of {PROMPT_TOKENS} tokens")
    table.add_column("", no_wrap=True)
    for column in ("served", "samples", "p50 ms", "p90 ms", "p99 ms", "ratio"):
        table.add_column(column, justify="right")
    for row in rows:
        figures = [f"{figure:.1f}" for figure in (row.p50_ms, row.p90_ms, row.p99_ms)]
        table.add_row(row.name, str(row.served_tokens), str(row.samples), *figures, f"{row.ratio:.2f}")
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_options(parser)
    arguments = parser.parse_args()
    run = Run(arguments)
    console = Console(width=120)
    prompts = prompts_of(arguments.prompts)
    with tempfile.TemporaryDirectory(prefix="offload-core-bench-") as folder:
        rows = measure(Path(folder), prompts, arguments.repeats, arguments.dtype, console)
    console.print(table_of(rows))
    run.write(Ttft(prompt_tokens=PROMPT_TOKENS, first_tokens=rows))


if __name__ == "__main__":
    main()
