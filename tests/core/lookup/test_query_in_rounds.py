"""Queries to remote tiers: few rounds, few questions, the right answer where prefixes have no holes, else a hint."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Collection, Sequence
from typing import cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from offload_core.api.keys import ObjectKey
from offload_core.lookup.known_objects import KnownObjects
from offload_core.lookup.prefix_query import PrefixAnswer, PrefixQuery
from offload_core.lookup.query_in_rounds import MAX_QUESTIONS, query_in_rounds
from offload_core.planning.chunk_keys import ChunkRef
from offload_core.planning.planner import GroupGeometry, HitPolicy, HybridOffloadPlanner
from offload_core.tiers.tier import Tier
from tests.support.geometries import FULL, STATE, Geometry, geometries, window

CHUNK = 256
PROMPT_TOKENS = 128 * 1024
NEVER = float("inf")
RANKS = tuple(f"{rank:064x}" for rank in range(8))


class RemoteTier:
    """The lookups of a tier, on a set of objects. It keeps the questions of each round."""

    name = "remote"

    def __init__(self) -> None:
        self.objects: set[ObjectKey] = set()
        self.rounds: list[list[ObjectKey]] = []
        self.failing_round = 0
        """Number of the round that has no answer, from 1 on."""

    async def ask(self, keys: Sequence[ObjectKey], seconds: float) -> list[bool] | None:
        assert seconds > 0
        self.rounds.append(list(keys))
        if len(self.rounds) == self.failing_round:
            return None
        return [key in self.objects for key in keys]

    @property
    def questions(self) -> int:
        return sum(map(len, self.rounds))


class Prompt:
    """A prompt on a tier: its planner, its hashes, and its queries.

    Args:
        family: prompts of another family share no chunk.
    """

    def __init__(self, planner: HybridOffloadPlanner, tokens: int, family: int = 0) -> None:
        self.planner = planner
        self.tokens = tokens
        self.hashes = {
            pack.name: [b"%d/%d" % (family, pack.tokens_in(unit + 1)) for unit in range(pack.units_in(tokens))]
            for pack in planner.all_packs
        }

    def keys(self, tokens: int, ranks: Sequence[str] = RANKS[:1]) -> set[ObjectKey]:
        """The objects of the first ``tokens`` tokens."""
        return {
            ObjectKey(rank, pack.name, digest)
            for rank in ranks
            for pack in self.planner.packs
            for digest in self.hashes[pack.name][: pack.units_in(tokens)]
        }

    def tail_keys(self) -> set[ObjectKey]:
        """The objects of the prompt's tail."""
        end = self.planner.tail_end(self.tokens)
        return {
            ObjectKey(RANKS[0], pack.name, self.hashes[pack.name][unit])
            for pack in self.planner.tail_packs
            for unit in pack.needed_units(0, end)
        }

    def ask(
        self,
        tier: RemoteTier,
        known: KnownObjects | None = None,
        *,
        computed: int = 0,
        attention: int = 0,
        ranks: tuple[str, ...] = RANKS[:1],
        excluded: Collection[tuple[str, ChunkRef]] = (),
        deadline: float = NEVER,
    ) -> PrefixAnswer | None:
        tier.rounds.clear()
        query = PrefixQuery(self.hashes, ranks, computed, self.tokens - 1, "", excluded, attention)
        memory = KnownObjects() if known is None else known
        return asyncio.run(query_in_rounds(cast("Tier", tier), self.planner, query, memory, deadline))


def plan(*policies: HitPolicy, chunk: int = CHUNK) -> HybridOffloadPlanner:
    groups = [
        GroupGeometry(index, 16 if policy.kind != "state" else chunk, policy) for index, policy in enumerate(policies)
    ]
    return HybridOffloadPlanner.build(groups, hash_block_size=16, max_model_len=1 << 20, hybrid_chunk_size=chunk)


PLANNERS = {
    "full": plan(FULL),
    "windows": plan(FULL, window(1024)),
    "states": plan(FULL, STATE),
    "windows only": plan(window(4096)),
}


@pytest.fixture
def tier() -> RemoteTier:
    return RemoteTier()


def boundary(answer: PrefixAnswer | None) -> int:
    assert answer is not None
    return answer.boundary_tokens


@pytest.mark.parametrize("failing_round", [1, 2])
def test_a_round_without_an_answer_leaves_the_query_without_one(tier: RemoteTier, failing_round: int) -> None:
    prompt, known = Prompt(PLANNERS["full"], PROMPT_TOKENS), KnownObjects()
    tier.objects = prompt.keys(200 * CHUNK)
    tier.failing_round = failing_round
    assert prompt.ask(tier, known) is None
    assert len(tier.rounds) == failing_round
    tier.failing_round = 0
    assert boundary(prompt.ask(tier, known)) == 200 * CHUNK


