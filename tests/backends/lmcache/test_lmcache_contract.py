"""The lmcache backend keeps the contract on a real LMCache server, in memory and with an L2 on disk."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from offload_backend_lmcache.plugin import LMCACHE

from offload_core.api.keys import ObjectKey
from offload_core.testing.contract.suite import BackendContract
from offload_core.testing.state_machine.machine import EXAMPLES, check_with_state_machine
from tests.backends.lmcache.l2_files import cut_short
from tests.support.clusters.lmcache import LMCacheCluster


class TestDisk(BackendContract):
    backend_type = LMCACHE
    machine_examples = 10  # the long tests run them all

    @pytest.fixture
    def options(self, cluster_on_disk: LMCacheCluster, tmp_path: Path) -> dict[str, Any]:
        return {"address": cluster_on_disk.address, "prefix": f"{tmp_path.name}/"}

    @pytest.fixture(autouse=True)
    def _cluster(self, cluster_on_disk: LMCacheCluster) -> None:
        self.cluster = cluster_on_disk

    def damage(self, options: Mapping[str, Any], key: ObjectKey) -> None:
        """Wait until the object is in the L2, drop it from memory, and cut its file short."""
        cut_short(self.cluster, f"{options['prefix']}{key.path}".encode())


@pytest.mark.long
@pytest.mark.timeout(600)
class TestDiskAtLength(TestDisk):
    machine_examples = EXAMPLES

    def take_away(self, options: Mapping[str, Any]) -> None:
        self.cluster.server.kill()

    def bring_back(self, options: Mapping[str, Any]) -> None:
        self.cluster.start()


@pytest.mark.long
@pytest.mark.timeout(600)
class TestMemory(BackendContract):
    backend_type = LMCACHE
    machine_examples = EXAMPLES

    @pytest.fixture
    def options(self, cluster: LMCacheCluster, tmp_path: Path) -> dict[str, Any]:
        return {"address": cluster.address, "prefix": f"{tmp_path.name}/"}

    @pytest.fixture(autouse=True)
    def _cluster(self, cluster: LMCacheCluster) -> None:
        self.cluster = cluster

    def take_away(self, options: Mapping[str, Any]) -> None:
        """End the server, with all of its objects."""
        self.cluster.server.kill()

    def bring_back(self, options: Mapping[str, Any]) -> None:
        self.cluster.start()


@pytest.mark.long
@pytest.mark.timeout(600)
def test_the_state_machine_while_lmcache_loses_its_memory(cluster_on_disk: LMCacheCluster) -> None:
    """Each object is in memory, on its way to the L2, in the L2 only, or evicted before it got there."""
    ended = threading.Event()

    def lose_memory() -> None:
        while not ended.wait(0.02):
            cluster_on_disk.clear_memory()

    thread = threading.Thread(target=lose_memory)
    thread.start()
    try:
        check_with_state_machine(LMCACHE, {"address": cluster_on_disk.address, "prefix": "lost/"})
    finally:
        ended.set()
        thread.join()
