"""Plugins that wrap backends and observe events, as real distributions and through real tiers."""

from __future__ import annotations

import dataclasses
import importlib
import queue
import threading
from collections.abc import Coroutine, Iterator
from pathlib import Path
from typing import Any

import pytest

from offload_core.api import events
from offload_core.api.backend import LoadOutcome
from offload_core.api.errors import ConfigError
from offload_core.api.events import Event
from offload_core.api.hooks import TierInfo
from offload_core.config.loading import load_config
from offload_core.config.model import OffloadConfig, OffloadSettings, TierConfig
from offload_core.plugins.registry import PluginRegistry, load_plugins
from offload_core.runtime.io_loop import IoLoop
from offload_core.runtime.metrics import Counters
from offload_core.tiers import health
from offload_core.tiers.opening import close_tiers, open_tiers
from offload_core.tiers.tier import Tier
from tests.support.memory_backend import MemoryBackend, key, memory_tier
from tests.support.plugin_site import Site
from tests.support.staged_objects import OBJECT_BYTES, StagedObjects

SECONDS = 30
HIT, MISS, CORRUPT = LoadOutcome.HIT, LoadOutcome.MISS, LoadOutcome.CORRUPT

WRAPPER = """
from offload_core.api.wrapper import BackendWrapper

CALLS = []

class Noting(BackendWrapper):
    async def open(self):
        CALLS.append("open")
        await super().open()

    async def prepare_store(self, keys, nbytes):
        CALLS.append("prepare_store")
        reservation = await super().prepare_store(keys, nbytes)
        reservation.evicted = keys[:1]
        return reservation

@hookimpl
def offload_wrap_backend(backend, tier):
    CALLS.append((tier, type(backend).__module__))
    return Noting(backend)
"""

OBSERVER = """
import queue
import threading

EVENTS = queue.SimpleQueue()

@hookimpl
def offload_observe(event):
    EVENTS.put((event, threading.current_thread()))
"""

BLOCKED_OBSERVER = """
import threading

BUSY, GO_ON = threading.Event(), threading.Event()
EVENTS = []

@hookimpl
def offload_observe(event):
    BUSY.set()
    GO_ON.wait(60)
    EVENTS.append(event)
"""


