"""Lookups: answered by every tier, or counted as misses at their deadline (I4)."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator

import pytest

from offload_core.lookup import Lookup, LookupService
from offload_core.runtime import IoLoop
from offload_core.stats import Counters
from offload_core.tier import Tier, close_tiers
from tests.unit.memory_backend import MemoryBackend, key, memory_tier

SECONDS = 30
Start = Callable[[float], LookupService]


@pytest.fixture
def backends() -> dict[str, MemoryBackend]:
    return {}


@pytest.fixture
def start(io: IoLoop, counters: Counters, backends: dict[str, MemoryBackend]) -> Iterator[Start]:
    tiers: list[Tier] = []
    for name in ("fast", "slow"):
        config, made = memory_tier(name)
        tiers.append(Tier(config, SECONDS, counters))
        backends[name] = made[0]
    yield lambda timeout_seconds: LookupService(io, tiers, timeout_seconds, counters)
    for backend in backends.values():
        backend.gates["contains"].open()
    close_tiers(tiers, io, SECONDS)


def wait_until_done(service: LookupService, lookup: Lookup) -> None:
    while not lookup.done():
        service.wait_for_answer(SECONDS)


def test_every_tier_is_asked_and_answers_per_key(start: Start, backends: dict[str, MemoryBackend]) -> None:
    backends["fast"].objects[key(1)] = b""
    backends["slow"].objects.update({key(1): b"", key(2): b""})
    service = start(SECONDS)
    lookup = service.start([key(0), key(1), key(2)])
    wait_until_done(service, lookup)
    assert lookup.unanswered() == []
    assert lookup.present() == {"fast": [False, True, False], "slow": [False, True, True]}


def test_a_tier_without_an_answer_at_the_deadline_has_nothing_and_is_counted(
    start: Start, backends: dict[str, MemoryBackend], counters: Counters
) -> None:
    for backend in backends.values():
        backend.objects[key(1)] = b""
    backends["slow"].gates["contains"].shut()
    service = start(0.2)
    lookup = service.start([key(1)])
    assert not lookup.done()
    while not lookup.done():
        service.wait_for_answer(0.01)
    assert lookup.unanswered() == ["slow"]
    assert lookup.present() == {"fast": [True], "slow": [False]}
    service.give_up(lookup)
    assert counters.take() == {("lookup_hits", "fast"): 1, ("lookup_failures", "slow"): 1}


@pytest.mark.parametrize("fault", [OSError("gone"), asyncio.CancelledError()], ids=["raises", "cancels itself"])
def test_a_tier_that_fails_has_nothing_and_the_engine_thread_sees_no_error(
    start: Start, backends: dict[str, MemoryBackend], fault: BaseException
) -> None:
    backends["fast"].objects[key(1)] = b""
    backends["slow"].faults = {"contains": fault}
    service = start(SECONDS)
    lookup = service.start([key(1)])
    wait_until_done(service, lookup)
    assert lookup.present() == {"fast": [True], "slow": [False]}
