"""Lookups: answered by every tier, or counted as misses at their deadline (I4)."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Collection, Iterator

import pytest

from offload_core.api.keys import ObjectKey
from offload_core.lookup.prefix_query import PrefixAnswer, PrefixQuery
from offload_core.lookup.service import Lookup, LookupService
from offload_core.planning.chunk_keys import ChunkRef
from offload_core.planning.planner import GroupGeometry, HitPolicy, HybridOffloadPlanner
from offload_core.runtime.io_loop import IoLoop
from offload_core.runtime.metrics import Counters
from offload_core.tiers.opening import close_tiers
from offload_core.tiers.tier import Tier
from tests.support.memory_backend import LIMITS, MemoryBackend, memory_tier

SECONDS = 30
NAMESPACE = "ab" * 32
OTHER_RANK = "cd" * 32
HASHES = [number.to_bytes(32, "big") for number in range(4)]
Start = Callable[..., LookupService]
UNPROBED = LIMITS.model_copy(
    update={"breaker_failures": 5, "breaker_pause_seconds": 3600.0, "breaker_max_pause_seconds": 3600.0}
)


@pytest.fixture
def backends() -> dict[str, MemoryBackend]:
    return {}


@pytest.fixture
def start(io: IoLoop, counters: Counters, backends: dict[str, MemoryBackend]) -> Iterator[Start]:
    """Returns a function that starts a service over the tiers ``fast`` and ``slow``, with these keys of theirs."""
    planner = HybridOffloadPlanner.build(
        [GroupGeometry(0, 16, HitPolicy("full"))], hash_block_size=16, max_model_len=1024, hybrid_chunk_size=16
    )
    tiers: list[Tier] = []
    for name in ("fast", "slow"):
        config, made = memory_tier(name)
        tiers.append(Tier(config, UNPROBED, counters))
        backends[name] = made[0]

    def start(
        timeout_seconds: float,
        grace_seconds: float = SECONDS,
        unavailable: Collection[str] = (),
        **keys: dict[str, float],
    ) -> LookupService:
        for tier in tiers:
            tier.config = tier.config.model_copy(update=keys.get(tier.name, {}))
            tier.load_weight = tier.config.load_weight
            limits = tier.limits.model_copy(update={"lookup_timeout_seconds": timeout_seconds})
            tier.limits = limits.overridden_by(tier.config)
        return LookupService(io, tiers, planner, counters, grace_seconds=grace_seconds, unavailable=unavailable)

    yield start
    for backend in backends.values():
        backend.gates["contains"].open()
    close_tiers(tiers, io, SECONDS)


def query(*namespaces: str, excluded: frozenset[tuple[str, ChunkRef]] = frozenset()) -> PrefixQuery:
    """About four units of 16 tokens, of which the first three may be used."""
    return PrefixQuery({"full-u16": HASHES}, namespaces or (NAMESPACE,), 0, 63, excluded=excluded)


def put(backend: MemoryBackend, units: int, namespace: str = NAMESPACE) -> None:
    backend.objects.update({ObjectKey(namespace, "full-u16", chunk_hash): b"" for chunk_hash in HASHES[:units]})


def ref(unit: int) -> ChunkRef:
    return ChunkRef("full-u16", HASHES[unit])


def wait_for_all(service: LookupService, lookup: Lookup) -> Lookup:
    """Wait for both tiers' answers, whether they still matter or not."""
    while len(lookup.answers()) < 2:
        service.wait_for_answer(0.01)
    return lookup


def wait_until_ended(service: LookupService, lookup: Lookup) -> Lookup:
    while not lookup.has_ended():
        service.wait_for_answer(0.01)
    return lookup


def wait_until_done(service: LookupService, lookup: Lookup) -> Lookup:
    while not lookup.done():
        service.wait_for_answer(0.01)
    return lookup


def test_every_tier_says_how_deep_a_prefix_it_holds_and_what_it_lacks(
    start: Start, backends: dict[str, MemoryBackend]
) -> None:
    put(backends["fast"], 1)
    put(backends["slow"], 4)
    service = start(SECONDS)
    lookup = wait_for_all(service, service.start(query()))
    assert lookup.answers() == {"fast": PrefixAnswer(16, 16, (ref(1), ref(2))), "slow": PrefixAnswer(48, 48)}


def test_a_chunk_is_there_when_every_rank_has_its_part(start: Start, backends: dict[str, MemoryBackend]) -> None:
    put(backends["fast"], 3)
    put(backends["fast"], 2, OTHER_RANK)
    put(backends["slow"], 3, OTHER_RANK)
    service = start(SECONDS)
    lookup = wait_for_all(service, service.start(query(NAMESPACE, OTHER_RANK)))
    assert {name: answer.boundary_tokens for name, answer in lookup.answers().items()} == {"fast": 32, "slow": 0}


