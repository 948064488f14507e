"""Traps of Mooncake, shown with its own client on a real cluster, and avoided by the backend."""

from __future__ import annotations

import asyncio
import os
import socket
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from offload_backend_mooncake import MooncakeBackend, connections
from offload_backend_mooncake.client import Client
from offload_backend_mooncake.frame import HEAD_BYTES

from offload_core.api.backend import LoadOutcome, StoreOutcome
from offload_core.testing.rig.recording_check import RecordingCheck
from tests.backends.mooncake.conftest import Mooncake, NewCluster, contains, key, load, load_all, run, store
from tests.backends.mooncake.raw_client import RawClient
from tests.support.clusters.mooncake import MooncakeCluster
from tests.support.damage import flipped
from tests.support.polling import wait_until

HIT, MISS, CORRUPT = LoadOutcome.HIT, LoadOutcome.MISS, LoadOutcome.CORRUPT
STORED, REJECTED, ALREADY_PRESENT = StoreOutcome.STORED, StoreOutcome.REJECTED, StoreOutcome.ALREADY_PRESENT
MIB = 1024 * 1024


@pytest.fixture
def prefix(tmp_path: Path) -> str:
    return f"traps/{tmp_path.name}"


def random_array(nbytes: int) -> np.ndarray:
    return np.frombuffer(os.urandom(nbytes), np.uint8)


def test_a_name_twice_in_a_batch_fills_every_buffer(
    shared_cluster: MooncakeCluster, mooncake: Mooncake, raw: RawClient, prefix: str
) -> None:
    data = os.urandom(1000)

    async def work(backend: MooncakeBackend) -> None:
        await store(backend, (0, data), (1, data[::-1]), (0, data))
        assert await load_all(backend, [0, 1, 0, 0], 1000) == [(HIT, data), (HIT, data[::-1]), (HIT, data), (HIT, data)]

    run(mooncake(shared_cluster, prefix=prefix), work)
    raw.put([f"{prefix}/raw"], [np.frombuffer(data, np.uint8)])
    arrays = [np.zeros(1000, np.uint8) for _ in range(2)]
    assert raw.get([f"{prefix}/raw"] * 2, arrays) == [1000, 1000]
    assert [array.any() for array in arrays] == [False, True], "Mooncake fills all buffers now: rounds can go"


def test_a_put_of_a_present_object_reports_success_and_a_store_says_that_it_is_there(
    shared_cluster: MooncakeCluster, mooncake: Mooncake, raw: RawClient, prefix: str
) -> None:
    data = os.urandom(1000)

    async def work(backend: MooncakeBackend) -> None:
        reservation = await backend.prepare_store([key(0), key(1)], [1000, 1000])
        assert await store(backend, (0, data)) == [STORED]
        assert list(reservation.outcomes) == [None, None]
        await reservation.release()
        assert await store(backend, (0, data[::-1]), (1, data), (1, data)) == [ALREADY_PRESENT, STORED, ALREADY_PRESENT]
        assert await load_all(backend, [0, 1], 1000) == [(HIT, data)] * 2

    run(mooncake(shared_cluster, prefix=prefix), work)
    array = np.frombuffer(data, np.uint8)
    assert raw.put([f"{prefix}/raw"], [array]) == [0]
    assert raw.put([f"{prefix}/raw"], [array]) == [0], "Mooncake says now that it is there: one question can go"


@pytest.mark.long
def test_mooncake_refuses_more_transfers_than_its_queue_holds(shared_cluster: MooncakeCluster, prefix: str) -> None:
    names = [f"{prefix}/{number}" for number in range(10_000)]
    with RawClient(shared_cluster.master) as raw:  # its transfers fail for a while afterwards
        assert set(raw.put(names, [random_array(64)] * len(names))) == {0, -800}, "Mooncake queues any number now"
        raw.store.batch_remove(names, True)


@pytest.mark.long
def test_many_objects_in_one_call_do_not_overflow_mooncakes_queue(
    shared_cluster: MooncakeCluster, mooncake: Mooncake, prefix: str
) -> None:
    async def work(backend: MooncakeBackend) -> None:
        objects = [(number, number.to_bytes(4, "big")) for number in range(1100)]
        assert set(await store(backend, *objects)) == {STORED}
        assert await load_all(backend, range(1100), 4) == [(HIT, data) for _, data in objects]
        assert await contains(backend, *range(1101)) == [True] * 1100 + [False]
        await backend.delete([key(number) for number in range(1100)])
        assert not any(await contains(backend, *range(1100)))

    run(mooncake(shared_cluster, prefix=prefix), work)


