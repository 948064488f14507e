"""One limit for real processes on a real folder, and on a server that speaks S3."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import boto3
import pytest
from offload_backend_nfs import NfsBackend

from offload_core.api.backend import StoreOutcome
from tests.backends.nfs.conftest import Nfs, key

WRITER = Path(__file__).with_name("capacity_writer.py")
KIB = 1024
CAPACITY = 2048 * KIB
LIMITS = {"capacity": CAPACITY, "eviction_grace": 0.3, "lease_seconds": 3, "retry_seconds": 20}
Writers = Callable[[dict[str, Any], int], "subprocess.Popen[str]"]


@pytest.fixture
def writers() -> Iterator[Writers]:
    started: list[subprocess.Popen[str]] = []

    def start(options: dict[str, Any], seed: int) -> subprocess.Popen[str]:
        command = [sys.executable, str(WRITER), json.dumps(options), str(seed)]
        pipe = subprocess.PIPE
        started.append(subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True))
        assert started[-1].stdout is not None
        assert started[-1].stdout.readline() == "storing\n"
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.communicate(timeout=30)


def used(folder: Path) -> int:
    """Return the bytes of all objects, complete or being written, that existed at one moment."""
    temporary = list(folder.glob(".temporary/*"))
    paths = [*folder.glob("*/*/*/*.kv"), *temporary]
    # The account's own files are temporary for a moment too. They are no objects, and may be empty at first.
    account = set(filter(is_of_the_account, temporary))
    before, after = ({path: status(path) for path in paths} for _ in range(2))
    account.update(filter(is_of_the_account, temporary))
    # A file that is the same in both passes existed between them. A key may be stored anew during the passes.
    existing = [
        now
        for path, now in after.items()
        if now and (then := before[path]) and now.st_ino == then.st_ino and path not in account
    ]
    # A new object has two names for a moment.
    return sum(one.st_size for one in existing if one.st_nlink == 1)


def is_of_the_account(path: Path) -> bool:
    """Return whether a file is there and no object, which is one byte repeated."""
    try:
        with path.open("rb") as file:
            return len(set(file.read(64))) > 1
    except FileNotFoundError:
        return False


def status(path: Path) -> os.stat_result | None:
    try:
        return path.stat()
    except FileNotFoundError:
        return None


def ended(process: subprocess.Popen[str]) -> dict[str, int]:
    """End a writer and return its counts. It must not have seen an error or a wrong byte."""
    process.terminate()
    out, err = process.communicate(timeout=60)
    assert process.returncode == 0, err
    assert err == ""
    assert "wrong" not in out
    counts: dict[str, int] = json.loads(out)
    return counts


async def wait_for_capacity(backend: NfsBackend, objects: int, limit_seconds: float) -> None:
    """Wait until objects of a 16th of the capacity each can be reserved."""
    deadline = time.monotonic() + limit_seconds
    size = CAPACITY // 16
    while True:
        reservation = await backend.prepare_store([key(1000 + n) for n in range(objects)], [size] * objects)
        await reservation.release()
        if all(outcome is None for outcome in reservation.outcomes):
            return
        assert time.monotonic() < deadline, f"no capacity: {backend._bounded_store and backend._bounded_store.state}"
        await asyncio.sleep(0.2)


def stay_under_the_limit(writers: Writers, folder: Path, seconds: float) -> None:
    options = {"url": f"file://{folder}", **LIMITS}
    processes = [writers(options, seed) for seed in range(4)]
    seen: list[int] = []
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        seen.append(used(folder))
    victim = processes.pop()
    victim.kill()
    victim.wait(30)
    counts = [ended(process) for process in processes]
    assert max(seen) <= CAPACITY
    assert max(seen) > CAPACITY // 2, "the limit was never near"
    assert all(count["stored"] and count["loaded"] for count in counts), counts
    assert sum(count["stored"] for count in counts) * 32 * KIB > CAPACITY, "nothing had to be evicted"


def test_processes_at_full_speed_stay_under_one_limit_and_read_whole_objects(
    writers: Writers, memory_folder: Path, nfs: Nfs
) -> None:
    folder = memory_folder / "objects"
    stay_under_the_limit(writers, folder, 3.0)

    async def next_process() -> None:
        backend = nfs(url=f"file://{folder}", **LIMITS)
        await backend.open()
        await wait_for_capacity(backend, 2, 40)
        await backend.close()

    asyncio.run(next_process())
    assert used(folder) <= CAPACITY


@pytest.mark.long
def test_processes_at_full_speed_stay_under_one_limit_for_a_minute(writers: Writers, memory_folder: Path) -> None:
    stay_under_the_limit(writers, memory_folder / "objects", 60.0)


@pytest.mark.long
@pytest.mark.timeout(240)
def test_processes_keep_one_limit_on_an_object_store(
    writers: Writers, s3_options: dict[str, Any], s3_server: Any
) -> None:
    options = {**s3_options, **LIMITS}
    bucket, _, prefix = options["url"].removeprefix("s3://").partition("/")
    client = boto3.client("s3", endpoint_url=s3_server.url)
    processes = [writers(options, seed) for seed in range(2)]
    seen: list[int] = []
    deadline = time.monotonic() + 5
    while time.monotonic() < deadline:
        pages = client.get_paginator("list_objects_v2").paginate(Bucket=bucket, Prefix=prefix)
        found = [entry for page in pages for entry in page.get("Contents", [])]
        seen.append(sum(entry["Size"] for entry in found if entry["Key"].endswith(".kv")))
    counts = [ended(process) for process in processes]
    assert max(seen) <= CAPACITY
    assert all(count["stored"] for count in counts), counts


def test_a_second_process_meets_the_same_limit(memory_folder: Path, nfs: Nfs) -> None:
    asyncio.run(two_meet_one_limit(nfs, {"url": f"file://{memory_folder}/objects"}))


def test_a_second_process_on_an_object_store_meets_the_same_limit(s3_options: dict[str, Any], nfs: Nfs) -> None:
    asyncio.run(two_meet_one_limit(nfs, s3_options))


async def two_meet_one_limit(nfs: Nfs, options: dict[str, Any]) -> None:
    """Let each of two backends reserve more than half of the capacity."""
    first, second = (nfs(**options, capacity=1000 * KIB) for _ in range(2))
    await first.open()
    await second.open()
    held = await first.prepare_store([key(1)], [600 * KIB])
    assert held.outcomes == (None,)
    refused = await second.prepare_store([key(2)], [600 * KIB])
    assert refused.outcomes == (StoreOutcome.REJECTED,)
    await held.release()
    granted = await second.prepare_store([key(2)], [600 * KIB])
    assert granted.outcomes == (None,)
    assert await second.store([key(2)], [memoryview(bytes(600 * KIB))]) == [StoreOutcome.STORED]
    await granted.release()
    await first.delete([key(2)])
    again = await first.prepare_store([key(3)], [1000 * KIB])
    assert again.outcomes == (None,)
    await again.release()
    await first.close()
    await second.close()
