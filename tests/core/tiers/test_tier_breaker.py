"""A tier whose medium fails or hangs is answered for at once, probed on the I/O loop, and used again by itself."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator, Sequence
from typing import Any

import pytest

from offload_core.api.backend import LoadOutcome
from offload_core.api.keys import ObjectKey
from offload_core.runtime.io_loop import IoLoop
from offload_core.runtime.metrics import Counters
from offload_core.tiers.opening import close_tiers
from offload_core.tiers.tier import Tier
from tests.support.memory_backend import LIMITS, key, memory_tier
from tests.support.staged_objects import StagedObjects

SECONDS = 30
SHORT_SECONDS = 0.02
NEVER_SECONDS = 3600.0
GONE = OSError("the medium is gone")


class Rig(StagedObjects):
    """A tier over a memory backend whose breaker opens after two failures."""

    def __init__(self, io: IoLoop, **limits: float) -> None:
        super().__init__()
        self.io, self.counters = io, Counters()
        config, made = memory_tier(io_threads=2)
        own = {"breaker_failures": 2, "breaker_pause_seconds": SHORT_SECONDS, **limits}
        self.tier = Tier(config, LIMITS.model_copy(update=own), self.counters)
        self.backend = made[0]
        self.calls = self.backend.calls
        self._totals: Counter[str] = Counter()

    def run(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        return self.io.submit(coroutine).result(SECONDS)

    def lookup(self, *numbers: int) -> list[bool]:
        return list(self.run(self.tier.lookup([key(number) for number in numbers])))

    def load(self, *numbers: int) -> list[LoadOutcome | None]:
        staged = [self.staged(number) for number in numbers]
        outcomes = list(self.run(self.tier.load(staged)))
        for item in staged:
            item.lease.release()
        return outcomes

    def store(self, *numbers: int) -> list[bool]:
        sealed = [self.sealed(number) for number in numbers]
        stored = list(self.run(self.tier.store(sealed)))
        for item in sealed:
            item.lease.release()
        return stored

    def total(self, counter: str) -> int:
        for (name, _), count in self.counters.take().items():
            self._totals[name] += int(count)
        return self._totals[counter]

    def close(self) -> None:
        for gate in self.backend.gates.values():
            gate.open()
        close_tiers([self.tier], self.io, SECONDS)


@pytest.fixture
def made(io: IoLoop) -> Iterator[Callable[..., Rig]]:
    rigs: list[Rig] = []

    def make(**limits: float) -> Rig:
        rigs.append(Rig(io, **limits))
        return rigs[-1]

    yield make
    for rig in rigs:
        rig.close()


def until(happened: Callable[[], bool]) -> None:
    end = time.monotonic() + SECONDS
    while not happened():
        assert time.monotonic() < end
        time.sleep(0.001)


FAILING: dict[str, tuple[str, Callable[[Rig], object]]] = {
    "lookup": ("contains", lambda rig: rig.lookup(1)),
    "load": ("prepare_load", lambda rig: rig.load(1)),
    "store": ("prepare_store", lambda rig: rig.store(1)),
}


@pytest.mark.parametrize("operation", FAILING)
def test_a_tier_that_keeps_failing_is_not_asked_any_more(made: Callable[..., Rig], operation: str) -> None:
    rig = made(breaker_pause_seconds=NEVER_SECONDS, breaker_max_pause_seconds=NEVER_SECONDS)
    call, fail = FAILING[operation]
    rig.backend.faults = {call: GONE}
    for _ in range(2):
        fail(rig)
    rig.backend.faults = {}
    rig.calls.clear()
    assert (rig.lookup(1, 2), rig.load(1, 2), rig.store(1, 2)) == ([False] * 2, [None] * 2, [False] * 2)
    assert rig.calls == []
    assert rig.total("breaker_refused") == 3
    assert (rig.total("breaker_opened"), rig.total("breaker_open")) == (1, 1)
    assert not rig.tier.health.admits("store")


@pytest.mark.parametrize("operation", FAILING)
def test_it_is_used_again_by_itself(made: Callable[..., Rig], operation: str) -> None:
    rig = made()
    call, fail = FAILING[operation]
    rig.backend.faults = {call: GONE}
    for _ in range(2):
        fail(rig)
    if operation == "lookup":
        until(lambda: rig.calls.count("contains") >= 4)  # two probes
    rig.backend.faults = {}
    until(lambda: rig.tier.health.admits(operation))  # type: ignore[arg-type]  # a key of FAILING
    fail(rig)
    assert rig.tier.health.available
    assert rig.total("breaker_open") == 0
    assert rig.store(1) == [True]
    assert (rig.lookup(1), rig.load(1)) == ([True], [LoadOutcome.HIT])


def watched_contains(rig: Rig) -> list[Sequence[ObjectKey]]:
    """Make the backend's lookups fail without a thread; returns the keys of each lookup."""
    asked: list[Sequence[ObjectKey]] = []

    async def contains(keys: Sequence[ObjectKey]) -> Sequence[bool]:
        asked.append(tuple(keys))
        raise GONE

    rig.backend.contains = contains  # type: ignore[method-assign]  # as a wrapper would
    return asked