def test_a_excluded_chunk_counts_as_missing(start: Start, backends: dict[str, MemoryBackend]) -> None:
    put(backends["fast"], 3)
    service = start(SECONDS)
    lookup = wait_for_all(service, service.start(query(excluded=frozenset({("fast", ref(1))}))))
    assert lookup.answers()["fast"] == PrefixAnswer(16, 16, (ref(1),))


def test_a_chunk_excluded_on_one_tier_is_taken_from_another(start: Start, backends: dict[str, MemoryBackend]) -> None:
    put(backends["fast"], 3)
    put(backends["slow"], 3)
    service = start(SECONDS, fast={"load_weight": 10.0})
    lookup = wait_for_all(service, service.start(query(excluded=frozenset({("fast", ref(0))}))))
    assert lookup.best() == ("slow", 48)
    assert lookup.missing() == set()


def test_a_tier_without_an_answer_at_the_deadline_has_nothing_and_is_counted(
    start: Start, backends: dict[str, MemoryBackend], counters: Counters
) -> None:
    put(backends["fast"], 2)
    put(backends["slow"], 3)
    backends["slow"].gates["contains"].shut()
    service = start(1)
    lookup = service.start(query())
    assert not lookup.done()
    while not lookup.done():
        service.wait_for_answer(0.01)
    assert lookup.answers() == {"fast": PrefixAnswer(32, 32, (ref(2),))}
    assert lookup.best() == ("fast", 32)
    while not (counted := counters.take()).get(("lookup_failures", "slow")):  # on the loop, at the deadline
        service.wait_for_answer(0.01)
    assert counted[("lookup_failures", "slow")] == 1


@pytest.mark.parametrize("fault", [OSError("gone"), asyncio.CancelledError()], ids=["raises", "cancels itself"])
def test_a_tier_that_fails_has_no_answer_and_the_engine_thread_sees_no_error(
    start: Start, backends: dict[str, MemoryBackend], counters: Counters, fault: BaseException
) -> None:
    put(backends["fast"], 2)
    put(backends["slow"], 3)
    backends["slow"].faults = {"contains": fault}
    service = start(SECONDS)
    lookup = wait_until_ended(service, service.start(query()))
    assert {name: answer.boundary_tokens for name, answer in lookup.answers().items()} == {"fast": 32}
    assert lookup.missing() == {ref(2)}, "the tier without an answer is left out"
    backends["fast"].faults = {"contains": fault}
    lookup = wait_until_ended(service, service.start(query()))
    assert lookup.missing() == set(), "nothing is known, so that nothing is stored again"
    counted = counters.take()
    assert [counted.get(("lookup_failures", name), 0) for name in ("fast", "slow")] == [1, 2]
    assert ("lookup_misses", "slow") not in counted


def hit_on_fast_while_slow_hangs(backends: dict[str, MemoryBackend], units: int) -> None:
    put(backends["fast"], units)
    put(backends["slow"], 4)
    backends["slow"].gates["contains"].shut()


def test_no_other_tier_is_waited_for_that_could_not_do_better(start: Start, backends: dict[str, MemoryBackend]) -> None:
    hit_on_fast_while_slow_hangs(backends, 3)
    service = start(SECONDS, fast={"load_weight": 2.0}, slow={"load_weight": 2.0})
    lookup = wait_until_done(service, service.start(query()))
    assert lookup.best() == ("fast", 48), "of equals the first"
    assert lookup.missing() == set(), "the other may have what this one lacks"


@pytest.mark.parametrize(("slow_weight", "best"), [(1.0, ("fast", 32)), (0.5, ("fast", 32)), (3.0, ("slow", 48))])
def test_a_tier_that_could_do_better_is_waited_for(
    start: Start, backends: dict[str, MemoryBackend], slow_weight: float, best: tuple[str, int]
) -> None:
    hit_on_fast_while_slow_hangs(backends, 2)
    service = start(SECONDS, fast={"load_weight": 1.5}, slow={"load_weight": slow_weight})
    lookup = service.start(query())
    while not lookup.answers():
        service.wait_for_answer(0.01)
    assert lookup.done() == (slow_weight < 3.0), "32 tokens x 1.5 are worth as much as 48 x 1 at most"
    backends["slow"].gates["contains"].open()
    assert wait_until_done(service, lookup).best() == best


def test_the_wait_for_a_better_answer_ends_with_the_grace(
    start: Start, backends: dict[str, MemoryBackend], counters: Counters
) -> None:
    hit_on_fast_while_slow_hangs(backends, 1)
    service = start(SECONDS, grace_seconds=0.05)
    lookup = service.start(query())
    assert wait_until_done(service, lookup).best() == ("fast", 16)
    assert ("lookup_failures", "slow") not in counters.take(), "it has time until its deadline"


