"""Tokens per second while everything is stored and nothing is reused: the cost of offloading for new prompts.

The model is a Gemma 3 of some 76 million parameters with seeded random weights. All prompts are different, and those of
a batch run at the same time. Contenders, each an engine:

- "none": no connector. Beside one half of its batches, this process writes as many bytes as "disk" stores, by plain
  writes to files of 2 MiB. So it shows the cost of the system itself;
- "disk", "disk, O_DIRECT" and "cpu": ours with one tier. The memory of "cpu" is taken at the start (``prefault``);
- "stock": vLLM's own connector with an in-RAM spec.

All engines are there at once, and one of them computes at a time. They take turns in a random order, after a turn that
warms them up. A turn is two batches, in a random order: one is stored, and the requests of the other opt out of it. For
"stock", which knows no such option, the two are alike. A batch's tokens per second are those until its last output, and
the next batch begins when its stores have ended. There are two ratios:

- "to opted out": of a batch to the other one of its turn. It has the cost of lookups, copies and stores, and no
  difference between two engines, each of which has a speed of its own. The limit is 1.
- "to none": of the opted-out batch to that of "none" in the same round of turns.

    python -m benchmarks.overhead [--turns 12] [--prompts 8] [--prompt-tokens 1500] [--output-tokens 64]

``--dtype float32`` is for processors without bfloat16. A line after each round tells the medians so far.
"""

from __future__ import annotations

import argparse
import os
import random
import tempfile
import time
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import count
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from rich.console import Console
from rich.table import Table

from benchmarks.reporting.options import add_dtype_option
from benchmarks.reporting.rows import percentile
from tests.support import tiny_models
from tests.support.engine.spec import (
    PromptSpec,
    Round,
    RoundResult,
    RunResult,
    RunSpec,
    disk_transfer_config,
    run_in_process,
    stock_transfer_config,
)

VOCABULARY = 4096
FILE_BYTES = 2 << 20
OPT_OUT = {"hybrid_offload": {"load": False, "store": False}}
RUN_TIMEOUT_SECONDS = 3600.0
BATCH_TIMEOUT_SECONDS = 600.0
ENGINE_ENVIRONMENT = {  # the threads and compilation of a server
    "OMP_NUM_THREADS": str(os.cpu_count()), "TORCHDYNAMO_DISABLE": "0", "VLLM_CPU_OMP_THREADS_BIND": "auto",
}  # fmt: skip


class Speeds(NamedTuple):
    """The tokens per second of an engine's batches, by turn."""

    stored: list[float]
    opted_out: list[float]

    @property
    def ratios(self) -> list[float]:
        """By turn, the part of the speed that remains while the prompts are stored."""
        return [one / other for one, other in zip(self.stored, self.opted_out, strict=True)]


def prompts(number_of_prompts: int, tokens: int, output_tokens: int, seed: int, stored: bool) -> list[PromptSpec]:
    """Return prompts that share nothing."""
    return [
        PromptSpec(
            name=str(number),
            token_ids=tiny_models.prompt_token_ids(tokens, seed=1000 * seed + number, vocab_size=VOCABULARY),
            max_tokens=output_tokens,
            kv_transfer_params=None if stored else OPT_OUT,
        )
        for number in range(number_of_prompts)
    ]


