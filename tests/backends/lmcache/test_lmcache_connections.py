"""The connections over which a batch is spread: several for one batch alone, one while others use the threads."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest
from offload_backend_lmcache.client.connection import Connection, Target
from offload_backend_lmcache.client.pool import ConnectionPool
from offload_backend_lmcache.plugin import LMCACHE
from offload_backend_lmcache.server.object_store import Content
from offload_backend_lmcache.wire.addresses import parse_address
from offload_backend_lmcache.wire.frames import Entry

from offload_core.api.backend import LoadOutcome
from tests.backends.lmcache.calls import Calls, key, opened
from tests.backends.lmcache.shelf import Shelf, listening
from tests.support.held_threads import check_that_nothing_waits_for_slower_work
from tests.support.polling import wait_until

MIB = 1024**2
NUMBERS = range(4)
SECONDS = 30


class SlowShelf(Shelf):
    """A shelf that counts the objects of each request to read, and can hold the answers."""

    def __init__(self) -> None:
        super().__init__()
        self.requests: list[int] = []
        self.may_answer = threading.Event()
        self.may_answer.set()

    @contextmanager
    def reading(self, entries: Sequence[Entry], deadline: float) -> Iterator[list[Content]]:
        self.requests.append(len(entries))
        self.may_answer.wait(SECONDS)
        with super().reading(entries, deadline) as contents:
            yield contents


@pytest.fixture
def shelf() -> SlowShelf:
    return SlowShelf()


@pytest.fixture
def calls(shelf: SlowShelf) -> Iterator[Calls]:
    with listening(shelf) as (address, _), opened(address, threads=4, connections=2) as calls:
        calls.store(*((number, bytes([number]) * MIB) for number in NUMBERS))
        yield calls


async def load(calls: Calls) -> Sequence[LoadOutcome]:
    views = [memoryview(bytearray(MIB)) for _ in NUMBERS]
    return await calls.backend.load_into([key(number) for number in NUMBERS], views)


def test_a_batch_alone_uses_all_its_connections(shelf: SlowShelf, calls: Calls) -> None:
    async def one() -> None:
        assert set(await load(calls)) == {LoadOutcome.HIT}

    calls.run(one())
    assert shelf.requests == [2, 2]


def test_a_batch_stays_whole_while_others_use_the_threads(shelf: SlowShelf, calls: Calls) -> None:
    async def three() -> None:
        loads = [asyncio.create_task(load(calls)) for _ in range(3)]
        await asyncio.to_thread(wait_until, lambda: len(shelf.requests) == 4, "the first two do not begin")
        shelf.may_answer.set()
        assert {outcome for outcomes in await asyncio.gather(*loads) for outcome in outcomes} == {LoadOutcome.HIT}

    shelf.may_answer.clear()
    calls.run(three())
    assert shelf.requests == [2, 2, 2, 2, 4]


def test_the_next_batch_uses_all_again(shelf: SlowShelf, calls: Calls) -> None:
    async def many() -> None:
        await asyncio.gather(*(load(calls) for _ in range(3)))
        shelf.requests.clear()
        await load(calls)

    calls.run(many())
    assert shelf.requests == [2, 2]


def test_no_idle_connection_is_used_after_a_time_out() -> None:
    used: list[Connection] = []
    together = threading.Barrier(2)

    def use(connection: Connection) -> None:
        used.append(connection)
        together.wait(SECONDS)

    def time_out(connection: Connection) -> None:
        raise TimeoutError

    with listening(Shelf()) as (address, _), ThreadPoolExecutor(2) as threads:
        pool = ConnectionPool(Target(parse_address(address), SECONDS, SECONDS, b"", "TOKEN", insecure=False), 2)
        for call in [threads.submit(pool.call, use) for _ in range(2)]:
            call.result(SECONDS)
        with pytest.raises(TimeoutError):
            pool.call(time_out)
        assert pool.call(lambda connection: connection) not in used, "each old connection costs a time-out"
        pool.close()


def test_lookups_wait_for_no_transfers_and_loads_for_no_stores() -> None:
    with listening(Shelf()) as (address, _):
        check_that_nothing_waits_for_slower_work(LMCACHE, {"address": address})
