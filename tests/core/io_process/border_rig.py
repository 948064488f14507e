"""A transfer engine whose tiers are in real I/O processes, with both sides of the border under the test's control."""

from __future__ import annotations

import contextlib
import os
import signal
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

from offload_core.api.memory.shared_memory import SharedMemory
from offload_core.config.loading import load_config
from offload_core.io_process.process import IoProcess
from offload_core.io_process.processes import IoProcesses
from offload_core.memory.canonical import CanonicalKVCaches
from offload_core.memory.staging_pool import Lease, LoadShare, StagingPool, arena_bytes
from offload_core.memory.staging_size import STORE_SHARE, lease_bytes
from offload_core.objects.format import object_bytes
from offload_core.runtime.io_loop import IoLoop
from offload_core.runtime.restart_pause import RestartPause
from offload_core.tiers.opening import open_tiers
from tests.core.io_process import commanded
from tests.support.process_state import io_process_ids, is_running
from tests.support.transfer_rig import SECONDS, Rig, WatchedCopier

FREE = 0xA5
"""Byte of all staging memory that nobody holds."""


@dataclass(frozen=True)
class RunningCall:
    """Work of a backend on a thread of an I/O process."""

    pid: int
    name: str
    call: str
    objects: int


class Medium:
    """The test's side of a :mod:`~tests.core.io_process.commanded` backend."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._objects = folder / commanded.OBJECTS
        self._objects.mkdir(parents=True)
        self._log = folder / commanded.LOG
        self._log.touch()
        self._read_bytes = 0
        self._running: dict[str, RunningCall] = {}
        self.began: Counter[str] = Counter()

    def shut(self, call: str, pid: int | None = None) -> None:
        """Let calls of this kind wait, in one process or in every one."""
        self._write(commanded.gate_file(self.folder, call), commanded.EVERY_PROCESS if pid is None else str(pid))

    def fail(self, call: str, fault: str) -> None:
        self._write(commanded.fault_file(self.folder, call), fault)

    def slow_down(self) -> None:
        self._write(self.folder / commanded.SLOW, "")

    def fork_loads(self) -> None:
        self._write(self.folder / commanded.FORKED, "")

    def recover(self) -> None:
        """Open all gates, and end all faults."""
        for call in ("load", "store"):
            commanded.gate_file(self.folder, call).unlink(missing_ok=True)
            commanded.fault_file(self.folder, call).unlink(missing_ok=True)
        for name in (commanded.SLOW, commanded.FORKED):
            (self.folder / name).unlink(missing_ok=True)

    def forget(self, number: int) -> None:
        (self._objects / str(number)).unlink(missing_ok=True)

    def has(self, number: int) -> bool:
        return (self._objects / str(number)).exists()

    def running(self) -> set[RunningCall]:
        """The work that has begun and not ended, of processes that may be gone."""
        with self._log.open("rb") as log:
            log.seek(self._read_bytes)
            lines = log.read()
        self._read_bytes += len(lines)
        for line in lines.decode().splitlines():
            pid, name, call, objects, step = line.split()
            if step == "begin":
                self._running[name] = RunningCall(int(pid), name, call, int(objects))
                self.began[call] += 1
            else:
                del self._running[name]
        return set(self._running.values())

    def _write(self, path: Path, text: str) -> None:
        part = self.folder / "part"  # the backend never sees an empty file
        part.write_text(text)
        part.rename(path)


class GuardedPool(StagingPool):
    """A pool that knows the bytes of its free memory, so that the next lease finds a late write."""

    def __init__(self, capacity_bytes: int, store_share: float, arena: memoryview) -> None:
        super().__init__(capacity_bytes, store_share, arena=arena)
        self.most_replaced_bytes = 0
        """The largest value that ``replaced_bytes`` has had."""
        self._bytes = np.frombuffer(self.memory, dtype=np.uint8)
        self._bytes[:] = FREE
        self.late_writes: list[str] = []

    def try_acquire(self, nbytes: int, *, for_store: bool) -> Lease | None:
        lease = super().try_acquire(nbytes, for_store=for_store)
        if lease is not None:
            self._check(lease)
        return lease

    def try_acquire_all(self, sizes: Sequence[int], share: LoadShare | None = None) -> list[Lease] | None:
        leases = super().try_acquire_all(sizes, share)
        for lease in leases or ():
            self._check(lease)
        return leases

    def check_free(self) -> None:
        """Check the whole memory, which nobody holds."""
        if not (self._bytes == FREE).all():
            self.late_writes.append("the pool has bytes that were written after a release")

    def forget_memory(self) -> None:
        """Give the arena up; a view of it would keep its descriptor."""
        del self._bytes

    def _change_reserve(self, nbytes: int) -> None:
        super()._change_reserve(nbytes)
        self.most_replaced_bytes = max(self.most_replaced_bytes, self.replaced_bytes)

    def _release(self, lease: Lease) -> None:
        self._bytes[lease.offset : lease.offset + lease.nbytes] = FREE
        super()._release(lease)

    def _check(self, lease: Lease) -> None:
        if not (self._bytes[lease.offset : lease.offset + lease.nbytes] == FREE).all():
            self.late_writes.append(f"the memory at {lease.offset} was written after its release")


class HeldKills:
    """SIGKILLs that this process sends. One to a *deaf* process waits, as for a call that nothing interrupts.

    A deaf process runs on, and its threads may write to staging memory, until :meth:`bury`.
    """

    def __init__(self) -> None:
        self.deaf: set[int] = set()
        self.held: set[int] = set()
        self._kill = os.kill
        self._patch = mock.patch("os.kill", self._send)
        self._patch.start()

    def bury(self) -> None:
        """Let all SIGKILLs through, the held ones first."""
        self.deaf.clear()
        while self.held:
            send(self.held.pop(), signal.SIGKILL, self._kill)

    def close(self) -> None:
        self.bury()
        self._patch.stop()

    def _send(self, pid: int, number: int) -> None:
        if number == signal.SIGKILL and pid in self.deaf:
            self.held.add(pid)
        else:
            self._kill(pid, number)


def send(pid: int, number: int, kill: Any = os.kill) -> None:
    """Send a signal to an I/O process that may be gone."""
    if pid in io_process_ids():  # the id may belong to another process by now
        with contextlib.suppress(ProcessLookupError):
            kill(pid, number)


class BorderRig(Rig):
    """A transfer engine over commanded backends in I/O processes.

    Args:
        folder: has a folder per tier.
        mode: the configuration key ``io_process``.
        common: configuration keys of every tier.
    """

    def __init__(
        self, io: IoLoop, folder: Path, names: Sequence[str], *, mode: str, page_bytes: int, staging_bytes: int,
        num_blocks: int, make_copier: Callable[[CanonicalKVCaches], WatchedCopier] = WatchedCopier, **common: Any,
    ) -> None:  # fmt: skip
        super().__init__(io, page_bytes=page_bytes, num_blocks=num_blocks, make_copier=make_copier)
        self.media = [Medium(folder / name) for name in names]
        backends = [
            {"name": name, "type": "commanded", "path": str(medium.folder), **common}
            for name, medium in zip(names, self.media, strict=True)
        ]
        config = load_config({"io_process": mode, "io_process_timeout_seconds": 2, "backends": backends})
        self.kills = HeldKills()
        self.memory = SharedMemory.create("border", arena_bytes(staging_bytes))
        self.processes = IoProcesses(f"border {folder}", io, config)
        self.processes.share_staging(self.memory)
        for process in self.processes.all:
            process._pause = RestartPause(first_seconds=0.02, longest_seconds=0.05)
        try:
            self.tiers = open_tiers(config, io, self.counters, host=self.processes)
        except BaseException:
            self.processes.release(SECONDS)
            self.kills.close()
            raise
        self.pool = GuardedPool(staging_bytes, STORE_SHARE, self.memory.view)
        self.start_with(self.pool, self.processes)

    @property
    def object_lease_bytes(self) -> int:
        return lease_bytes(object_bytes(self.largest_payload_bytes))

    def process(self, tier: int) -> IoProcess:
        processes = self.processes.all
        return processes[tier % len(processes)]

    def running(self) -> list[set[RunningCall]]:
        """Per tier, the work in processes that are there."""
        calls = [medium.running() for medium in self.media]
        return [{call for call in its if is_running(call.pid)} for its in calls]

    def close(self) -> None:
        """End it all; afterwards nothing of it is left."""
        for medium in self.media:
            medium.recover()
        self.kills.close()
        try:
            self.finish()
        finally:
            self.processes.release(SECONDS)
            self.pool.forget_memory()
            self.memory.close()
