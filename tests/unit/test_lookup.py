"""Lookups: answered by every tier, or counted as misses at their deadline (I4)."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator

import pytest

from offload_core.keys import ChunkRef, ObjectKey
from offload_core.lookup import Lookup, LookupService, PrefixAnswer, PrefixQuestion
from offload_core.planner import GroupGeometry, HitPolicy, HybridOffloadPlanner
from offload_core.runtime import IoLoop
from offload_core.stats import Counters
from offload_core.tier import Tier
from offload_core.tier_opening import close_tiers
from tests.unit.memory_backend import MemoryBackend, memory_tier

SECONDS = 30
NAMESPACE = "ab" * 32
OTHER_RANK = "cd" * 32
HASHES = [number.to_bytes(32, "big") for number in range(4)]
Start = Callable[[float], LookupService]


@pytest.fixture
def backends() -> dict[str, MemoryBackend]:
    return {}


@pytest.fixture
def start(io: IoLoop, counters: Counters, backends: dict[str, MemoryBackend]) -> Iterator[Start]:
    planner = HybridOffloadPlanner.build(
        [GroupGeometry(0, 16, HitPolicy("full"))], hash_block_size=16, max_model_len=1024, hybrid_chunk_size=16
    )
    tiers: list[Tier] = []
    for name in ("fast", "slow"):
        config, made = memory_tier(name)
        tiers.append(Tier(config, SECONDS, counters))
        backends[name] = made[0]
    yield lambda timeout_seconds: LookupService(io, tiers, planner, timeout_seconds, counters)
    for backend in backends.values():
        backend.gates["contains"].open()
    close_tiers(tiers, io, SECONDS)


def question(*namespaces: str, mistrusted: frozenset[ChunkRef] = frozenset()) -> PrefixQuestion:
    """About four units of 16 tokens, of which the first three may be used."""
    return PrefixQuestion({"full-u16": HASHES}, namespaces or (NAMESPACE,), 0, 63, mistrusted=mistrusted)


def put(backend: MemoryBackend, units: int, namespace: str = NAMESPACE) -> None:
    backend.objects.update({ObjectKey(namespace, "full-u16", chunk_hash): b"" for chunk_hash in HASHES[:units]})


def ref(unit: int) -> ChunkRef:
    return ChunkRef("full-u16", HASHES[unit])


def wait_until_done(service: LookupService, lookup: Lookup) -> Lookup:
    while not lookup.done():
        service.wait_for_answer(SECONDS)
    return lookup


def test_every_tier_says_how_deep_a_prefix_it_holds_and_what_it_lacks(
    start: Start, backends: dict[str, MemoryBackend]
) -> None:
    put(backends["fast"], 1)
    put(backends["slow"], 4)
    service = start(SECONDS)
    lookup = wait_until_done(service, service.start(question()))
    assert lookup.answers() == {"fast": PrefixAnswer(16, (ref(1), ref(2))), "slow": PrefixAnswer(48)}


def test_a_chunk_is_there_when_every_rank_has_its_part(start: Start, backends: dict[str, MemoryBackend]) -> None:
    put(backends["fast"], 3)
    put(backends["fast"], 2, OTHER_RANK)
    put(backends["slow"], 3, OTHER_RANK)
    service = start(SECONDS)
    lookup = wait_until_done(service, service.start(question(NAMESPACE, OTHER_RANK)))
    assert {name: answer.boundary_tokens for name, answer in lookup.answers().items()} == {"fast": 32, "slow": 0}


def test_a_mistrusted_chunk_counts_as_missing(start: Start, backends: dict[str, MemoryBackend]) -> None:
    put(backends["fast"], 3)
    service = start(SECONDS)
    lookup = wait_until_done(service, service.start(question(mistrusted=frozenset({ref(1)}))))
    assert lookup.answers()["fast"] == PrefixAnswer(16, (ref(1),))


def test_a_tier_without_an_answer_at_the_deadline_has_nothing_and_is_counted(
    start: Start, backends: dict[str, MemoryBackend], counters: Counters
) -> None:
    for backend in backends.values():
        put(backend, 3)
    backends["slow"].gates["contains"].shut()
    service = start(0.2)
    lookup = service.start(question())
    assert not lookup.done()
    while not lookup.done():
        service.wait_for_answer(0.01)
    assert lookup.answers() == {"fast": PrefixAnswer(48)}
    assert lookup.best() == ("fast", 48)


@pytest.mark.parametrize("fault", [OSError("gone"), asyncio.CancelledError()], ids=["raises", "cancels itself"])
def test_a_tier_that_fails_has_nothing_and_the_engine_thread_sees_no_error(
    start: Start, backends: dict[str, MemoryBackend], fault: BaseException
) -> None:
    put(backends["fast"], 3)
    backends["slow"].faults = {"contains": fault}
    service = start(SECONDS)
    lookup = wait_until_done(service, service.start(question()))
    assert {name: answer.boundary_tokens for name, answer in lookup.answers().items()} == {"fast": 48, "slow": 0}
