"""Lookups and loads have threads of their own. Two transfers at a time remain the limit of Mooncake's client."""

from __future__ import annotations

from offload_backend_mooncake.plugin import MOONCAKE

from tests.backends.mooncake.raw_client import DEADLINES
from tests.support.clusters.mooncake import MooncakeCluster
from tests.support.held_threads import check_that_nothing_waits_for_slower_work


def test_lookups_wait_for_no_transfers_and_loads_for_no_stores(shared_cluster: MooncakeCluster) -> None:
    check_that_nothing_waits_for_slower_work(MOONCAKE, {"master": shared_cluster.master, **DEADLINES})
