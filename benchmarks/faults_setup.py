"""Setup of the engines of ``benchmarks.faults``: a tiny model, tiers, folders that are filled beforehand."""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.faults_plugin import VICTIM
from benchmarks.live_engines import DISTRIBUTION, LiveEngine, Order
from tests.support import tiny_models
from tests.support.engine.spec import PromptResult, PromptSpec, Round, RunSpec, disk_transfer_config, run_in_process

PROMPT_TOKENS = 1100
CHUNK_TOKENS = 256
VOCABULARY = 1024
MAX_LOGPROB_GAP = 1e-4
NEVER_OPENS = 1_000_000
"""Value of ``breaker_failures`` that no run reaches, for an engine to measure without a breaker."""
TRIP_REQUESTS = 30


def prompt(name: str, length: int, seed: int) -> PromptSpec:
    return PromptSpec(
        name=name,
        token_ids=tiny_models.prompt_token_ids(length, seed=seed, vocab_size=VOCABULARY),
        max_tokens=1,
    )


def run_spec(model: Path, tiers: Sequence[dict[str, Any]], max_num_seqs: int = 1) -> RunSpec:
    transfer = disk_transfer_config(
        model, backends=list(tiers), hybrid_chunk_size=CHUNK_TOKENS, required_plugins=[DISTRIBUTION]
    )  # fmt: skip
    return RunSpec(
        model=str(model), dtype="float32", max_model_len=8192, max_num_batched_tokens=8192, max_num_seqs=max_num_seqs,
        kv_cache_memory_bytes=256 * 2**20, kv_transfer_config=transfer,
    )  # fmt: skip


def victim(path: Path, deadline_seconds: float, breaker_failures: int | None = None) -> dict[str, Any]:
    """Return the configuration keys of the tier that gets the faults."""
    deadlines = {f"{name}_timeout_seconds": deadline_seconds for name in ("lookup", "load", "store")}
    breaker = {} if breaker_failures is None else {"breaker_failures": breaker_failures}
    return {"name": VICTIM, "type": "disk", "path": str(path), **deadlines, **breaker}


def fill(model: Path, folder: Path, prompts: Sequence[PromptSpec]) -> None:
    """Store the objects of ``prompts`` in a folder that later engines get copies of."""
    tiers = [{"name": "filled", "type": "disk", "path": str(folder)}]
    spec = run_spec(model, tiers)
    assert spec.kv_transfer_config is not None
    del spec.kv_transfer_config["kv_connector_extra_config"]["required_plugins"]
    rounds = [Round(name="fill", prompts=list(prompts))]
    run_in_process(spec.model_copy(update={"rounds": rounds}), timeout_seconds=600, fresh_interpreter=True)


def folder_with(objects: Path, place: Path) -> Path:
    """Return a folder with links to the objects of another one, since no object's file is ever written again."""
    shutil.copytree(objects, place, copy_function=os.link)
    return place


def breaker_is_open(engine: LiveEngine) -> bool:
    """Return whether the circuit breaker of either half is open; then neither half uses the tier."""
    metrics = engine.tell(Order(metrics=True)).metrics or {}
    return metrics.get(f'vllm:hybrid_offload_breaker_open{{tier="{VICTIM}"}}', 0.0) > 0


def trip(engine: LiveEngine) -> None:
    """Send requests until a circuit breaker opens."""
    for number in range(TRIP_REQUESTS):
        engine.tell(Order(prompts=[prompt(f"trip {number}", PROMPT_TOKENS, 10_000_000 + number)]))
        if breaker_is_open(engine):
            return
    raise SystemExit(f"no circuit breaker of {engine.name!r} is open after {TRIP_REQUESTS} requests to a hung tier")


def check_same(what: str, got: Sequence[PromptResult], wanted: Sequence[PromptResult]) -> None:
    """Stop if a first token differs from that of the engine without the tier: a fast wrong answer is no result."""
    for one, other in zip(got, wanted, strict=True):
        if one.token_ids[0] != other.token_ids[0] or abs(one.logprobs[0] - other.logprobs[0]) > MAX_LOGPROB_GAP:
            raise SystemExit(
                f"{what}: prompt {one.name} starts with another token or probability than without the tier"
            )
