"""Kills and stops of the I/O process at random moments, while a workload runs on a real engine."""

from __future__ import annotations

import contextlib
import gc
import os
import random
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

from offload_core.io_process.process import IoProcess
from offload_core.memory.staging_pool import StagingPool
from offload_core.runtime.restart_pause import RestartPause
from offload_core.transfer.engine import TransferEngine
from offload_core.transfer.loads import LoadResult
from tests.support.polling import wait_until
from tests.support.process_state import io_process_ids, own_files
from tests.support.workload import Workload

_SETTLE_SECONDS = 30.0
_LONGEST_LIFE_SECONDS = 0.5
_LONGEST_STOP_SECONDS = 0.3
_POLL_SECONDS = 0.01


@contextlib.contextmanager
def under_kills(workload: Workload, drain: Callable[[], float]) -> Iterator[dict[str, Any]]:
    """Hurt the I/O process while the workload runs, if the workload has a fault seed.

    The notes are ``kills``, ``stops``, and ``silences``, which are stops until the process is replaced. ``served`` is
    the number of those before which a load has ended well since the one before. ``left`` has the resources that are
    still held once the process has been replaced.
    """
    notes: dict[str, Any] = {"kills": 0, "stops": 0, "silences": 0, "served": 0, "left": {}}
    (process,) = IoProcess._shared.values()
    process._pause = RestartPause(first_seconds=0.02, longest_seconds=0.05)  # so that there is something to kill
    wait_until(lambda: _is_whole(process), "the I/O process of the workload before is not replaced")
    files = own_files()
    killer = _Killer(process, workload.fault_seed, notes)
    if workload.fault_seed is not None:
        killer.start()
    try:
        with _seen_by(killer):
            yield notes
    finally:
        if workload.fault_seed is not None:
            killer.finish()
        drain()
        limit = time.monotonic() + _SETTLE_SECONDS
        while (left := _left(process, files)) and time.monotonic() < limit:
            drain()
            time.sleep(_POLL_SECONDS)
        notes["left"] = left


class _Killer(threading.Thread):
    """Kills and stops the process at random moments, shortly after it serves."""

    def __init__(self, process: IoProcess, seed: int | str | None, notes: dict[str, Any]) -> None:
        super().__init__(name="killer")
        self._process = process
        self._chooser = random.Random(seed)
        self._notes = notes
        self._end = threading.Event()
        self.has_loaded = False
        """True if a load has ended well since this was set to false."""

    def finish(self) -> None:
        """End it; the process goes on."""
        self._end.set()
        self.join()

    def run(self) -> None:
        """Hurt one process after the other."""
        while not self._end.wait(self._chooser.uniform(0.0, _LONGEST_LIFE_SECONDS)):
            while (pid := self._process.pid) is None:
                if self._end.wait(_POLL_SECONDS):
                    return
            with contextlib.suppress(ProcessLookupError):
                self._hurt(pid, self._chooser.random())

    def _hurt(self, pid: int, choice: float) -> None:
        if choice < 0.7:
            os.kill(pid, signal.SIGKILL)
            self._count("kills")
            while self._process.pid == pid and not self._end.wait(_POLL_SECONDS):
                pass
            return
        os.kill(pid, signal.SIGSTOP)
        if choice < 0.93:
            self._count("stops")
            self._end.wait(self._chooser.uniform(0.0, _LONGEST_STOP_SECONDS))
        else:
            self._count("silences")
            while self._process.pid == pid and not self._end.wait(_POLL_SECONDS):
                pass
        os.kill(pid, signal.SIGCONT)

    def _count(self, kind: str) -> None:
        self._notes[kind] += 1
        self._notes["served"] += self.has_loaded
        self.has_loaded = False


@contextlib.contextmanager
def _seen_by(killer: _Killer) -> Iterator[None]:
    """Tell the killer of the loads that end well."""
    poll = TransferEngine.poll

    def watched(engine: TransferEngine) -> list[LoadResult]:
        results = poll(engine)
        if any(result.status == "loaded" for result in results):
            killer.has_loaded = True
        return results

    with mock.patch.object(TransferEngine, "poll", watched):
        yield


def _is_whole(process: IoProcess) -> bool:
    """Return whether the process serves and its tiers are open, so that their memory is mapped here."""
    return process.pid is not None and all(storage._is_here for storage in process._storages.values())


def _left(process: IoProcess, files: Counter[str]) -> dict[str, int]:
    """Return the resources that are held although nothing is under way.

    Args:
        files: this process's descriptors before the first kill.
    """
    pools = [one for one in gc.get_objects() if isinstance(one, StagingPool)]
    session = process._session
    left = {
        "staging_bytes": sum(pool.used_bytes for pool in pools),
        "calls": len(session._calls) if session is not None else 0,
        "missing_processes": int(session is None),
        "further_processes": max(0, len(io_process_ids()) - 1),
        **(own_files() - files),
    }
    return {name: amount for name, amount in left.items() if amount}
