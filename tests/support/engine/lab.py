"""Runs of one tiny model on real engines, with and without offloading."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tests.support import tiny_models
from tests.support.engine.spec import (
    PromptSpec,
    Round,
    RunResult,
    RunSpec,
    disk_transfer_config,
    install_plugin,
    run_in_process,
    stock_transfer_config,
)
from tests.support.paths import ROOT

RUN_TIMEOUT_SECONDS = 240.0
VOCABULARY = 1024
STANDARD_LENGTHS = (700, 1283, 2500)
UNTIL_STORED: dict[str, Any] = {"kv_events_config": {"enable_kv_cache_events": True, "publisher": "null"}}
"""Extra engine arguments: an idle engine steps on until its stores have ended, since events of them are to come.

It does so for five seconds at most. Without events it stops at once. The next prompt may then be looked up before a
store ends, and no counter has a store that ends after the last step.
"""

TO_THE_LAST_STORE: dict[str, Any] = {"shutdown_timeout_seconds": 20}
"""Keys of our connector: an engine that ends waits for the stores of its last prompt, on a slow machine too."""


class Lab:
    """One tiny model, its outputs without offloading, and runs of it with our connector.

    Args:
        model: the model's folder.
        dtype: the dtype it runs in.
        block_size: its largest block size on this engine, in tokens.
    """

    def __init__(self, name: str, model: Path, dtype: str, block_size: int) -> None:
        self.name = name
        self.model = model
        self.dtype = dtype
        self.block_size = block_size
        self._once_run: dict[str, RunResult] = {}

    def prompts(self, *lengths: int, family: int = 0, shared_prefix: int = 0, max_tokens: int = 8) -> list[PromptSpec]:
        """Random prompts of the given lengths; those of one family share their first ``shared_prefix`` tokens."""
        return [
            PromptSpec(
                name=f"family{family}-{length}",
                token_ids=tiny_models.prompt_token_ids(
                    length, seed=family, vocab_size=VOCABULARY, shared_prefix=shared_prefix
                ),
                max_tokens=max_tokens,
            )
            for length in lengths
        ]

    def standard(self, *lengths: int) -> list[Round]:
        """One round of prompts that many tests use; their outputs without offloading are computed only once."""
        return [Round(name="prompts", prompts=self.prompts(*(lengths or STANDARD_LENGTHS), family=30))]

    def alone(self, rounds: Sequence[Round]) -> RunResult:
        """The answers of an engine without offloading to rounds of :meth:`standard` prompts, once per session."""
        whole = self.reference(self.standard())
        (answers,) = whole.rounds
        by_name = {prompt.name: prompt for prompt in answers.prompts}
        asked = [
            answers.model_copy(update={"name": item.name, "prompts": [by_name[prompt.name] for prompt in item.prompts]})
            for item in rounds
        ]
        return whole.model_copy(update={"rounds": asked})

    def run(
        self,
        rounds: Sequence[Round],
        transfer: dict[str, Any] | None,
        env: dict[str, str] | None = None,
        on_line: Callable[[str], None] | None = None,
        on_progress: Callable[[dict[str, Any]], None] | None = None,
        **engine: Any,
    ) -> RunResult:
        """Run the rounds on a new engine in a new process."""
        spec = RunSpec(
            model=str(self.model), dtype=self.dtype, kv_transfer_config=transfer, rounds=list(rounds), **engine
        )
        return run_in_process(
            spec, timeout_seconds=RUN_TIMEOUT_SECONDS, env=env, on_line=on_line, on_progress=on_progress
        )

    def reference(self, rounds: Sequence[Round], **engine: Any) -> RunResult:
        """Run the rounds without any connector, once per session."""
        return self._once(rounds, None, **engine)

    def peer(self, rounds: Sequence[Round], **engine: Any) -> RunResult:
        """Run the rounds with vLLM's own connector, once per session."""
        return self._once(rounds, stock_transfer_config(), **engine)

    def _once(self, rounds: Sequence[Round], transfer: dict[str, Any] | None, **engine: Any) -> RunResult:
        key = repr([*rounds, transfer, engine])
        if key not in self._once_run:
            self._once_run[key] = self.run(rounds, transfer, **engine)
        return self._once_run[key]


stock = stock_transfer_config


def ours(folder: Path, **extra_config: Any) -> dict[str, Any]:
    """Our connector with one disk tier, and every block that it is about to load filled with a pattern first."""
    return {
        **disk_transfer_config(folder, **extra_config),
        "kv_connector": "PoisoningConnector",
        "kv_connector_module_path": "tests.support.engine.poisoning",
    }


def served(result: RunResult, round_index: int = 0) -> dict[str, int]:
    """Tokens of each prompt that came through the connector."""
    return {prompt.name: prompt.external_cached_tokens for prompt in result.rounds[round_index].prompts}


def count(result: RunResult, counter: str, tier: str = "disk") -> int:
    """The final value of one of our counters."""
    return int(result.metrics.get(f'vllm:hybrid_offload_{counter}_total{{tier="{tier}"}}', 0))


def objects(folder: Path) -> list[Path]:
    """All stored objects."""
    return sorted(folder.rglob("*.kv"))


def installed(folder: Path, module: str, package: str = "tests.engine") -> dict[str, str]:
    """Install a distribution whose entry point is a module of ``package``; return the variables that show it."""
    site = install_plugin(folder / "site", module.replace("_", "-"), f"{package}.{module}")
    path = (str(site), str(ROOT), os.environ.get("PYTHONPATH"))
    return {"PYTHONPATH": os.pathsep.join(filter(None, path))}
