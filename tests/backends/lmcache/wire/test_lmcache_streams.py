"""The deadlines of a connection, with a peer that is silent, does not read, or is slow."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager

import pytest
import xxhash
from offload_backend_lmcache.wire.streams import Stream

MIB = 1024**2


@contextmanager
def connected(timeout_seconds: float) -> Iterator[tuple[Stream, socket.socket]]:
    """Give both ends of a TCP connection."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        stream = Stream(socket.create_connection(listener.getsockname()), timeout_seconds)
        peer, _ = listener.accept()
    with peer, closing(stream):
        yield stream, peer


def test_a_silent_peer_times_out() -> None:
    with connected(0.3) as (stream, peer):
        peer.sendall(b"begin")
        with pytest.raises(TimeoutError, match="too slow"):
            stream.receive(6)


def test_a_wait_of_its_own_replaces_that_of_the_stream_for_one_call() -> None:
    with connected(60) as (stream, peer):
        with pytest.raises(TimeoutError):
            stream.receive(1, 0.1)
        threading.Timer(0.3, peer.sendall, [b"late"]).start()
        assert stream.receive(4) == b"late"


def test_a_peer_that_reads_nothing_times_out_after_one_wait() -> None:
    """The kernel tells of bytes that it took before the wait. They must not start a second wait."""
    with connected(2) as (stream, _):
        began = time.monotonic()
        with pytest.raises(TimeoutError, match="too slow"):
            stream.send(bytes(64 * MIB))
        assert time.monotonic() - began < 3.9


def test_a_peer_that_reads_slowly_gets_everything() -> None:
    """The transfer takes longer than the timeout, but no wait does."""
    payload = bytes(range(256)) * (96 * 1024 * 1024 // 256)
    received = xxhash.xxh3_64()

    def read_slowly(peer: socket.socket) -> None:
        left = len(payload)
        while left:
            content = peer.recv(min(left, 4 * MIB), socket.MSG_WAITALL)
            received.update(content)
            left -= len(content)
            time.sleep(0.05)

    with connected(0.5) as (stream, peer):
        reader = threading.Thread(target=read_slowly, args=(peer,))
        reader.start()
        began = time.monotonic()
        stream.send(payload)
        assert time.monotonic() - began > 0.5
        reader.join()
    assert received.intdigest() == xxhash.xxh3_64_intdigest(payload)


def test_sent_and_received_checksums_are_of_the_same_bytes() -> None:
    payload = memoryview(bytes(range(256)) * (3 * MIB // 256) + b"tail")
    with connected(10) as (stream, peer):
        other = Stream(peer, 10)
        buffer = bytearray(len(payload))
        sums = xxhash.xxh3_64(), xxhash.xxh3_64()
        parts: list[int] = []
        reader = threading.Thread(target=lambda: other.receive_summed(memoryview(buffer), sums[0]))
        reader.start()
        stream.send_summed(b"", payload, sums[1], parts.append)
        reader.join()
    assert bytes(buffer) == payload
    assert [one.intdigest() for one in sums] == [xxhash.xxh3_64_intdigest(payload)] * 2
    assert parts == [MIB, MIB, MIB, 4]