def test_probes_ask_for_keys_that_nobody_stores_each_a_new_one(made: Callable[..., Rig]) -> None:
    rig = made()
    asked = watched_contains(rig)
    for _ in range(2):
        rig.lookup(1)
    until(lambda: len(asked) >= 5)
    probes = asked[2:]
    assert len(set(probes)) == len(probes), "a backend may remember answers"
    assert {(len(keys), keys[0].namespace, keys[0].pack) for keys in probes} == {(1, "0" * 64, "probe")}


def test_what_was_found_damaged_is_not_deleted_from_a_tier_that_is_not_used(made: Callable[..., Rig]) -> None:
    rig = made(breaker_pause_seconds=NEVER_SECONDS, breaker_max_pause_seconds=NEVER_SECONDS)
    rig.backend.objects[key(1)] = b"damaged"
    gate = rig.backend.gates["load_into"]
    gate.shut()
    staged = rig.staged(1)
    load = rig.io.submit(rig.tier.load([staged]))
    gate.wait_for_a_call()
    for _ in range(2):
        rig.tier.health.timed_out("store", key(2))
    gate.open()
    assert load.result(SECONDS) == [LoadOutcome.CORRUPT]
    assert "delete" not in rig.calls
    staged.lease.release()


def test_a_hung_probe_is_not_repeated_and_its_return_closes_the_breaker(made: Callable[..., Rig]) -> None:
    rig = made()
    gate = rig.backend.gates["contains"]
    rig.backend.faults = {"contains": GONE}
    rig.lookup(1)
    gate.shut()
    failing = rig.io.submit(rig.tier.lookup([key(1)]))
    gate.wait_for_a_call()
    gate.arrived.clear()
    gate.open()
    assert failing.result(SECONDS) == [False]
    gate.shut()
    gate.wait_for_a_call()
    rig.backend.faults = {}
    asked = rig.calls.count("contains")
    for _ in range(10):
        rig.run(asyncio.sleep(SHORT_SECONDS))
        assert rig.tier.health.probe_in_seconds is None
    assert rig.calls.count("contains") == asked
    gate.open()
    until(lambda: rig.tier.health.available)


def test_a_probe_that_never_comes_back_is_given_up_for_a_few_others(made: Callable[..., Rig]) -> None:
    rig = made(breaker_max_pause_seconds=SHORT_SECONDS)
    lost: list[asyncio.Event] = []
    contains = rig.backend.contains

    async def first_ones_hang(keys: Sequence[ObjectKey]) -> Sequence[bool]:
        if len(lost) < 2:
            lost.append(asyncio.Event())
            await lost[-1].wait()
        return await contains(keys)

    rig.backend.faults = {"contains": GONE}
    for _ in range(2):
        rig.lookup(1)
    rig.backend.contains = first_ones_hang  # type: ignore[method-assign]
    until(lambda: len(lost) == 2)
    rig.backend.faults = {}
    until(lambda: rig.tier.health.available)
    for event in lost:
        rig.io.loop.call_soon_threadsafe(event.set)


