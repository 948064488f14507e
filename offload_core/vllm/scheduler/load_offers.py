"""Offers of loads to the engine: the depth of the prefix on the tiers, and the right time to load it."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from offload_core.api.keys import ObjectKey
from offload_core.lookup.chunk_ledger import ChunkLedger
from offload_core.lookup.load_choice import LoadChoice
from offload_core.lookup.prefix_query import PrefixQuery
from offload_core.lookup.service import Lookup, LookupService
from offload_core.lookup.waiting_time import WaitReason
from offload_core.planning.chunk_keys import ChunkRef
from offload_core.planning.planner import HybridOffloadPlanner, PrefixDepth
from offload_core.runtime.metrics import ALL_TIERS, Counters
from offload_core.tiers.tier import Tier
from offload_core.vllm.scheduler.backfill import Backfill
from offload_core.vllm.scheduler.block_holders import BlockHolders, has_free_blocks, needed_blocks
from offload_core.vllm.scheduler.local_cache import LocalPrefix, LocalTails
from offload_core.vllm.scheduler.placement_plan import PlacementPlan
from offload_core.vllm.scheduler.request_state import Offer, RequestState

if TYPE_CHECKING:
    from vllm.v1.core.block_pool import BlockPool

_IDLE_WAIT_SECONDS = 0.002
_OFFER_LIFE_SECONDS = 1.0
_OFFERS_AFTER_FAILURE = 4


class LoadOffers:
    """Offers loads and follows them to their end. All methods run on the engine thread.

    Args:
        choice: the worth of a load; the same one that the lookups use.
        block_holders: requests that hold blocks for a load; the caller keeps them up to date.
        ranks_namespaces: returns the namespace of each rank's keys, for an adapter's digest.
    """

    def __init__(
        self,
        planner: HybridOffloadPlanner,
        tiers: Sequence[Tier],
        lookups: LookupService,
        choice: LoadChoice,
        ledger: ChunkLedger,
        block_holders: BlockHolders,
        placement: PlacementPlan,
        backfill: Backfill,
        ranks_namespaces: Callable[[str], tuple[str, ...]],
        counters: Counters,
    ) -> None:
        self._planner = planner
        self._lookups = lookups
        self._choice = choice
        self._counters = counters
        self._ledger = ledger
        self._block_holders = block_holders
        self._placement = placement
        self._backfill = backfill
        self._ranks_namespaces = ranks_namespaces
        self._block_alignment_tokens = math.lcm(*(g.block_size_tokens for pack in planner.packs for g in pack.groups))
        self._has_attention = any(pack.policy.kind == "full" for pack in planner.packs)
        self._lookup_seconds = max(tier.limits.lookup_timeout_seconds for tier in tiers)
        self._load_seconds = {tier.name: tier.limits.load_timeout_seconds for tier in tiers}
        self._chunks_loading: Counter[ChunkRef] = Counter()
        self._local_tails: LocalTails | None = None
        self._block_pool: BlockPool | None = None
        self._num_groups = 0
        self._recomputing: dict[str, int] = {}
        """Requests whose load has failed and that have not run since, each with the blocks that it needs to run."""
        self._storage_awaited = False
        """True if a request was told in this step to ask again."""

    def bind(self, block_pool: BlockPool, num_groups: int, *, backfills: bool) -> None:
        """Use the engine's block pool: for backfills if wanted, for hits that end inside a block, and to see room."""
        self._block_pool, self._num_groups = block_pool, num_groups
        if backfills:
            self._backfill.bind(block_pool)
        if self._planner.tail_packs and any(pack.policy.kind == "state" for pack in self._planner.packs):
            self._local_tails = LocalTails(block_pool, self._planner)

    def matched_tokens(self, state: RequestState, computed_tokens: int) -> int | None:
        """Return the number of tokens past ``computed_tokens`` that can be loaded, or ``None`` to be asked again.

        All of a request's waits for lookups together end at the longest lookup deadline. All its waits for loads end at
        the load deadline of the tier in its offer. After that, nothing is loaded for it.
        """
        matched = self._matched_tokens(state, computed_tokens)
        state.answered = matched is not None
        if state.answered:
            state.wait.end()
        return matched

    def load_begins(self, state: RequestState, chunks: Sequence[ChunkRef]) -> None:
        """Note that the engine has accepted the offer: the request waits for a load of ``chunks``."""
        self._recomputing.pop(state.request.request_id, None)  # the engine has found blocks for another load of it
        offer, job_id = _load_of(state)
        self._choice.load_begins(offer.tier, job_id, offer.computed_tokens, state.resumed_tokens)
        state.loading = chunks
        self._counters.add("pending_loads", offer.tier)
        self._chunks_loading.update(chunks)
        state.wait.begin("load")
        state.lookup = None

    def load_incomplete(self, state: RequestState) -> None:
        """Decide, after a load that failed or got only a part, whether to offer another one."""
        offer, _ = _load_of(state)
        in_time = state.wait.seconds("load") < self._load_seconds[offer.tier]
        self._end_load(state, measured=not in_time)  # a load that missed its deadline says how slow the tier is
        self._lookups.doubt(offer.tier, self._first_ranks_keys(state.loading))
        again = in_time and not state.failed_once and state.options.max_load_tokens is None  # a part may have arrived
        state.offers_left = _OFFERS_AFTER_FAILURE if again else 0
        state.failed_once = True
        state.not_loaded |= self.excluded_chunks(state)

    def excluded_chunks(self, state: RequestState) -> frozenset[tuple[str, ChunkRef]]:
        """Return the chunks of the request's load that this load, or another one from the same tier, did not get."""
        offer, _ = _load_of(state)
        return self._ledger.excluded & {(offer.tier, ref) for ref in state.loading}

    def stored(self, refs: Iterable[ChunkRef]) -> None:
        """Note chunks that some tier has stored. Stores from before a reset are under names that are no longer used."""
        self._lookups.learn_stored(self._first_ranks_keys(ref for ref in refs if self._ledger.is_present(ref)))

    def load_complete(self, state: RequestState) -> None:
        """Note that the request's load got every chunk."""
        offer, _ = _load_of(state)
        self._end_load(state, measured=True)
        self._count_hit(state, offer)
        self._lookups.learn(offer.tier, self._first_ranks_keys(state.loading))

    def loaded_within_step(self, state: RequestState) -> None:
        """Note that the engine has accepted the offer, and that the request runs in this step, after its load."""
        self._recomputing.pop(state.request.request_id, None)
        assert state.offer is not None
        self._counters.add("loads_within_step", state.offer.tier)
        self._count_hit(state, state.offer)
        state.lookup = None

    def load_ended(self, state: RequestState) -> None:
        """Forget the request's load."""
        self._counters.add("pending_loads", _load_of(state)[0].tier, -1)
        self._end_load(state, measured=False)
        state.wait.end()
        state.partial_load = False
        self._chunks_loading -= Counter(state.loading)
        state.loading = ()
        state.job_id = None
        state.offer = state.lookup = None

    def recompute(self, needed_blocks: Mapping[str, int]) -> None:
        """Note requests that the engine recomputes, since their load has failed, and the blocks that they need."""
        self._recomputing.update(needed_blocks)

    def no_longer_recomputed(self, request_ids: Iterable[str]) -> None:
        """Note requests that run now, or have finished."""
        if self._recomputing:
            for request_id in request_ids:
                self._recomputing.pop(request_id, None)

    def end_step(self, *, may_wait: bool) -> None:
        """End an engine step.

        Args:
            may_wait: wait briefly for a lookup's answer, if a request was told in this step to ask again.
        """
        if may_wait and self._storage_awaited:
            self._lookups.wait_for_answer(_IDLE_WAIT_SECONDS)
        self._storage_awaited = False
        self._backfill.end_step()

    def _matched_tokens(self, state: RequestState, computed_tokens: int) -> int | None:
        if not _may_load(state):
            return 0
        if computed_tokens % self._block_alignment_tokens:
            return 0  # vLLM asks from the block before it on, if its own hit ends inside a block, which may be shared
        if not state.has_names:
            return self._ask_again(state, "lookup") if state.adapter and state.adapter.pending else 0
        if state.offer and self._backfill.is_expected(state, computed_tokens):  # a step may outlast an offer
            state.offer = replace(state.offer, expires=time.monotonic() + _OFFER_LIFE_SECONDS)
        local = self._backfill.local_prefix(state, computed_tokens)
        if state.offer and not _still_valid(state.offer, local):
            state.offer = None
            if state.answered and not state.failed_once:  # it had no free blocks: that was no wait for storage
                state.wait.reset("lookup")
        if state.offer is None:
            stale = state.lookup is None or not _answers_for(state.lookup.query, local)
            if stale and (self._lookup_time_is_over(state) or not self._start_lookup(state, local)):
                return 0
            assert state.lookup is not None
            if not state.lookup.done():
                return self._ask_again(state, "lookup")
            state.offer = self._choose_offer(state, state.lookup, local)
            if state.offer is None:
                return self._ask_again(state, "lookup")
        boundary = state.offer.boundary_tokens
        if boundary <= local.computed_tokens:
            return 0  # a local prefix without states at its end is then shortened by the engine
        asked_tokens, computed_tokens = computed_tokens, state.offer.computed_tokens
        if state.wait.seconds("load") >= self._load_seconds[state.offer.tier]:
            return 0
        if self._recomputing:
            # vLLM reserves blocks for a request whose load has failed until it runs. It admits no load that does not
            # fit beside all of these reservations, and then looks at no request behind it. So if blocks are short,
            # other requests wait until it runs. The request itself must not wait for its own reservation.
            if state.request.request_id in self._recomputing:
                state.offers_left -= 1
            elif not self._has_room_beside_recomputed(state):
                return self._ask_again(state, "load")
        if self._block_holders.withholds_failures:  # they would wait for this load too
            return self._ask_again(state, "load")
        if self._chunks_loading and not self._chunks_loading.keys().isdisjoint(
            state.needed_refs(self._planner, computed_tokens, boundary)
        ):
            state.wait.begin("load")
            return None  # another request already loads them; soon they are in the local prefix cache
        if asked_tokens != computed_tokens:
            self._backfill.expect(state, state.offer)
            state.wait.end()  # the engine's next question needs no storage
            return None
        return boundary - computed_tokens

    def _first_ranks_keys(self, refs: Iterable[ChunkRef]) -> Iterator[ObjectKey]:
        """Yield the keys lazily, since few tiers want them."""
        return (ObjectKey(self._ranks_namespaces(ref.adapter)[0], ref.pack, ref.chunk_hash) for ref in refs)

    def _ask_again(self, state: RequestState, reason: WaitReason) -> int | None:
        """Return ``None``, so that the engine asks again; an otherwise idle engine waits briefly before that."""
        state.wait.begin(reason)
        self._storage_awaited = True
        return None

    def _has_room_beside_recomputed(self, state: RequestState) -> bool:
        """Return whether there are free blocks for a request, and for all that hold blocks or will be recomputed.

        A request whose load has failed may wait for something else than blocks, for as long as others run.
        """
        reserved = sum(self._recomputing.values()) + self._block_holders.lacking_blocks
        needed = needed_blocks(self._planner, state.request, self._num_groups)
        return has_free_blocks(self._block_pool, reserved + needed)

    def _end_load(self, state: RequestState, *, measured: bool) -> None:
        """Tell the choice that a load has ended, unless it knows that already."""
        offer, job_id = _load_of(state)
        seconds = self._choice.load_ends(offer.tier, job_id, measured=measured)
        self._counters.add("load_wait_seconds", offer.tier, seconds)

    def _count_hit(self, state: RequestState, offer: Offer) -> None:
        """Count the tokens of a complete load, and the seconds that they save."""
        self._counters.add("hit_tokens", offer.tier, state.resumed_tokens - offer.local_tokens)
        saved = self._choice.prefill_seconds_saved(offer.local_tokens, state.resumed_tokens, state.request.num_tokens)
        if math.isfinite(saved):
            self._counters.add("prefill_seconds_saved", offer.tier, max(0.0, saved))

    def _count_declined(self, state: RequestState, counter: str, tier: str) -> None:
        """Count a request once, however often the engine asks about it."""
        if not state.declined:
            state.declined = True
            self._counters.add(counter, tier)

    def _count_answers(self, lookup: Lookup) -> None:
        """Count a lookup that has ended, on every tier that it was for."""
        answers = lookup.answers()
        for tier in lookup.seconds():
            self._counters.add("queries", tier)
            if (answer := answers.get(tier)) is not None:
                deeper = answer.boundary_tokens > lookup.query.computed_tokens
                self._counters.add("query_hits" if deeper else "query_misses", tier)

    def _lookup_time_is_over(self, state: RequestState) -> bool:
        return state.wait.seconds("lookup") >= self._lookup_seconds

    def _start_lookup(self, state: RequestState, local: LocalPrefix) -> bool:
        """Ask the tiers for the depth of their prefix; returns ``False`` if no chunk is worth a question."""
        request = state.request
        hashes = request.block_hashes
        # The last token is always computed, and tokens without a block hash have no key yet.
        limit = min(request.num_tokens - 1, self._planner.named_tokens(len(hashes)))
        if state.options.max_load_tokens is not None:
            limit = min(limit, local.computed_tokens + state.options.max_load_tokens)
        held_tokens = local.computed_tokens
        if self._local_tails is not None:
            held_tokens = self._local_tails.end(request, held_tokens)
        if self._planner.reachable_prefix(limit) <= held_tokens:
            return False
        adapter = state.adapter.digest if state.adapter else ""
        query = PrefixQuery(
            hashes=self._planner.chunk_hashes(hashes),
            namespaces=self._ranks_namespaces(adapter),
            computed_tokens=local.computed_tokens,
            limit_tokens=limit,
            total_tokens=request.num_tokens,
            adapter=adapter,
            excluded=self._ledger.excluded | state.not_loaded,
            local_attention_tokens=local.attention_tokens,
        )
        tiers = self._choice.tiers_to_ask(query)
        if state.options.tiers is not None:
            tiers = {name: seconds for name, seconds in tiers.items() if name in state.options.tiers}
        if not tiers:
            self._count_declined(state, "lookups_declined", ALL_TIERS)
            return False
        patience = min(self._lookup_seconds, max(tiers.values())) - state.wait.seconds("lookup")
        if patience <= 0:
            return False
        state.lookup = self._lookups.start(query, patience, tiers)
        return True

    def _choose_offer(self, state: RequestState, lookup: Lookup, local: LocalPrefix) -> Offer | None:
        """Choose the tier whose load has the highest worth; ``None`` to look up again.

        It looks up again, for a short while, if a missing chunk is on its way to the tiers.
        """
        state.lookup = None
        missing = lookup.missing()
        arriving = self._ledger.any_arriving(missing, lookup.started) and not self._lookup_time_is_over(state)
        if arriving and self._start_lookup(state, local):
            return None
        self._counters.add("lookup_wait_seconds", ALL_TIERS, time.monotonic() - lookup.started)
        for name, (seconds, answered) in lookup.seconds().items():
            self._choice.lookup_ended(name, seconds, answered=answered)
        self._count_answers(lookup)
        tier, boundary = lookup.best()
        deepest_tier, deepest = lookup.deepest()
        if boundary <= local.computed_tokens < deepest:
            self._count_declined(state, "loads_declined", deepest_tier)
        attention_tokens = lookup.attention_tokens()
        if self._ledger.not_found(missing):  # store evicted chunks again, with all chunks behind them
            self._ledger.forget(state.refs_behind(self._planner, attention_tokens if self._has_attention else 0))
        if not state.options.limits_loads:
            self._placement.looked_up(state, PrefixDepth(boundary, attention_tokens))
        begin = self._backfill.begin_of_load(state, local, boundary)
        expires = time.monotonic() + _OFFER_LIFE_SECONDS
        attention_tokens = local.attention_tokens if begin > local.computed_tokens else 0
        return Offer(begin, boundary, tier, expires, local.computed_tokens, attention_tokens)


def _load_of(state: RequestState) -> tuple[Offer, int]:
    """Return the offer and the job of the request's load. Both last until the load has ended."""
    assert state.offer is not None
    assert state.job_id is not None
    return state.offer, state.job_id


def _may_load(state: RequestState) -> bool:
    return (
        state.options.load
        and not state.request.skip_reading_prefix_cache
        and (not state.failed_once or state.offers_left > 0)
    )


def _still_valid(offer: Offer, local: LocalPrefix) -> bool:
    begin = local.attention_tokens if offer.backfill else local.computed_tokens
    return offer.computed_tokens == begin and time.monotonic() < offer.expires


def _answers_for(query: PrefixQuery, local: LocalPrefix) -> bool:
    """Return whether the answer to a query is right for a local prefix. Attention may be deeper than it was."""
    return query.computed_tokens == local.computed_tokens and query.local_attention_tokens <= local.attention_tokens
