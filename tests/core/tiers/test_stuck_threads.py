"""Threads in calls that never come back: counted, replaced up to a bound, never waited for."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from offload_core.config.limits import Limits
from offload_core.runtime.io_loop import IoLoop
from offload_core.runtime.metrics import Counters
from offload_core.runtime.threads import DaemonExecutor
from offload_core.tiers.opening import close_tiers
from offload_core.tiers.tier import Tier
from tests.support.memory_backend import key, memory_tier

SECONDS = 30
STUCK_AFTER_SECONDS = 0.02


class Rig:
    """An executor whose calls hang until the test lets them go."""

    def __init__(self, max_threads: int) -> None:
        self.gate = threading.Event()
        self.stuck = 0
        self.most_threads = 0
        self._running = threading.Semaphore(0)
        self.threads = DaemonExecutor(max_threads, "test-stuck", STUCK_AFTER_SECONDS, self._count)

    def hang(self, calls: int) -> None:
        """Submit calls that hang."""
        self._futures = [self.threads.submit(self._hang) for _ in range(calls)]

    def wait_for(self, running: int) -> None:
        """Wait until so many more of them run."""
        for _ in range(running):
            assert self._running.acquire(timeout=SECONDS)

    def look_until_stuck(self, stuck: int) -> None:
        until(lambda: self.look() >= stuck)

    def look(self) -> int:
        self.threads.replace_stuck()
        self.most_threads = max(self.most_threads, len(alive()))
        return self.stuck

    def end(self) -> None:
        self.gate.set()
        for future in self._futures:
            future.result(SECONDS)
        until(lambda: not self.threads.busy and not self.stuck)  # a thread counts its call after the result

    def _hang(self) -> None:
        self._running.release()
        assert self.gate.wait(SECONDS)

    def _count(self, change: int) -> None:
        self.stuck += change


@pytest.fixture
def rig() -> Iterator[Rig]:
    rig = Rig(2)
    yield rig
    rig.gate.set()
    rig.threads.shutdown()
    until(lambda: not alive())


def alive() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("test-stuck-")]


def until(happened: Callable[[], bool]) -> None:
    end = time.monotonic() + SECONDS
    while not happened():
        assert time.monotonic() < end
        threading.Event().wait(0.001)


def test_a_call_gets_a_thread_although_all_threads_hang(rig: Rig) -> None:
    rig.hang(2)
    rig.wait_for(2)
    waiting = rig.threads.submit(str)
    rig.look_until_stuck(2)
    assert waiting.result(SECONDS) == ""
    assert rig.threads.submit(int).result(SECONDS) == 0, "and the next one without another look"


def test_no_more_threads_are_replaced_than_there_may_be(rig: Rig) -> None:
    rig.hang(6)
    rig.wait_for(2)
    rig.look_until_stuck(2)
    rig.wait_for(2)
    rig.look_until_stuck(4)
    for _ in range(20):
        rig.look()
    assert rig.most_threads == 4
    rig.end()
    assert rig.stuck == 0


def test_threads_that_come_back_while_there_are_too_many_end(rig: Rig) -> None:
    rig.hang(4)
    rig.wait_for(2)
    rig.look_until_stuck(2)
    rig.wait_for(2)
    rig.look_until_stuck(4)
    rig.end()
    until(lambda: len(alive()) == 2)
    assert rig.stuck == 0
    assert rig.threads.submit(int).result(SECONDS) == 0


def test_a_thread_that_comes_back_while_there_are_too_few_goes_on(rig: Rig) -> None:
    rig.hang(1)
    rig.wait_for(1)
    rig.look_until_stuck(1)
    (thread,) = alive()
    rig.end()
    assert rig.threads.submit(threading.current_thread).result(SECONDS) is thread
    assert rig.stuck == 0


def test_a_short_call_is_not_stuck(rig: Rig) -> None:
    for _ in range(100):
        rig.threads.submit(int).result(SECONDS)
    until(lambda: not rig.threads.busy)
    assert rig.look() == 0


class ShortTier:
    """A tier with one thread of each kind, which is stuck soon."""

    def __init__(self, counters: Counters) -> None:
        config, made = memory_tier(io_threads=1)
        names = ("open", "lookup", "load", "store", "close")
        short = {f"{name}_timeout_seconds": STUCK_AFTER_SECONDS for name in names}
        self.tier = Tier(config, Limits(**short), counters)  # type: ignore[arg-type]  # by name
        self.backend = made[0]
        self._counters = counters
        self._stuck = 0.0

    def wait_for_stuck(self, expected: int) -> None:
        """Wait until so many threads are stuck."""

        def is_so() -> bool:
            self._stuck += self._counters.take().get(("stuck_threads", "memory"), 0)
            return self._stuck == expected

        until(is_so)


@pytest.fixture
def short(io: IoLoop, counters: Counters) -> Iterator[ShortTier]:
    made = ShortTier(counters)
    yield made
    close_tiers([made.tier], io, SECONDS)


def test_a_tier_counts_its_stuck_threads_while_they_are(io: IoLoop, short: ShortTier) -> None:
    gate = short.backend.gates["contains"]
    gate.shut()
    lookup = io.submit(short.tier.lookup([key(1)], within_seconds=SECONDS))
    short.wait_for_stuck(1)
    gate.open()
    assert lookup.result(SECONDS) == [False]
    short.wait_for_stuck(0)


def test_stuck_loads_and_lookups_count_and_are_replaced_too(io: IoLoop, short: ShortTier) -> None:
    backend = short.backend
    gates = [threading.Event() for _ in range(3)]
    calls = [
        io.submit(run(gate.wait, SECONDS))
        for run, gate in zip((backend.run_blocking, backend.run_load, backend.run_lookup), gates, strict=True)
    ]
    lookup = io.submit(short.tier.lookup([key(1)]))  # starts the timer; it waits for a thread too
    short.wait_for_stuck(3)
    assert lookup.result(SECONDS) == [False]
    for run in (backend.run_load, backend.run_lookup):
        assert io.submit(run(str)).result(SECONDS) == ""
    for gate, left in zip(gates, (2, 1, 0), strict=True):
        gate.set()
        short.wait_for_stuck(left)
    assert all(call.result(SECONDS) for call in calls)


HANGS = """
import asyncio, os, sys, threading, time
from offload_core.config.model import OffloadConfig, OffloadSettings
from offload_core.runtime.io_loop import IoLoop
from offload_core.runtime.metrics import Counters
from offload_core.tiers.opening import close_tiers, open_tiers
from tests.support.memory_backend import key, memory_tier

