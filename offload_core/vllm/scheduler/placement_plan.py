"""The plan of placement: chunks that are spare, and the touches that follow a request's end."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from offload_core.api.keys import ObjectKey
from offload_core.config.model import PlacementPolicy
from offload_core.lookup.chunk_ledger import ChunkLedger
from offload_core.lookup.prefix_query import PrefixAnswer
from offload_core.planning.chunk_keys import ChunkHashes
from offload_core.planning.packs import Pack
from offload_core.planning.placement import BoundaryHistory
from offload_core.planning.planner import HybridOffloadPlanner
from offload_core.runtime.io_loop import IoLoop, log_unexpected
from offload_core.tiers.tier import Tier
from offload_core.vllm.compat import keep_state_at
from offload_core.vllm.metadata import ChunkTouch
from offload_core.vllm.scheduler.request_state import RequestState

_LONGEST_DELAY_SECONDS = 10.0


@dataclass(frozen=True)
class _EndedRequest:
    touches: list[ChunkTouch]
    due: float
    """By the monotonic clock. The touches wait no longer for stores of the request that have not ended."""


class PlacementPlan:
    """Decides which chunks are spare, and sets the order of eviction when a request has ended.

    The scheduler half touches the tiers that it sees itself. The workers touch the others.

    Args:
        tiers: the tiers that the scheduler half has opened.
        ranks_namespaces: returns the namespace of each rank's keys, for an adapter's digest.
    """

    def __init__(
        self,
        policy: PlacementPolicy,
        planner: HybridOffloadPlanner,
        ledger: ChunkLedger,
        tiers: Sequence[Tier],
        ranks_namespaces: Callable[[str], tuple[str, ...]],
    ) -> None:
        self._policy = policy
        self._planner = planner
        self._ledger = ledger
        self._own_tiers = [tier for tier in tiers if tier.capabilities.spares and tier.capabilities.shared]
        self._workers_touch = any(tier.capabilities.spares and not tier.capabilities.shared for tier in tiers)
        self._ranks_namespaces = ranks_namespaces
        self._history = BoundaryHistory()
        self._has_attention = any(pack.policy.kind == "full" for pack in planner.packs)
        self._has_states = any(pack.policy.kind == "state" for pack in planner.packs)
        self._ended: list[_EndedRequest] = []

    def stores(self, state: RequestState, pack: Pack, unit: int) -> bool:
        """Return whether a chunk is to be stored at all."""
        return self._policy != "kept" or state.path.keeps(pack, unit)

    def is_spare(self, state: RequestState, pack: Pack, unit: int) -> bool:
        """Return whether a chunk may use free capacity only."""
        return self._policy != "everything" and not state.path.keeps(pack, unit)

    def begin(self, state: RequestState) -> None:
        """Note a new request. Without full attention, the boundaries of earlier prompts show where paths part."""
        if not self._has_attention:
            names = self._boundary_names(state, state.request.num_prompt_tokens)
            state.seen_tokens = self._planner.covered_tokens(self._history.see(names))

    def looked_up(self, state: RequestState, boundary_tokens: int, answers: Iterable[PrefixAnswer]) -> None:
        """Note how deep a prefix the tiers have. Full attention beyond the usable boundary shows a junction.

        Args:
            boundary_tokens: the deepest usable boundary.
        """
        deepest = state.seen_tokens
        if self._has_attention:
            deepest = max((answer.attention_tokens for answer in answers), default=0)
        if deepest > boundary_tokens:
            state.path.add_junction(deepest)

    def keep_state_at_junction(self, state: RequestState) -> None:
        """Ask the engine for the recurrent state at the deepest junction, which it would not keep for itself."""
        if self._has_states and state.path.deepest_junction:
            keep_state_at(state.request, state.path.deepest_junction)

    def ended(self, state: RequestState) -> None:
        """Plan the touches for a request that has ended."""
        adapter_unusable = state.adapter is not None and not state.adapter.usable
        if adapter_unusable or not (self._own_tiers or self._workers_touch):
            return
        if state.options.store:
            tokens = min((next_unit * pack.unit_tokens for pack, next_unit in self._examined(state)), default=math.inf)
            tokens = min(tokens, len(state.request.block_hashes) * self._planner.hash_block_size)
            path = state.path.touches(int(tokens), self._boundary_names(state, int(tokens)), self._history)
        else:
            path = state.path.refreshing_touches(self._planner.storable_prefix(max(state.resumed_tokens, 0)))
        touches = [ChunkTouch(state.ref(touch.pack, touch.unit), touch.spare) for touch in path]
        if touches:
            self._ended.append(_EndedRequest(touches, time.monotonic() + _LONGEST_DELAY_SECONDS))

    def touch(self, io: IoLoop, *, at_once: bool = False) -> list[ChunkTouch]:
        """Touch the chunks of ended requests whose stores have ended too; return what the workers have to touch.

        Args:
            at_once: do not wait for stores.
        """
        now = time.monotonic()
        for_workers: list[ChunkTouch] = []
        waiting: list[_EndedRequest] = []
        for ended in self._ended:
            if not at_once and now < ended.due and any(self._ledger.is_pending(touch.chunk) for touch in ended.touches):
                waiting.append(ended)
                continue
            for tier in self._own_tiers:
                keys, spare = self._keys(ended.touches)
                io.submit(tier.touch(keys, spare)).add_done_callback(log_unexpected)
            if self._workers_touch:
                for_workers += ended.touches
        self._ended = waiting
        return for_workers

    def reset(self) -> None:
        """Forget everything. The names of chunks change."""
        self._history.clear()
        self._ended.clear()

    def _examined(self, state: RequestState) -> Iterator[tuple[Pack, int]]:
        return ((pack, state.next_unit[pack.name]) for pack in self._planner.packs if pack.name in state.next_unit)

    def _boundary_names(self, state: RequestState, tokens: int) -> Sequence[bytes]:
        """Return the names of the boundaries of a request's path that have hashes, up to ``tokens``."""
        hashes = ChunkHashes(state.request.block_hashes, self._planner.boundary_tokens // self._planner.hash_block_size)
        return hashes[: self._planner.chunk_count(tokens)]

    def _keys(self, touches: Sequence[ChunkTouch]) -> tuple[list[ObjectKey], list[bool]]:
        """Return the keys of all ranks, and a flag for each."""
        keys: list[ObjectKey] = []
        spare: list[bool] = []
        for (pack, chunk_hash, adapter), is_spare in touches:
            for namespace in self._ranks_namespaces(adapter):
                keys.append(ObjectKey(namespace, pack, chunk_hash))
                spare.append(is_spare)
        return keys, spare