class Rig(StagedObjects):
    """Opens tiers with plugins."""

    def __init__(self, io: IoLoop, counters: Counters) -> None:
        super().__init__()
        self.io, self.counters = io, counters
        self._opened: list[Tier] = []

    def open(self, registry: PluginRegistry, *configs: TierConfig) -> list[Tier]:
        settings = OffloadSettings(backends=[config.common for config in configs])
        return self.open_config(OffloadConfig(settings, configs, registry))

    def open_config(self, config: OffloadConfig) -> list[Tier]:
        tiers = open_tiers(config, self.io, self.counters)
        self._opened += tiers
        return tiers

    def open_memory(self, registry: PluginRegistry) -> tuple[Tier, MemoryBackend]:
        config, made = memory_tier(io_threads=2, load_weight=3)
        (tier,) = self.open(registry, config)
        return tier, made[0]

    def run(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        return self.io.submit(coroutine).result(SECONDS)

    def load(self, tier: Tier, *numbers: int) -> list[LoadOutcome | None]:
        staged = [self.staged(number) for number in numbers]
        outcomes = list(self.run(tier.load(staged)))
        for item in staged:
            item.lease.release()
        return outcomes

    def store(self, tier: Tier, *numbers: int) -> list[bool]:
        sealed = [self.sealed(number) for number in numbers]
        stored = list(self.run(tier.store(sealed)))
        for item in sealed:
            item.lease.release()
        return stored

    def close(self, seconds: float = SECONDS) -> None:
        opened, self._opened = self._opened, []
        close_tiers(opened, self.io, seconds)


@pytest.fixture
def rig(io: IoLoop, counters: Counters) -> Iterator[Rig]:
    rig = Rig(io, counters)
    yield rig
    rig.close()


def of_plugin(module: str, name: str) -> Any:
    """Return the value of a name in the plugin's module."""
    return getattr(importlib.import_module(module), name)


def taken(module: str) -> list[Event]:
    """Return the events that an OBSERVER has received, with all durations set to zero."""
    found: queue.SimpleQueue[tuple[Event, threading.Thread]] = of_plugin(module, "EVENTS")
    told = [found.get()[0] for _ in range(found.qsize())]
    return [_without_duration(event) for event in told]


def _without_duration(event: Event) -> Event:
    if isinstance(event, events.TierOpened | events.LoadsEnded | events.StoresEnded):
        assert 0 <= event.seconds < SECONDS
        return dataclasses.replace(event, seconds=0.0)
    return event


def test_offload_wrap_backend(site: Site, rig: Rig, tmp_path: Path) -> None:
    site.declare("masking", "masking = tests.engine.masking")
    backends = [{"name": "nvme", "type": "disk", "path": str(tmp_path / "kv")}]
    config = load_config({"required_plugins": ["masking"], "backends": backends}, load_plugins())
    (tier,) = rig.open_config(config)
    assert rig.store(tier, 1, 2) == [True, True]
    assert rig.run(tier.lookup([key(1), key(3)])) == [True, False]
    staged = [rig.staged(number) for number in (2, 3, 1)]
    assert rig.run(tier.load(staged)) == [HIT, MISS, HIT]
    assert [bytes(item.lease.view) for item in staged[::2]] == [bytes(rig.sealed(n).lease.view) for n in (2, 1)]
    assert set(staged[1].lease.tensor.tolist()) == {0x5A}, "a miss leaves the buffer untouched"
    whole = bytes(rig.sealed(1).lease.view)
    (on_disk,) = [path.read_bytes() for path in (tmp_path / "kv").rglob(f"{key(1).chunk_hash.hex()}.kv")]
    assert on_disk == bytes(byte ^ 0x5A for byte in whole)

    types = config.plugins.backend_types.values()
    (bare,) = rig.open_config(load_config({"backends": backends}, PluginRegistry(types)))
    assert rig.load(bare, 1, 2) == [CORRUPT, CORRUPT], "without the plugin nothing can be read"


def test_plugins_wrap_in_the_order_of_their_names(site: Site, rig: Rig) -> None:
    for name in ("outer", "inner"):  # installed in another order than that of the names
        site.install(name, WRAPPER, name={"inner": "a", "outer": "b"}[name])
    tier, backend = rig.open_memory(site.load())
    info = TierInfo(name="memory", type="memory", load_weight=3.0)
    assert of_plugin("inner", "CALLS") == [(info, "tests.support.memory_backend"), "open"]
    assert of_plugin("outer", "CALLS") == [(info, "inner"), "open"]
    assert rig.store(tier, 1) == [True]
    assert of_plugin("inner", "CALLS")[-1] == of_plugin("outer", "CALLS")[-1] == "prepare_store"
    assert set(backend.objects) == {key(1)}


def test_a_wrapping_plugin_may_leave_a_tier_alone(site: Site, rig: Rig) -> None:
    site.install("idle", "@hookimpl\ndef offload_wrap_backend(tier):\n    return None")
    tier, backend = rig.open_memory(site.load())
    assert rig.store(tier, 1) == [True]
    assert set(backend.objects) == {key(1)}


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("raise RuntimeError('no key')", "failed to wrap tier 'memory': RuntimeError: no key"),
        ("raise SystemExit('no key')", "failed to wrap tier 'memory': SystemExit: no key"),
        ("return False", "wrapped tier 'memory' in False; offload_wrap_backend must return a Backend or None"),
        ("return type(backend)", ".Recorded'>; offload_wrap_backend must return a Backend or None"),
        ("return asleep()", "failed to wrap tier 'memory': the hook returned a coroutine, which nobody awaits"),
    ],
)
def test_a_tier_that_cannot_be_wrapped_does_not_open(site: Site, rig: Rig, body: str, message: str) -> None:
    source = f"""
async def asleep():
    pass

@hookimpl
def offload_wrap_backend(backend, tier):
    if tier.name == "memory":
        {body}
"""
    site.install("cipher-plugin", source, name="cipher")
    wrapped, made = memory_tier("memory")
    healthy, made_healthy = memory_tier("healthy")
    broken, _ = memory_tier("broken", lambda backend: backend.faults.update(open=OSError("no disk")))
    with pytest.raises(ConfigError) as caught:
        rig.open(site.load(), wrapped, healthy, broken)
    first, second = caught.value.problems
    assert first.startswith("backend 'memory' cannot be opened: plugin 'cipher' of cipher-plugin 1.0 ")
    assert message in first
    assert second == "backend 'broken' cannot be opened: no disk"
    assert made[0].calls == [], "it is not used without its wrapper"
    made_healthy[0].gates["close"].wait_for_a_call()


