"""A real LMCache server that is killed, suspended or started without the module."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from offload_backend_lmcache.wire import frames
from offload_backend_lmcache.wire.frames import Entry, Operation

from offload_core.api.backend import LoadOutcome, StoreOutcome
from tests.backends.lmcache.calls import Calls, opened, sent
from tests.backends.lmcache.test_lmcache_hostile_clients import Raw
from tests.support.clusters.lmcache import LMCacheCluster

MIB = 1024**2
LARGE = 32 * MIB


@pytest.fixture
def own_cluster(lmcache_logs: Path) -> Iterator[LMCacheCluster]:
    """A server that the test may kill."""
    cluster = LMCacheCluster(lmcache_logs / "own.log")
    cluster.start()
    yield cluster
    cluster.stop()


def test_a_suspended_server_times_out_writes_nothing_later_and_serves_again(
    cluster_on_disk: LMCacheCluster, tmp_path: Path
) -> None:
    server, content, address = cluster_on_disk.parts["server"], bytes([7]) * LARGE, cluster_on_disk.address
    prefix, buffer = f"{tmp_path.name}/", bytearray(LARGE)
    with opened(address, prefix=prefix) as patient, opened(address, prefix=prefix, io_timeout_seconds=0.5) as hasty:
        assert patient.store((1, content)) == [StoreOutcome.STORED]
        server.pause()
        try:
            began = time.monotonic()
            for work in (
                lambda: hasty.load_into((1, buffer)),
                lambda: hasty.contains(1),
                lambda: hasty.store((2, content)),
                lambda: hasty.delete(1),
            ):
                with pytest.raises(TimeoutError, match=r"127\.0\.0\.1:\d+"):
                    work()
            seconds = time.monotonic() - began
            buffer[:] = b"\x5a" * LARGE
        finally:
            server.resume()
        assert seconds < 4 * 0.5 + 2, "a suspended server holds a call longer than its time-out"
        assert patient.load(1, LARGE) in ((LoadOutcome.HIT, content), (LoadOutcome.MISS, bytes(LARGE)))
        assert buffer == b"\x5a" * LARGE, "a load that had timed out has written its buffer"
        patient.delete(1, 2)


@pytest.mark.parametrize("delay", [0.005, *(pytest.param(delay, marks=pytest.mark.long) for delay in (0.0, 0.02))])
def test_a_server_that_is_suspended_in_loads_and_stores(
    cluster_on_disk: LMCacheCluster, tmp_path: Path, delay: float
) -> None:
    server, content, address = cluster_on_disk.parts["server"], bytes([8]) * LARGE, cluster_on_disk.address
    prefix = f"{tmp_path.name}/"
    with opened(address, prefix=prefix) as patient, opened(address, prefix=prefix, io_timeout_seconds=0.5) as hasty:
        patient.store((1, content))
        for number in (2, 3):
            pause = threading.Timer(delay, server.pause)
            pause.start()
            try:
                assert hasty.load(1, LARGE) == (LoadOutcome.HIT, content)
                hasty.store((number, content))
            except OSError:
                pass  # it was suspended in one of the two
            finally:
                pause.join()
                server.resume()
            assert patient.load(1, LARGE) == (LoadOutcome.HIT, content)
            assert patient.load(number, LARGE) in ((LoadOutcome.HIT, content), (LoadOutcome.MISS, bytes(LARGE)))
        patient.delete(1, 2, 3)


def test_a_writer_that_leaves_half_way_leaves_nothing_in_lmcache(
    cluster_on_disk: LMCacheCluster, tmp_path: Path
) -> None:
    name, payload = f"{tmp_path.name}/half".encode(), bytes(MIB)
    raw = Raw(cluster_on_disk.address).shake_hands()
    request = frames.encode_request(Operation.STORE, 1, [Entry(name, MIB)])
    raw.socket.sendall(request + payload[: MIB // 2])
    raw.close()
    again = Raw(cluster_on_disk.address).shake_hands()
    again.socket.sendall(frames.encode_request(Operation.FIND, 1, [Entry(name)]))
    again.receive(frames.ANSWER_BYTES)
    assert not frames.decode_found(again.receive(frames.find_body_bytes(1)), 1)[0].present, "half an object is visible"
    again.socket.sendall(request + sent(payload))
    assert again.receive(frames.ANSWER_BYTES + 1)[-1] == frames.Status.STORED, "half an object blocks its key"
    again.close()


def test_a_server_without_the_module_is_told_from_a_dead_one(cluster_on_disk: LMCacheCluster) -> None:
    for port in (cluster_on_disk.zmq_port, cluster_on_disk.http_port):
        text = f"a server answers at 127.0.0.1:{port}, but not offload-core's module"
        with pytest.raises(OSError, match=re.escape(text)), opened(f"127.0.0.1:{port}"):
            pass


@pytest.mark.long
@pytest.mark.timeout(240)
def test_a_killed_server_is_an_error_at_once_and_serves_again_after_its_start(own_cluster: LMCacheCluster) -> None:
    content = bytes([9]) * MIB
    with opened(own_cluster.address) as calls:
        calls.store((1, content))
        own_cluster.parts["server"].kill()
        began = time.monotonic()
        for work in (lambda: calls.contains(1), lambda: calls.load(1, MIB), lambda: calls.store((1, content))):
            with pytest.raises(OSError, match="no server at"):
                work()
        assert time.monotonic() - began < 1
        own_cluster.start()
        assert calls.load(1, MIB)[0] is LoadOutcome.MISS, "memory without an L2 does not outlive the server"
        assert calls.store((1, content)) == [StoreOutcome.STORED]
        assert calls.load(1, MIB) == (LoadOutcome.HIT, content)


def load_for_ever(calls: Calls, content: bytes) -> None:
    while True:
        assert calls.load(1, len(content)) == (LoadOutcome.HIT, content)


@pytest.mark.long
@pytest.mark.timeout(240)
def test_a_server_that_is_killed_in_loads_and_stores(own_cluster: LMCacheCluster) -> None:
    content = bytes([9]) * LARGE
    for delay in (0.0, 0.01, 0.03):
        with opened(own_cluster.address) as calls:
            calls.store((1, content))
            killer = threading.Timer(delay, own_cluster.parts["server"].kill)
            killer.start()
            with pytest.raises(OSError, match=r"127\.0\.0\.1:\d+"):
                load_for_ever(calls, content)
            killer.join()
            own_cluster.start()
            assert calls.load(1, LARGE)[0] is LoadOutcome.MISS


@pytest.mark.long
@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("module", "message"),
    [
        ({"adress": "127.0.0.1:1"}, "adress: Extra inputs are not permitted"),
        ({"token_variable": "NOT_SET_HERE"}, "token_variable names NOT_SET_HERE, which is empty or not set"),
    ],
)
def test_a_wrong_config_ends_the_server_with_a_message(
    lmcache_logs: Path, module: dict[str, str], message: str
) -> None:
    log = lmcache_logs / f"{next(iter(module))}.log"
    cluster = LMCacheCluster(log, module=module)
    with pytest.raises(AssertionError, match="ended at once"):
        cluster.start()
    assert message in log.read_text()


@pytest.mark.long
@pytest.mark.timeout(120)
def test_a_token_in_the_environment_of_a_real_server(lmcache_logs: Path) -> None:
    environment = {"KV_TOKEN": "secret"}
    cluster = LMCacheCluster(lmcache_logs / "token.log", module={"token_variable": "KV_TOKEN"}, environment=environment)
    cluster.start()
    try:
        with opened(cluster.address, token="secret") as calls:
            assert calls.store((1, b"one")) == [StoreOutcome.STORED]
        with pytest.raises(PermissionError, match="another token"), opened(cluster.address):
            pass
    finally:
        cluster.stop()
