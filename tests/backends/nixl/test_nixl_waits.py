"""A lookup waits for no transfer, and a load for no store. A medium that hangs costs few processes."""

from __future__ import annotations

import asyncio
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from offload_backend_nixl.plugin import NIXL

from offload_core.api import LoadOutcome, StoreOutcome
from tests.backends.nixl.conftest import Nixl, key
from tests.media.fuse.mount import FaultFs
from tests.support.held_threads import check_that_nothing_waits_for_slower_work


def test_lookups_wait_for_no_transfers_and_loads_for_no_stores(folder_options: dict[str, Any]) -> None:
    check_that_nothing_waits_for_slower_work(NIXL, folder_options)


def own_children() -> set[int]:
    """Return the processes that this process has started, also those that have ended and are not gone."""
    found: set[int] = set()
    for task in Path("/proc/self/task").iterdir():
        with suppress(FileNotFoundError, ProcessLookupError):  # a thread that has ended meanwhile
            found.update(map(int, (task / "children").read_text().split()))
    return found


def test_a_medium_that_hangs_keeps_two_processes_at_most(nixl: Nixl, fault_fs: FaultFs) -> None:
    """A killed process stays until its call of the file system ends."""
    others = own_children()

    async def run() -> None:
        path = str(fault_fs.path / "objects")
        backend = nixl(plugin="POSIX", path=path, ring="1MiB")
        await backend.open()
        assert await backend.store([key(1)], [memoryview(b"x" * 100)]) == [StoreOutcome.STORED]
        supervisor = backend._supervisor
        supervisor.child()._deadline_seconds = supervisor._deadline_seconds = (
            1.0  # the start of a child may take longer
        )
        fault_fs.add("*", "*", "hang")
        messages: list[str] = []
        deadline = time.monotonic() + 60
        while not any("hang in the medium" in message for message in messages[:-3]):
            assert time.monotonic() < deadline, f"all of these were tried: {messages}"
            with pytest.raises(OSError, match="tier 'fabric'") as failed:
                await backend.contains([key(1)])
            messages.append(str(failed.value))
            assert len(own_children() - others) <= 2, "another process was started"
            await asyncio.sleep(0.1)
        assert backend.child_pid is None
        supervisor._deadline_seconds = 30.0
        fault_fs.clear()
        deadline = time.monotonic() + 60
        buffer = bytearray(100)
        while True:
            try:
                assert await backend.load_into([key(1)], [memoryview(buffer)]) == [LoadOutcome.HIT]
                break
            except OSError:
                assert time.monotonic() < deadline, "the medium is back, and the tier does not notice"
                await asyncio.sleep(0.1)
        assert buffer == b"x" * 100
        await backend.close()

    asyncio.run(run())
    assert not own_children() - others, "a process is left"