def test_a_backend_whose_construction_fails_is_named(rig: Rig) -> None:
    def fail(backend: MemoryBackend) -> None:
        raise ValueError("a plugin's defect")

    with pytest.raises(ConfigError) as caught:
        rig.open(PluginRegistry(), memory_tier("box", fail)[0])
    assert caught.value.problems == ("backend 'box' cannot be opened: ValueError: a plugin's defect",)


def test_what_is_not_used_of_a_failed_plugin_is_said_when_tiers_are_opened(
    site: Site, rig: Rig, caplog: pytest.LogCaptureFixture
) -> None:
    site.install("cipher", WRAPPER + "\nraise RuntimeError('no key')")
    rig.open_memory(site.load())
    assert "plugin 'cipher' of cipher 1.0 failed and is not used: RuntimeError: no key" in caplog.messages


def test_offload_observe(site: Site, rig: Rig) -> None:
    site.install("watcher", OBSERVER)
    tier, backend = rig.open_memory(site.load())
    rig.store(tier, 1, 2)
    rig.store(tier, 2, 3)
    backend.objects[key(1)] = b"damaged"
    assert rig.load(tier, 1, 2, 4) == [CORRUPT, HIT, MISS]
    rig.close()
    assert taken("watcher") == [
        events.TierOpened("memory", 0.0),
        events.StoresEnded("memory", 2, 0, 0, 0, 2 * OBJECT_BYTES, 0.0),
        events.StoresEnded("memory", 1, 1, 0, 0, OBJECT_BYTES, 0.0),
        events.LoadsEnded("memory", 1, 1, 1, 0, OBJECT_BYTES, 0.0),
        events.ObjectsDamaged("memory", (key(1),)),
        events.TierClosed("memory"),
    ]


