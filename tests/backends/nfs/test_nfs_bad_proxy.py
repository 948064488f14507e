"""A bucket behind a proxy that damages answers: the sound objects stay in it, and damage on the medium is deleted."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from offload_core.api.backend import LoadOutcome
from offload_core.config.loading import load_config
from offload_core.runtime.io_loop import IoLoop
from offload_core.runtime.metrics import Counters
from offload_core.tiers.opening import close_tiers
from offload_core.tiers.tier import Tier
from tests.support.memory_backend import LIMITS, key
from tests.support.misbehaving_proxy import DAMAGE, MisbehavingProxy
from tests.support.s3_server import S3Server
from tests.support.staged_objects import OBJECT_BYTES, StagedObjects

SECONDS = 60
HIT, MISS, CORRUPT = LoadOutcome.HIT, LoadOutcome.MISS, LoadOutcome.CORRUPT


class Rig(StagedObjects):
    """A tier on a bucket behind a proxy, with one object."""

    def __init__(self, server: S3Server, proxy: MisbehavingProxy, retry_seconds: float) -> None:
        super().__init__()
        self.proxy, self.client, self.bucket = proxy, server.client(), server.make_bucket()
        self.io, self.counters = IoLoop.acquire(), Counters()
        tier = {
            "name": "far",
            "type": "nfs",
            "url": f"s3://{self.bucket}/kv",
            "storage_options": {"endpoint_url": proxy.url},
            "lookup_cache_seconds": 0,
            "retry_seconds": retry_seconds,
        }
        self.tier = Tier(load_config({"backends": [tier]}).tiers[0], LIMITS, self.counters)
        self.run(self.tier.open())
        assert self.run(self.tier.store([self.sealed(1)])) == [True]

    def run(self, coroutine: Any) -> Any:
        return self.io.submit(coroutine).result(SECONDS)

    def load(self) -> LoadOutcome | None:
        (outcome,) = self.run(self.tier.load([self.staged(1)]))
        return outcome  # type: ignore[no-any-return]

    def names(self) -> list[str]:
        return [one["Key"] for one in self.client.list_objects_v2(Bucket=self.bucket).get("Contents", [])]

    def counted(self, name: str) -> float:
        return self.counters.take().get((name, "far"), 0)


@pytest.fixture
def rig(request: pytest.FixtureRequest, s3_server: S3Server) -> Iterator[Rig]:
    """Return a tier that tries a call again for 0.2 s, or for as long as the test says."""
    with MisbehavingProxy(s3_server.port).running() as proxy:
        made = Rig(s3_server, proxy, getattr(request, "param", 0.2))
        yield made
        proxy.damage = None
        close_tiers([made.tier], made.io, SECONDS)
        made.io.release()


@pytest.mark.parametrize("damage", DAMAGE)
def test_no_damage_of_the_way_deletes_an_object(rig: Rig, damage: str) -> None:
    (name,) = rig.names()
    rig.proxy.damage = DAMAGE[damage]
    assert rig.load() in (MISS, None), "a miss, or a failure of the medium"
    assert rig.proxy.damaged > 0
    assert rig.names() == [name]
    assert rig.counted("load_corrupt") == 0
    rig.proxy.damage = None
    assert rig.load() is HIT


@pytest.mark.parametrize("rig", [30], indirect=True)
@pytest.mark.parametrize("damage", DAMAGE)
def test_after_one_damaged_answer_the_object_is_read_again(rig: Rig, damage: str) -> None:
    rig.proxy.damage, rig.proxy.answers_to_damage = DAMAGE[damage], 1
    assert rig.load() is HIT
    assert len(rig.names()) == 1


@pytest.mark.parametrize("content", [bytes(OBJECT_BYTES), b"short", bytes(OBJECT_BYTES + 1)])
def test_damage_on_the_medium_is_deleted(rig: Rig, content: bytes) -> None:
    (name,) = rig.names()
    rig.client.put_object(Bucket=rig.bucket, Key=name, Body=content)
    assert rig.load() is CORRUPT
    assert rig.names() == []
    assert rig.load() is MISS
    assert key(1).chunk_hash.hex() in name
