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
import random
import tempfile
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.live_engines import LiveEngine, Order, running
from benchmarks.reporting.document import Run, add_json_option
from benchmarks.reporting.options import add_dtype_option
from benchmarks.reporting.rows import FirstToken, Ttft, percentile
from tests.support import tiny_models
from tests.support.engine.spec import (
    PromptResult,
    PromptSpec,
    Round,
    RunSpec,
    disk_transfer_config,
    run_in_process,
    stock_transfer_config,
)

PROMPT_TOKENS = 3900
VOCABULARY = 4096
RUN_TIMEOUT_SECONDS = 1800.0
MAX_LOGPROB_GAP = 0.1
WARM_UP_ROUNDS = 2
WAKE_TOKENS = 16
"""Tokens of the prompt before each measured one, too few for a block."""
REST_SECONDS = 0.6
"""Rest before each turn, so that no thread of another engine is still at work."""
CPU_TIER = {"name": "cpu", "type": "cpu", "capacity": "2GiB"}
SERVER_ENVIRONMENT = {
    "OMP_NUM_THREADS": str(os.cpu_count()),
    "TORCHDYNAMO_DISABLE": "0",
    "VLLM_CPU_OMP_THREADS_BIND": "auto",
}
"""Threads and compilation of a server."""
LOCAL = "local prefix cache"
DISK = "disk, page cache"


def prompt_of(name: str, tokens: int, seed: int) -> PromptSpec:
    token_ids = tiny_models.prompt_token_ids(tokens, seed=seed, vocab_size=VOCABULARY)
    return PromptSpec(name=name, token_ids=token_ids, max_tokens=2)


def drop_from_page_cache(folder: Path) -> None:
    """Write the objects' dirty pages, then ask the operating system to drop all pages of objects."""
    for path in folder.rglob("*.kv"):
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


class Turns:
    """Engines that answer prompts in turns, and the answers that are measured.

    The model may run in bfloat16. There a prefill from a prefix rounds differently from a whole one, with and without
    offloading. So the log probabilities may differ by up to :data:`MAX_LOGPROB_GAP` from those of the recompute.
    """

    def __init__(self, live: Mapping[str, LiveEngine], wake: PromptSpec) -> None:
        self._live = live
        self._wake = wake
        self._chance = random.Random(1)
        self._computed: dict[str, PromptResult] = {}
        self.answers: dict[str, list[PromptResult]] = defaultdict(list)

    def ask(self, engine: str, row: str, prompt: PromptSpec) -> None:
        """Let an engine answer a prompt, for a row of the table; see :meth:`add`."""
        keeps = engine == LOCAL
        time.sleep(REST_SECONDS)
        self._live[engine].tell(Order(prompts=[self._wake], keeps_prefix_cache=keeps))
        (answer,) = self._live[engine].tell(Order(prompts=[prompt], keeps_prefix_cache=keeps)).prompts
        self.add(row, answer)

    def add(self, row: str, answer: PromptResult) -> None:
        """Add an answer to a row. The first answer to a prompt is the one that the others must match.

        Raises:
            SystemExit: the first token differs from the recomputed one: a fast wrong answer is no result.
        """
        wanted = self._computed.setdefault(answer.name, answer)
        gap = abs(answer.logprobs[0] - wanted.logprobs[0])
        if answer.token_ids[0] != wanted.token_ids[0] or gap > MAX_LOGPROB_GAP:
            raise SystemExit(f"{row}: prompt {answer.name} starts with another token or probability than recomputed")
        self.answers[row].append(answer)

    def ask_all(self, rows: Mapping[str, str], prompts: Sequence[PromptSpec]) -> None:
        """Let engines answer prompts in turns.

        Args:
            rows: the row of each engine that takes part.
        """
        for prompt in prompts:
            for engine in self._chance.sample(list(rows), len(rows)):
                self.ask(engine, rows[engine], prompt)


def row_of(name: str, answers: Sequence[PromptResult], base_ms: float | None = None) -> FirstToken:
    """Return the row of some answers; its ratio is to the median ``base_ms``, by default to its own median."""
    p50, p90, p99 = (percentile([1e3 * answer.ttft_seconds for answer in answers], at) for at in (50, 90, 99))
    return FirstToken(
        name=name,
        served_tokens=min(answer.external_cached_tokens + answer.local_cached_tokens for answer in answers),
        samples=len(answers),
        p50_ms=p50,
        p90_ms=p90,
        p99_ms=p99,
        ratio=p50 / (base_ms or p50),
    )


def measure(
    folder: Path, prompts: Sequence[PromptSpec], repeats: int, dtype: str, console: Console
) -> list[FirstToken]:
    """Run every variant and return a row for each."""
    model = tiny_models.write_gemma3_75m(folder / "model", dtype=dtype)
    disk = disk_transfer_config(folder / "kv")

    def spec(transfer: dict[str, Any] | None) -> RunSpec:
        return RunSpec(
            model=str(model), dtype=dtype, max_model_len=4096, max_num_batched_tokens=4096,
            kv_cache_memory_bytes=1 << 30, kv_transfer_config=transfer,
        )  # fmt: skip

    os.environ.update(SERVER_ENVIRONMENT)
    console.print("our connector, storing …")
    stores = spec(disk).model_copy(update={"rounds": [Round(name="stores", prompts=list(prompts))]})
    stored = run_in_process(stores, timeout_seconds=RUN_TIMEOUT_SECONDS, fresh_interpreter=True).rounds[0].prompts
    specs = {
        LOCAL: spec(None),
        "cpu": spec(disk_transfer_config(folder, backends=[CPU_TIER])),
        DISK: spec(disk),
        "stock connector, RAM": spec(stock_transfer_config()),
    }
    with running(specs, folder) as live:
        turns = Turns(live, prompt_of("wake", WAKE_TOKENS, seed=10_000))
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
    parser.add_argument("--prompts", type=int, default=8, help="number of different prompts")
    parser.add_argument("--repeats", type=int, default=3, help="measurements of each prompt that a cache serves")
    add_dtype_option(parser)
    add_json_option(parser)
    arguments = parser.parse_args()
    run = Run(arguments)
    console = Console(width=120)
    prompts = [prompt_of(str(seed), PROMPT_TOKENS, seed) for seed in range(arguments.prompts)]
    with tempfile.TemporaryDirectory(prefix="offload-core-bench-") as folder:
        rows = measure(Path(folder), prompts, arguments.repeats, arguments.dtype, console)
    console.print(table_of(rows))
    run.write(Ttft(prompt_tokens=PROMPT_TOKENS, first_tokens=rows))


if __name__ == "__main__":
    main()
