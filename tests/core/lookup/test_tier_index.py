"""The index of a medium that only its own process sees."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from offload_core.api.backend import LoadOutcome, StoreOutcome
from offload_core.api.keys import ObjectKey
from offload_core.config.model import OffloadConfig, OffloadSettings
from offload_core.lookup.prefix_query import PrefixAnswer, PrefixQuery
from offload_core.lookup.service import LookupService
from offload_core.lookup.tier_index import TierIndex
from offload_core.memory.staging_pool import StagingPool
from offload_core.objects import format as object_format
from offload_core.objects.format import HEADER_BYTES
from offload_core.planning.chunk_keys import ChunkRef
from offload_core.planning.planner import GroupGeometry, HitPolicy, HybridOffloadPlanner
from offload_core.runtime.io_loop import IoLoop
from offload_core.runtime.metrics import Counters
from offload_core.tiers.changes import TierChange
from offload_core.tiers.opening import close_tiers, open_tiers
from offload_core.tiers.staged_object import StagedObject
from offload_core.tiers.tier import Tier
from tests.support.memory_backend import LIMITS, MemoryBackend, key, memory_tier

SECONDS = 30
RANKS = ("ab" * 32, "cd" * 32)
HASHES = [number.to_bytes(32, "big") for number in range(4)]

keys = st.builds(ObjectKey, st.sampled_from(RANKS), st.sampled_from(["full-u16", "state-u16"]), st.sampled_from(HASHES))


@given(st.lists(st.tuples(keys, st.booleans())), st.sampled_from([RANKS, RANKS[:1]]), st.lists(st.sampled_from(HASHES)))
def test_a_chunk_is_there_when_its_last_change_on_every_rank_said_so(
    changes: list[tuple[ObjectKey, bool]], ranks: tuple[str, ...], asked: list[bytes]
) -> None:
    index = TierIndex()
    there: dict[ObjectKey, bool] = {}
    for changed, present in changes:
        index.update(changed, present)
        there[changed] = present
    for pack in ("full-u16", "state-u16"):
        expected = [all(there.get(ObjectKey(rank, pack, digest), False) for rank in ranks) for digest in asked]
        assert index.present(ranks, pack, asked) == expected


@pytest.fixture
def planner() -> HybridOffloadPlanner:
    return HybridOffloadPlanner.build(
        [GroupGeometry(0, 16, HitPolicy("full"))], hash_block_size=16, max_model_len=1024, hybrid_chunk_size=16
    )


def test_an_indexed_tier_is_answered_for_at_once_and_never_asked(
    io: IoLoop, counters: Counters, planner: HybridOffloadPlanner
) -> None:
    tier, backend = _constructed(counters)
    index = TierIndex()
    for rank in RANKS:
        for digest in HASHES[:2]:
            index.update(ObjectKey(rank, "full-u16", digest), True)
    index.update(ObjectKey(RANKS[0], "full-u16", HASHES[2]), True)
    service = LookupService(io, [tier], planner, counters, {"memory": index})
    excluded = frozenset({("memory", ChunkRef("full-u16", HASHES[1]))})

    all_chunks = service.start(PrefixQuery({"full-u16": HASHES}, RANKS, 0, 63))
    without_excluded = service.start(PrefixQuery({"full-u16": HASHES}, RANKS, 0, 63, excluded=excluded))

    assert all_chunks.done()
    assert all_chunks.answers() == {"memory": PrefixAnswer(32, 32, (ChunkRef("full-u16", HASHES[2]),))}
    assert without_excluded.answers()["memory"].boundary_tokens == 16
    assert backend.calls == []
    counted = counters.take()
    assert counted["lookup_hits", "memory"] == 8
    assert counted["lookup_misses", "memory"] == 4
    close_tiers([tier], io, SECONDS)


def _only_seen_here(backend: MemoryBackend) -> None:
    backend.shared = False


def _constructed(counters: Counters) -> tuple[Tier, MemoryBackend]:
    config, made = memory_tier(prepare=_only_seen_here)
    return Tier(config, LIMITS, counters), made[0]


def _sealed(pool: StagingPool, number: int) -> StagedObject:
    lease = pool.try_acquire(HEADER_BYTES + 100, for_store=False)
    assert lease is not None
    object_format.seal(lease.view, key(number))
    return StagedObject(key(number), lease)


def test_a_tier_reports_what_came_and_what_a_load_did_not_find(io: IoLoop, counters: Counters) -> None:
    tier, backend = _constructed(counters)
    pool = StagingPool(1 << 20, 1.0)
    staged = [_sealed(pool, number) for number in range(3)]
    assert io.submit(tier.store(staged)).result(SECONDS) == [True] * 3
    assert tier.take_changes() == [TierChange("memory", key(number), True) for number in range(3)]
    backend.objects[key(1)] = b"damaged"
    del backend.objects[key(2)]
    assert io.submit(tier.load(staged)).result(SECONDS) == [LoadOutcome.HIT, LoadOutcome.CORRUPT, LoadOutcome.MISS]
    assert tier.take_changes() == [TierChange("memory", key(number), False) for number in (1, 2)]
    backend.faults = {"store": [StoreOutcome.REJECTED]}
    assert io.submit(tier.store(staged[2:])).result(SECONDS) == [False]
    assert tier.take_changes() == []
    close_tiers([tier], io, SECONDS)


def test_a_process_that_could_not_see_the_medium_does_not_open_it(io: IoLoop, counters: Counters) -> None:
    config, made = memory_tier(prepare=_only_seen_here)
    settings = OffloadSettings(backends=[config.common])
    tiers = open_tiers(OffloadConfig(settings, (config,)), io, counters, only_shared=True)
    close_tiers(tiers, io, SECONDS)
    assert made[0].calls == ["close"]
