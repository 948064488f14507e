"""A master and an owner that die, hang and return: errors in time, no late bytes, and right bytes afterwards."""

from __future__ import annotations

import asyncio
import errno
import os
import re
import threading
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import numpy as np
import pytest
from offload_backend_mooncake import MooncakeBackend
from offload_backend_mooncake.client import Client

from offload_core.api.backend import LoadOutcome, StoreOutcome
from tests.backends.mooncake.conftest import Mooncake, NewCluster, contains, key, load, run, store
from tests.backends.mooncake.raw_client import DEADLINES, RawClient

HIT, MISS, CORRUPT = LoadOutcome.HIT, LoadOutcome.MISS, LoadOutcome.CORRUPT
STORED, REJECTED = StoreOutcome.STORED, StoreOutcome.REJECTED
MIB = 1024 * 1024
SLACK_SECONDS = 5.0
"""For a machine that is busy."""
TRANSFER_LIMIT_SECONDS = 4 * DEADLINES["transfer_timeout_seconds"] + 1 + SLACK_SECONDS
MASTER_LIMIT_SECONDS = 5 + SLACK_SECONDS
"""Mooncake tries for some 4.5 s to connect to a master that is gone."""
RETURN_LIMIT_SECONDS = 40


async def fails_within(seconds: float, call: Awaitable[Any], match: str) -> OSError:
    began = time.monotonic()
    with pytest.raises(OSError, match=match) as caught:
        await call
    assert time.monotonic() - began < seconds
    return caught.value


async def until_stored(backend: MooncakeBackend, number: int, data: bytes) -> None:
    """Store an object as soon as the cluster takes it again."""
    deadline = time.monotonic() + RETURN_LIMIT_SECONDS
    while True:
        try:
            (outcome,) = await store(backend, (number, data))
        except OSError as error:
            outcome = error  # type: ignore[assignment]
        if outcome is STORED:
            return
        assert time.monotonic() < deadline, f"it stores nothing: {outcome}"
        await asyncio.sleep(0.1)


def test_a_hung_owner_is_an_error_in_time_and_its_late_bytes_come_nowhere(
    new_cluster: NewCluster, mooncake: Mooncake
) -> None:
    cluster = new_cluster(forget_seconds=60)
    data = {number: os.urandom(512 * 1024) for number in range(20)}

    async def work(backend: MooncakeBackend) -> None:
        await store(backend, *data.items())
        buffers = [bytearray(b"\xa5" * len(one)) for one in data.values()]
        cluster.parts["owner"].pause()
        try:
            views = [memoryview(buffer) for buffer in buffers]
            loading = backend.load_into([key(number) for number in data], views)
            error = await fails_within(TRANSFER_LIMIT_SECONDS, loading, "owner (is gone, )?hangs")
            assert cluster.master in str(error)
            await fails_within(TRANSFER_LIMIT_SECONDS, store(backend, (99, data[0])), "cannot store objects")
            assert await contains(backend, 0, 99) == [True, False], "the master answers meanwhile"
            for buffer in buffers:
                buffer[:] = b"\x5a" * len(buffer)
        finally:
            cluster.parts["owner"].resume()
        await until_stored(backend, 50, data[0])
        for number, one in data.items():
            assert await load(backend, number, len(one)) == (HIT, one)
        assert all(buffer == b"\x5a" * len(buffer) for buffer in buffers), "C7: bytes came after the call had failed"

    run(mooncake(cluster), work)


@pytest.mark.long
def test_a_killed_owner_is_an_error_then_its_objects_are_gone_and_another_takes_over(
    new_cluster: NewCluster, mooncake: Mooncake
) -> None:
    cluster = new_cluster(forget_seconds=2)

    async def work(backend: MooncakeBackend) -> None:
        await store(backend, (0, b"zero"))
        cluster.parts["owner"].kill()
        await fails_within(TRANSFER_LIMIT_SECONDS, load(backend, 0, 4), "a segment owner is gone")
        deadline = time.monotonic() + RETURN_LIMIT_SECONDS
        while (await contains(backend, 0)) == [True]:
            assert time.monotonic() < deadline, "the master never forgets the owner"
            await asyncio.sleep(0.05)
        assert await load(backend, 0, 4) == (MISS, bytes(4))
        assert await store(backend, (0, b"zero")) == [REJECTED], "there is no owner"
        cluster.parts["owner"].start()
        await until_stored(backend, 0, b"zero")
        assert await load(backend, 0, 4) == (HIT, b"zero")

    run(mooncake(cluster, full_wait_seconds=0.1), work)