def test_an_object_that_another_client_is_writing_is_not_stored_yet(
    new_cluster: NewCluster, mooncake: Mooncake
) -> None:
    cluster = new_cluster(forget_seconds=60, master_flags=["--put_start_discard_timeout_sec=60"])
    data = os.urandom(1000)

    async def work(backend: MooncakeBackend) -> None:
        name = f"offload-core/{key(0).path}"
        with RawClient(cluster.master) as raw, ThreadPoolExecutor() as threads:
            await store(backend, (1, data))  # the connection to the owner is there
            cluster.parts["owner"].pause()
            names = [name, *(f"slow/{number}" for number in range(79))]  # they time out one after the other, in 5 s
            slow = threads.submit(raw.put, names, [random_array(HEAD_BYTES + 1000)] * len(names))
            try:
                while raw.store.get_size(name) != -703:  # not ready: the write has begun
                    assert not slow.done()
                assert raw.put([name], [random_array(10)]) == [0], "Mooncake tells the truth now"
                assert await store(backend, (0, data)) == [REJECTED]
                assert await load(backend, 0, 1000) == (MISS, bytes(1000))
            finally:
                cluster.parts["owner"].resume()
            assert set(slow.result()) <= {0, -800}
        await backend.delete([key(0)])
        assert await store(backend, (0, data)) == [STORED]

    run(mooncake(cluster, full_wait_seconds=0), work)


def test_a_looked_up_object_is_leased_and_deleted_all_the_same(
    shared_cluster: MooncakeCluster, mooncake: Mooncake, raw: RawClient, prefix: str
) -> None:
    async def work(backend: MooncakeBackend) -> None:
        await store(backend, (0, b"zero"))
        assert raw.store.remove(f"{prefix}/{key(0).path}") == -706, "a lookup pins no longer"
        await backend.delete([key(0)])
        assert await contains(backend, 0) == [False]

    run(mooncake(shared_cluster, prefix=prefix), work)


def test_objects_that_were_changed_behind_our_back_are_corrupt(
    shared_cluster: MooncakeCluster, mooncake: Mooncake, raw: RawClient, prefix: str
) -> None:
    data = os.urandom(5000)

    async def work(backend: MooncakeBackend) -> None:
        await store(backend, *((number, data[number:]) for number in range(6)))
        names = [f"{prefix}/{key(number).path}" for number in range(6)]
        first = raw.read(names[0])
        changed = first.copy()
        changed[3000] ^= 1
        raw.replace(names[0], changed)
        raw.replace(names[1], raw.read(names[2]))
        raw.replace(names[2], np.concatenate([first, first]))
        raw.replace(names[3], first[:10].copy())
        raw.replace(names[4], first)
        for number in range(5):
            outcome, _ = await load(backend, number, 5000 - number)
            assert outcome is CORRUPT, number
        await store(backend, (7, b""))
        buffers = [memoryview(bytearray(nbytes)) for nbytes in (*range(5000, 4994, -1), 0)]
        checks = [RecordingCheck(buffer, data) for buffer in buffers]
        keys = [key(number) for number in (*range(6), 7)]
        assert await backend.load_and_check(keys, buffers, checks) == [CORRUPT] * 5 + [HIT] * 2
        told = [flipped(data, 3000 - HEAD_BYTES), b"", b"", b"", b"", data[5:], b""]
        assert [bytes(check.told) for check in checks] == told, "of objects of the right name and size, once"
        assert [check.problem for check in checks] == [None] * 7
        reservation = await backend.prepare_load([key(number) for number in range(7)])
        assert reservation.present == (True,) * 6 + (False,)
        assert reservation.nbytes == (5000, 4998, 10_000 + HEAD_BYTES, None, 5000, 4995, None)
        await reservation.release()
        assert await load(backend, 5, 4995) == (HIT, data[5:])

    run(mooncake(shared_cluster, prefix=prefix), work)


@pytest.mark.parametrize("stored_again", [False, True])
def test_an_object_that_is_deleted_while_it_is_loaded_is_not_damaged(
    shared_cluster: MooncakeCluster,
    mooncake: Mooncake,
    raw: RawClient,
    prefix: str,
    monkeypatch: pytest.MonkeyPatch,
    stored_again: bool,
) -> None:
    data, name = os.urandom(MIB), f"{prefix}/{key(0).path}"
    transfer, transfers = Client.transfer, 0

    def deleted_meanwhile(client: Client, call: Callable[[Any], Sequence[int]]) -> Sequence[int]:
        """Get the bytes that have come to the place of the object."""
        nonlocal transfers
        codes, transfers = transfer(client, call), transfers + 1
        if transfers == 1:
            stored = raw.read(name)
            raw.replace(name, stored) if stored_again else raw.store.batch_remove([name], True)
            buffer[:] = data[::-1]
        return codes

    async def work(backend: MooncakeBackend) -> LoadOutcome:
        await store(backend, (0, data))
        monkeypatch.setattr(Client, "transfer", deleted_meanwhile)
        (outcome,) = await backend.load_into([key(0)], [memoryview(buffer)])
        return outcome

    buffer = bytearray(MIB)
    assert run(mooncake(shared_cluster, prefix=prefix), work) is (HIT if stored_again else MISS)
    assert not stored_again or buffer == data