reading, writing = os.pipe()

def hang(backend):
    backend.gates["contains"].pass_through = lambda: os.read(reading, 1)

config, _ = memory_tier(prepare=hang, lookup_timeout_seconds=0.02, breaker_failures=100, io_threads=2)
settings = OffloadSettings(backends=[config.common], open_timeout_seconds=0.05, load_timeout_seconds=0.05,
                           store_timeout_seconds=0.05, close_timeout_seconds=0.05)
io, counters, counted = IoLoop.acquire(), Counters(), {}
tiers = open_tiers(OffloadConfig(settings, (config,)), io, counters)
while not tiers[0].health.available:
    time.sleep(0.01)
lookups = [io.submit(tiers[0].lookup([key(number)])) for number in range(4)]
while counted.get("stuck_threads", 0) < 4:
    for (name, _), count in counters.take().items():
        counted[name] = counted.get(name, 0) + count
    time.sleep(0.01)
mine = [thread for thread in threading.enumerate() if thread.name.startswith("offload-memory")]
print("stuck:", counted["stuck_threads"], "threads:", len(mine))
close_tiers(tiers, io)
io.release()
print("the end")
"""


def test_a_process_ends_at_once_although_all_threads_of_a_tier_hang() -> None:
    started = time.monotonic()
    done = subprocess.run([sys.executable, "-c", HANGS], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (0, "stuck: 4 threads: 4\nthe end\n"), done.stderr
    assert "Traceback" not in done.stderr
    assert time.monotonic() - started < 30