@pytest.mark.long
def test_a_killed_master_is_an_error_in_time_and_a_new_one_is_used(new_cluster: NewCluster, mooncake: Mooncake) -> None:
    cluster = new_cluster()
    data = os.urandom(MIB)

    async def work(backend: MooncakeBackend) -> None:
        await store(backend, (0, data))
        cluster.parts["master"].kill()
        for call in (contains(backend, 0), load(backend, 0, MIB), store(backend, (1, data)), backend.delete([key(0)])):
            error = await fails_within(MASTER_LIMIT_SECONDS, call, "no connection to the master; see that")
            assert cluster.master in str(error)
        reservation = backend.prepare_load([key(0)])
        await fails_within(MASTER_LIMIT_SECONDS, reservation, "cannot look up")
        cluster.parts["master"].start()
        await until_stored(backend, 2, data)
        assert await load(backend, 2, MIB) == (HIT, data)
        assert await load(backend, 0, MIB) == (MISS, bytes(MIB)), "a new master knows no objects"

    run(mooncake(cluster), work)


@pytest.mark.long
def test_a_hung_master_is_an_error_in_time_and_keeps_its_objects(new_cluster: NewCluster, mooncake: Mooncake) -> None:
    cluster = new_cluster(forget_seconds=60)
    data = os.urandom(MIB)

    async def work(backend: MooncakeBackend) -> None:
        await store(backend, (0, data))
        cluster.parts["master"].pause()
        try:
            limit = DEADLINES["request_timeout_seconds"] + SLACK_SECONDS
            error = await fails_within(limit, contains(backend, 0), "did not answer in time")
            assert error.errno == errno.ETIMEDOUT
            await fails_within(limit, load(backend, 0, MIB), "did not answer in time")
            await fails_within(2 * limit, store(backend, (1, data)), re.escape(cluster.master))
        finally:
            cluster.parts["master"].resume()
        await until_stored(backend, 2, data)
        assert await load(backend, 0, MIB) == (HIT, data)

    run(mooncake(cluster), work)


@pytest.mark.long
@pytest.mark.timeout(300)
def test_a_late_write_of_a_failed_store_is_never_a_hit(new_cluster: NewCluster, mooncake: Mooncake) -> None:
    """A put that fails when its owner hangs frees its memory, and writes into it when the owner goes on.

    The memory belongs to another object by then. In some rounds its bytes are wrong.
    """
    cluster = new_cluster(segment="64MB", forget_seconds=100)
    owner = cluster.parts["owner"]
    nbytes = 24 * MIB
    old, new = np.full(nbytes, 0x11, np.uint8), b"\x22" * nbytes
    seen: Counter[LoadOutcome] = Counter()

    async def work(backend: MooncakeBackend) -> None:
        with RawClient(cluster.master) as raw:
            for number in range(16):
                failing = threading.Thread(target=raw.put, args=[["old"], [old]])
                failing.start()
                await asyncio.sleep((0.001, 0.002, 0.003, 0.004)[number % 4])
                owner.pause()
                await asyncio.to_thread(failing.join)
                storing = asyncio.ensure_future(store(backend, (number, new)))
                await asyncio.sleep(0.5)
                owner.resume()
                if await storing == [STORED]:
                    outcome, found = await load(backend, number, nbytes)
                    assert outcome is not HIT or found == new
                    seen[outcome] += 1
                await backend.delete([key(number)])
                raw.store.batch_remove(["old"], True)

    run(mooncake(cluster, full_wait_seconds=0.1), work)
    assert set(seen) <= {HIT, CORRUPT}, seen
    print(f"outcomes: {dict(seen)}")


@pytest.mark.long
def test_a_store_that_a_hung_master_takes_up_late_blocks_its_object_for_a_while(
    new_cluster: NewCluster, mooncake: Mooncake, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster = new_cluster(forget_seconds=60, master_flags=["--put_start_discard_timeout_sec=5"])
    master, transfer, data = cluster.parts["master"], Client.transfer, os.urandom(MIB)

    def hang(client: Client, call: Callable[[Any], Sequence[int]]) -> Sequence[int]:
        """Let the master hang after the question whether the object is there."""
        master.pause()
        return transfer(client, call)

    async def work(backend: MooncakeBackend) -> None:
        await store(backend, (1, data))
        with monkeypatch.context() as patch:
            patch.setattr(Client, "transfer", hang)
            await fails_within(TRANSFER_LIMIT_SECONDS, store(backend, (0, data)), "cannot store objects")
        master.resume()
        assert await store(backend, (0, data)) == [REJECTED], "the master has begun the store that its client gave up"
        assert await contains(backend, 0) == [False]
        await until_stored(backend, 0, data)
        assert await load(backend, 0, MIB) == (HIT, data)

    run(mooncake(cluster, full_wait_seconds=0), work)
