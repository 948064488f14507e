"""Opening all tiers of a configuration at start, and closing them at the end."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable

import pytest

from offload_core.api.errors import ConfigError
from offload_core.config.model import OffloadConfig, OffloadSettings
from offload_core.runtime.io_loop import IoLoop
from offload_core.runtime.metrics import Counters
from offload_core.tiers.opening import close_tiers, open_tiers
from tests.support.memory_backend import MemoryBackend, key, memory_tier

Prepare = Callable[[MemoryBackend], None]


def configured(
    tiers: dict[str, Prepare | None], open_timeout_seconds: float = 30.0
) -> tuple[OffloadConfig, dict[str, list[MemoryBackend]]]:
    """Make tiers. If one of them hangs, it alone has the deadline: a busy machine may miss a short one."""
    made = {
        name: memory_tier(name, prepare, **({"open_timeout_seconds": open_timeout_seconds} if prepare is hangs else {}))
        for name, prepare in tiers.items()
    }
    configs = [config for config, _ in made.values()]
    settings = OffloadSettings(
        backends=[config.common for config in configs],
        open_timeout_seconds=30.0 if hangs in tiers.values() else open_timeout_seconds,
    )
    return OffloadConfig(settings, tuple(configs)), {name: backends for name, (_, backends) in made.items()}


def fails(error: Exception) -> Prepare:
    return lambda backend: backend.faults.update(open=error)


def test_every_tier_is_opened_in_its_order(io: IoLoop, counters: Counters) -> None:
    config, made = configured({"fast": None, "slow": None})
    tiers = open_tiers(config, io, counters)
    assert [tier.name for tier in tiers] == ["fast", "slow"]
    assert [backends[0].calls for backends in made.values()] == [["open"], ["open"]]
    close_tiers(tiers, io, seconds=30)
    assert [backends[0].calls for backends in made.values()] == [["open", "close"], ["open", "close"]]


def test_a_backend_knows_the_deadlines_of_its_tier(io: IoLoop, counters: Counters) -> None:
    config, made = configured({"fast": None}, open_timeout_seconds=7.0)
    tiers = open_tiers(config, io, counters)
    context, limits = made["fast"][0].context, tiers[0].limits
    close_tiers(tiers, io, seconds=30)
    assert limits.open_timeout_seconds == 7.0
    assert context.open_timeout_seconds == limits.open_timeout_seconds
    assert context.lookup_timeout_seconds == limits.lookup_timeout_seconds
    assert context.load_timeout_seconds == limits.load_timeout_seconds
    assert context.load_timeout_seconds_per_mib == limits.load_timeout_seconds_per_mib
    assert context.store_timeout_seconds == limits.store_timeout_seconds
    assert context.close_timeout_seconds == limits.close_timeout_seconds


def test_every_tier_that_cannot_be_opened_is_named_with_its_reason(io: IoLoop, counters: Counters) -> None:
    broken = {"a": OSError("no disk"), "c": PermissionError(13, "not yours"), "d": ValueError("a plugin's defect")}
    config, _ = configured({"b": None} | {name: fails(error) for name, error in broken.items()})
    with pytest.raises(ConfigError) as caught:
        open_tiers(config, io, counters)
    assert caught.value.problems == (
        "backend 'a' cannot be opened: no disk",
        "backend 'c' cannot be opened: [Errno 13] not yours",
        "backend 'd' cannot be opened: ValueError: a plugin's defect",
    )


def test_a_medium_that_times_out_by_itself_is_named_with_its_own_reason(io: IoLoop, counters: Counters) -> None:
    config, _ = configured({"nfs": fails(TimeoutError(110, "Connection timed out"))})
    with pytest.raises(ConfigError, match=r"backend 'nfs' cannot be opened: .*Connection timed out"):
        open_tiers(config, io, counters)


def hangs(backend: MemoryBackend) -> None:
    backend.gates["open"].shut()


def test_a_tier_that_hangs_in_open_is_left_out_with_one_warning_until_it_answers(
    io: IoLoop, counters: Counters, caplog: pytest.LogCaptureFixture
) -> None:
    config, made = configured({"hung": hangs, "b": None}, 0.05)
    tiers = open_tiers(config, io, counters)
    hung, other = tiers
    (warning,) = caplog.messages
    assert warning.startswith("tier 'hung': open did not finish within open_timeout_seconds = 0.05; ")
    assert counters.take() == {("breaker_open", "hung"): 1}
    assert [tier.health.admits("lookup") for tier in tiers] == [False, True]
    assert io.submit(hung.lookup([key(1)])).result(30) == [False], "at once"
    assert (hung.health.available, other.health.available) == (False, True)

    made["hung"][0].gates["open"].open()
    while not hung.health.available:
        io.submit(asyncio.sleep(0.001)).result(30)
    assert made["hung"][0].calls == ["open"], "it was not asked before"
    made["hung"][0].objects[key(1)] = b""
    assert io.submit(hung.lookup([key(1)])).result(30) == [True]
    assert [message.partition(",")[0] for message in caplog.messages[1:]] == ["tier 'hung' is used again"]
    assert counters.take()["breaker_open", "hung"] == -1
    close_tiers(tiers, io, seconds=30)


def test_a_tier_whose_open_fails_late_stays_out(
    io: IoLoop, counters: Counters, caplog: pytest.LogCaptureFixture
) -> None:
    config, made = configured({"hung": hangs, "b": None}, 0.05)
    tiers = open_tiers(config, io, counters)
    made["hung"][0].faults["open"] = OSError("no share")
    made["hung"][0].gates["open"].open()
    while len(caplog.messages) < 2:
        io.submit(asyncio.sleep(0.001)).result(30)
    assert caplog.messages[1].startswith("tier 'hung': open failed after its deadline: OSError: no share. ")
    assert not tiers[0].health.admits("store")
    close_tiers(tiers, io, seconds=30)


def test_a_tier_that_still_hangs_in_open_is_closed_when_it_has_come_back(io: IoLoop, counters: Counters) -> None:
    config, made = configured({"hung": hangs, "b": None}, 0.05)
    tiers = open_tiers(config, io, counters)
    started = time.monotonic()
    close_tiers(tiers, io, seconds=60)
    assert time.monotonic() - started < 30, "nothing to wait for"
    assert (made["hung"][0].calls, made["b"][0].calls) == ([], ["open", "close"])
    made["hung"][0].gates["open"].open()
    for thread in [thread for thread in threading.enumerate() if thread.name.startswith("offload-hung-")]:
        thread.join(30)
    assert made["hung"][0].calls == ["open", "close"]
    assert not tiers[0].health.available


def test_a_wrong_tier_beside_one_that_hangs_refuses_the_start(io: IoLoop, counters: Counters) -> None:
    config, made = configured({"hung": hangs, "b": fails(OSError("no disk"))}, 0.05)
    with pytest.raises(ConfigError) as caught:
        open_tiers(config, io, counters)
    assert caught.value.problems == ("backend 'b' cannot be opened: no disk",)
    made["hung"][0].gates["open"].open()


def test_closing_waits_no_longer_than_it_may(io: IoLoop, counters: Counters) -> None:
    config, made = configured({"slow": None})
    tiers = open_tiers(config, io, counters)
    backend = made["slow"][0]
    backend.gates["close"].shut()
    start = time.monotonic()
    close_tiers(tiers, io, seconds=0.05)
    assert time.monotonic() - start < 10
    assert backend.calls == ["open"]
    backend.gates["close"].open()
    for thread in [thread for thread in threading.enumerate() if thread.name.startswith("offload-slow-")]:
        thread.join(30)
    assert backend.calls == ["open", "close"], "the close went on by itself"


def opens_after(seconds: float, name: str) -> Prepare:
    def prepare(backend: MemoryBackend) -> None:
        backend.gates[name].shut()
        threading.Timer(seconds, backend.gates[name].open).start()

    return prepare


def test_each_tier_opens_under_its_own_deadline(io: IoLoop, counters: Counters) -> None:
    hung, made = memory_tier("hung", hangs, open_timeout_seconds=0.05)
    slow, _ = memory_tier("slow", opens_after(0.3, "open"), open_timeout_seconds=30)
    settings = OffloadSettings(backends=[hung.common, slow.common], open_timeout_seconds=0.01)
    tiers = open_tiers(OffloadConfig(settings, (hung, slow)), io, counters)
    assert [tier.health.available for tier in tiers] == [False, True]
    made[0].gates["open"].open()
    close_tiers(tiers, io, seconds=30)


def test_each_tier_closes_under_its_own_deadline(io: IoLoop, counters: Counters) -> None:
    hung, made = memory_tier("hung", close_timeout_seconds=0.05)
    slow, others = memory_tier("slow", opens_after(0.3, "close"), close_timeout_seconds=30)
    settings = OffloadSettings(backends=[hung.common, slow.common], close_timeout_seconds=0.01)
    tiers = open_tiers(OffloadConfig(settings, (hung, slow)), io, counters)
    made[0].gates["close"].shut()
    close_tiers(tiers, io)
    assert (made[0].calls, others[0].calls) == (["open"], ["open", "close"])
    made[0].gates["close"].open()
