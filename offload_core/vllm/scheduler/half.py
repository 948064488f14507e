"""The scheduler half: which prefix to load, which blocks to store, in vLLM's terms; the planner decides."""

from __future__ import annotations

import math
import secrets
import time
from collections import Counter
from itertools import chain
from typing import TYPE_CHECKING

from offload_core.api.errors import PlanError
from offload_core.config.model import OffloadConfig
from offload_core.lookup.chunk_ledger import ChunkLedger
from offload_core.lookup.prefix_query import PrefixQuery
from offload_core.lookup.service import Lookup, LookupService
from offload_core.lookup.tier_index import TierIndex
from offload_core.lookup.waiting_time import WaitReason
from offload_core.objects.fingerprint import Json, fingerprint
from offload_core.planning.chunk_keys import ChunkHashes, ChunkRef
from offload_core.planning.planner import HybridOffloadPlanner
from offload_core.runtime.io_loop import IoLoop
from offload_core.runtime.metrics import Counters
from offload_core.tiers.opening import close_tiers, open_tiers
from offload_core.vllm.metadata import RequestLoad, StepMetadata, StepReport
from offload_core.vllm.model.lora import AdapterIdentities
from offload_core.vllm.scheduler.block_holders import BlockHolders
from offload_core.vllm.scheduler.load_plan import plan_load
from offload_core.vllm.scheduler.request_state import Offer, RequestOptions, RequestState
from offload_core.vllm.scheduler.store_plan import StorePlan

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request

_IDLE_WAIT_SECONDS = 0.002
_ANSWER_LIFE_SECONDS = 1.0
_OFFERS_AFTER_FAILURE = 4