@pytest.mark.parametrize("ranks", [1, 8])
@pytest.mark.parametrize("name", PLANNERS)
@pytest.mark.parametrize("chunks", [0, 1, 200, 511])
def test_a_prompt_of_128k_tokens_takes_three_rounds_and_64_questions(
    tier: RemoteTier, name: str, ranks: int, chunks: int
) -> None:
    prompt = Prompt(PLANNERS[name], PROMPT_TOKENS)
    tier.objects = prompt.keys(chunks * CHUNK, RANKS[:ranks])
    found = boundary(prompt.ask(tier, ranks=RANKS[:ranks]))
    assert len(tier.rounds) <= 3
    assert tier.questions <= MAX_QUESTIONS
    assert found == chunks * CHUNK
    if not chunks:
        assert len(tier.rounds) == 1, "new prompts take one round"


def test_a_short_prompt_takes_a_round_for_attention_and_one_for_windows(tier: RemoteTier) -> None:
    prompt = Prompt(PLANNERS["windows"], 4096)
    tier.objects = prompt.keys(2048)
    assert boundary(prompt.ask(tier)) == 2048
    assert len(tier.rounds) == 2


@given(geometry=geometries(), data=st.data())
def test_without_holes_the_answer_is_the_usable_prefix(geometry: Geometry, data: st.DataObject) -> None:
    planner = geometry.plan()
    stored = data.draw(st.integers(0, 600), label="stored tokens")
    prompt = Prompt(planner, data.draw(st.integers(1, 600), label="tokens"))
    computed = data.draw(st.integers(0, prompt.tokens - 1) | st.just(0), label="computed tokens")
    tier = RemoteTier()
    tier.objects = prompt.keys(stored)
    present = {
        pack.name: [pack.tokens_in(unit + 1) <= stored for unit in range(pack.units_in(computed), 600)]
        for pack in planner.packs
    }
    exact = planner.usable_prefix(present, computed, prompt.tokens - 1)
    found = boundary(prompt.ask(tier, computed=computed))
    assert found == exact or (found < exact and tier.questions >= MAX_QUESTIONS)
    assert tier.questions <= MAX_QUESTIONS


@pytest.mark.parametrize("stored", [68 * 1024, 100 * 1024])
def test_local_attention_deeper_than_the_states(tier: RemoteTier, stored: int) -> None:
    prompt = Prompt(PLANNERS["states"], PROMPT_TOKENS)
    tier.objects = prompt.keys(stored)
    assert boundary(prompt.ask(tier, computed=1024, attention=80 * 1024)) == stored
    assert tier.questions <= MAX_QUESTIONS
    head = {key for key in prompt.keys(60 * 1024) if key.pack.startswith("full")}
    tier.objects -= head
    assert boundary(prompt.ask(tier, computed=1024, attention=80 * 1024)) == stored, "the engine holds the head"
    assert len(tier.rounds) <= 3


def test_what_was_found_once_is_not_asked_about_again(tier: RemoteTier) -> None:
    planner, known = PLANNERS["windows"], KnownObjects()
    turn, next_turn = Prompt(planner, 64 * 1024), Prompt(planner, 68 * 1024)
    tier.objects = next_turn.keys(66 * 1024)
    assert boundary(turn.ask(tier, known)) == 64 * 1024 - CHUNK
    assert boundary(turn.ask(tier, known)) == 64 * 1024 - CHUNK
    assert tier.questions == 0
    assert boundary(next_turn.ask(tier, known)) == 66 * 1024
    assert tier.questions <= 24, "only the rest is searched"


def test_what_was_stored_or_loaded_is_known(tier: RemoteTier) -> None:
    prompt, known = Prompt(PLANNERS["states"], 64 * 1024), KnownObjects()
    tier.objects = prompt.keys(64 * 1024)
    known.add(tier.objects)
    assert boundary(prompt.ask(tier, known)) == 64 * 1024 - CHUNK
    assert tier.questions == 0


def test_a_prefix_without_its_head_is_a_miss_at_once(tier: RemoteTier) -> None:
    prompt = Prompt(PLANNERS["full"], PROMPT_TOKENS)
    tier.objects = prompt.keys(PROMPT_TOKENS) - prompt.keys(CHUNK)
    assert boundary(prompt.ask(tier)) == 0, "no load is needed to find out"


