"""The main job on the real engine: two hybrid models find their KV cache on disk after a restart.

The models are a Gemma 3 (sliding windows and full attention) and a Qwen3-Next (recurrent states and full attention)
with seeded random weights. Each runs in three processes: one without offloading as reference, one that stores to disk,
and one that loads from it. The exit code is 1 if any output differs or no token was loaded.

    python -m examples.demo [--folder FOLDER]
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from tests.support import tiny_models
from tests.support.engine.spec import (
    PromptResult,
    PromptSpec,
    Round,
    RunFailedError,
    RunResult,
    RunSpec,
    compare,
    disk_transfer_config,
    run_in_process,
)

VOCABULARY = 1024
MAX_LOGPROB_GAP = 1e-4
RUN_TIMEOUT_SECONDS = 600.0


@dataclass(frozen=True)
class Model:
    """A model of the demo: its title, the folder that holds it, and its dtype."""

    title: str
    folder: Path
    dtype: str


@dataclass(frozen=True)
class Outcome:
    """The three runs of one model."""

    model: Model
    reference: RunResult
    first: RunResult
    second: RunResult


def prompts(*lengths: int, seed: int) -> list[PromptSpec]:
    """Return random prompts that share a prefix of 512 tokens."""
    return [
        PromptSpec(
            name=str(length),
            token_ids=tiny_models.prompt_token_ids(length, seed=seed, vocab_size=VOCABULARY, shared_prefix=512),
            max_tokens=16,
        )
        for length in lengths
    ]


STORED_PROMPTS = prompts(200, 700, 1283, 4000, seed=1)
NEW_PROMPTS = [prompt.model_copy(update={"name": f"{prompt.name} (new)"}) for prompt in prompts(300, 1500, seed=2)]
FIRST_ROUND = [Round(name="stored", prompts=STORED_PROMPTS)]
SECOND_ROUND = [
    Round(
        name="mixed",
        prompts=[STORED_PROMPTS[3], NEW_PROMPTS[0], *STORED_PROMPTS[1:3], NEW_PROMPTS[1], STORED_PROMPTS[0]],
    )
]


def run_model(model: Model, store: Path, advance: Callable[[str, str], None]) -> Outcome:
    """Run the model's three processes; ``advance(step, prompt)`` is called as prompts finish."""

    def run(step: str, rounds: list[Round], transfer: dict[str, Any] | None) -> RunResult:
        advance(step, "starting vLLM")
        spec = RunSpec(model=str(model.folder), dtype=model.dtype, kv_transfer_config=transfer, rounds=rounds)
        return run_in_process(
            spec,
            timeout_seconds=RUN_TIMEOUT_SECONDS,
            on_progress=lambda fields: advance(step, str(fields["name"])),
            fresh_interpreter=True,
        )

    return Outcome(
        model,
        run("without offloading", SECOND_ROUND, None),
        run("first process, stores", FIRST_ROUND, disk_transfer_config(store)),
        run("second process, loads", SECOND_ROUND, disk_transfer_config(store)),
    )


def differences(outcome: Outcome) -> dict[str, list[str]]:
    """Return the differences from the run without offloading, by prompt name."""
    reference = {prompt.name: prompt for prompt in outcome.reference.rounds[0].prompts}
    found: dict[str, list[str]] = {name: [] for name in reference}
    for run in (outcome.first, outcome.second):
        for prompt in run.rounds[0].prompts:
            found[prompt.name] += compare(
                _single(outcome.reference, reference[prompt.name]),
                _single(run, prompt),
                max_logprob_gap=MAX_LOGPROB_GAP,
            )
    return found


def _single(run: RunResult, prompt: PromptResult) -> RunResult:
    return run.model_copy(update={"rounds": [run.rounds[0].model_copy(update={"name": "", "prompts": [prompt]})]})


def result_table(outcomes: list[Outcome]) -> Table:
    """Return the table that ends the demo."""
    table = Table(
        title="KV cache found on disk after a restart",
        caption="TTFT: time to first token, of the process that stored (cold) and of the one that loaded (warm)",
    )
    for column in ("model", "prompt tokens", "from disk", "cold TTFT", "warm TTFT", "same output"):
        table.add_column(column, justify="left" if column in ("model", "prompt tokens") else "right")
    for outcome in outcomes:
        different = differences(outcome)
        cold = {prompt.name: prompt.ttft_seconds for prompt in outcome.first.rounds[0].prompts}
        for prompt in outcome.second.rounds[0].prompts:
            table.add_row(
                outcome.model.title,
                prompt.name,
                str(prompt.external_cached_tokens),
                f"{cold[prompt.name] * 1e3:.1f} ms" if prompt.name in cold else "",
                f"{prompt.ttft_seconds * 1e3:.1f} ms",
                "no" if different[prompt.name] else "yes",
                style="red" if different[prompt.name] else "",
            )
        table.add_section()
    return table


def verdict(outcomes: list[Outcome]) -> list[str]:
    """Return one line for each problem; an empty list if the demo has succeeded."""
    problems = [
        f"{outcome.model.title}: {line}"
        for outcome in outcomes
        for lines in differences(outcome).values()
        for line in lines
    ]
    for outcome in outcomes:
        if not any(prompt.external_cached_tokens for prompt in outcome.second.rounds[0].prompts):
            problems.append(f"{outcome.model.title}: nothing was served from disk")
    return problems


def run_demo(folder: Path, console: Console) -> int:
    """Write the models, run them and print the table; returns the exit code."""
    models = [
        Model("Gemma 3", tiny_models.write_gemma3(folder / "gemma3"), "float32"),
        Model("Qwen3-Next", tiny_models.write_qwen3_next(folder / "qwen3-next"), "bfloat16"),
    ]
    finished = (
        len(SECOND_ROUND[0].prompts) * 2 + len(STORED_PROMPTS) + 6
    )  # three starts, three warm-ups and every prompt
    columns = (
        TextColumn("{task.description:12}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(),
        TextColumn("{task.fields[doing]}"),
    )  # fmt: skip
    outcomes: list[Outcome] = []
    with Progress(*columns, console=console) as progress:
        for model in models:
            task = progress.add_task(model.title, total=finished, doing="")

            def advance(step: str, prompt: str, task: Any = task) -> None:
                progress.update(task, advance=1, doing=f"{step}: {prompt}")
                if not console.is_terminal:
                    console.print(f"{progress.tasks[task].description}: {step}: {prompt}")

            outcomes.append(run_model(model, folder / "kv-cache", advance))
            progress.update(task, doing="done")
    console.print(result_table(outcomes))
    problems = verdict(outcomes)
    for problem in problems:
        console.print(f"[red]{problem}")
    if not problems:
        console.print("Tokens and log probabilities are the same as without offloading, for every prompt.")
    return 1 if problems else 0


def main() -> int:
    parser = argparse.ArgumentParser(description="Show that hybrid models find their KV cache on disk after a restart.")
    parser.add_argument("--folder", type=Path, help="where models and objects go; by default a temporary folder")
    folder = parser.parse_args().folder
    console = Console()
    try:
        if folder is not None:
            return run_demo(folder, console)
        with tempfile.TemporaryDirectory(prefix="offload-core-demo-") as temporary:
            return run_demo(Path(temporary), console)
    except RunFailedError as error:
        console.print(f"[red]{error}", markup=True)
        return 1


if __name__ == "__main__":
    sys.exit(main())
