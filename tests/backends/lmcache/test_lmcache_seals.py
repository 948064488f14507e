"""Stores that are sealed meanwhile: the beginning of an object is sent last."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from offload_backend_lmcache.server.object_store import Writing
from offload_backend_lmcache.wire import frames
from offload_backend_lmcache.wire.frames import CHECKSUM_BYTES, LAST_BYTES, Entry, Found, Operation, Status

from offload_core.api.backend import StoreOutcome
from offload_core.api.one_pass import StoreSeal
from tests.backends.lmcache.calls import Calls, key, opened
from tests.backends.lmcache.shelf import Shelf, listening
from tests.backends.lmcache.test_lmcache_hostile_servers import Peer, served
from tests.support.polling import wait_until

MIB = 1024**2
SIZES = [0, 100, LAST_BYTES, LAST_BYTES + 1, 2 * MIB + LAST_BYTES]
SEALED, UNSEALED = b"\xaa", b"\xbb"


class Seal(StoreSeal):
    """Completes the beginning of an object.

    Args:
        wait: called before the seal.
    """

    def __init__(self, nbytes: int, head_bytes: int, wait: Callable[[], object] = lambda: None) -> None:
        self._head_bytes = min(head_bytes, nbytes)
        self._wait = wait
        self.rest = (bytes(range(1, 252)) * (nbytes // 251 + 1))[: nbytes - self._head_bytes]
        self.buffer = memoryview(bytearray(UNSEALED * self._head_bytes + self.rest))
        self.told: list[int] = []

    @property
    def head_bytes(self) -> int:
        return self._head_bytes

    def stored(self, nbytes: int) -> None:
        self.told.append(nbytes)

    def seal(self) -> None:
        self._wait()
        self.buffer[: self._head_bytes] = SEALED * self._head_bytes

    @property
    def complete(self) -> bytes:
        return SEALED * self._head_bytes + self.rest


def store(calls: Calls, *seals: Seal) -> None:
    keys = [key(number) for number in range(len(seals))]
    outcomes: list[StoreOutcome] = []

    async def work() -> None:
        outcomes.extend(await calls.backend.store_and_seal(keys, [seal.buffer.toreadonly() for seal in seals], seals))

    calls.run(work())
    assert outcomes == [StoreOutcome.STORED] * len(seals)


@pytest.mark.parametrize("head_bytes", [0, 100, LAST_BYTES, LAST_BYTES + 100])
def test_objects_of_any_size_are_stored_as_they_were_sealed(head_bytes: int) -> None:
    seals = [Seal(nbytes, head_bytes) for nbytes in SIZES]
    with listening(Shelf()) as (address, _), opened(address) as calls:
        store(calls, *seals)
        for number, (seal, nbytes) in enumerate(zip(seals, SIZES, strict=True)):
            assert calls.load(number, nbytes)[1] == seal.complete
    if head_bytes == LAST_BYTES:
        assert [sum(seal.told) for seal in seals] == [len(seal.rest) for seal in seals]
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

    seal = Seal(2 * MIB, LAST_BYTES, wait)
    with listening(Watched()) as (address, _), opened(address) as calls:
        store(calls, seal)
        assert calls.load(0, 2 * MIB)[1] == seal.complete


def test_a_store_that_begins_again_on_another_connection_is_whole() -> None:
    seal = Seal(3 * MIB, LAST_BYTES)
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
