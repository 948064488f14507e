"""`vllm serve` over HTTP with the openai client: on what another process has stored, and on storage that hangs."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import openai
import pytest
from openai.types import Completion

from tests.media.fuse.mount import FaultFs
from tests.support.engine.api_server import LEAN, SERVED_NAME, api_server
from tests.support.engine.lab import TO_THE_LAST_STORE, Lab, objects, ours
from tests.support.engine.spec import PromptSpec, Round
from tests.support.paths import ROOT
from tests.support.polling import wait_until

HANG_SECONDS = 1.0
"""For what a request waits on storage that hangs: a lookup, a load."""
SLACK_SECONDS = 10.0
"""For a busy machine. What hangs here would hang for ever."""


def _complete(url: str, words: list[str]) -> tuple[str, int]:
    """Return a completion's text and how many prompt tokens the usage reports as cached."""
    answer = _answer(url, words)
    assert answer.usage is not None
    details = answer.usage.prompt_tokens_details
    return answer.choices[0].text, (details.cached_tokens or 0) if details else 0


def _answer(url: str, words: list[str], transfer_params: dict[str, Any] | None = None) -> Completion:
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        return client.completions.create(
            model=SERVED_NAME, prompt=" ".join(words), max_tokens=12, temperature=0.0,
            extra_body={"kv_transfer_params": transfer_params},
        )  # fmt: skip


def _documented_hints() -> dict[str, Any]:
    """Return the ``kv_transfer_params`` of the request in the document: ``kv.retain`` for 600 seconds."""
    text = (ROOT / "docs" / "hints.md").read_text()
    (request,) = re.findall(r"^```json\n({\n  \"model\".*?)^```", text, re.MULTILINE | re.DOTALL)
    params: dict[str, Any] = json.loads(request)["kv_transfer_params"]
    return params


def _seconds(call: Callable[[], object]) -> float:
    began = time.monotonic()
    call()
    return time.monotonic() - began


def _metric(url: str, name: str) -> float:
    with urllib.request.urlopen(f"{url}/metrics", timeout=10) as response:
        text = response.read().decode()
    return sum(float(value) for value in re.findall(rf"^{name}{{[^}}]*}} (\S+)$", text, re.MULTILINE))


def _configured(folder: Path) -> Path:
    path = folder / "offload.yaml"
    path.write_text(
        "lookup_timeout_seconds: 30\nshutdown_timeout_seconds: 20\n"
        "backends:\n  - {name: disk, type: disk, path: ./kv-cache, capacity: 1GiB}\n"
    )
    return path


def _forget_prefixes(url: str) -> None:
    """Empty the engine's own prefix cache, so that a prefix can come from a tier only."""
    with urllib.request.urlopen(f"{url}/reset_prefix_cache", data=b"", timeout=10) as response:
        assert response.status == 200


def _check_log(log: Path) -> None:
    # vLLM's own shutdown leaves a traceback of its client; none may come from us.
    assert not re.search(r'File ".*offload_(core|backend)', log.read_text())