class PlainWriter:
    """Writes as much as a tier stores per batch, evenly over as long as a batch takes.

    Args:
        like: the folder of the tier.
    """

    def __init__(self, folder: Path, like: Path) -> None:
        self._folder = folder
        self._like = like
        self._nbytes = 0
        self._numbers = count()
        self.batch_seconds = 0.0
        """The time that a batch takes."""

    def write(self, until: Path) -> None:
        """Write until all is written, or until a file exists."""
        data = os.urandom(FILE_BYTES)
        began = time.monotonic()
        for number in range(self._nbytes // FILE_BYTES):
            if until.exists():
                break
            time.sleep(max(0.0, began + number * FILE_BYTES / self._nbytes * self.batch_seconds - time.monotonic()))
            (self._folder / str(next(self._numbers))).write_bytes(data)

    def learn(self) -> None:
        """Note the bytes that the tier has stored for its first batch."""
        self._nbytes = sum(path.stat().st_size for path in self._like.rglob("*") if path.is_file())


class Contender:
    """An engine in its own process that computes a batch when it is told to.

    Args:
        transfer: the engine's ``kv_transfer_config``.
        folder: a new one, for the files that begin and end the batches.
        writer: writes beside the batches that are "stored".
        engine_args: of vLLM, beside and in place of those of this benchmark.
    """

    def __init__(
        self,
        model: Path,
        transfer: dict[str, Any] | None,
        folder: Path,
        arguments: argparse.Namespace,
        writer: PlainWriter | None = None,
        engine_args: Mapping[str, Any] | None = None,
    ) -> None:
        folder.mkdir()
        self._writer = writer
        batches = range(2 * (1 + arguments.turns))
        self._begins = [folder / f"begin {number}" for number in batches]
        self._ends = [folder / f"end {number}" for number in batches]
        draw = random.Random(str(folder.name))
        self._stored_first = [draw.random() < 0.5 for _ in range(1 + arguments.turns)]
        shape = arguments.prompts, arguments.prompt_tokens, arguments.output_tokens
        self._tokens = arguments.prompts * (arguments.prompt_tokens + arguments.output_tokens)
        self.speeds = Speeds([], [])
        """Those of each turn but the first, prompts and outputs together."""
        spec = RunSpec(
            model=str(model), dtype=arguments.dtype, max_model_len=4096, max_num_batched_tokens=2048,
            kv_cache_memory_bytes=1 << 30, kv_transfer_config=transfer, extra_engine_args=dict(engine_args or {}),
            rounds=[
                Round(
                    name=str(number), prompts=prompts(*shape, 1 + number, self.is_stored(number)), one_at_a_time=False,
                    begin_file=str(self._begins[number]), end_file=str(self._ends[number]),
                )
                for number in batches
            ],
        )  # fmt: skip
        self._pool = ThreadPoolExecutor(1)
        self._run: Future[RunResult] = self._pool.submit(
            run_in_process,
            spec,
            timeout_seconds=RUN_TIMEOUT_SECONDS,
            env=ENGINE_ENVIRONMENT,
            fresh_interpreter=True,
        )

    def compute(self, batch: int) -> None:
        """Compute a batch, and wait for the end of its stores.

        Args:
            batch: two per turn.

        Raises:
            RunFailedError: the engine has failed.
            SystemExit: the batch took too long, or it had a hit.
        """
        self._begins[batch].touch()
        began = time.monotonic()
        if self._writer is not None and self.is_stored(batch):
            self._writer.write(self._ends[batch])
        while not self._ends[batch].exists():
            if self._run.done():
                self._run.result()
            if time.monotonic() > began + BATCH_TIMEOUT_SECONDS:
                raise SystemExit(f"batch {batch} did not end within {BATCH_TIMEOUT_SECONDS:.0f} s")
            time.sleep(0.02)
        if self._writer is not None:
            self._writer.batch_seconds = time.monotonic() - began
        result = RoundResult.model_validate_json(self._ends[batch].read_text())
        if any(one.external_cached_tokens or one.local_cached_tokens for one in result.prompts):
            raise SystemExit("a prompt was served from a cache, so this run says nothing about new prompts")
        if batch > 1:
            speeds = self.speeds.stored if self.is_stored(batch) else self.speeds.opted_out
            speeds.append(self._tokens / max(one.total_seconds for one in result.prompts))

    def end(self) -> RunResult:
        """Wait until the engine has ended, and return its report."""
        result = self._run.result()
        self._pool.shutdown()
        return result

    def is_stored(self, batch: int) -> bool:
        """Return whether a batch is stored, or its requests opt out."""
        return self._stored_first[batch // 2] == (batch % 2 == 0)


def transfers(folder: Path) -> dict[str, dict[str, Any] | None]:
    """Return the connector of each contender."""
    direct = {"name": "disk", "type": "disk", "path": str(folder / "direct"), "direct_io": "on"}
    ram = {"name": "ram", "type": "cpu", "capacity": "3GiB", "prefault": True}
    return {
        "none": None,
        "disk": disk_transfer_config(folder / "kv"),
        "disk, O_DIRECT": disk_transfer_config(folder, backends=[direct]),
        "cpu": disk_transfer_config(folder, backends=[ram]),
        "stock": stock_transfer_config(),
    }


def measure(arguments: argparse.Namespace, console: Console) -> dict[str, Speeds]:
    """Return the speeds of each contender."""
    with tempfile.TemporaryDirectory(prefix="offload-core-bench-") as folder:
        model = tiny_models.write_gemma3_75m(Path(folder) / "model", dtype=arguments.dtype)
        (written := Path(folder) / "written").mkdir()
        writer = PlainWriter(written, Path(folder) / "kv")
        contenders = {
            name: Contender(
                model, transfer, Path(folder) / f"files of {name}", arguments, writer if transfer is None else None
            )
            for name, transfer in transfers(Path(folder)).items()
        }
        draw = random.Random(arguments.turns)
        for turn in range(1 + arguments.turns):
            for name in draw.sample(list(contenders), len(contenders)):
                contenders[name].compute(2 * turn)
                contenders[name].compute(2 * turn + 1)
            if not turn:
                writer.learn()
                console.print("warmed up")
                continue
            medians = ", ".join(f"{name} {median(one.speeds.ratios):.3f}" for name, one in contenders.items())
            console.print(f"round {turn} of {arguments.turns} computed; to opted out so far: {medians}")
        for contender in contenders.values():
            contender.end()
        return {name: contender.speeds for name, contender in contenders.items()}


def _percentiles(values: list[float], digits: int) -> str:
    return ", ".join(f"{percentile(values, at):.{digits}f}" for at in (10, 50, 90))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=12, help="measured turns of each engine")
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--prompt-tokens", type=int, default=1500)
    parser.add_argument("--output-tokens", type=int, default=64)
    add_dtype_option(parser)
    arguments = parser.parse_args()
    console = Console(width=120)
    speeds = measure(arguments, console)
    table = Table(title="New prompts: tokens per second, prompts and outputs together (p10, p50, p90)")
    for column in ("", "stored", "opted out", "to opted out", "to none"):
        table.add_column(column, justify="right" if column else "left")
    for name, one in speeds.items():
        to_none = [own / none for own, none in zip(one.opted_out, speeds["none"].opted_out, strict=True)]
        table.add_row(
            name,
            *(_percentiles(values, 0) for values in one),
            *(_percentiles(values, 3) for values in (one.ratios, to_none)),
        )
    console.print(table)


if __name__ == "__main__":
    main()