def test_observers_hear_once_that_an_operation_fails_and_once_that_it_works_again(
    site: Site, rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(health, "QUIET_SECONDS", 0.0)
    site.install("watcher", OBSERVER)
    tier, backend = rig.open_memory(site.load())
    backend.faults = {call: OSError("gone") for call in ("contains", "prepare_load", "prepare_store")}
    for _ in range(2):
        rig.run(tier.lookup([key(1)]))
        rig.store(tier, 1)
        rig.load(tier, 1, 2)
    backend.faults = {}
    rig.run(tier.lookup([key(1)]))
    rig.store(tier, 3)
    rig.load(tier, 3)
    rig.close()
    cause = "OSError: gone"
    assert taken("watcher")[1:-1] == [
        events.TierFailing("memory", "lookup", cause),
        events.TierFailing("memory", "store", cause),
        events.StoresEnded("memory", 0, 0, 0, 1, 0, 0.0),
        events.TierFailing("memory", "load", cause),
        events.LoadsEnded("memory", 0, 0, 0, 2, 0, 0.0),
        events.StoresEnded("memory", 0, 0, 0, 1, 0, 0.0),
        events.LoadsEnded("memory", 0, 0, 0, 2, 0, 0.0),
        events.TierRecovered("memory", "lookup"),
        events.TierRecovered("memory", "store"),
        events.StoresEnded("memory", 1, 0, 0, 0, OBJECT_BYTES, 0.0),
        events.TierRecovered("memory", "load"),
        events.LoadsEnded("memory", 1, 0, 0, 0, OBJECT_BYTES, 0.0),
    ]


def test_observers_hear_what_was_evicted_also_when_the_store_fails_afterwards(site: Site, rig: Rig) -> None:
    site.install("evicting", WRAPPER)
    site.install("watcher", OBSERVER)
    tier, backend = rig.open_memory(site.load())
    backend.faults = {"store": OSError("gone")}
    assert rig.store(tier, 7, 8) == [False, False]
    rig.close()
    assert events.ObjectsEvicted("memory", (key(7),)) in taken("watcher")


def test_all_observers_of_all_tiers_are_called_on_one_thread_of_their_own(site: Site, rig: Rig) -> None:
    site.install("first", OBSERVER)
    site.install("second", OBSERVER)
    registry = site.load()
    for _ in range(2):  # as both halves of a connector do in one process
        tier, _ = rig.open_memory(registry)
        rig.store(tier, 1)
    rig.close()
    for module in ("first", "second"):
        found = of_plugin(module, "EVENTS")
        threads = {found.get()[1] for _ in range(found.qsize())}
        assert [thread.name for thread in threads] == ["offload-observers-0"]


def test_a_blocked_observer_blocks_neither_engine_nor_storage_and_what_it_misses_is_counted(
    site: Site, rig: Rig, caplog: pytest.LogCaptureFixture
) -> None:
    site.install("blocked", BLOCKED_OBSERVER)
    tier, _ = rig.open_memory(site.load())
    try:
        assert of_plugin("blocked", "BUSY").wait(SECONDS)
        for _ in range(1100):
            assert rig.store(tier, 1) == [True]
        # 1,024 wait, the first of them in the observer's hands: that the tier was opened.
        assert rig.counters.take()["events_dropped", "memory"] == 1 + 1100 - 1024
        (warning,) = [message for message in caplog.messages if "too slow" in message]
        assert warning.startswith("observers (plugin 'blocked' of blocked 1.0) are too slow: 1024 events wait")
        rig.close(seconds=0.05)
        assert "observers were still busy after 0.05 s; the waiting events are dropped" in caplog.messages
    finally:
        of_plugin("blocked", "GO_ON").set()
    site.install("watcher", OBSERVER)
    rig.open_memory(site.load())  # the thread is free again, and comes to this tier after all that was queued before
    rig.close()
    assert taken("watcher") == [events.TierOpened("memory", 0.0), events.TierClosed("memory")]
    told = of_plugin("blocked", "EVENTS")
    assert [type(event) for event in told] == [events.TierOpened, events.TierOpened, events.TierClosed], (
        "those that waited when the tier was closed were dropped"
    )


def test_an_observer_that_keeps_up_misses_nothing(site: Site, rig: Rig) -> None:
    site.install("watcher", OBSERVER)
    tier, _ = rig.open_memory(site.load())
    found = of_plugin("watcher", "EVENTS")
    assert isinstance(found.get(timeout=SECONDS)[0], events.TierOpened)
    for _ in range(1100):
        rig.store(tier, 1)
        assert isinstance(found.get(timeout=SECONDS)[0], events.StoresEnded)
    assert ("events_dropped", "memory") not in rig.counters.take()


def test_closing_delivers_what_is_queued(site: Site, rig: Rig) -> None:
    site.install("blocked", BLOCKED_OBSERVER)
    tier, _ = rig.open_memory(site.load())
    for _ in range(10):
        rig.store(tier, 1)
    assert of_plugin("blocked", "EVENTS") == []
    of_plugin("blocked", "GO_ON").set()
    rig.close()
    assert len(of_plugin("blocked", "EVENTS")) == 12


@pytest.mark.parametrize("problem", ["RuntimeError('mine')", "SystemExit('mine')"])
def test_an_observer_that_raises_is_logged_once_and_goes_on_receiving(
    site: Site, rig: Rig, caplog: pytest.LogCaptureFixture, problem: str
) -> None:
    site.install("a-raising", OBSERVER + f"    raise {problem}")
    site.install("z-watcher", OBSERVER)
    tier, _ = rig.open_memory(site.load())
    rig.store(tier, 1)
    rig.close()
    assert len(taken("a_raising")) == len(taken("z_watcher")) == 3
    (message,) = [message for message in caplog.messages if "offload_observe failed" in message]
    assert message.startswith("plugin 'a-raising' of a-raising 1.0: offload_observe failed on TierOpened(tier='memory'")
    assert f"{problem.split('(')[0]}: mine; it still gets events" in message


def test_an_async_observer_behind_a_plain_function_is_logged(
    site: Site, rig: Rig, caplog: pytest.LogCaptureFixture
) -> None:
    site.install("asleep", "async def asleep(): pass\n\n@hookimpl\ndef offload_observe(event):\n    return asleep()")
    rig.open_memory(site.load())
    rig.close()
    assert any("the hook returned a coroutine, which nobody awaits" in message for message in caplog.messages)


def test_without_observers_nothing_is_delivered(site: Site, rig: Rig) -> None:
    site.install("wrapping", WRAPPER)
    tier, _ = rig.open_memory(site.load())
    assert tier.observers is None


def test_tiers_that_did_not_open_are_not_said_to_be_closed(site: Site, rig: Rig) -> None:
    site.install("watcher", OBSERVER)
    registry = site.load()
    broken, made = memory_tier("broken", lambda backend: backend.faults.update(open=OSError("no disk")))
    with pytest.raises(ConfigError):
        rig.open(registry, broken)
    made[0].gates["close"].wait_for_a_call()
    rig.open_memory(registry)
    rig.close()
    assert [(type(event), event.tier) for event in taken("watcher")] == [
        (events.TierOpened, "memory"),
        (events.TierClosed, "memory"),
    ]
