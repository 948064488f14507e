"""Plugins of strangers in the real engine."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

from tests.support.engine.lab import UNTIL_STORED, Lab, count, installed, objects, ours, served
from tests.support.engine.spec import RunResult, compare


def test_a_plugin_wraps_every_tier_and_observes_what_happens(gemma3: Lab, tmp_path: Path) -> None:
    rounds = gemma3.standard(700, 1283)
    plugin = installed(tmp_path, "masking")
    events = tmp_path / "events.jsonl"

    def run(**config: object) -> tuple[RunResult, Counter[str]]:
        transfer = ours(tmp_path / "kv", **config)
        result = gemma3.run(rounds, transfer, plugin if config else None, extra_engine_args=UNTIL_STORED)
        assert compare(gemma3.alone(rounds), result) == []
        told: Counter[str] = Counter()
        for line in events.read_text().splitlines() if events.exists() else ():
            event = json.loads(line)
            told[event["event"]] += 1
            told.update({f"{event['event']}.{name}": n for name, n in event.items() if isinstance(n, int)})
        events.unlink(missing_ok=True)
        return result, told

    first, told = run(required_plugins=["masking"])
    # Both halves of the connector live in this engine's process, and each opens the tier.
    assert (told["TierOpened"], told["TierClosed"], told["TierFailing"]) == (2, 2, 0)
    assert told["StoresEnded.stored"] == count(first, "stores") == len(objects(tmp_path / "kv")) > 0
    assert told["StoresEnded.nbytes"] == count(first, "store_bytes")

    second, told = run(required_plugins=["masking"])
    assert all(served(second).values())
    assert (told["TierOpened"], told["TierClosed"], told["TierFailing"]) == (2, 2, 0)
    assert told["LoadsEnded.loaded"] == count(second, "load_hits") > 0
    assert count(first, "events_dropped") == count(second, "events_dropped") == 0

    without, told = run()
    assert not any(served(without).values()), "what is on disk is masked"
    assert count(without, "load_corrupt") > 0
    assert not told
