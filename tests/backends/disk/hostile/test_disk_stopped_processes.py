"""Processes that are stopped with SIGSTOP while they hold a lock of the folder."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from offload_backend_disk import DiskBackend
from offload_backend_disk.folder.layout import Layout
from offload_backend_disk.folder.processes import STATE_FOLDER

from offload_core.api.backend import LoadOutcome, StoreOutcome
from tests.backends.disk.conftest import Disk, key, store
from tests.support.polling import wait_until
from tests.support.process_state import process_state

HELD_LOCK = Path(__file__).with_name("held_lock.py")
REJECTED, STORED = StoreOutcome.REJECTED, StoreOutcome.STORED
STORE_SECONDS = 2.0
"""One second, and more for a busy machine."""
LOAD_SECONDS = 0.9
"""Less than one wait for the lock."""


@contextmanager
def stopped_process(root: Path, lock: str) -> Iterator[None]:
    """A stopped process that holds a lock; it is killed at the end."""
    command = [sys.executable, str(HELD_LOCK), str(root / STATE_FOLDER), lock]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "held\n"
            wait_until(lambda: process_state(process.pid) == "T", "the process has not stopped")
            yield
        finally:
            process.send_signal(signal.SIGKILL)


async def load(backend: DiskBackend, number: int = 0) -> LoadOutcome:
    held = await backend.prepare_load([key(number)])
    try:
        return (await backend.load_into([key(number)], [memoryview(bytearray(4))]))[0]
    finally:
        await held.release()


async def stored_soon(backend: DiskBackend, number: int) -> None:
    """Store again and again until it works, after the lock is free; otherwise the test's time limit ends it."""
    while await store(backend, number) is not STORED:  # noqa: ASYNC110 - retried after a second
        await asyncio.sleep(0.05)


def test_while_the_account_is_held_stores_are_rejected_soon_and_loads_go_on(
    disk: Disk, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def timed_loads(backend: DiskBackend) -> list[float]:
        seconds = []
        for _ in range(20):
            began = time.monotonic()
            assert await load(backend) is LoadOutcome.HIT
            seconds.append(time.monotonic() - began)
            await asyncio.sleep(0.02)
        return seconds

    async def main() -> None:
        backend = disk(tmp_path, capacity="10MiB")
        await backend.open()
        for number in (0, 1):
            assert await store(backend, number) is STORED
        with stopped_process(tmp_path, "transaction"):
            began = time.monotonic()
            stores = asyncio.gather(*(store(backend, number) for number in range(10, 14)))
            loads = await timed_loads(backend)
            assert await stores == [REJECTED] * 4
            assert time.monotonic() - began < STORE_SECONDS + 20 * 0.02
            assert max(loads) < LOAD_SECONDS
            began = time.monotonic()
            for number in range(20, 30):
                assert await store(backend, number) is REJECTED
            assert time.monotonic() - began < STORE_SECONDS, "later stores do not wait"
            began = time.monotonic()
            await backend.delete([key(1)])
            assert time.monotonic() - began < LOAD_SECONDS
            assert await backend.contains([key(1)]) == [False]
        await stored_soon(backend, 30)
        assert await store(backend, 1) is STORED
        await backend.close()

    asyncio.run(main())
    messages = [record.getMessage() for record in caplog.records if "loads continue" in record.getMessage()]
    assert len(messages) == 1
    assert "account.sqlite" in messages[0]
    assert "continue or end it" in messages[0]


def test_the_first_delete_after_the_account_is_held_does_not_make_a_load_slow(disk: Disk, tmp_path: Path) -> None:
    async def main() -> None:
        backend = disk(tmp_path, capacity="10MiB")
        await backend.open()
        assert await store(backend) is STORED
        with stopped_process(tmp_path, "transaction"):
            began = time.monotonic()
            await backend.delete([key(0)])
            assert time.monotonic() - began < LOAD_SECONDS
        assert not Layout(tmp_path).path(key(0)).exists()
        await backend.close()
        again = disk(tmp_path, capacity="10MiB")
        await again.open()
        assert again._bounded is not None
        assert again._bounded._account.used_bytes == 0
        await again.close()

    asyncio.run(main())


@pytest.mark.parametrize("lock", ["transaction", "opening", "scanning"])
@pytest.mark.parametrize("options", [{}, {"capacity": "10MiB"}], ids=["without a limit", "with a limit"])
def test_a_tier_opens_and_loads_while_a_lock_is_held(
    disk: Disk, tmp_path: Path, lock: str, options: dict[str, str]
) -> None:
    async def main() -> None:
        first = disk(tmp_path, capacity="10MiB")
        await first.open()
        assert await store(first) is STORED
        await first.close()
        backend = disk(tmp_path, **options)
        with stopped_process(tmp_path, lock):
            began = time.monotonic()
            await backend.open()
            assert time.monotonic() - began < 2 * STORE_SECONDS
            began = time.monotonic()
            assert await load(backend) is LoadOutcome.HIT
            assert time.monotonic() - began < LOAD_SECONDS
            began = time.monotonic()
            is_held = options and lock != "scanning"
            assert await store(backend, 1) is (REJECTED if is_held else STORED)
            await backend.delete([key(1)])
            assert await backend.contains([key(1)]) == [False]
            assert time.monotonic() - began < STORE_SECONDS
        await stored_soon(backend, 2)
        await backend.close()

    asyncio.run(main())