def test_no_probe_is_sent_after_closing(made: Callable[..., Rig]) -> None:
    rig = made(breaker_max_pause_seconds=SHORT_SECONDS)
    asked = watched_contains(rig)
    for _ in range(2):
        rig.lookup(1)
    until(lambda: len(asked) >= 3)
    close_tiers([rig.tier], rig.io, SECONDS)
    asked.clear()
    rig.run(asyncio.sleep(10 * SHORT_SECONDS))
    assert asked == []


def test_a_timeout_told_on_another_thread_starts_the_probes(made: Callable[..., Rig]) -> None:
    rig = made()
    rig.run(rig.tier.open())
    for _ in range(2):
        rig.tier.health.timed_out("store", key(1))
    assert not rig.tier.health.available
    until(lambda: "contains" in rig.calls)
    until(lambda: rig.tier.health.admits("store"))
    assert rig.store(1) == [True]
    assert rig.tier.health.available


def test_half_open_only_one_load_at_a_time_reaches_the_medium(made: Callable[..., Rig]) -> None:
    rig = made()
    rig.store(1)
    rig.backend.faults = {"load_into": GONE}
    for _ in range(2):
        rig.load(1)
    rig.backend.faults = {}
    until(lambda: rig.tier.health.admits("load"))
    gate = rig.backend.gates["load_into"]
    gate.shut()
    staged = rig.staged(1)
    trial = rig.io.submit(rig.tier.load([staged]))
    gate.wait_for_a_call()
    assert [rig.load(1) for _ in range(3)] == [[None]] * 3
    assert rig.lookup(1) == [True]
    gate.open()
    assert trial.result(SECONDS) == [LoadOutcome.HIT]
    assert rig.load(1) == [LoadOutcome.HIT]
    staged.lease.release()


def test_lookups_that_are_refused_since_others_hang_open_the_breaker(made: Callable[..., Rig]) -> None:
    rig = made(breaker_failures=6, lookup_timeout_seconds=SHORT_SECONDS)
    rig.backend.gates["contains"].shut()
    for number in range(1, 5):
        rig.io.submit(rig.tier.lookup([key(1)]))
        until(lambda: rig.total("lookup_timeouts") == number)  # noqa: B023  # called before the next number
    assert rig.lookup(1) == [False]
    assert rig.tier.health.admits("lookup")
    assert rig.lookup(1) == [False]
    assert not rig.tier.health.admits("lookup")


def test_a_lookup_without_any_time_is_late_at_once(made: Callable[..., Rig]) -> None:
    rig = made()
    gate = rig.backend.gates["contains"]
    gate.shut()
    rig.io.submit(rig.tier.lookup([key(1)], within_seconds=0.0))
    until(lambda: rig.total("lookup_timeouts") == 1)
    gate.open()


def test_lookups_past_their_deadline_do_not_pile_up(made: Callable[..., Rig]) -> None:
    rig = made(breaker_failures=1000, lookup_timeout_seconds=SHORT_SECONDS)
    rig.store(1)
    gate = rig.backend.gates["contains"]
    gate.shut()
    hung = []
    for number in range(1, 5):
        hung.append(rig.io.submit(rig.tier.lookup([key(1)])))
        until(lambda: rig.total("lookup_timeouts") == number)  # noqa: B023  # called before the next number
    for _ in range(100):
        assert rig.lookup(1) == [False]
    assert rig.total("lookup_timeouts") == 4
    assert not any(answer.done() for answer in hung)
    assert rig.total("lookup_failures") == 104
    gate.open()
    assert [answer.result(SECONDS) for answer in hung] == [[True]] * 4
    assert rig.lookup(1) == [True]
