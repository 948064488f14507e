"""Tokens per second while everything is stored and nothing is reused: the cost of offloading for new prompts.

The model is a Gemma 3 of some 76 million parameters with seeded random weights. All prompts are different and run at
the same time. Contenders, each in a new engine:

- "none": no connector;
- "disk" and "cpu": ours with one tier;
- "stock": vLLM's own connector with an in-RAM spec.

The contenders take turns. A ratio compares a run with the run without a connector of the same turn. The limit is 1.

    python -m benchmarks.overhead [--rounds 5] [--prompts 8] [--prompt-tokens 1500] [--output-tokens 64]
"""

from __future__ import annotations

import argparse
import os
import tempfile
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.reporting.rows import percentile
from tests.support import tiny_models
from tests.support.engine.spec import (
    PromptSpec,
    Round,
    RunSpec,
    disk_transfer_config,
    run_in_process,
    stock_transfer_config,
)

VOCABULARY = 4096
RUN_TIMEOUT_SECONDS = 1800.0


def prompts(count: int, tokens: int, output_tokens: int, seed: int) -> list[PromptSpec]:
    """Return prompts that share nothing."""
    return [
        PromptSpec(
            name=str(number),
            token_ids=tiny_models.prompt_token_ids(tokens, seed=1000 * seed + number, vocab_size=VOCABULARY),
            max_tokens=output_tokens,
        )
        for number in range(count)
    ]


def tokens_per_second(model: Path, transfer: dict[str, Any] | None, arguments: argparse.Namespace) -> float:
    """Return the tokens per second of one engine, prompts and outputs together, after a round that warms it up."""
    warm = prompts(2, arguments.prompt_tokens, 4, seed=1)
    measured = prompts(arguments.prompts, arguments.prompt_tokens, arguments.output_tokens, seed=2)
    spec = RunSpec(
        model=str(model), dtype="bfloat16", max_model_len=4096, max_num_batched_tokens=2048,
        kv_cache_memory_bytes=1 << 30, kv_transfer_config=transfer,
        rounds=[Round(name="warm", prompts=warm), Round(name="measured", prompts=measured, one_at_a_time=False)],
    )  # fmt: skip
    env = {  # the threads and compilation of a server
        "OMP_NUM_THREADS": str(os.cpu_count()), "TORCHDYNAMO_DISABLE": "0", "VLLM_CPU_OMP_THREADS_BIND": "auto",
    }  # fmt: skip
    result = run_in_process(spec, timeout_seconds=RUN_TIMEOUT_SECONDS, env=env, fresh_interpreter=True)
    last = result.rounds[-1]
    if any(prompt.external_cached_tokens or prompt.local_cached_tokens for prompt in last.prompts):
        raise SystemExit("a prompt was served from a cache, so this run says nothing about new prompts")
    return float(arguments.prompts * (arguments.prompt_tokens + arguments.output_tokens) / last.seconds)


def transfers(folder: Path) -> dict[str, dict[str, Any] | None]:
    """Return the connector of each contender."""
    ram = {"name": "ram", "type": "cpu", "capacity": "2GiB"}
    return {
        "none": None,
        "disk": disk_transfer_config(folder / "kv"),
        "cpu": disk_transfer_config(folder / "kv", backends=[ram]),
        "stock": stock_transfer_config(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--prompt-tokens", type=int, default=1500)
    parser.add_argument("--output-tokens", type=int, default=64)
    arguments = parser.parse_args()
    console = Console(width=120)
    speeds: dict[str, list[float]] = {}
    for number in range(arguments.rounds):
        with tempfile.TemporaryDirectory(prefix="offload-core-bench-") as folder:
            model = tiny_models.write_gemma3_75m(Path(folder) / "model")
            contenders = list(transfers(Path(folder)).items())
            for name, transfer in contenders[number % 4 :] + contenders[: number % 4]:
                speeds.setdefault(name, []).append(tokens_per_second(model, transfer, arguments))
                console.print(f"round {number + 1}, {name}: {speeds[name][-1]:.0f} tokens/s")
    table = Table(title="New prompts: tokens per second, prompts and outputs together")
    for column in ("", "p10", "p50", "p90", "ratio p10", "ratio p50", "ratio p90"):
        table.add_column(column, justify="right" if column else "left")
    for name in transfers(Path()):
        ratios = [ours / none for ours, none in zip(speeds[name], speeds["none"], strict=True)]
        cells = [f"{percentile(speeds[name], at):.0f}" for at in (10, 50, 90)]
        table.add_row(name, *cells, *(f"{percentile(ratios, at):.3f}" for at in (10, 50, 90)))
    console.print(table)


if __name__ == "__main__":
    main()
