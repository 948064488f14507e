"""The loads that a step begins: the engine has accepted their offers and allocated their blocks."""

from __future__ import annotations

from itertools import count
from typing import TYPE_CHECKING

from offload_core.api.errors import PlanError
from offload_core.lookup.chunk_ledger import ChunkLedger
from offload_core.lookup.kept_loads import KeptLoads
from offload_core.planning.planner import HybridOffloadPlanner
from offload_core.runtime.metrics import Counters
from offload_core.vllm.metadata import RequestLoad
from offload_core.vllm.scheduler.block_holders import (
    BlockHolders,
    has_free_blocks,
    held_and_needed_blocks,
    needed_blocks,
)
from offload_core.vllm.scheduler.load_offers import LoadOffers
from offload_core.vllm.scheduler.load_plan import plan_load
from offload_core.vllm.scheduler.request_state import RequestState

if TYPE_CHECKING:
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.request import Request


class NewLoads:
    """Plans loads until the next step takes them. For the engine thread."""

    def __init__(
        self,
        planner: HybridOffloadPlanner,
        offers: LoadOffers,
        kept_loads: KeptLoads,
        block_holders: BlockHolders,
        ledger: ChunkLedger,
        counters: Counters,
    ) -> None:
        self._planner = planner
        self._offers = offers
        self._kept_loads = kept_loads
        self._block_holders = block_holders
        self._ledger = ledger
        self._counters = counters
        self._job_ids = count(1)
        self._loads: list[RequestLoad] = []
        self._within_step: list[RequestState] = []
        self._has_states = any(pack.policy.kind == "state" for pack in planner.packs)
        self._block_pool: BlockPool | None = None
        self._num_groups = 0

    def bind(self, block_pool: BlockPool, num_groups: int) -> None:
        """Use the engine's block pool, which all its groups share, to see whether a load within the step has room."""
        self._block_pool, self._num_groups = block_pool, num_groups

    def may_load_within_step(self, state: RequestState) -> bool:
        """Return whether the load that was just offered takes place in the step that runs its request.

        All its objects are pinned and at hand on all ranks. For vLLM has no way back from such a load. With recurrent
        states, the pool has free blocks for all tokens of the request too. vLLM expects one new block per group of
        states, but such a request takes two: one for the loaded state and one to go on. Without a block for it, the
        engine ends (seen with 0.32).
        """
        offer = state.offer
        assert offer is not None, "the engine asks after an offer"
        if offer.backfill or not self._has_room(state):
            state.within_step = False
        else:
            refs = state.needed_refs(self._planner, offer.computed_tokens, offer.boundary_tokens)
            state.within_step = self._kept_loads.try_use(offer.tier, refs)
        return state.within_step

    def add(self, state: RequestState, blocks: KVCacheBlocks, external_tokens: int) -> None:
        """Plan the load of ``external_tokens`` tokens into the blocks that the engine has allocated for them.

        Raises:
            PlanError: the objects of a load within the step do not fill the blocks, so the step must fail.
        """
        request, offer = state.request, state.offer
        assert offer is not None, "the engine loads only tokens that were offered"
        request_id, job_id = request.request_id, next(self._job_ids)
        boundary = state.resumed_tokens = offer.computed_tokens + external_tokens
        planned = plan_load(self._planner, state, blocks, offer.computed_tokens, boundary)
        chunks = tuple(planned or ())
        refs = [item.chunk for item in chunks]
        if state.within_step:
            if planned is None:
                raise PlanError(f"request {request_id}: its load does not fill the blocks of a step that has begun")
            self._loads.append(RequestLoad(job_id, request_id, offer.tier, chunks, within_step=True))
            self._within_step.append(state)
            self._ledger.loaded(refs)
            self._offers.loaded_within_step(state)
            return
        state.job_id = job_id
        self._block_holders.load_begins(request_id, *held_and_needed_blocks(self._planner, request, blocks))
        waited = state.wait.seconds("load")
        keep = self._kept_loads.begins(job_id, offer.tier, refs)
        self._loads.append(RequestLoad(job_id, request_id, offer.tier, chunks, planned is None, waited, keep))
        self._offers.load_begins(state, refs)
        self._counters.add("backfills", offer.tier, int(offer.backfill))

    def maybe_loaded_by_another(self, request: Request, blocks: KVCacheBlocks) -> None:
        """Note that a request without a load of ours has blocks. Another connector may load for it, until it runs."""
        held = held_and_needed_blocks(self._planner, request, blocks)
        self._block_holders.load_begins(request.request_id, *held, ours=False)

    def take(self) -> list[RequestLoad]:
        """Return the loads of this step."""
        for state in self._within_step:
            state.offer, state.within_step = None, False
        self._within_step.clear()
        loads, self._loads = self._loads, []
        return loads

    def _has_room(self, state: RequestState) -> bool:
        """Return whether the engine has blocks for the request, as far as vLLM does not check that itself."""
        if not self._has_states:
            return True
        return has_free_blocks(self._block_pool, needed_blocks(self._planner, state.request, self._num_groups))
