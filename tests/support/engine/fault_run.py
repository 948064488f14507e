"""Workloads under a script of faults on a real engine, and what is noted around each.

A run has :mod:`offload_core.testing.faults.plugin` installed as a plugin, and names
:class:`~tests.support.engine.waiting.WaitingConnector` as its connector and :func:`under_faults` as
``around_workloads``. All of it is in one process with the engine, which opens every tier twice: both halves' backends
follow one script.

The first workload of a run should have no faults: what the process holds after it is what later ones are compared with.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole

from offload_core.runtime.io_loop import IoLoop
from offload_core.testing.faults.plugin import SCRIPT
from tests.support.engine.waiting import WaitingConnector
from tests.support.workload import Workload

if TYPE_CHECKING:
    from offload_core.tiers.tier import Tier

_SETTLE_SECONDS = 30.0

_before: dict[str, int] | None = None


@contextlib.contextmanager
def under_faults(workload: Workload, drain: Callable[[], float]) -> Iterator[dict[str, Any]]:
    """Play the script of ``workload.fault_seed`` while the workload runs, and note what it did to the process.

    The notes are ``injected`` (see :meth:`FaultScript.injected`, over all workloads so far), ``waits`` (by internal
    request id, the fields of :class:`StorageWait`), ``phases`` (how many the script has begun), ``held`` (what the
    process holds once the script is over, all calls have ended and the engine is idle), ``left`` (by how much that is
    more or less than after the first workload) and ``settle_seconds`` (how long it took to come to rest, at most 30).
    """
    global _before
    notes: dict[str, Any] = {}
    scheduler, worker = (WaitingConnector.current[role] for role in (KVConnectorRole.SCHEDULER, KVConnectorRole.WORKER))
    tiers = _tiers(scheduler, worker)
    if workload.fault_seed is not None:
        SCRIPT.start(workload.fault_seed)
    try:
        yield notes
    finally:
        SCRIPT.stop()
    started = time.monotonic()
    pause = threading.Event()
    if _before is None:
        _start_threads(tiers)
        while _held(worker)["staging bytes"] and time.monotonic() < started + _SETTLE_SECONDS:
            pause.wait(0.05)
        _before = _held(worker)
    while (held := _held(worker)) != _before and time.monotonic() < started + _SETTLE_SECONDS:
        drain()
        pause.wait(0.05)
    notes["settle_seconds"] = time.monotonic() - started
    notes["held"] = held
    notes["left"] = {
        name: more for name in sorted(held | _before) if (more := held.get(name, 0) - _before.get(name, 0))
    }
    notes["phases"] = SCRIPT.phases_begun
    notes["injected"] = SCRIPT.injected()
    notes["waits"] = {request_id: asdict(wait) for request_id, wait in scheduler.waits.take().items()}


def _tiers(scheduler: WaitingConnector, worker: WaitingConnector) -> list[Tier]:
    assert scheduler._scheduler_half is not None
    assert worker._worker_half is not None
    return [*scheduler._scheduler_half._tiers, *worker._worker_half._tiers]


def _start_threads(tiers: list[Tier]) -> None:
    """Have every tier start all its threads, which it does as they are needed."""
    loop = _io(WaitingConnector.current[KVConnectorRole.WORKER])
    for tier in tiers:
        together = threading.Barrier(tier.config.io_threads)
        calls = [loop.submit(tier.backend.run_blocking(together.wait, 10)) for _ in range(together.parties)]
        for call in calls:
            call.result(10)


def _io(worker: WaitingConnector) -> IoLoop:
    assert worker._worker_half is not None
    loop = worker._worker_half._io
    assert loop is not None
    return loop


def _held(worker: WaitingConnector) -> dict[str, int]:
    """Return how much the process holds of what could leak."""
    assert worker._worker_half is not None
    held = {"staging bytes": worker._worker_half._staging.used_bytes}
    threads = Counter(re.sub(r"[-_ ]?\d+", "", thread.name) for thread in threading.enumerate())
    threads["offload-seal"] = max(threads["offload-seal"], 2)  # so many are started as they are needed
    held |= {f"thread {name}": count for name, count in threads.items()}
    tasks: Counter[str] = _io(worker).submit(_tasks()).result(10)
    held |= {f"task {name}": count for name, count in tasks.items()}
    held |= {f"file {name}": count for name, count in _files().items()}
    return held


async def _tasks() -> Counter[str]:
    """Count the other tasks of the loop by what they run. Cancellation leaves nothing behind."""
    others = asyncio.all_tasks() - {asyncio.current_task()}
    return Counter(getattr(task.get_coro(), "__qualname__", str(task)) for task in others)


def _files() -> Counter[str]:
    """Count the open descriptors by what they are."""
    kinds: Counter[str] = Counter()
    for entry in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):  # that of the listing itself
            kinds[re.sub(r"\d+", "N", str(entry.readlink()))] += 1
    return kinds
