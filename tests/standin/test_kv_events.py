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
        engine.scheduler.kv_event_publisher = self

    def publish(self, batch: Any) -> None:
        _, events, *_ = msgspec.msgpack.decode(msgspec.msgpack.encode(batch))
        for event in events:
            self.content.apply(event)

    def shutdown(self) -> None:
        """Do nothing: there is no thread to end."""


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_subscriber_sees_what_a_small_disk_has(rig: Rig, ranks: int) -> None:
    model = MODELS["gemma3"]()
    disk = {"name": "files", "type": "disk", "path": str(rig.kv), "capacity": "2MiB"}
    engine = rig.engine(model, ranks=ranks, backends=[disk], kv_events_config=EVENTS, kv_events_resync_seconds=0.01)
    publisher = Publisher(engine)
    for family in range(1, 9):
        rig.run(engine, [3 + (i * family + family) % 997 for i in range(4 * model.chunk_tokens + 5)])
    assert publisher.content.problems == []
    parts = Counter(int(path.stem, 16) & (1 << 64) - 1 for path in rig.kv.rglob("*.kv"))
    ends = {block for block, count in parts.items() if count >= ranks}
    seen = {block for counts in publisher.content.blocks.values() for block in counts}
    assert ends
    assert ends <= seen
    assert engine.counters["evictions|files"] > 0


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