def test_a_server_is_served_what_an_engine_has_stored_and_takes_hints(qwen3_next: Lab, tmp_path: Path) -> None:
    prompt = PromptSpec(name="words", token_ids=[4 + 7 * index % 1000 for index in range(1500)], max_tokens=12)
    rounds = [Round(name="words", prompts=[prompt])]
    transfer = ours(tmp_path / "kv-cache", **TO_THE_LAST_STORE)
    engine = qwen3_next.run(rounds, transfer, block_size=qwen3_next.block_size, max_model_len=4096)
    stored = objects(tmp_path / "kv-cache")

    with api_server(qwen3_next, _configured(tmp_path), tmp_path / "server.log", LEAN) as url:
        text, cached = _complete(url, [f"w{token}" for token in prompt.token_ids])
        loaded = _metric(url, "vllm:hybrid_offload_load_hits_total")
        external_hits = _metric(url, "vllm:external_prefix_cache_hits_total")
        hints = _documented_hints()
        unknown = {"action_id": "2", "action_type": "kv.evict", "action_version": "1.0", "payload": {}}
        hints["hybrid_offload"]["hints"]["actions"].append(unknown)
        hinted = _answer(url, [f"w{token}" for token in reversed(prompt.token_ids)], hints)
        view = subprocess.run(
            [sys.executable, "-m", "offload_core.cli", "top", url, "--once", "--json"], capture_output=True, check=True
        )

    assert text.split() == [f"w{token}" for token in engine.rounds[0].prompts[0].token_ids]
    assert cached == external_hits == 1280
    assert loaded > 0
    assert hinted.model_extra is not None
    (answered,) = hinted.model_extra["kv_transfer_params"]["hybrid_offload_hints"]
    retained, refused = answered["actions"]
    expected = {"action_id": "1", "action_type": "kv.retain", "status": "accepted", "tokens": 1280}
    assert (answered["message_id"], retained) == ("turn-17", expected)
    assert (refused["status"], "'kv.evict' is unknown" in refused["reason"]) == ("refused", True)
    assert len(objects(tmp_path / "kv-cache")) >= 2 * len(stored) > 0, "the server's shutdown finishes its stores"
    (tier,) = json.loads(view.stdout)["tiers"]
    shown = {name: tier[name] for name in ("tier", "queries", "query_hits", "query_misses", "hit_tokens")}
    assert shown == {"tier": "disk", "queries": 2, "query_hits": 1, "query_misses": 1, "hit_tokens": 1280}
    assert (tier["pending_loads"], tier["breaker_open"], tier["load_bytes"] > 0) == (0, 0, True)
    assert all(tier[f"mean_{call}_seconds"] > 0 for call in ("lookup", "load", "load_queue"))
    _check_log(tmp_path / "server.log")


@pytest.mark.long
def test_two_server_lifetimes(lab: Lab, tmp_path: Path) -> None:
    config = _configured(tmp_path)
    words = [f"w{4 + 7 * index % 1000}" for index in range(1500)]

    with api_server(lab, config, tmp_path / "first.log") as url:
        first_text, first_cached = _complete(url, words)
    stored = objects(tmp_path / "kv-cache")
    with api_server(lab, config, tmp_path / "second.log") as url:
        second_text, second_cached = _complete(url, words)
        loaded = _metric(url, "vllm:hybrid_offload_load_hits_total")
        external_hits = _metric(url, "vllm:external_prefix_cache_hits_total")

    assert first_cached == 0
    assert stored, "the first server's shutdown finishes its stores"
    assert second_text == first_text
    assert second_cached == external_hits == 1280
    assert loaded > 0
    for log in ("first.log", "second.log"):
        _check_log(tmp_path / log)


@pytest.mark.long
def test_a_server_answers_while_its_storage_hangs_and_is_served_from_it_afterwards(
    lab: Lab, fault_fs: FaultFs, tmp_path: Path
) -> None:
    folder, config, log = fault_fs.path / "kv", tmp_path / "offload.yaml", tmp_path / "server.log"
    config.write_text(
        f"lookup_timeout_seconds: {HANG_SECONDS}\nload_timeout_seconds: {HANG_SECONDS}\n"
        "load_when: always\nbreaker_pause_seconds: 0.1\nbreaker_max_pause_seconds: 0.2\n"
        f"backends:\n  - {{name: files, type: disk, path: {folder}}}\n"
    )
    words = [f"w{4 + 7 * index % 1000}" for index in range(1500)]

    with api_server(lab, config, log, {**LEAN, "VLLM_SERVER_DEV_MODE": "1"}) as url:

        def ask() -> int:
            """Ask without a prefix in the engine's own cache; returns how many tokens came from the tier."""
            _forget_prefixes(url)
            answer, cached = _complete(url, words)
            assert answer == expected
            return cached

        expected, _ = _complete(url, words)
        healthy = _seconds(ask)
        wait_until(lambda: ask() == 1280, "the server is not served from its disk")

        fault_fs.pause()
        waited = _seconds(ask)
        assert waited < 2 * HANG_SECONDS + healthy + SLACK_SECONDS
        wait_until(lambda: ask() == 0 and _metric(url, "vllm:hybrid_offload_breaker_open") == 1, "no breaker opened")
        assert _seconds(ask) < HANG_SECONDS + healthy, "an open breaker makes no request wait"

        fault_fs.resume()
        wait_until(lambda: ask() == 1280, "the server is not served from its disk again")
    assert len(re.findall(r"tier 'files'.* is not used for now", log.read_text())) == 1
    _check_log(log)
