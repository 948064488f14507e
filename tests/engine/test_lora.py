"""Requests with LoRA adapters: each adapter is served what it has stored itself, as long as its files are the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.support.engine.lab import Lab, ours, served
from tests.support.engine.spec import PromptSpec, Round, compare
from tests.support.lora_folder import write_lora

LORA: dict[str, Any] = {"extra_engine_args": {"enable_lora": True, "max_lora_rank": 8, "max_loras": 2}}


def test_an_adapter_finds_what_the_same_files_have_stored(gemma3: Lab, tmp_path: Path) -> None:
    adapters = [write_lora(tmp_path / name, gemma3.model, seed=seed) for seed, name in enumerate(("one", "two"))]
    (plain,) = gemma3.prompts(1283, family=40)

    def with_adapter(adapter: Path) -> PromptSpec:
        return plain.model_copy(update={"name": adapter.name, "lora": str(adapter)})

    rounds = [Round(name="all", prompts=[plain, *map(with_adapter, adapters)])]
    first = gemma3.run(rounds, ours(tmp_path / "kv"), **LORA)
    assert len({tuple(prompt.token_ids) for prompt in first.rounds[0].prompts}) == 3, "the adapters change the output"
    assert not any(served(first).values())

    second = gemma3.run(rounds, ours(tmp_path / "kv"), **LORA)
    assert compare(first, second) == []
    assert all(served(second).values())

    write_lora(adapters[0], gemma3.model, seed=7)  # other weights under the same name and path
    changed = gemma3.run(rounds, ours(tmp_path / "kv"), **LORA)
    fresh = gemma3.run(rounds, None, **LORA)
    assert compare(fresh, changed) == []
    tokens = served(changed)
    assert tokens["one"] == 0
    assert tokens["two"] == served(second)["two"]