class SchedulerHalf:
    """Lives in the engine-core process; all methods run on the engine thread.

    Args:
        identity: what all ranks' fingerprints share.
        num_blocks: blocks in the engine's pool.
        loads: whether this engine loads, as its ``kv_role`` says.
        stores: whether this engine stores.
    """

    def __init__(
        self,
        config: OffloadConfig,
        planner: HybridOffloadPlanner,
        identity: dict[str, Json],
        num_ranks: int,
        num_blocks: int,
        *,
        loads: bool = True,
        stores: bool = True,
    ) -> None:
        settings = config.settings
        self._planner = planner
        self._identity = identity
        self._num_ranks = num_ranks
        self._block_alignment_tokens = math.lcm(*(g.block_size_tokens for pack in planner.packs for g in pack.groups))
        self._role = RequestOptions(load=loads, store=stores)
        self._layouts: dict[int, dict[str, Json]] = {}
        self._namespaces: dict[str, tuple[str, ...]] = {}
        self._reset_salt = ""
        self.counters = Counters()
        self._io: IoLoop | None = IoLoop.acquire()
        self._tiers = open_tiers(config, self._io, self.counters, only_shared=True)
        self._unavailable: Counter[str] = Counter()
        self._indexes = {tier.name: TierIndex() for tier in self._tiers if not tier.capabilities.shared}
        self._lookups = LookupService(
            self._io,
            self._tiers,
            planner,
            self.counters,
            self._indexes,
            settings.lookup_grace_seconds,
            self._unavailable,
        )
        self._lookup_seconds = max(tier.limits.lookup_timeout_seconds for tier in self._tiers)
        self._load_seconds = {tier.name: tier.limits.load_timeout_seconds for tier in self._tiers}
        self._adapters = AdapterIdentities(settings.lookup_timeout_seconds)
        self._ledger = ChunkLedger(num_ranks, settings.lookup_timeout_seconds)
        self._store_plan = StorePlan(planner, self._ledger, prompt_only=settings.offload_prompt_only)
        self._requests: dict[str, RequestState] = {}
        self._jobs = 0
        self._new_loads: list[RequestLoad] = []
        self._cancelled: list[int] = []
        self._waiting_for_answers = False
        self._loading: Counter[ChunkRef] = Counter()
        self._recomputing: set[str] = set()
        self._holders = BlockHolders(num_blocks - 1)  # one is vLLM's null block
        self._gone_with_failed_load: set[str] = set()

    def set_layouts(self, layouts: dict[int, dict[str, Json]]) -> None:
        """Take each rank's layout; with it every rank's identity is complete."""
        self._layouts = layouts
        self._namespaces.clear()

    def on_new_request(self, request: Request) -> None:
        """Start to follow a request, unless it or this engine wants nothing of the tiers."""
        wishes = RequestOptions.of(request)
        options = wishes
        if self._role != wishes:
            options = RequestOptions(load=wishes.load and self._role.load, store=wishes.store and self._role.store)
        if not (options.load or options.store):
            return
        adapter = self._adapters.of(request.lora_request) if request.lora_request is not None else None
        state = RequestState(request, options, adapter, {})
        self._store_plan.look_from_start(state)
        self._requests[request.request_id] = state

    def matched_tokens(self, request: Request, computed_tokens: int) -> int | None:
        """Return how many tokens past ``computed_tokens`` can be loaded, or ``None`` to be asked again.

        All of a request's waits for lookups together end at the longest lookup deadline, all for loads at the load
        deadline of the tier that is to serve it: then there is nothing to be loaded for it any more.
        """
        state = self._requests.get(request.request_id)
        if state is None:
            return 0
        matched = self._matched_tokens(state, computed_tokens)
        if matched is not None:
            state.wait.end()
        return matched

    def _matched_tokens(self, state: RequestState, computed_tokens: int) -> int | None:
        if not self._may_load(state):
            return 0
        if computed_tokens % self._block_alignment_tokens:
            return 0  # the local prefix ends inside a block, which may be shared and must not be written to
        if state.adapter is not None and not state.adapter.usable:
            return self._ask_again(state, "lookup") if state.adapter.pending else 0
        if state.offer and not _still_valid(state.offer, computed_tokens):
            state.offer = None
            if not state.failed_once:  # the engine had no room for it: that was no wait for storage
                state.wait.reset("lookup")
        if state.offer is None:
            stale = state.lookup is None or state.lookup.query.computed_tokens != computed_tokens
            if stale and (self._lookups_are_over(state) or not self._start_lookup(state, computed_tokens)):
                return 0
            assert state.lookup is not None
            if not state.lookup.done():
                return self._ask_again(state, "lookup")
            state.offer = self._take_answers(state, state.lookup)
            if state.offer is None:
                self._start_lookup(state, computed_tokens)
                return self._ask_again(state, "lookup")
        boundary = state.offer.boundary_tokens
        if boundary > computed_tokens and state.wait.seconds("load") >= self._load_seconds[state.offer.tier]:
            return 0
        if boundary > computed_tokens and self._recomputing:
            # vLLM keeps blocks reserved for a request whose load has failed until it runs, and admits no load that does
            # not fit beside all of these. Others wait until it runs, and it must not wait for its own reservation.
            if state.request.request_id not in self._recomputing:
                return self._ask_again(state, "load")
            state.offers_left -= 1
        if boundary > computed_tokens and self._holders.keeps_back:  # it would wait for this load too
            return self._ask_again(state, "load")
        if self._loading and not self._loading.keys().isdisjoint(
            state.needed_refs(self._planner, computed_tokens, boundary)
        ):
            state.wait.begin("load")
            return None  # another request loads them already; soon they are in the local prefix cache
        return boundary - computed_tokens

    def _ask_again(self, state: RequestState, what: WaitReason) -> int | None:
        """Return what has the engine ask again, after a brief wait where it has nothing else to do."""
        state.wait.begin(what)
        self._waiting_for_answers = True
        return None

    def _lookups_are_over(self, state: RequestState) -> bool:
        return state.wait.seconds("lookup") >= self._lookup_seconds

    def load_tier(self, request_id: str) -> str | None:
        """Return the tier that serves the request's current offer."""
        state = self._requests.get(request_id)
        return state.offer.tier if state and state.offer else None

    def medium(self, tier_name: str | None) -> str | None:
        """Return the kind of medium of a tier."""
        return next((tier.capabilities.medium for tier in self._tiers if tier.name == tier_name), None)

    def blocks_allocated(self, request: Request, blocks: KVCacheBlocks, external_tokens: int) -> None:
        """Plan the load of ``external_tokens`` tokens into the blocks that the engine has allocated for them."""
        if external_tokens == 0:
            return
        state = self._requests[request.request_id]
        offer = state.offer
        assert offer is not None, "the engine loads only what matched_tokens offered"
        boundary = offer.computed_tokens + external_tokens
        self._recomputing.discard(request.request_id)  # it has found room for another load: one among others again
        state.job_id = self._jobs = self._jobs + 1
        chunks = plan_load(self._planner, state, blocks, offer.computed_tokens, boundary)
        self._holders.load_begins(request.request_id, *_held_and_needed_blocks(self._planner, request, blocks))
        state.loading = [item.chunk for item in chunks or ()]
        self._loading.update(state.loading)
        waited = state.wait.seconds("load")
        load = RequestLoad(state.job_id, request.request_id, offer.tier, tuple(chunks or ()), chunks is None, waited)
        self._new_loads.append(load)
        state.wait.begin("load")
        state.lookup = None

    def build_step(self, output: SchedulerOutput) -> StepMetadata:
        """Return what the workers shall do in this step."""
        idle = output.total_num_scheduled_tokens == 0
        self._recomputing -= output.num_scheduled_tokens.keys()
        self._holders.remove(output.num_scheduled_tokens.keys())
        stores = list(self._store_plan.stores(output, self._requests))
        transfers = chain(stores, *(load.chunks for load in self._new_loads))
        adapters = {item.chunk.adapter for item in transfers}
        metadata = StepMetadata(
            {adapter: self._ranks_namespaces(adapter) for adapter in adapters},
            loads=self._new_loads,
            stores=stores,
            cancelled_jobs=self._cancelled,
            failures_to_report=[*self._holders.give_back(), *self._gone_with_failed_load],
            idle=idle,
        )
        if idle and self._waiting_for_answers and not self._new_loads:
            self._lookups.wait_for_answer(_IDLE_WAIT_SECONDS)
        self._waiting_for_answers = False
        self._new_loads, self._cancelled = [], []
        self._gone_with_failed_load.clear()
        return metadata

    def take_output(self, finished: set[str], failed: set[str], report: StepReport | None) -> None:
        """Learn how loads and stores ended."""
        if report is not None:
            for change in report.changes:
                self._indexes[change.tier].update(change.key, change.present)
            for tier, ranks in report.refusals.items():
                self._unavailable[tier] += ranks
                if not self._unavailable[tier]:
                    del self._unavailable[tier]
            self._ledger.load_failed(report.failed)
            self._ledger.stores_ended(report.stores_ended, report.not_stored)
            for request_id in report.failed_requests:
                if request_id in self._holders:
                    self._holders.load_fails(request_id)
                else:  # aborted: the engine waits for its load to end, to free its blocks
                    self._gone_with_failed_load.add(request_id)
            for request_id in report.partial_requests & self._requests.keys():
                self._requests[request_id].uses_part = True
        for request_id in finished:
            state = self._requests.get(request_id)
            if state is None:
                continue
            if request_id not in failed:
                self._ledger.loaded(set(state.loading) - {ref for _, ref in self._mistrusted_of(state)})
            if request_id in failed or state.uses_part:
                self._not_all_loaded(state)
            self._load_ended(state)
        self._recomputing |= {request_id for request_id in failed if request_id in self._holders}
        self._holders.remove(failed)
        self.counters.add("recomputed_requests", "all", len(failed))

    def request_finished(self, request: Request) -> None:
        """Forget a request; a load it still waits for is cancelled, and the engine frees its blocks afterwards."""
        self._recomputing.discard(request.request_id)
        if self._holders.failed(request.request_id):
            self._gone_with_failed_load.add(request.request_id)
        self._holders.remove([request.request_id])
        self._follow_no_longer(request)

    def _follow_no_longer(self, request: Request) -> None:
        state = self._requests.pop(request.request_id, None)
        if state is not None and state.job_id is not None:
            self._cancelled.append(state.job_id)
            self._load_ended(state)

    def reset(self) -> None:
        """Serve nothing that was stored before.

        The caller may have changed the weights in place, which no fingerprint could see, so this process goes on under
        a namespace of its own; what lies on shared media stays valid for other engines. Requests that have begun are
        followed no longer: a load of theirs is dropped and recomputed, and blocks they hold may be of the old weights.
        """
        self._reset_salt = secrets.token_hex(16)
        self._namespaces.clear()
        self._ledger.clear()
        for state in list(self._requests.values()):
            if state.job_id is None and state.request.num_computed_tokens == 0:
                state.offer = state.lookup = None
                self._store_plan.look_from_start(state)
            else:
                self._follow_no_longer(state.request)

    def shutdown(self) -> None:
        """Let go of the tiers. Idempotent; never waits for a hung medium."""
        if self._io is not None:
            self._adapters.shutdown()
            close_tiers(self._tiers, self._io)
            self._io.release()
            self._io = None

    def _ranks_namespaces(self, adapter: str) -> tuple[str, ...]:
        """Return the namespace of each rank's keys."""
        if adapter not in self._namespaces:
            missing = [rank for rank in range(self._num_ranks) if rank not in self._layouts]
            if missing:
                raise PlanError(f"workers {missing} did not report the layout of their KV cache; cannot name objects")
            extra: dict[str, Json] = {"reset": self._reset_salt}
            if adapter:
                extra["adapter"] = adapter
            self._namespaces[adapter] = tuple(
                fingerprint({**self._identity, **extra, "rank": rank, "layout": self._layouts[rank]})
                for rank in range(self._num_ranks)
            )
        return self._namespaces[adapter]

    @staticmethod
    def _may_load(state: RequestState) -> bool:
        return (
            state.options.load
            and not state.request.skip_reading_prefix_cache
            and (not state.failed_once or state.offers_left > 0)
        )

    def _start_lookup(self, state: RequestState, computed_tokens: int) -> bool:
        """Ask how deep a prefix the tiers hold; returns whether there is anything to ask."""
        request = state.request
        hashes = request.block_hashes
        # The last token is always computed, and what is not hashed yet cannot be named.
        limit = min(request.num_tokens - 1, len(hashes) * self._planner.hash_block_size)
        if self._planner.storable_prefix(limit) <= computed_tokens:
            return False
        adapter = state.adapter.digest if state.adapter else ""
        question = PrefixQuery(
            hashes={pack.name: ChunkHashes(hashes, pack.hash_factor) for pack in self._planner.packs},
            namespaces=self._ranks_namespaces(adapter),
            computed_tokens=computed_tokens,
            limit_tokens=limit,
            adapter=adapter,
            excluded=self._ledger.excluded | state.not_loaded,
        )
        state.lookup = self._lookups.start(question, self._lookup_seconds - state.wait.seconds("lookup"))
        return True

    def _take_answers(self, state: RequestState, lookup: Lookup) -> Offer | None:
        """Choose the tier with the highest matched tokens times weight; ``None`` to ask again.

        It asks again while a chunk that no tier has yet is on its way to them, for a short while.
        """
        state.lookup = None
        missing = lookup.missing()
        if self._ledger.any_arriving(missing, lookup.started) and not self._lookups_are_over(state):
            return None
        if self._ledger.not_found(missing):  # what has gone since is to be stored again, and all that lay behind it
            self._ledger.forget(state.all_refs(self._planner))
        tier, boundary = lookup.best()
        return Offer(lookup.query.computed_tokens, boundary, tier, time.monotonic() + _ANSWER_LIFE_SECONDS)

    def _not_all_loaded(self, state: RequestState) -> None:
        """Have what was not loaded stored again, since it is computed, and settle whether to try another load."""
        self._store_plan.look_from_start(state)
        assert state.offer is not None
        in_time = state.wait.seconds("load") < self._load_seconds[state.offer.tier]
        state.offers_left = _OFFERS_AFTER_FAILURE if in_time and not state.failed_once else 0
        state.failed_once = True
        state.not_loaded |= self._mistrusted_of(state)

    def _mistrusted_of(self, state: RequestState) -> frozenset[tuple[str, ChunkRef]]:
        """Return what the load that has just ended did not get, or another one from the same tier."""
        assert state.offer is not None, "it is kept until the load has ended"
        return self._ledger.excluded & {(state.offer.tier, ref) for ref in state.loading}

    def _load_ended(self, state: RequestState) -> None:
        state.wait.end()
        state.uses_part = False
        self._loading -= Counter(state.loading)
        state.loading = ()
        state.job_id = None
        state.offer = state.lookup = None


def _held_and_needed_blocks(planner: HybridOffloadPlanner, request: Request, blocks: KVCacheBlocks) -> tuple[int, int]:
    """Return how many blocks a request holds, and at most needs for all its tokens."""
    held = sum(not block.is_null for table in blocks.blocks for block in table)
    tokens = sum(-(-request.num_tokens // group.block_size_tokens) for group in planner.groups)
    # Some more for what the engine adds to every group: states under way, speculated tokens, rings.
    return held, tokens + 3 * len(blocks.blocks)


def _still_valid(offer: Offer, computed_tokens: int) -> bool:
    return offer.computed_tokens == computed_tokens and time.monotonic() < offer.expires
