"""Backends on files and on a bucket, through real NIXL; skipped where there is no NIXL."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from offload_backend_nixl.backend import NixlBackend
from offload_backend_nixl.options import NixlOptions

from offload_core.api.backend import BackendContext
from offload_core.api.keys import ObjectKey
from offload_core.runtime.threads import DaemonExecutor
from tests.media.fuse.fixtures import _session_fault_fs as _session_fault_fs
from tests.media.fuse.fixtures import fault_fs as fault_fs
from tests.support.clusters.nixl import BucketLab, why_not
from tests.support.s3_server import S3_CREDENTIALS

Nixl = Callable[..., NixlBackend]

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    reason = why_not()
    for item in items:
        if reason is not None and HERE in item.path.parents and item.get_closest_marker("needs_no_nixl") is None:
            item.add_marker(pytest.mark.skip(reason=reason))


def key(number: int, pack: str = "full-u256") -> ObjectKey:
    return ObjectKey("ab" * 32, pack, bytes([number % 256, number // 256]) * 16)


@pytest.fixture
def nixl() -> Iterator[Nixl]:
    """Make backends with four threads each, by their options."""
    executors: list[DaemonExecutor] = []

    def make(**options: Any) -> NixlBackend:
        executors.append(DaemonExecutor(4, f"nixl-{len(executors)}"))
        return NixlBackend(NixlOptions(**options), BackendContext("fabric", executors[-1]))

    yield make
    for executor in executors:
        executor.shutdown()


@pytest.fixture
def folder_options(tmp_path: Path) -> dict[str, Any]:
    return {"plugin": "POSIX", "path": str(tmp_path / "objects"), "ring": "16MiB"}


@pytest.fixture(scope="session")
def _bucket_lab() -> Iterator[BucketLab]:
    lab = BucketLab()
    lab.start()
    yield lab
    lab.stop()


@pytest.fixture
def bucket_lab(_bucket_lab: BucketLab, monkeypatch: pytest.MonkeyPatch) -> BucketLab:
    """The store that tests share; leave it running."""
    for name, value in S3_CREDENTIALS.items():
        monkeypatch.setenv(name, value)
    return _bucket_lab


@pytest.fixture
def bucket_options(bucket_lab: BucketLab) -> dict[str, Any]:
    """The options of a fresh bucket."""
    tier = bucket_lab.tier(ring="192MiB", prefix="engines/kv")
    tier.pop("type")
    tier["params"] = {**tier["params"], "bucket": bucket_lab.server.make_bucket()}
    return tier
