"""Local hits that diverge by group, on the real engine: right outputs, and the bytes that each case has to load."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from tests.engine import diverging
from tests.engine.workloads import SEEDS, check_outputs, run_workloads
from tests.support.engine.lab import VOCABULARY, Lab, count, objects, ours
from tests.support.engine.spec import PromptSpec, Round, RunResult, compare
from tests.support.tiny_models import prompt_token_ids
from tests.support.workload import WorkloadAction, random_workload

LENGTHS = (700, 2300)
TURN = 400
WINDOW = 512

Sources = dict[str, tuple[int, int]]


def _conversations() -> list[Round]:
    """Prompts; after each, the same prompt again, and its next turn. The engine keeps everything but for evictions."""
    texts = {length: prompt_token_ids(length + TURN, seed=length, vocab_size=VOCABULARY) for length in LENGTHS}
    prompts = [
        PromptSpec(name=f"{name} {length}", token_ids=text[:end], max_tokens=8)
        for length, text in texts.items()
        for name, end in (("first", length), ("again", length), ("turn", length + TURN))
    ]
    return [Round(name="conversations", prompts=prompts)]


def _run(lab: Lab, name: str, folder: Path) -> RunResult:
    return lab.run(_conversations(), diverging.connector(name, ours(folder, hybrid_chunk_size=lab.block_size)))


def _sources(result: RunResult) -> Sources:
    """Per prompt, its local and its loaded tokens."""
    (answers,) = result.rounds
    return {prompt.name: (prompt.local_cached_tokens, prompt.external_cached_tokens) for prompt in answers.prompts}


def _objects_of(lab: Lab, sources: Sources) -> Counter[str]:
    """The number of objects, by kind of pack, that brings just these tokens."""
    needed: Counter[str] = Counter()
    for local, loaded in sources.values():
        if end := loaded and local + loaded:
            needed["full"] += loaded // lab.block_size
            needed["window"] += (
                end - max(local, end - WINDOW + 1) // lab.block_size * lab.block_size
            ) // lab.block_size
            needed["state"] += 1
    del needed["state" if lab.name == "gemma3" else "window"]
    return needed


def _check_bytes(lab: Lab, result: RunResult, folder: Path) -> None:
    """Fail if more or fewer bytes were loaded than the sources of the prompts need."""
    sizes = {
        kind: {
            path.stat().st_size for path in objects(folder) if any(part.startswith(f"{kind}-") for part in path.parts)
        }
        for kind in ("full", "window", "state")
    }
    needed = _objects_of(lab, _sources(result))
    assert count(result, "load_hits") == needed.total()
    assert count(result, "load_bytes") == sum(amount * size for kind, amount in needed.items() for size in sizes[kind])


long = pytest.mark.long
COMPUTED = {f"first {length}": (0, 0) for length in LENGTHS}
CASES = [
    pytest.param("qwen3_next", "EvictsStates", [(256, 256), (1792, 256)], marks=long),
    pytest.param("qwen3_next", "EvictsStatesAndTail", [(256, 256), (512, 1536)], marks=long),
    pytest.param("qwen3_next", "EvictsTail", [(512, 0), (0, 2048)], marks=long),
    pytest.param("qwen3_next", "EvictsStatesEverywhere", [(0, 0), (0, 0)], marks=long),
    ("gemma3", "EvictsWindows", [(0, 640), (0, 2176)]),
    pytest.param("gemma3", "EvictsWindowsTail", [(0, 640), (0, 2176)], marks=long),
    pytest.param("gemma3", "EvictsAttention", [(0, 640), (0, 2176)], marks=long),
    pytest.param("gemma3", "EvictsTail", [(0, 640), (0, 2176)], marks=long),
]


@pytest.mark.parametrize(("lab", "name", "expected"), CASES, indirect=["lab"])
def test_evictions_from_some_groups(lab: Lab, name: str, expected: list[tuple[int, int]], tmp_path: Path) -> None:
    """Prompts that come back find their local tokens, and load the rest up to their replay boundary.

    Args:
        expected: local and loaded tokens of each conversation's second and third prompt.
    """
    result = _run(lab, name, tmp_path / "kv")
    assert compare(lab.reference(_conversations()), result) == []
    later = {
        f"{prompt} {length}": sources
        for length, sources in zip(LENGTHS, expected, strict=True)
        for prompt in ("again", "turn")
    }
    assert _sources(result) == COMPUTED | later
    _check_bytes(lab, result, tmp_path / "kv")
    backfilled = lab.name == "qwen3_next" and name.startswith("EvictsStates") and name != "EvictsStatesEverywhere"
    assert count(result, "backfills") == (len(later) if backfilled else 0)


@pytest.mark.parametrize("fault", [None, "ClaimsStates", pytest.param("ClaimsAttention", marks=long)])
def test_nothing_is_read_but_the_local_prefix_and_the_load(qwen3_next: Lab, tmp_path: Path, fault: str | None) -> None:
    """All other blocks hold a pattern; a connector with a fault shows that a mixture of sources would be seen."""
    result = _run(qwen3_next, fault or "PoisonsAllElse", tmp_path / "kv")
    differences = compare(qwen3_next.reference(_conversations()), result)
    assert count(result, "backfills") == 2 * len(LENGTHS)
    if fault is not None:
        prompts = [f"conversations/{name} {length}" for length in LENGTHS for name in ("again", "turn")]
        assert [line.split(":")[0] for line in differences] == prompts
        return
    assert differences == []
    assert set(_sources(result).values()) == {(0, 0), (256, 256), (1792, 256)}
    _check_bytes(qwen3_next, result, tmp_path / "kv")


@long
def test_random_work_with_random_evictions(lab: Lab, tmp_path: Path) -> None:
    """Shared prefixes, aborts and preemptions; whole prefixes and parts of them come from either cache."""
    actions = [WorkloadAction(step=step, kind="preempt") for step in range(5, 120, 10)]
    many = [random_workload(seed).model_copy(update={"actions": actions}) for seed in SEEDS]
    transfer = diverging.connector("EvictsAtRandom", ours(tmp_path / "kv", hybrid_chunk_size=lab.block_size))
    result = run_workloads(lab, many, transfer)
    assert sum(item.preemptions for item in result.workloads) > 0
    assert (count(result, "backfills") > 0) == (lab.name == "qwen3_next")
    check_outputs(lab, many, result)
