"""An S3-compatible server as a process of its own, and backends on all kinds of media."""

from __future__ import annotations

import os
import sys
import tempfile
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import boto3
import botocore.exceptions
import pytest
from botocore.config import Config
from offload_backend_nfs import NfsBackend, NfsOptions

from offload_core.api.backend import BackendContext
from offload_core.api.keys import ObjectKey
from offload_core.runtime.threads import DaemonExecutor
from tests.support.server_process import ServerProcess, accepts, free_port

Nfs = Callable[..., NfsBackend]

S3_CREDENTIALS = {
    "AWS_ACCESS_KEY_ID": "testing",
    "AWS_SECRET_ACCESS_KEY": "testing",
    "AWS_DEFAULT_REGION": "us-east-1",
    "AWS_CONFIG_FILE": os.devnull,
    "AWS_SHARED_CREDENTIALS_FILE": os.devnull,
}


def key(number: int, pack: str = "full-u256") -> ObjectKey:
    return ObjectKey("ab" * 32, pack, bytes([number % 256, number // 256]) * 16)


class S3Server(ServerProcess):
    """A moto server in its own process. It can be killed and started again.

    Args:
        log: file that gets a line for each answered request.
    """

    def __init__(self, log: Path | None = None) -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        command = [sys.executable, "-m", "moto.server", "--host", "127.0.0.1", "--port", str(self.port)]
        super().__init__(command, lambda: accepts(self.port), log)
        self.start()

    def client(self) -> Any:
        return boto3.client("s3", endpoint_url=self.url, config=Config(retries={"total_max_attempts": 3}))

    def make_bucket(self, name: str | None = None) -> str:
        name = name or f"kv-{uuid.uuid4().hex[:12]}"
        try:
            self.client().create_bucket(Bucket=name)
        except botocore.exceptions.ClientError as error:
            raise AssertionError(f"no bucket: {error}") from error
        return name


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
