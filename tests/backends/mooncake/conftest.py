"""A Mooncake cluster that the tests share, clusters that a test may hurt, and backends on them."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import pytest
from offload_backend_mooncake import MooncakeBackend, MooncakeOptions

from offload_core.api.backend import BackendContext, LoadOutcome, StoreOutcome
from offload_core.api.keys import ObjectKey
from offload_core.runtime.threads import DaemonExecutor
from tests.backends.mooncake.raw_client import DEADLINES, RawClient
from tests.support.clusters.mooncake import MooncakeCluster, why_not

T = TypeVar("T")

Mooncake = Callable[..., MooncakeBackend]
NewCluster = Callable[..., MooncakeCluster]


def key(number: int, pack: str = "full-u256") -> ObjectKey:
    return ObjectKey("ab" * 32, pack, number.to_bytes(4, "big") * 8)


def run(backend: MooncakeBackend, work: Callable[[MooncakeBackend], Awaitable[T]]) -> T:
    """Open ``backend``, do ``work`` and close it, all on one loop."""

    async def main() -> T:
        await backend.open()
        try:
            return await work(backend)
        finally:
            await backend.close()

    return asyncio.run(main())


async def store(backend: MooncakeBackend, *objects: tuple[int, bytes]) -> list[StoreOutcome]:
    outcomes = await backend.store([key(n) for n, _ in objects], [memoryview(data) for _, data in objects])
    return list(outcomes)


async def load(backend: MooncakeBackend, number: int, nbytes: int) -> tuple[LoadOutcome, bytes]:
    (found,) = await load_all(backend, [number], nbytes)
    return found


async def load_all(
    backend: MooncakeBackend, numbers: Sequence[int], nbytes: int, fill: int = 0
) -> list[tuple[LoadOutcome, bytes]]:
    buffers = [bytearray([fill]) * nbytes for _ in numbers]
    outcomes = await backend.load_into([key(number) for number in numbers], [memoryview(one) for one in buffers])
    return [(outcome, bytes(one)) for outcome, one in zip(outcomes, buffers, strict=True)]


async def contains(backend: MooncakeBackend, *numbers: int) -> list[bool]:
    return list(await backend.contains([key(number) for number in numbers]))


@pytest.fixture(scope="session")
def _mooncake_runs_here() -> None:
    if reason := why_not():
        pytest.skip(reason)


@pytest.fixture(scope="session")
def shared_cluster(_mooncake_runs_here: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[MooncakeCluster]:
    """A cluster that tests share; leave it running."""
    cluster = MooncakeCluster(tmp_path_factory.mktemp("mooncake"), segment="1GB")
    try:
        yield cluster.start()
    finally:
        cluster.stop()


@pytest.fixture(scope="session")
def raw(shared_cluster: MooncakeCluster) -> Iterator[RawClient]:
    """Mooncake's own client of the shared cluster."""
    with RawClient(shared_cluster.master) as client:
        yield client


@pytest.fixture
def new_cluster(_mooncake_runs_here: None, tmp_path: Path) -> Iterator[NewCluster]:
    """Make clusters that the test may hurt."""
    clusters: list[MooncakeCluster] = []

    def make(**arguments: Any) -> MooncakeCluster:
        folder = tmp_path / f"cluster-{len(clusters)}"
        folder.mkdir()
        clusters.append(MooncakeCluster(folder, **arguments))
        return clusters[-1].start()

    yield make
    for cluster in clusters:
        cluster.stop()


@pytest.fixture
def mooncake() -> Iterator[Mooncake]:
    """Make backends with four threads each, by their options."""
    executors: list[DaemonExecutor] = []

    def make(cluster: MooncakeCluster, **options: Any) -> MooncakeBackend:
        executors.append(DaemonExecutor(4, f"mooncake-{len(executors)}"))
        checked = MooncakeOptions.model_validate({"master": cluster.master, **DEADLINES, **options})
        return MooncakeBackend(checked, BackendContext("pool", executors[-1]))

    yield make
    for executor in executors:
        executor.shutdown()
