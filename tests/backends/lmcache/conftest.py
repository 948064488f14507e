"""One LMCache server for all tests that do not hurt it, and backends on any address."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.clusters import lmcache
from tests.support.clusters.lmcache import LMCacheCluster


@pytest.fixture(scope="session")
def lmcache_logs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the servers' logs. Skips where LMCache cannot run."""
    if reason := lmcache.why_not():
        pytest.skip(reason)
    return tmp_path_factory.mktemp("lmcache")


@pytest.fixture(scope="session")
def cluster(lmcache_logs: Path) -> Iterator[LMCacheCluster]:
    """A server with memory only."""
    cluster = LMCacheCluster(lmcache_logs / "memory.log", l1_gib=0.5)
    cluster.start()
    yield cluster
    cluster.stop()


@pytest.fixture(scope="session")
def cluster_on_disk(lmcache_logs: Path) -> Iterator[LMCacheCluster]:
    """A server with little memory and an L2 on disk."""
    folder = lmcache_logs / "objects"
    folder.mkdir()
    l2 = {"type": "fs_native", "base_path": str(folder), "num_workers": 1}
    cluster = LMCacheCluster(lmcache_logs / "disk.log", l1_gib=0.25, l2=l2)
    cluster.start()
    yield cluster
    cluster.stop()
