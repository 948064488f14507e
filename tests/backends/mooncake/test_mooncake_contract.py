"""The mooncake backend keeps the contract on a real cluster."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from offload_backend_mooncake.plugin import MOONCAKE

from offload_core.api.keys import ObjectKey
from offload_core.testing.contract.suite import BackendContract
from offload_core.testing.state_machine.machine import EXAMPLES
from tests.backends.mooncake.raw_client import DEADLINES, RawClient
from tests.support.clusters.mooncake import MooncakeCluster


class TestMooncake(BackendContract):
    backend_type = MOONCAKE
    machine_examples = 20  # the long tests run them all

    @pytest.fixture
    def options(self, shared_cluster: MooncakeCluster, tmp_path: Path) -> dict[str, Any]:
        return {"master": shared_cluster.master, "prefix": f"contract/{tmp_path.name}", **DEADLINES}

    def damage(self, options: Mapping[str, Any], key: ObjectKey) -> None:
        with RawClient(options["master"]) as client:
            client.cut_short(f"{options['prefix']}/{key.path}", 500)


@pytest.mark.long
@pytest.mark.timeout(600)
class TestMooncakeAtLength(TestMooncake):
    machine_examples = EXAMPLES

    @pytest.fixture(autouse=True)
    def _cluster(self, shared_cluster: MooncakeCluster) -> None:
        self.cluster = shared_cluster

    def take_away(self, options: Mapping[str, Any]) -> None:
        """End the master, which alone knows the objects."""
        self.cluster.parts["master"].kill()

    def bring_back(self, options: Mapping[str, Any]) -> None:
        """Start a master. The owner of the memory finds it."""
        self.cluster.parts["master"].start()
