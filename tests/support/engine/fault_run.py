"""Workloads under a script of faults on a real engine, with measurements around each workload.

A run has :mod:`offload_core.testing.faults.plugin` installed as a plugin, and names
:class:`~tests.support.engine.waiting.WaitingConnector` as its connector and :func:`under_faults` as
``around_workloads``. All of it is in one process with the engine. The engine opens every tier twice, once in each half;
the backends of both halves follow one script.

The first workload of a run should have no faults: later workloads are compared with the resources that the process
holds after it.
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

from offload_core.io_process.process import IoProcess
from offload_core.runtime.io_loop import IoLoop
from offload_core.testing.faults.plugin import SCRIPT
from tests.support.engine.waiting import WaitingConnector
from tests.support.workload import Workload

if TYPE_CHECKING:
    from offload_core.tiers.tier import Tier

_SETTLE_SECONDS = 30.0

_baseline: dict[str, int] | None = None


@contextlib.contextmanager
def under_faults(workload: Workload, drain: Callable[[], float]) -> Iterator[dict[str, Any]]:
    """Play the script of ``workload.fault_seed`` while the workload runs, and measure its effects on the process.

    The notes are:

    - ``injected``: see :meth:`FaultScript.injected`, over all workloads so far;
    - ``waits``: the fields of :class:`StorageWait`, by internal request id;
    - ``phases``: the number of phases that the script has begun;
    - ``held``: the process's resources once the script is over, all calls have ended and the engine is idle;
    - ``left``: the differences between those resources and the resources after the first workload;
    - ``settle_seconds``: the time until the process came to rest, at most 30 seconds.
    """
    global _baseline
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
    if _baseline is None:
        _start_threads(tiers)
        while _held(worker)["staging bytes"] and time.monotonic() < started + _SETTLE_SECONDS:
            pause.wait(0.05)
        _baseline = _held(worker)
    while (held := _held(worker)) != _baseline and time.monotonic() < started + _SETTLE_SECONDS:
        drain()
        pause.wait(0.05)
    notes["settle_seconds"] = time.monotonic() - started
    notes["held"] = held
    notes["left"] = {
        name: more for name in sorted(held | _baseline) if (more := held.get(name, 0) - _baseline.get(name, 0))
    }
    notes["phases"] = SCRIPT.phases_begun
    notes["injected"] = SCRIPT.injected()
    notes["waits"] = {request_id: asdict(wait) for request_id, wait in scheduler.waits.take().items()}


def _tiers(scheduler: WaitingConnector, worker: WaitingConnector) -> list[Tier]:
    assert scheduler._scheduler_half is not None
    assert worker._worker_half is not None
    return [*scheduler._scheduler_half._tiers, *worker._worker_half._tiers]


def _start_threads(tiers: list[Tier]) -> None:
    """Make every tier start all its threads; a tier starts them only as they are needed."""
    loop = _io(WaitingConnector.current[KVConnectorRole.WORKER])
    for tier in tiers:
        if tier.is_elsewhere:  # its threads are in the I/O process
            continue
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
    """Return the amounts of all resources of the process that could leak."""
    assert worker._worker_half is not None
    held = {"staging bytes": worker._worker_half._staging.used_bytes}
    threads = Counter(re.sub(r"[-_ ]?\d+", "", thread.name) for thread in threading.enumerate())
    threads["offload-seal"] = max(threads["offload-seal"], 2)  # two are started as they are needed
    held |= {f"thread {name}": count for name, count in threads.items()}
    tasks: Counter[str] = _io(worker).submit(_tasks()).result(10)
    held |= {f"task {name}": count for name, count in tasks.items()}
    held |= {f"file {name}": count for name, count in _files("self").items()}
    for process in IoProcess._shared.values():
        files = _files(str(process.pid))
        held |= {f"I/O process: file {name}": count for name, count in files.items() if not name.startswith("/proc")}
    return held


async def _tasks() -> Counter[str]:
    """Count the other tasks of the loop by their coroutines. Cancellation leaves nothing behind."""
    others = asyncio.all_tasks() - {asyncio.current_task()}
    return Counter(getattr(task.get_coro(), "__qualname__", str(task)) for task in others)


def _files(process: str) -> Counter[str]:
    """Count the open descriptors of a process by their targets."""
    kinds: Counter[str] = Counter()
    for entry in Path(f"/proc/{process}/fd").iterdir():
        with contextlib.suppress(OSError):  # the descriptor of this listing is closed
            kinds[re.sub(r"\d+", "N", str(entry.readlink()))] += 1
    return kinds
