"""The plan of placement: chunks that are spare, and the touches that follow a request's end."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from offload_core.api.keys import ObjectKey
from offload_core.lookup.chunk_ledger import ChunkLedger
from offload_core.planning.chunk_keys import ChunkHashes, ChunkRef
from offload_core.planning.end_worth import EndWorth
from offload_core.planning.packs import Pack
from offload_core.planning.placement import BoundaryHistory, PlacementPolicy, Touch
from offload_core.planning.planner import HybridOffloadPlanner, PrefixDepth
from offload_core.runtime.io_loop import IoLoop, log_unexpected
from offload_core.tiers.tier import Tier
from offload_core.vllm.compat import keep_state_at
from offload_core.vllm.metadata import ChunkTouch
from offload_core.vllm.scheduler.request_state import RequestState

_LONGEST_DELAY_SECONDS = 10.0


@dataclass(frozen=True)
class _PlannedTouches:
    touches: list[ChunkTouch]
    due: float
    """By the monotonic clock. Until then, they wait for the stores of their chunks."""


class PlacementPlan:
    """Decides which chunks are spare, and sets the order of eviction when a request begins and ends.

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
        self._any_spares = any(tier.capabilities.spares for tier in tiers)
        self._shared_tiers = [tier for tier in tiers if tier.capabilities.shared]
        self._ranks_namespaces = ranks_namespaces
        self._history = BoundaryHistory()
        self._worth: EndWorth | None = None
        if policy == "kept and spare" and not any(tier.capabilities.evicts for tier in tiers):
            self._worth = EndWorth(planner)  # a tier that evicts by itself would not store spare ends at all
        self._has_states = any(pack.policy.kind == "state" for pack in planner.packs)
        self._attention = {pack.name for pack in planner.packs if pack.policy.kind == "full"}
        self._planned: list[_PlannedTouches] = []
        self.store_waits: Callable[[ChunkRef], bool] = lambda ref: False
        """Returns whether the store of a chunk waits for room."""

    def set_object_bytes(self, object_bytes: Mapping[str, int]) -> None:
        """Take the bytes of one object, by the name of its pack."""
        if self._worth is not None:
            self._worth.object_bytes = object_bytes

    def stores(self, state: RequestState, pack: Pack, unit: int) -> bool:
        """Return whether a chunk is to be stored at all."""
        return self._policy != "kept" or state.path.keeps(pack, unit)

    def is_spare(self, state: RequestState, pack: Pack, unit: int) -> bool:
        """Return whether a chunk may use free capacity only."""
        return self._policy != "everything" and not state.path.keeps(pack, unit)

    def stores_tail(self, state: RequestState) -> bool:
        """Return whether a prompt's tail is to be stored at all."""
        return self._policy != "kept" or not state.path.ends_are_spare

    def is_spare_tail(self, state: RequestState) -> bool:
        """Return whether a prompt's tail may use free capacity only, as the end of a path that does not pay."""
        return self._policy != "everything" and state.path.ends_are_spare

    def begin(self, state: RequestState) -> None:
        """Note a new request: the boundaries of earlier prompts show where its path parts from theirs."""
        names = self.boundary_names(state, state.request.num_prompt_tokens)
        state.seen_boundaries = state.path.begin(names, self._history, self._worth)

    def looked_up(self, state: RequestState, found: PrefixDepth) -> None:
        """Note how deep a prefix the tiers have, which may show a junction."""
        names = self.boundary_names(state, state.request.num_tokens)  # more than the prompt after a preemption
        state.path.find_junction(found, names, state.seen_boundaries, self._history)
        self._plan_touches(state, state.path.head_touches(found.attention_tokens), delay_seconds=0.0)

    def keep_state_at_junction(self, state: RequestState) -> None:
        """Ask the engine for the recurrent state at the deepest junction, which it would not keep for itself."""
        if self._has_states and state.path.deepest_junction:
            keep_state_at(state.request, state.path.deepest_junction)

    def ended(self, state: RequestState) -> None:
        """Plan the touches for a request that has ended."""
        if state.demoted_from is not None:
            named = self._planner.named_tokens(len(state.request.block_hashes))
            tail = [touch._replace(spare=True) for touch in self._tail_touches(state)]
            path = [*tail, *state.path.demoting_touches(state.demoted_from, named)]
        elif state.options.store:
            tokens = min((next_unit * pack.unit_tokens for pack, next_unit in self._examined(state)), default=math.inf)
            tokens = min(tokens, self._planner.named_tokens(len(state.request.block_hashes)))
            path = [*self._tail_touches(state), *self._touches(state, int(tokens))]
        else:
            path = state.path.refreshing_touches(self._planner.storable_prefix(max(state.resumed_tokens, 0)))
        self._plan_touches(state, path, _LONGEST_DELAY_SECONDS)

    def take_touches(self) -> list[ChunkTouch]:
        """Return the planned touches that wait for no store. The workers make them before their next stores.

        Of several touches of one chunk, only the last counts.
        """
        if not self._planned:
            return []
        now = time.monotonic()
        touches: dict[ChunkRef, ChunkTouch] = {}
        waiting: list[_PlannedTouches] = []
        for planned in self._planned:
            if now < planned.due and any(map(self._is_pending, planned.touches)):
                waiting.append(planned)
            else:
                for touch in self._spare_behind_gap(planned.touches):
                    touches.pop(touch.chunk, None)  # so that it moves to the end
                    touches[touch.chunk] = touch
        self._planned = waiting
        return list(touches.values())

    def shutdown(self, io: IoLoop) -> None:
        """Make the remaining touches, on the tiers that the scheduler half sees: there is no next step."""
        planned, self._planned = self._planned, []
        for tier in self._shared_tiers:
            for one in planned:
                io.submit(tier.touch(*self._keys(one.touches))).add_done_callback(log_unexpected)

    def reset(self) -> None:
        """Forget everything. The names of chunks change."""
        self._history.clear()
        if self._worth is not None:
            self._worth.clear()
        self._planned.clear()

    def boundary_names(self, state: RequestState, tokens: int) -> Sequence[bytes]:
        """Return the names of the boundaries of a request's path that have hashes, up to ``tokens``.

        If a draft's cache reads ahead, the tokens behind a boundary are part of its name.
        """
        planner = self._planner
        hash_factor = planner.boundary_tokens // planner.hash_block_size
        hashes = ChunkHashes(state.request.block_hashes, hash_factor, planner.lookahead_blocks)
        return hashes[: planner.chunk_count(tokens)]

    def prompt_hashes(self, state: RequestState) -> Sequence[bytes]:
        """Return the hashes of the tokens up to each boundary of a prompt. Drafts have no part in them."""
        request = state.request
        hash_factor = self._planner.boundary_tokens // self._planner.hash_block_size
        return ChunkHashes(request.block_hashes, hash_factor)[: self._planner.chunk_count(request.num_prompt_tokens)]

    def _touches(self, state: RequestState, tokens: int) -> list[Touch]:
        if self._policy == "everything":
            return state.path.touches_of_all(state.resumed_tokens, tokens)
        return state.path.touches(tokens, self.boundary_names(state, tokens), self._history)

    def _tail_touches(self, state: RequestState) -> list[Touch]:
        """Return the touches of a prompt's tail, which come before all others, if the prompt was computed."""
        end = self._planner.tail_end(state.request.num_prompt_tokens)
        if state.request.num_computed_tokens < end or not self.stores_tail(state):
            return []
        spare = self.is_spare_tail(state)
        return [Touch(pack, unit, spare) for pack in self._planner.tail_packs for unit in pack.needed_units(0, end)]

    def _plan_touches(self, state: RequestState, path: Iterable[Touch], delay_seconds: float) -> None:
        if self._any_spares and state.has_names:
            touches = [ChunkTouch(state.ref(touch.pack, touch.unit), touch.spare) for touch in path]
            self._planned.append(_PlannedTouches(touches, time.monotonic() + delay_seconds))

    def _spare_behind_gap(self, touches: Sequence[ChunkTouch]) -> list[ChunkTouch]:
        """Make everything spare that lies behind a missing chunk of full attention, since no prefix can reach it.

        Args:
            touches: of one path, the deepest first.
        """
        marked: list[ChunkTouch] = []
        gap = False
        for touch in reversed(touches):
            gap = gap or (touch.chunk.pack in self._attention and self._ledger.is_absent(touch.chunk))
            marked.append(touch._replace(spare=True) if gap else touch)
        return marked[::-1]

    def _is_pending(self, touch: ChunkTouch) -> bool:
        return self._ledger.is_pending(touch.chunk) or self.store_waits(touch.chunk)

    def _examined(self, state: RequestState) -> Iterator[tuple[Pack, int]]:
        return ((pack, state.next_unit[pack.name]) for pack in self._planner.packs if pack.name in state.next_unit)

    def _keys(self, touches: Sequence[ChunkTouch]) -> tuple[list[ObjectKey], list[bool]]:
        """Return the keys of all ranks, and a flag for each."""
        keys: list[ObjectKey] = []
        spare: list[bool] = []
        for (pack, chunk_hash, adapter), is_spare in touches:
            for namespace in self._ranks_namespaces(adapter):
                keys.append(ObjectKey(namespace, pack, chunk_hash))
                spare.append(is_spare)
        return keys, spare
