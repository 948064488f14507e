"""Plugins that take their process with them, or keep it: the engine's process lives, and the tier comes back."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from offload_core.api.backend import LoadOutcome
from offload_core.api.errors import ConfigError
from offload_core.runtime.io_loop import IoLoop
from offload_core.tiers.staged_object import StagedObject
from tests.core.io_process.rig import Rig, key
from tests.support.plugin_site import Site
from tests.support.polling import wait_until
from tests.support.process_state import is_running, listening_sockets

HIT = LoadOutcome.HIT

PLUGIN = """
import ctypes, os, signal, time
from pathlib import Path
from offload_core.api import Backend, BackendOptions, BackendType, Capabilities, LoadOutcome, StoreOutcome, hookimpl

OFFLOAD_API_VERSION = 1

class Options(BackendOptions):
    path: str

class Panic(BaseException):
    pass

class Unreadable(OSError):
    def __str__(self):
        return self.message

class Trouble(Backend):
    capabilities = Capabilities(medium="disk", persistent=True, shared=True)

    def __init__(self, *arguments):
        super().__init__(*arguments)
        for place in Path(self.options.path).glob("ends-while-made-*"):
            place.unlink()
            os._exit(3)

    async def open(self):
        for place in Path(self.options.path).glob("ends-while-opened-*"):
            place.unlink()
            os._exit(3)
        await self.run_blocking(self._hang)

    def _hang(self):
        while (Path(self.options.path) / "hangs-in-open").exists():
            time.sleep(0.01)

    def _file(self, key):
        return Path(self.options.path) / key.chunk_hash.hex()

    def _order_for_lookup(self):
        place = Path(self.options.path) / "order-for-lookup"
        if place.exists():
            place.rename(place.with_name("order"))
            self._order([])

    def _order(self, buffers):
        # An order is carried out once: the replacement finds none.
        place = Path(self.options.path) / "order"
        try:
            order = place.read_text()
            place.unlink()
        except FileNotFoundError:
            return
        if order == "segmentation fault":
            ctypes.string_at(0)
        elif order == "os._exit":
            os._exit(3)
        elif order == "stop iteration":
            next(iter(()))
        elif order == "exit":
            raise SystemExit(3)
        elif order == "panic":
            raise Panic("rust")
        elif order == "error without a text":
            raise Unreadable()
        elif order == "abort":
            os.abort()
        elif order == "memory":
            hoard = []
            while True:
                hoard.append(bytearray(16 << 20))
        elif order == "interpreter lock":
            ctypes.PyDLL(None).sleep(60)
        elif order == "fork":
            if os.fork() == 0:
                os._exit(0)
        elif order == "load in a fork":
            if (child := os.fork()) == 0:
                named = Path(self.options.path) / "forked-part"  # here, where the handlers of forks have run
                named.write_text(str(os.getpid()))
                named.rename(named.with_name("forked"))
                limit = time.monotonic() + 60
                while not (Path(self.options.path) / "go").exists() and time.monotonic() < limit:
                    time.sleep(0.001)
                for buffer in buffers:
                    buffer[:] = bytes([0xEE]) * len(buffer)
                os._exit(0)
            os.waitpid(child, 0)
        elif order == "stop the loop":
            time.sleep(60)

    async def contains(self, keys):
        await self.run_lookup(self._order_for_lookup)
        return [self._file(key).exists() for key in keys]

    async def load_into(self, keys, buffers):
        self._order(buffers)
        for key, buffer in zip(keys, buffers):
            buffer[:] = self._file(key).read_bytes()
        return [LoadOutcome.HIT] * len(keys)

    async def store(self, keys, buffers):
        for key, buffer in zip(keys, buffers):
            self._file(key).write_bytes(buffer)
        return [StoreOutcome.STORED] * len(keys)

    async def delete(self, keys):
        pass

@hookimpl
def offload_register_backends():
    return [BackendType("trouble", Trouble, Options)]
