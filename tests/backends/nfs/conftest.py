"""An S3-compatible server as a process of its own, and backends on all kinds of media."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from offload_backend_nfs import NfsBackend, NfsOptions

from offload_core.api.backend import BackendContext
from offload_core.api.keys import ObjectKey
from offload_core.runtime.threads import DaemonExecutor
from tests.support.s3_server import S3_CREDENTIALS, S3Server

Nfs = Callable[..., NfsBackend]


def key(number: int, pack: str = "full-u256") -> ObjectKey:
    return ObjectKey("ab" * 32, pack, bytes([number % 256, number // 256]) * 16)


@pytest.fixture
def credentials(monkeypatch: pytest.MonkeyPatch) -> None:
    """S3 credentials in the environment, as an operator sets them."""
    for name, value in S3_CREDENTIALS.items():
        monkeypatch.setenv(name, value)


@pytest.fixture(scope="session")
def _server() -> Iterator[S3Server]:
    server = S3Server()
    yield server
    server.kill()


@pytest.fixture
def s3_server(_server: S3Server, credentials: None) -> S3Server:
    """The server that tests share; leave it running."""
    return _server


@pytest.fixture
def own_server(credentials: None) -> Iterator[S3Server]:
    """A server that the test may kill."""
    server = S3Server()
    yield server
    server.kill()


@pytest.fixture
def s3_options(s3_server: S3Server) -> dict[str, Any]:
    """The options of a fresh bucket."""
    return {
        "url": f"s3://{s3_server.make_bucket()}/engines/kv",
        "storage_options": {"endpoint_url": s3_server.url},
    }


@pytest.fixture
def memory_folder(tmp_path: Path) -> Iterator[Path]:
    """A folder on a file system in memory, if there is one. An account changes small files all the time."""
    memory = Path("/dev/shm")
    if not memory.is_dir():
        yield tmp_path
        return
    with tempfile.TemporaryDirectory(dir=memory, prefix="offload-nfs-") as folder:
        yield Path(folder)


@pytest.fixture
def nfs() -> Iterator[Nfs]:
    """Make backends with four threads each, by their options."""
    executors: list[DaemonExecutor] = []

    def make(**options: Any) -> NfsBackend:
        executors.append(DaemonExecutor(4, f"nfs-{len(executors)}"))
        return NfsBackend(NfsOptions(**options), BackendContext("shared", executors[-1]))

    yield make
    for executor in executors:
        executor.shutdown()
