"""Kills and stops of the I/O process at random moments, while a workload runs on a real engine."""

from __future__ import annotations

import contextlib
import gc
import os
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

from offload_core.io_process.process import IoProcess
from offload_core.memory.staging_pool import StagingPool
from offload_core.runtime.restart_pause import RestartPause
from tests.support.workload import Workload

_SETTLE_SECONDS = 30.0
_LONGEST_STOP_SECONDS = 0.3


@contextlib.contextmanager
def under_kills(workload: Workload, drain: Callable[[], float]) -> Iterator[dict[str, Any]]:
    """Hurt the I/O process while the workload runs, if the workload has a fault seed.

    The notes are ``kills`` and ``stops``, and ``left``: resources still held once the process has been replaced.
    """
    notes: dict[str, Any] = {"kills": 0, "stops": 0, "left": {}}
    (process,) = IoProcess._shared.values()
    process._pause = RestartPause(first_seconds=0.02, longest_seconds=0.05)  # so that there is something to kill
    end = threading.Event()
    killer = threading.Thread(target=_hurt, args=(process, workload.fault_seed, end, notes))
    if workload.fault_seed is not None:
        killer.start()
    try:
        yield notes
    finally:
        end.set()
        if workload.fault_seed is not None:
            killer.join()
        drain()
        limit = time.monotonic() + _SETTLE_SECONDS
        while (left := _left(process)) and time.monotonic() < limit:
            drain()
            time.sleep(0.01)
        notes["left"] = left


def _hurt(process: IoProcess, seed: int | None, end: threading.Event, notes: dict[str, Any]) -> None:
    chooser = random.Random(seed)
    while not end.wait(chooser.uniform(0.02, 0.6)):
        pid = process.pid
        if pid is None:
            continue
        with contextlib.suppress(ProcessLookupError):
            if chooser.random() < 0.7:
                os.kill(pid, signal.SIGKILL)
                notes["kills"] += 1
            else:
                os.kill(pid, signal.SIGSTOP)
                notes["stops"] += 1
                end.wait(chooser.uniform(0.0, _LONGEST_STOP_SECONDS))
                os.kill(pid, signal.SIGCONT)


def _left(process: IoProcess) -> dict[str, int]:
    """Return the resources that are held although nothing is under way."""
    pools = [one for one in gc.get_objects() if isinstance(one, StagingPool)]
    session = process._session
    left = {
        "staging_bytes": sum(pool.used_bytes for pool in pools),
        "calls": len(session._pending) if session is not None else 0,
        "missing_processes": int(session is None),
    }
    return {name: amount for name, amount in left.items() if amount}
