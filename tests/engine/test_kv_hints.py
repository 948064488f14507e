"""KV hints and the options of requests on the real engine: which prefixes survive, and from where they are served."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.engine.lab import UNTIL_STORED, Lab, count, objects, ours, served
from tests.support.engine.spec import Round, compare

pytest.importorskip("vllm.v1.kv_hints", reason="vLLM has hints from 0.32 on")

LENGTH = 700
RAM = {"name": "ram", "type": "cpu", "capacity": "256MiB"}


def turn(lab: Lab, name: str, family: int, kind: str = "", /, options: Any = None, **payload: Any) -> Round:
    """One prompt of a family, whose prefix the engine does not hold itself; maybe with one hint."""
    (prompt,) = lab.prompts(LENGTH, family=family)
    hints = None
    if kind:
        action = {"action_id": name, "action_type": kind, "action_version": "1.0", "payload": payload}
        hints = {"protocol_version": "0.1", "message_id": "m", "actions": [action]}
    params = {"hybrid_offload": options} if options else None
    prompt = prompt.model_copy(update={"name": name, "kv_hints": hints, "kv_transfer_params": params})
    return Round(name=name, prompts=[prompt], reset_prefix_cache_before=True)


def test_prefixes_survive_go_first_and_move_to_a_faster_tier(gemma3: Lab, tmp_path: Path) -> None:
    chunk = gemma3.block_size
    whole = LENGTH // chunk * chunk
    gemma3.run([turn(gemma3, "stored", 60)], ours(tmp_path / "kv", hybrid_chunk_size=chunk))
    nbytes = sum(file.stat().st_size for file in objects(tmp_path / "kv"))

    rounds = [
        turn(gemma3, "kept", 70, "kv.retain", seconds=3600),
        turn(gemma3, "older", 71),
        turn(gemma3, "demoted", 72, "kv.demote"),
        turn(gemma3, "new", 73),
        turn(gemma3, "older again", 71),
        turn(gemma3, "demoted again", 72),
        *(turn(gemma3, f"fill {number}", 74 + number) for number in range(5)),
        turn(gemma3, "kept at last", 70, "kv.evict"),
        turn(gemma3, "older at last", 71),
    ]
    disk = {"name": "disk", "type": "disk", "path": str(tmp_path / "small"), "capacity": int(3.2 * nbytes)}
    settings = {"hybrid_chunk_size": chunk, "retained_share_per_tenant": 0.5}
    transfer = ours(tmp_path / "small", backends=[disk], **settings)
    result = gemma3.run(rounds, transfer, extra_engine_args=UNTIL_STORED)

    assert compare(gemma3.reference(rounds), result) == []
    tokens = {name: got for number in range(len(rounds)) for name, got in served(result, number).items()}
    assert tokens["older again"] == whole
    assert tokens["demoted again"] < whole
    assert tokens["kept at last"] == whole
    assert tokens["older at last"] < whole
    answers = {
        prompt.name: action
        for one in result.rounds
        for prompt in one.prompts
        for envelope in (prompt.kv_transfer_params or {}).get("hybrid_offload_hints", [])
        for action in envelope["actions"]
    }
    assert {name: answer["status"] for name, answer in answers.items()} == {
        "kept": "accepted",
        "demoted": "accepted",
        "kept at last": "refused",
    }
    assert "good actions are: kv.retain" in answers["kept at last"]["reason"]
    assert count(result, "hints_accepted", "all") == 2

    rounds = [
        turn(gemma3, "prefetched", 60, "kv.prefetch", options={"max_load_tokens": 0, "store": False}),
        turn(gemma3, "one chunk", 60, options={"max_load_tokens": 2 * chunk - 1}),
        turn(gemma3, "from memory", 60),
        turn(gemma3, "from disk", 60, options={"tiers": ["disk"]}),
    ]
    backends = [RAM, {"name": "disk", "type": "disk", "path": str(tmp_path / "kv")}]
    result = gemma3.run(rounds, ours(tmp_path / "kv", hybrid_chunk_size=chunk, backends=backends))
    assert compare(gemma3.reference(rounds), result) == []
    tokens = {name: got for number in range(len(rounds)) for name, got in served(result, number).items()}
    assert tokens["prefetched"] == 0
    assert tokens["one chunk"] == chunk
    assert tokens["from memory"] == tokens["from disk"] == whole
    assert count(result, "hit_tokens", "ram") == whole
    assert count(result, "hit_tokens", "disk") == whole + chunk, "the windows of the first boundary are on disk only"
    assert count(result, "promotions", "ram") > 0
