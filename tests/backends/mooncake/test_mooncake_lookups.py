"""A lookup does not wait for transfers."""

from __future__ import annotations

from offload_backend_mooncake.plugin import MOONCAKE

from tests.support.clusters.mooncake import MooncakeCluster
from tests.support.held_threads import lookups_beside_held_threads


def test_lookups_are_answered_while_transfers_hold_all_threads(shared_cluster: MooncakeCluster) -> None:
    assert lookups_beside_held_threads(MOONCAKE, {"master": shared_cluster.master}) == [[True], [True]]