@pytest.mark.long
def test_a_full_cluster_evicts_or_rejects_and_never_fails(new_cluster: NewCluster, mooncake: Mooncake) -> None:
    cluster = new_cluster(segment="64MB", lease_milliseconds=200)
    data = [os.urandom(2 * MIB) for _ in range(4)]

    async def work(backend: MooncakeBackend) -> None:
        outcomes = [(await store(backend, (number, data[number % 4])))[0] for number in range(60)]
        assert outcomes[:20] == [STORED] * 20
        assert outcomes.count(STORED) > 30, outcomes
        assert outcomes[-20:].count(STORED) > 5, "it evicts old objects for new ones"
        for number in range(60):
            assert await load(backend, number, 2 * MIB) in ((HIT, data[number % 4]), (MISS, bytes(2 * MIB)))
        assert not all(await contains(backend, *range(60)))
        assert await store(backend, (99, bytes(100 * MIB))) == [REJECTED], "larger than all segments"

    run(mooncake(cluster, full_wait_seconds=1), work)


@pytest.mark.long
def test_copies_and_soft_pins_are_asked_for(new_cluster: NewCluster, mooncake: Mooncake) -> None:
    cluster = new_cluster(segment="64MB")
    cluster.add_owner("second", "64MB").start()

    async def work(backend: MooncakeBackend) -> None:
        assert await store(backend, (0, b"zero")) == [STORED]

    run(mooncake(cluster, replicas=2, soft_pin=True), work)
    with RawClient(cluster.master) as raw:
        assert len(raw.store.get_replica_desc(f"offload-core/{key(0).path}")) == 2
    assert b"soft-pinned: 1" in cluster.ask("/metrics/summary")


def test_tiers_of_a_process_share_one_connection(
    shared_cluster: MooncakeCluster, mooncake: Mooncake, prefix: str
) -> None:
    first, second, other = (mooncake(shared_cluster, prefix=f"{prefix}/{part}") for part in "aab")

    async def work() -> None:
        await asyncio.gather(first.open(), second.open(), other.open())
        assert first._client is second._client is other._client
        await store(first, (0, b"zero"))
        await first.close()
        assert await load(second, 0, 4) == (HIT, b"zero")
        assert await contains(other, 0) == [False], "another prefix shares no objects"
        await second.close()
        await other.close()
        await other.close()

    asyncio.run(work())


@pytest.mark.long
def test_a_connection_without_tiers_is_closed_after_a_while(
    new_cluster: NewCluster, mooncake: Mooncake, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster = new_cluster(segment="64MB")
    monkeypatch.setattr(connections, "IDLE_SECONDS", 0.01)

    async def work(backend: MooncakeBackend) -> object:
        await store(backend, (0, b"zero"))
        return backend._client

    client = run(mooncake(cluster), work)
    wait_until(lambda: client._store is None, "the connection is not closed")  # type: ignore[attr-defined]
    run(mooncake(cluster), lambda backend: load(backend, 0, 4))


def test_another_set_of_timeouts_in_one_process_is_refused(shared_cluster: MooncakeCluster, mooncake: Mooncake) -> None:
    run(mooncake(shared_cluster), lambda backend: contains(backend, 0))
    with pytest.raises(OSError, match=r"transfer_timeout_seconds 7, but tier .* give both tiers the same"):
        run(mooncake(shared_cluster, transfer_timeout_seconds=7), lambda backend: contains(backend, 0))


def test_a_port_without_a_master_is_named_at_open(mooncake: Mooncake, shared_cluster: MooncakeCluster) -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        master = f"127.0.0.1:{closed.getsockname()[1]}"
        backend = mooncake(shared_cluster)
        backend.options = backend.options.model_copy(update={"master": master})
        with pytest.raises(ConnectionRefusedError, match=f"no master answers at {master}; start mooncake_master"):
            run(backend, lambda backend: contains(backend, 0))


@pytest.mark.long
def test_a_foreign_server_is_refused_in_time(mooncake: Mooncake, shared_cluster: MooncakeCluster) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        connections_taken: list[socket.socket] = []

        def greet() -> None:
            while True:
                try:
                    taken, _ = server.accept()
                    connections_taken.append(taken)
                    taken.sendall(b"220 mail.example ESMTP\r\n" * 1000)
                except OSError:
                    return

        threading.Thread(target=greet, daemon=True).start()
        backend = mooncake(shared_cluster)
        master = f"127.0.0.1:{server.getsockname()[1]}"
        backend.options = backend.options.model_copy(update={"master": master})
        began = time.monotonic()
        with pytest.raises(OSError, match=f"{master}: no connection .* of this version"):
            run(backend, lambda backend: contains(backend, 0))
        assert time.monotonic() - began < 15
        server.shutdown(socket.SHUT_RDWR)
    for taken in connections_taken:
        taken.close()
