"""LMCache's own connector on the real engine: beside our tier on one server, and above our tiers as its L2."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.clusters import lmcache
from tests.support.clusters.lmcache import FOR_OWN_CONNECTOR, LMCacheCluster
from tests.support.engine.lab import Lab, ours, served
from tests.support.engine.spec import Round, compare, lmcache_transfer_config
from tests.support.polling import wait_until

pytestmark = [
    pytest.mark.long,
    pytest.mark.timeout(300),
    pytest.mark.skipif(lmcache.why_not() is not None, reason=str(lmcache.why_not())),
]

CHUNK_TOKENS = 256
"""LMCache's default."""
GROUPS = 2
"""Those of Gemma 3."""


def rounds_of(lab: Lab) -> list[Round]:
    (first,) = lab.standard()
    return [first, first.model_copy(update={"name": "again", "reset_prefix_cache_before": True})]


def test_our_tier_and_lmcaches_connector_use_one_server(gemma3: Lab, tmp_path: Path) -> None:
    rounds = rounds_of(gemma3)
    cluster = LMCacheCluster(tmp_path / "server.log", l1_gib=0.5, flags=FOR_OWN_CONNECTOR)
    cluster.start()
    try:
        theirs = gemma3.run(rounds, lmcache_transfer_config(cluster.zmq_port, "lmcache_driven"))
        mine = gemma3.run(rounds, ours(tmp_path, backends=[cluster.tier(name="cluster")]))
    finally:
        cluster.stop()
    for result in (theirs, mine):
        assert compare(gemma3.alone(rounds), result) == []
        assert not any(served(result, 0).values()), "the two do not share objects"
        assert all(served(result, 1).values())


def test_lmcaches_connector_is_served_from_our_tiers_after_its_server_has_ended(gemma3: Lab, tmp_path: Path) -> None:
    first, again = rounds_of(gemma3)
    objects = GROUPS * sum(len(prompt.token_ids) // CHUNK_TOKENS for prompt in first.prompts)
    tiers = {"backends": [{"name": "disk", "type": "disk", "path": str(tmp_path / "kv")}], "model_identity": "gemma3"}
    l2 = {
        "type": "plugin",
        "module_path": "offload_core.elsewhere.lmcache_l2",
        "class_name": "OffloadCoreL2Adapter",
        "adapter_params": tiers,
    }
    cluster = LMCacheCluster(tmp_path / "server.log", l1_gib=0.5, l2=l2, flags=FOR_OWN_CONNECTOR)
    cluster.start()
    try:
        stores = gemma3.run([first], lmcache_transfer_config(cluster.zmq_port, "lmcache_driven"))
        wait_until(lambda: len(list((tmp_path / "kv").rglob("*.kv"))) == objects, "LMCache has not stored all in L2")
        cluster.server.kill()
        cluster.start()
        loads = gemma3.run([again], lmcache_transfer_config(cluster.zmq_port, "lmcache_driven"))
    finally:
        cluster.stop()
    assert compare(gemma3.alone([first]), stores) == []
    assert compare(gemma3.alone([again]), loads) == []
    assert all(served(loads, 0).values())