def test_the_grace_does_not_begin_with_an_answer_that_has_nothing(
    start: Start, backends: dict[str, MemoryBackend]
) -> None:
    hit_on_fast_while_slow_hangs(backends, 0)
    service = start(SECONDS, grace_seconds=0.0)
    lookup = service.start(query())
    while not lookup.answers():
        service.wait_for_answer(0.01)
    assert not lookup.done()
    backends["slow"].gates["contains"].open()
    assert wait_until_done(service, lookup).best() == ("slow", 48)
    assert lookup.missing() == set()


def test_each_tier_has_its_own_deadline_and_those_without_an_answer_then_have_no_say_in_what_is_missing(
    start: Start, backends: dict[str, MemoryBackend]
) -> None:
    hit_on_fast_while_slow_hangs(backends, 0)
    service = start(SECONDS, slow={"lookup_timeout_seconds": 0.2})
    lookup = service.start(query())
    while not lookup.answers():
        service.wait_for_answer(0.01)
    if not lookup.done():
        assert lookup.missing() == set(), "the other tier may still have it"
    wait_until_done(service, lookup)
    assert lookup.best() == ("fast", 0)
    assert lookup.missing() == {ref(0), ref(1), ref(2)}


def test_a_caller_with_less_patience_than_a_tier_has_time_goes_without_it_and_the_tier_is_not_blamed(
    start: Start, backends: dict[str, MemoryBackend], counters: Counters
) -> None:
    hit_on_fast_while_slow_hangs(backends, 1)
    service = start(SECONDS)
    lookup = wait_until_done(service, service.start(query(), max_wait_seconds=1))
    assert lookup.best() == ("fast", 16)
    assert time.monotonic() - lookup.started < SECONDS
    backends["slow"].gates["contains"].open()
    assert wait_for_all(service, lookup).best() == ("slow", 48), "what comes all the same is used"
    assert ("lookup_timeouts", "slow") not in counters.take()


def test_a_tier_whose_breaker_is_open_is_answered_for_at_once_and_has_no_say_in_what_is_missing(
    start: Start, backends: dict[str, MemoryBackend], counters: Counters
) -> None:
    put(backends["fast"], 1)
    backends["slow"].faults = {"contains": OSError("gone")}
    service = start(SECONDS)
    for _ in range(UNPROBED.breaker_failures):
        wait_until_ended(service, service.start(query()))
    asked = backends["slow"].calls.count("contains")

    lookup = service.start(query())
    while not lookup.answers():
        service.wait_for_answer(0.01)
    assert lookup.done(), "although the grace is not over"
    assert lookup.best() == ("fast", 16)
    assert lookup.missing() == {ref(1), ref(2)}
    assert backends["slow"].calls.count("contains") == asked
    assert counters.take()["breaker_refused", "slow"] == 1


def test_a_tier_that_others_say_is_unavailable_is_not_asked_until_they_say_otherwise(
    start: Start, backends: dict[str, MemoryBackend], counters: Counters
) -> None:
    put(backends["slow"], 3)
    unavailable = {"fast", "slow"}
    service = start(SECONDS, unavailable=unavailable)
    lookup = service.start(query())
    assert lookup.done()
    assert lookup.best()[1] == 0
    assert lookup.answers() == {}
    assert backends["slow"].calls == []
    assert counters.take() == {("breaker_refused", "fast"): 1, ("breaker_refused", "slow"): 1}
    unavailable.clear()
    assert wait_for_all(service, service.start(query())).best() == ("slow", 48)


@pytest.mark.parametrize(("seconds", "rounds"), [(SECONDS, 2), (0.5, 1)], ids=["in time", "late"])
def test_past_its_deadline_a_lookup_asks_nothing_more(
    io: IoLoop, start: Start, backends: dict[str, MemoryBackend], seconds: float, rounds: int
) -> None:
    hashes = [number.to_bytes(32, "big") for number in range(40)]  # more than are asked for at first
    backends["fast"].objects.update({ObjectKey(NAMESPACE, "full-u16", chunk_hash): b"" for chunk_hash in hashes})
    gates = [backend.gates["contains"] for backend in backends.values()]
    for gate in gates:
        gate.shut()
    service = start(seconds)
    lookup = service.start(PrefixQuery({"full-u16": hashes}, (NAMESPACE,), 0, 639))
    gates[0].wait_for_a_call()
    if rounds == 1:
        while not lookup.done():
            service.wait_for_answer(0.01)
    for gate in gates:
        gate.open()
    if rounds == 2:
        wait_until_done(service, lookup)
    io.submit(_others_done()).result(SECONDS)
    assert backends["fast"].calls.count("contains") == rounds
    assert ("fast" in lookup.answers()) == (rounds == 2)


async def _others_done() -> None:
    if others := asyncio.all_tasks() - {asyncio.current_task()}:
        await asyncio.wait(others)
