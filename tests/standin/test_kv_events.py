"""KV events of whole stand-in engines: a subscriber's view is the content of the disk, in every geometry."""

from __future__ import annotations

from collections import Counter
from typing import Any

import msgspec
import pytest

from offload_core.vllm.kv_events import events as kv_events
from tests.engine.kv_subscriber import Content
from tests.standin.rig import NEVER_SECONDS, Rig
from tests.standin.scripted_disk import Script
from tests.support.standin.engine import StandInEngine
from tests.support.standin.geometries import MODELS

EVENTS = {"enable_kv_cache_events": True, "publisher": "null"}


class Publisher:
    """Takes vLLM's batches in place of its publisher, and gives them to a subscriber as bytes."""

    def __init__(self, engine: StandInEngine) -> None:
        self.content = Content()
        self.ends: dict[bool, dict[tuple[int, int], Any]] = {True: {}, False: {}}
        """Parent and tokens of blocks with events of their own, by group and hash; the engine's own, and the tiers'."""
        engine.scheduler.kv_event_publisher = self

    def publish(self, batch: Any) -> None:
        _, events, *_ = msgspec.msgpack.decode(msgspec.msgpack.encode(batch))
        for event in events:
            self.content.apply(event)
            if event["type"] == "BlockStored" and len(event["block_hashes"]) == 1:
                block = event["group_idx"], event["block_hashes"][0]
                self.ends[event["medium"] == "GPU"][block] = event["parent_block_hash"], event["token_ids"]

    def shutdown(self) -> None:
        """Do nothing: there is no thread to end."""


@pytest.mark.parametrize(("ranks", "prefix_match_unit"), [(1, None), (2, None), (1, 32)])
def test_a_subscriber_sees_what_a_small_disk_has(rig: Rig, ranks: int, prefix_match_unit: int | None) -> None:
    model = MODELS["gemma3"]()
    disk = {"name": "files", "type": "disk", "path": str(rig.kv), "capacity": "2MiB"}
    engine = rig.engine(
        model, ranks=ranks, backends=[disk], kv_events_config=EVENTS, kv_events_resync_seconds=0.01,
        prefix_match_unit=prefix_match_unit,
    )  # fmt: skip
    publisher = Publisher(engine)
    for family in range(1, 9):
        rig.run(engine, [3 + (i * family + family) % 997 for i in range(4 * model.chunk_tokens + 75)])
    assert publisher.content.problems == []
    files = list(rig.kv.rglob("*.kv"))
    assert any("-tail" in str(path) for path in files) is (prefix_match_unit is not None)
    parts = Counter(int(path.stem, 16) & (1 << 64) - 1 for path in files)
    ends = {block for block, count in parts.items() if count >= ranks}
    seen = {block for counts in publisher.content.blocks.values() for block in counts}
    assert ends
    assert ends <= seen
    assert engine.counters["evictions|files"] > 0


def test_the_end_of_a_tail_is_announced_as_vllm_announces_it(rig: Rig) -> None:
    model, unit = MODELS["qwen3_next"](), 32
    engine = rig.engine(model, kv_events_config=EVENTS, prefix_match_unit=unit)
    publisher = Publisher(engine)
    rig.run(engine, [3 + i % 997 for i in range(2 * model.chunk_tokens + 75)])
    told, own = publisher.ends[False], publisher.ends[True]
    ends = {block for block in told.keys() & own.keys() if len(told[block][1]) == unit}
    assert {group for group, _ in ends} == {0, 1, 2, 3}
    assert {block: told[block] for block in ends} == {block: own[block] for block in ends}


def test_an_idle_engine_announces_what_a_slower_tier_gets_late(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_events, "_AWAKE_SECONDS", NEVER_SECONDS)
    model = MODELS["gemma3"]()
    ram = {"name": "ram", "type": "cpu", "capacity": "64MiB"}
    script = Script(0, shut={"store"})
    engine = rig.engine(model, script, backends=[ram, rig.scripted_disk()], kv_events_config=EVENTS)
    publisher = Publisher(engine)

    def seen(tier: str) -> dict[int, dict[int, int]]:
        return {group: counts for (_, owner, group), counts in publisher.content.blocks.items() if owner == tier}

    engine.add(list(range(3, 4 * model.chunk_tokens + 8)), 4)
    rig.step_until(engine, lambda: not engine.unfinished() and seen("ram") and script.held["store"])
    for _ in range(5):  # the results of all stores: the first tier has them
        engine.step()
        rig.tick()
    assert seen("disk") == {}
    assert engine.busy
    rig.open("store")
    rig.step_until(engine, lambda: not engine.busy)
    assert seen("disk") == seen("ram")