"""


@pytest.fixture
def make(site: Site, tmp_path: Path, io: IoLoop) -> Iterator[Callable[..., Rig]]:
    site.install("trouble", PLUGIN)
    medium = tmp_path / "medium"
    medium.mkdir()
    rigs: list[Rig] = []

    def make_rig(**settings: Any) -> Rig:
        rigs.append(Rig.of(io, {"name": "trouble", "type": "trouble", "path": str(medium)}, **settings))
        return rigs[-1]

    yield make_rig
    for rig in rigs:
        rig.close()


def order(tmp_path: Path, words: str) -> None:
    (tmp_path / "medium" / "order").write_text(words)


@pytest.mark.parametrize(
    "words",
    [
        "segmentation fault",
        "interpreter lock",
        *(pytest.param(words, marks=pytest.mark.long) for words in ("os._exit", "abort", "stop the loop")),
    ],
)
def test_the_process_is_replaced_and_the_tier_serves_again(
    make: Callable[..., Rig], tmp_path: Path, words: str
) -> None:
    rig = make(io_process_timeout_seconds=2)
    rig.store(1)
    order(tmp_path, words)
    first, longest = rig.pid, _Longest()
    with longest:
        assert rig.load(1) == [None], "the call has failed"
        wait_until(lambda: rig.load(1) == [HIT], "the tier does not serve again")
    assert rig.pid != first
    assert longest.seconds < 2, "the engine's process runs on meanwhile"
    assert rig.tiers[0].health.available


@pytest.mark.parametrize("words", ["stop iteration", "exit", "panic", "error without a text"])
def test_an_odd_error_fails_its_call_and_no_other(make: Callable[..., Rig], tmp_path: Path, words: str) -> None:
    rig = make(lookup_timeout_seconds=20, breaker_failures=100)
    rig.store(1)
    first = rig.pid
    for _ in range(5):  # four hung lookups would put the tier out of use
        (tmp_path / "medium" / "order-for-lookup").write_text(words)
        assert rig.lookup(1) == [False]
    order(tmp_path, words)
    assert rig.load(1) == [None]
    assert rig.lookup(1) == [True]
    assert rig.load(1) == [HIT]
    assert rig.pid == first
    counted = rig.counters.take()
    assert (counted["lookup_failures", "trouble"], counted["load_failures", "trouble"]) == (5, 1)


@pytest.mark.parametrize(("when", "process"), [("made", "process"), ("opened", "process of tier 'trouble'")])
def test_the_engine_starts_though_the_process_ends_while_a_tier_is(
    make: Callable[..., Rig], tmp_path: Path, caplog: pytest.LogCaptureFixture, when: str, process: str
) -> None:
    (tmp_path / "medium" / f"ends-while-{when}-once").touch()
    rig = make()
    assert f"the I/O {process} exited with status 3. " in caplog.text
    assert rig.store(1) == [True]
    assert rig.load(1) == [HIT]
    assert rig.tiers[0].health.available


def test_the_engine_is_told_if_the_process_always_ends_while_a_tier_is_made(
    make: Callable[..., Rig], tmp_path: Path
) -> None:
    for number in range(10):
        (tmp_path / "medium" / f"ends-while-made-{number}").touch()
    with pytest.raises(ConfigError, match="backend 'trouble' cannot be opened: the I/O process exited with status 3"):
        make()


def test_a_tier_whose_process_ends_while_open_hangs_is_used_when_the_next_one_has_opened_it(
    make: Callable[..., Rig], tmp_path: Path
) -> None:
    hangs = tmp_path / "medium" / "hangs-in-open"
    hangs.touch()
    rig = make(open_timeout_seconds=0.2)
    health, first = rig.tiers[0].health, rig.pid
    assert not health.available
    os.kill(first, signal.SIGKILL)
    wait_until(lambda: rig.process.pid not in (None, first), "the process is not replaced")
    assert not health.available
    hangs.unlink()
    wait_until(lambda: health.available, "the tier is not used although it is open")
    assert rig.store(1) == [True]
    assert rig.load(1) == [HIT]


def test_an_engine_may_end_while_a_tier_hangs_in_open_in_a_further_process(
    make: Callable[..., Rig], tmp_path: Path
) -> None:
    """The loop's fixture finds an ``open`` that waits for ever."""
    (tmp_path / "medium" / "hangs-in-open").touch()
    rig = make(open_timeout_seconds=0.2)
    first = rig.pid
    os.kill(first, signal.SIGKILL)
    wait_until(lambda: rig.process.pid not in (None, first), "the process is not replaced")
    rig.processes.release(0.5)


def test_a_plugin_that_allocates_without_end_gets_an_error(make: Callable[..., Rig], tmp_path: Path) -> None:
    rig = make(io_process_memory_bytes="512MiB", io_process_timeout_seconds=60)
    rig.store(1)
    first = rig.pid
    order(tmp_path, "memory")
    assert rig.load(1) == [None]
    assert rig.load(1) == [HIT]
    assert rig.pid == first, "MemoryError is an error like any other"


def test_a_fork_of_the_process_does_no_harm(make: Callable[..., Rig], tmp_path: Path) -> None:
    rig = make()
    rig.store(1)
    first = rig.pid
    order(tmp_path, "fork")
    assert rig.load(1) == [HIT]
    assert rig.load(1) == [HIT]
    assert rig.pid == first


def test_i3_a_fork_that_outlives_the_process_writes_to_no_memory_of_others(
    make: Callable[..., Rig], tmp_path: Path
) -> None:
    """A backend may load in a process of its own, which nobody kills with the I/O process."""
    rig = make()
    rig.store(1, 2)
    order(tmp_path, "load in a fork")
    medium, first = tmp_path / "medium", rig.pid
    hung = StagedObject(key(1), rig.lease())
    ended = rig.begin(rig.tiers[0].start_load, [hung])
    wait_until((medium / "forked").exists, "the backend has not forked")
    child = int((medium / "forked").read_text())
    assert listening_sockets(first), "the process of the engine that starts it gives it one"
    assert not listening_sockets(child), "others would wait for this process"
    os.kill(first, signal.SIGKILL)
    wait_until(lambda: rig.process.pid not in (None, first), "the process is not replaced beside the fork")
    wait_until(lambda: rig.load(2) == [HIT], "the tier does not serve again")
    assert not ended.done(), "the fork may write to the memory of the call"
    (medium / "go").touch()
    wait_until(lambda: not is_running(child), "the fork has not ended")
    rig.receive_until(ended.done)
    assert ended.result() == [None]
    assert set(hung.lease.view) == {0xEE}
    hung.lease.release()


class _Longest:
    """Measures the longest pause of a thread of this process that does nothing but look at the clock."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._watch)

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, *_: object) -> None:
        self._end.set()
        self._thread.join()

    def _watch(self) -> None:
        last = time.monotonic()
        while not self._end.wait(0.01):
            now = time.monotonic()
            self.seconds = max(self.seconds, now - last)
            last = now
