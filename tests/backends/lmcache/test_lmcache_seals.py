"""Stores that are sealed meanwhile: the beginning of an object is sent last."""

from __future__ import annotations

import pytest
from offload_backend_lmcache.server.object_store import Writing
from offload_backend_lmcache.wire import frames
from offload_backend_lmcache.wire.frames import CHECKSUM_BYTES, LAST_BYTES, Entry, Found, Operation, Status

from offload_core.api.backend import StoreOutcome
from tests.backends.lmcache.calls import Calls, key, opened
from tests.backends.lmcache.shelf import Shelf, listening
from tests.backends.lmcache.test_lmcache_hostile_servers import Peer, served
from tests.support.completing_seal import CompletingSeal
from tests.support.polling import wait_until

MIB = 1024**2
SIZES = [0, 100, LAST_BYTES, LAST_BYTES + 1, 2 * MIB + LAST_BYTES]


def store(calls: Calls, *seals: CompletingSeal) -> None:
    keys = [key(number) for number in range(len(seals))]
    outcomes: list[StoreOutcome] = []

    async def work() -> None:
        outcomes.extend(await calls.backend.store_and_seal(keys, [seal.buffer.toreadonly() for seal in seals], seals))

    calls.run(work())
    assert outcomes == [StoreOutcome.STORED] * len(seals)


@pytest.mark.parametrize("head_bytes", [0, 100, LAST_BYTES, LAST_BYTES + 100])
def test_objects_of_any_size_are_stored_as_they_were_sealed(head_bytes: int) -> None:
    seals = [CompletingSeal(nbytes, head_bytes) for nbytes in SIZES]
    with listening(Shelf()) as (address, _), opened(address) as calls:
        store(calls, *seals)
        for number, (seal, nbytes) in enumerate(zip(seals, SIZES, strict=True)):
            assert calls.load(number, nbytes)[1] == seal.complete
    if head_bytes == LAST_BYTES:
        assert [sum(seal.told) for seal in seals] == [max(0, nbytes - LAST_BYTES) for nbytes in SIZES]
        assert max(seals[-1].told) <= MIB, "it reads parts that have left the processor's cache"


def test_the_server_gets_the_bytes_before_the_object_is_sealed() -> None:
    writings: list[Writing] = []

    class Watched(Shelf):
        def begin_write(self, entry: Entry, deadline: float) -> Writing | Status:
            writing = super().begin_write(entry, deadline)
            assert not isinstance(writing, Status)
            writings.append(writing)
            return writing

    def wait() -> None:
        wait_until(lambda: bool(writings) and writings[0].payload[-1] != 0, "the server waits for the seal")

    seal = CompletingSeal(2 * MIB, LAST_BYTES, wait)
    with listening(Watched()) as (address, _), opened(address) as calls:
        store(calls, seal)
        assert calls.load(0, 2 * MIB)[1] == seal.complete


def test_a_store_that_begins_again_on_another_connection_is_whole() -> None:
    seal = CompletingSeal(3 * MIB, LAST_BYTES)
    arrived: list[bytes] = []

    def script(peer: Peer) -> None:
        peer.shake_hands()
        header, _ = peer.request()
        if header.operation is Operation.FIND:
            body = frames.encode_found([Found(False, None)])
            peer.socket.sendall(frames.encode_answer(Operation.FIND, header.request_id, 1, body))
            peer.request()
            peer.receive(MIB)
            return
        arrived.append(peer.receive(3 * MIB))
        peer.receive(CHECKSUM_BYTES)
        body = bytes([Status.STORED])
        peer.socket.sendall(frames.encode_answer(Operation.STORE, header.request_id, 1, body))

    with served(script) as address, opened(address, connections=1) as calls:
        assert list(calls.contains(0)) == [False]
        store(calls, seal)
    assert arrived == [seal.complete[LAST_BYTES:] + seal.complete[:LAST_BYTES]]
