"""The delivery of events where there is no thread for it."""

from __future__ import annotations

import subprocess
import sys
import threading
from typing import NoReturn

import pytest

from offload_core.api.events import Event, TierOpened
from offload_core.plugins import observers
from offload_core.plugins.observers import EventDelivery
from offload_core.plugins.registry import Observer, PluginReport
from offload_core.runtime.metrics import Counters
from offload_core.runtime.threads import DaemonExecutor

SECONDS = 60


def _observer(notify: object) -> Observer:
    report = PluginReport("seen", "seen", "1.0", "seen", 1, ("offload_observe",), (), None)
    return Observer(report, notify)  # type: ignore[arg-type]


def test_events_are_delivered_again_once_threads_can_be_started(
    counters: Counters, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(thread: threading.Thread) -> NoReturn:
        raise RuntimeError("can't start new thread")

    seen: list[Event] = []
    delivery = EventDelivery([_observer(seen.append)], counters)
    monkeypatch.setattr(observers, "_thread", DaemonExecutor(1, "offload-observers"))
    with monkeypatch.context() as without_threads:
        without_threads.setattr(threading.Thread, "start", refuse)
        for _ in range(1100):
            delivery.emit(TierOpened("disk", 1.0))
        EventDelivery([], counters).close(SECONDS)
    assert counters.take() == {("events_dropped", "disk"): 1100}
    last = TierOpened("disk", 2.0)
    delivery.emit(last)
    delivery.close(SECONDS)
    assert (seen, counters.take()) == ([last], {})


FORK = f"""
import os, sys
from offload_core.api.events import TierOpened
from offload_core.plugins.observers import EventDelivery
from offload_core.runtime.metrics import Counters
from tests.core.plugins.test_observers import _observer

def deliver(who):
    delivery = EventDelivery([_observer(lambda event: print(who, event.tier, flush=True))], Counters())
    delivery.emit(TierOpened("disk", 1.0))
    delivery.close({SECONDS})

deliver("parent")
if (pid := os.fork()) == 0:
    deliver("fork")
    os._exit(3)
sys.exit(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
"""


def test_a_fork_delivers_its_own_events() -> None:
    done = subprocess.run([sys.executable, "-c", FORK], capture_output=True, text=True, timeout=SECONDS * 4)
    assert (done.stdout.splitlines(), done.returncode) == (["parent disk", "fork disk"], 3), done.stderr
