"""Placement on the real engine: junctions hit from their second sight on, and a limit keeps what is resumed from."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from offload_core.objects.format import HEADER_BYTES
from offload_core.runtime.metrics import HIT_RATIO_GAUGES
from offload_core.simulation.trace import read_trace
from tests.engine.labs import QUICK_LABS
from tests.support.engine.lab import VOCABULARY, Lab, count, ours, served
from tests.support.engine.spec import PromptSpec, Round, RunResult, compare
from tests.support.tiny_models import prompt_token_ids

SHARED_TOKENS = 1024
CHUNK = 256
CONVERSATIONS = 4


@pytest.fixture
def model(request: pytest.FixtureRequest) -> Lab:
    lab = request.getfixturevalue(request.param)
    assert isinstance(lab, Lab)
    return lab


WINDOWS_ONLY = pytest.param("mistral", marks=pytest.mark.long)


def _run(lab: Lab, rounds: list[Round], folder: Path, **config: Any) -> RunResult:
    result = lab.run(rounds, ours(folder, hybrid_chunk_size=CHUNK, **config))
    assert compare(lab.reference(rounds), result) == []
    return result


def _hits(result: RunResult) -> list[list[int]]:
    """Per round, the tokens of each prompt that came from the tier."""
    return [list(served(result, number).values()) for number in range(len(result.rounds))]


def _sum(result: RunResult) -> int:
    return sum(map(sum, _hits(result)))


def _branches(prompts: int) -> list[Round]:
    """Prompts that share their first tokens and then part; the local cache is empty before each."""
    return [
        Round(
            name=str(number),
            prompts=[
                PromptSpec(
                    name="branch",
                    token_ids=prompt_token_ids(
                        1800 + 100 * number, seed=90, vocab_size=VOCABULARY, shared_prefix=SHARED_TOKENS, member=number
                    ),
                    max_tokens=4,
                )
            ],
            reset_prefix_cache_before=True,
        )
        for number in range(prompts)
    ]


def _conversations() -> list[Round]:
    """Conversations that go on twice, two turns each time; the local cache is empty before each turn."""
    texts = [prompt_token_ids(2400, seed=200 + number, vocab_size=VOCABULARY) for number in range(CONVERSATIONS)]
    turns = [(number, turn) for pair in ((0, 1), (2, 3)) for number in range(CONVERSATIONS) for turn in pair]
    return [
        Round(
            name=f"conversation {number}, turn {turn}",
            prompts=[PromptSpec(name="turn", token_ids=texts[number][: 900 + 450 * turn], max_tokens=2)],
            reset_prefix_cache_before=True,
        )
        for number, turn in turns
    ]


@pytest.mark.parametrize("model", [*QUICK_LABS, WINDOWS_ONLY], indirect=True)
def test_a_junction_hits_from_its_second_sight_on(model: Lab, tmp_path: Path) -> None:
    trace_file = tmp_path / "prompts.jsonl"
    result = _run(model, _branches(4), tmp_path / "kv", placement="kept", trace_file=str(trace_file))
    assert _hits(result) == [[0], [0], [SHARED_TOKENS], [SHARED_TOKENS]]
    trace = read_trace(trace_file)
    *_, first, second, third, fourth = trace.requests
    assert [one.input_tokens for one in (first, second, third, fourth)] == [1800, 1900, 2000, 2100]
    shared = SHARED_TOKENS // trace.block_tokens
    assert first.ids[:shared] == fourth.ids[:shared]
    assert first.ids[shared] != fourth.ids[shared]


@pytest.mark.long
@pytest.mark.parametrize("model", [*QUICK_LABS, WINDOWS_ONLY], indirect=True)
def test_under_a_limit_more_is_served_than_by_storing_everything(model: Lab, tmp_path: Path) -> None:
    rounds = _conversations()
    whole = _run(model, rounds, tmp_path / "whole", placement="everything")
    assert _hits(_run(model, rounds, tmp_path / "placed")) == _hits(whole), "without a limit nothing is different"
    total = dict.fromkeys(("everything", "kept and spare"), 0)
    for share in (2, 10):
        hits: dict[str, int] = {}
        for placement in total:
            folder = tmp_path / f"{placement} {share}"
            limit = count(whole, "store_bytes") // share
            tier = {"name": "disk", "type": "disk", "path": str(folder), "capacity": limit}
            hits[placement] = _sum(_run(model, rounds, folder, placement=placement, backends=[tier]))
            total[placement] += hits[placement]
        assert hits["kept and spare"] >= hits["everything"]
    if model.name != "qwen3_next":  # whose states are few already, since the engine hands over few
        assert total["kept and spare"] > total["everything"], (
            "at one limit alone they may be equal, by the times of stores"
        )


@pytest.mark.parametrize("model", ["gemma3"], indirect=True)
def test_the_live_curve_shows_the_hits_of_the_tier_and_those_at_other_capacities(model: Lab, tmp_path: Path) -> None:
    rounds = _conversations()
    tier = {"name": "disk", "type": "disk", "path": str(tmp_path / "kv"), "capacity": "3MiB"}
    result = _run(model, rounds, tmp_path / "kv", backends=[tier])
    prompt_tokens = count(result, "estimated_prompt_tokens")
    half, same, twice, four_times = (
        result.metrics.get(f'vllm:hybrid_offload_{gauge}{{tier="disk"}}', 0.0) for gauge in HIT_RATIO_GAUGES
    )
    tokens = [len(prompt.token_ids) for one in rounds for prompt in one.prompts]
    # The estimate of the last request, on a thread of its own, may come after the last look at the metrics.
    counted = len(rounds) - (prompt_tokens < sum(tokens))
    assert prompt_tokens >= sum(tokens[:counted])
    hits = sum(map(sum, _hits(result)[:counted]))
    assert same == pytest.approx(hits / prompt_tokens, abs=0.03)
    assert half < same <= twice <= four_times
    assert result.metrics['vllm:hybrid_offload_capacity_bytes{tier="disk"}'] == 3 << 20


@pytest.mark.parametrize("model", [*QUICK_LABS, WINDOWS_ONLY], indirect=True)
def test_kept_objects_have_no_more_bytes_than_stock_stores(model: Lab, tmp_path: Path) -> None:
    rounds = model.standard(1283, 2500)
    result = _run(model, rounds, tmp_path / "kv", placement="kept")
    payload = count(result, "store_bytes") - count(result, "stores") * HEADER_BYTES
    assert 0 < payload <= model.peer(rounds).metrics["vllm:kv_offload_store_bytes_total"]
