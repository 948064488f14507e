"""Time to first token of long prompts: recompute, local prefix cache, our tiers, the stock connector from RAM.

The model is a Gemma 3 of some 76 million parameters with seeded random weights. The prompts have 3,900 tokens and run
one at a time. All rows come from one run on the same machine. "page cache" reads objects that the operating system
still holds in memory. "cold" asks the operating system to drop them first. A ratio compares the median with that of the
local prefix cache.

    python -m benchmarks.ttft [--prompts 8] [--repeats 3] [--dtype float32] [--json FILE]
"""

from __future__ import annotations

import argparse
import os
import tempfile
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.reporting.document import Run, add_json_option
from benchmarks.reporting.options import add_dtype_option
from benchmarks.reporting.rows import FirstToken, Ttft, percentile
from tests.support import tiny_models
from tests.support.engine.spec import (
    PromptSpec,
    Round,
    RunResult,
    RunSpec,
    disk_transfer_config,
    run_in_process,
    stock_transfer_config,
)

PROMPT_TOKENS = 3900
VOCABULARY = 4096
RUN_TIMEOUT_SECONDS = 1800.0
MAX_LOGPROB_GAP = 0.1
CPU_TIER = {"name": "cpu", "type": "cpu", "capacity": "2GiB"}


def drop_from_page_cache(folder: Path) -> None:
    """Write the objects' dirty pages, then ask the operating system to drop all pages of objects."""
    for path in folder.rglob("*.kv"):
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def row_of(name: str, result: RunResult, rounds: slice, base_ms: float | None = None) -> FirstToken:
    """Return the row of some rounds; its ratio is to the median ``base_ms``, by default to its own median."""
    prompts = [prompt for item in result.rounds[rounds] for prompt in item.prompts]
    p50, p90, p99 = (percentile([1e3 * prompt.ttft_seconds for prompt in prompts], at) for at in (50, 90, 99))
    return FirstToken(
        name=name,
        served_tokens=min(prompt.external_cached_tokens + prompt.local_cached_tokens for prompt in prompts),
        samples=len(prompts),
        p50_ms=p50,
        p90_ms=p90,
        p99_ms=p99,
        ratio=p50 / (base_ms or p50),
    )


def check_outputs(what: str, result: RunResult, reference: RunResult) -> None:
    """Stop if a first token differs from the recomputed one: a fast wrong answer is no result.

    The model runs in bfloat16. There a prefill from a prefix rounds differently from a whole one, with and without
    offloading. So the log probabilities may differ by up to :data:`MAX_LOGPROB_GAP`.
    """
    for item in result.rounds:
        for got, wanted in zip(item.prompts, reference.rounds[0].prompts, strict=True):
            if got.token_ids[0] != wanted.token_ids[0] or abs(got.logprobs[0] - wanted.logprobs[0]) > MAX_LOGPROB_GAP:
                raise SystemExit(f"{what}: prompt {got.name} starts with another token or probability than recomputed")


def measure(folder: Path, prompts: list[PromptSpec], repeats: int, dtype: str, console: Console) -> list[FirstToken]:
    """Run every variant and return a row for each."""
    model = tiny_models.write_gemma3_75m(folder / "model", dtype=dtype)
    once = [Round(name="once", prompts=prompts)]
    again = [Round(name=f"again {index}", prompts=prompts) for index in range(repeats)]
    reset = [Round(name=f"reset {index}", prompts=prompts, reset_prefix_cache_before=True) for index in range(repeats)]

    def run(what: str, rounds: list[Round], transfer: dict[str, Any] | None) -> RunResult:
        console.print(f"{what} …")
        spec = RunSpec(
            model=str(model), dtype=dtype, max_model_len=4096, max_num_batched_tokens=4096,
            kv_cache_memory_bytes=1 << 30, kv_transfer_config=transfer, rounds=rounds,
        )  # fmt: skip
        env = {  # the threads and compilation of a server
            "OMP_NUM_THREADS": str(os.cpu_count()), "TORCHDYNAMO_DISABLE": "0", "VLLM_CPU_OMP_THREADS_BIND": "auto",
        }  # fmt: skip
        return run_in_process(spec, timeout_seconds=RUN_TIMEOUT_SECONDS, env=env, fresh_interpreter=True)

    plain = run("recompute and local prefix cache", [*once, *again], None)
    store = run("our connector, storing", once, disk_transfer_config(folder / "kv"))
    warm = run("our connector, loading from the page cache", reset, disk_transfer_config(folder / "kv"))
    drop_from_page_cache(folder / "kv")
    cold = run("our connector, loading cold", once, disk_transfer_config(folder / "kv"))
    memory = run("our connector, host memory", [*once, *reset], disk_transfer_config(folder, backends=[CPU_TIER]))
    stock = run("stock connector with an in-RAM spec", [*once, *reset], stock_transfer_config())
    results = {"local": plain, "storing": store, "memory": memory, "page cache": warm, "cold": cold, "stock": stock}
    for what, result in results.items():
        check_outputs(what, result, plain)
    local = row_of("local prefix cache", plain, slice(1, None))
    return [
        local,
        row_of("cpu", memory, slice(1, None), local.p50_ms),
        row_of("disk, page cache", warm, slice(0, None), local.p50_ms),
        row_of("disk, cold", cold, slice(0, None), local.p50_ms),
        row_of("stock connector, RAM", stock, slice(1, None), local.p50_ms),
        row_of("recompute", plain, slice(0, 1), local.p50_ms),
        row_of("recompute while storing", store, slice(0, 1), local.p50_ms),
    ]


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
    parser.add_argument("--prompts", type=int, default=8, help="number of different prompts")
    parser.add_argument("--repeats", type=int, default=3, help="measurements of each prompt that a cache serves")
    add_dtype_option(parser)
    add_json_option(parser)
    arguments = parser.parse_args()
    run = Run(arguments)
    console = Console(width=120)
    prompts = [
        PromptSpec(
            name=str(seed),
            token_ids=tiny_models.prompt_token_ids(PROMPT_TOKENS, seed=seed, vocab_size=VOCABULARY),
            max_tokens=2,
        )
        for seed in range(arguments.prompts)
    ]
    with tempfile.TemporaryDirectory(prefix="offload-core-bench-") as folder:
        rows = measure(Path(folder), prompts, arguments.repeats, arguments.dtype, console)
    console.print(table_of(rows))
    run.write(Ttft(prompt_tokens=PROMPT_TOKENS, first_tokens=rows))


if __name__ == "__main__":
    main()