def test_one_rank_speaks_for_the_others(tier: RemoteTier) -> None:
    prompt = Prompt(PLANNERS["full"], PROMPT_TOKENS)
    tier.objects = prompt.keys(1024, RANKS[:1])
    assert boundary(prompt.ask(tier, ranks=RANKS)) == 1024, "the load finds out"


def test_an_excluded_chunk_ends_the_prefix(tier: RemoteTier) -> None:
    prompt, known = Prompt(PLANNERS["full"], PROMPT_TOKENS), KnownObjects()
    tier.objects = prompt.keys(PROMPT_TOKENS)
    known.add(tier.objects)
    ref = ChunkRef(prompt.planner.packs[0].name, prompt.hashes[prompt.planner.packs[0].name][100])
    answer = prompt.ask(tier, known, excluded={("remote", ref), ("another tier", ref._replace(chunk_hash=b"0/256"))})
    assert answer == PrefixAnswer(100 * CHUNK, 100 * CHUNK, (ref,))


def test_an_excluded_state_is_not_used(tier: RemoteTier) -> None:
    prompt = Prompt(PLANNERS["states"], 8 * CHUNK + 1)
    tier.objects = prompt.keys(8 * CHUNK)
    (states,) = (pack for pack in prompt.planner.packs if pack.policy.kind == "state")
    ref = ChunkRef(states.name, prompt.hashes[states.name][7])
    assert boundary(prompt.ask(tier, excluded={("remote", ref)})) == 7 * CHUNK


def test_no_question_is_sent_after_the_deadline(tier: RemoteTier) -> None:
    prompt = Prompt(PLANNERS["full"], PROMPT_TOKENS)
    assert prompt.ask(tier, deadline=time.monotonic()) is None
    assert tier.rounds == []


@given(data=st.data(), name=st.sampled_from(sorted(PLANNERS)))
def test_each_hole_costs_one_failed_load_at_most_and_nothing_missing_is_used(data: st.DataObject, name: str) -> None:
    """A load that does not get an object excludes it, and all objects of the load are doubted."""
    prompt, tier, known = Prompt(PLANNERS[name], 64 * CHUNK), RemoteTier(), KnownObjects()
    whole = sorted(prompt.keys(64 * CHUNK))
    holes = data.draw(st.sets(st.sampled_from(whole), max_size=5))
    known.add(data.draw(st.sets(st.sampled_from(whole), max_size=20)))  # some of it from before the holes
    tier.objects = set(whole) - holes
    excluded: set[tuple[str, ChunkRef]] = set()
    for _ in range(len(holes) + 1):
        end = boundary(prompt.ask(tier, known, excluded=frozenset(excluded)))
        needed = {
            ObjectKey(RANKS[0], pack.name, prompt.hashes[pack.name][unit])
            for pack in prompt.planner.packs
            for unit in pack.needed_units(0, end)
        }
        missing = needed - tier.objects
        if not missing:
            return
        excluded |= {("remote", ChunkRef(key.pack, key.chunk_hash)) for key in missing}
        known.discard(needed)
    pytest.fail("more loads failed than there are holes")


def test_the_memory_of_objects_is_bounded() -> None:
    known = KnownObjects(limit=3)
    keys = [ObjectKey(RANKS[0], "full-u16", bytes([number])) for number in range(4)]
    known.add(keys[:3])
    assert keys[0] in known
    known.add(keys[3:])
    assert [key in known for key in keys] == [True, False, True, True], "the least recently used one went"
    known.discard(keys[:1])
    assert keys[0] not in known


@pytest.mark.parametrize("policies", [(FULL,), (FULL, window(1024)), (FULL, STATE), (window(1024),)])
def test_the_tail_of_a_prompt_is_found_by_few_questions_more(tier: RemoteTier, policies: tuple[HitPolicy, ...]) -> None:
    groups = [GroupGeometry(index, 16 if it.kind != "state" else CHUNK, it) for index, it in enumerate(policies)]
    planner = HybridOffloadPlanner.build(
        groups, hash_block_size=16, max_model_len=1 << 20, hybrid_chunk_size=CHUNK, tail_tokens=16
    )
    prompt = Prompt(planner, 10 * CHUNK + 100)
    tier.objects = prompt.keys(10 * CHUNK)
    assert boundary(prompt.ask(tier)) == 10 * CHUNK
    assert tier.questions <= MAX_QUESTIONS
    tier.objects |= prompt.tail_keys()
    assert boundary(prompt.ask(tier)) == 10 * CHUNK + 96
    assert tier.questions <= MAX_QUESTIONS
    for lost in prompt.tail_keys():
        tier.objects -= {lost}
        assert boundary(prompt.ask(tier)) == 10 * CHUNK
        tier.objects |= {lost}
