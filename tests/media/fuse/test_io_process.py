"""An I/O process with a call that not even SIGKILL ends: its memory stays in use, and another process takes over."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from offload_core.api.backend import LoadOutcome
from offload_core.objects.format import HEADER_BYTES
from offload_core.runtime.io_loop import IoLoop
from offload_core.tiers.staged_object import StagedObject
from tests.core.io_process.rig import OBJECT_BYTES, SECONDS, Rig, content, key
from tests.media.fuse.conftest import PLACES
from tests.media.fuse.mount import FaultFs
from tests.support.polling import wait_until

RAM = {"name": "ram", "type": "cpu", "capacity": "16MiB"}


@pytest.fixture
def rig(io: IoLoop, fault_fs: FaultFs) -> Iterator[Rig]:
    rig = Rig.of(io, {"name": "files", **PLACES["disk"](fault_fs)}, RAM, io_process_timeout_seconds=2)
    yield rig
    fault_fs.clear()
    rig.close()


def test_i3_the_memory_of_a_call_stays_in_use_until_its_process_is_gone(rig: Rig, fault_fs: FaultFs) -> None:
    rig.store(1)
    first = rig.pid
    rule = fault_fs.add("read", "*", "hang")
    lease = rig.lease()
    lease.view[:] = bytes(OBJECT_BYTES)
    hung = rig.begin(rig.tiers[0].start_load, [StagedObject(key(1), lease)])
    fault_fs.wait_for_hit(rule)
    os.kill(first, signal.SIGKILL)
    wait_until(lambda: rig.process.pid not in (None, first), "no other process takes over")
    assert Path(f"/proc/{first}").exists(), "the kernel keeps it: its thread may still write into the lease"
    assert not hung.done(), "the call's end is that of the process"
    wait_until(lambda: rig.store(2, tier=1) == [True], "the next process does not open the tier")
    assert rig.load(2, tier=1) == [LoadOutcome.HIT], "the next process serves meanwhile"
    assert bytes(lease.view) == bytes(OBJECT_BYTES)
    fault_fs.clear()
    assert hung.result(SECONDS) == [None]
    assert bytes(lease.view[HEADER_BYTES:]) == content(1), "the kernel wrote into it long after the SIGKILL"
    wait_until(lambda: not Path(f"/proc/{first}").exists(), "it is not gone although nothing hangs")
    lease.release()
    wait_until(lambda: rig.load(1) == [LoadOutcome.HIT], "the disk does not serve again")
