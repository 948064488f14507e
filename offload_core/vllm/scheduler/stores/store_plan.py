"""The plan of a step's stores: units that the step completes, with their blocks."""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from operator import attrgetter
from typing import TYPE_CHECKING

from offload_core.lookup.chunk_ledger import ChunkLedger
from offload_core.memory.block_copier import BlockSlice
from offload_core.memory.staging_size import lease_bytes
from offload_core.planning.chunk_keys import ChunkRef
from offload_core.planning.packs import Pack
from offload_core.planning.planner import HybridOffloadPlanner
from offload_core.planning.store_pace import StorePace
from offload_core.runtime.metrics import ALL_TIERS, Counters
from offload_core.vllm.kv_events.events import KvEvents
from offload_core.vllm.metadata import ChunkTransfer, WorkerIdentity, largest_objects
from offload_core.vllm.scheduler.load_plan import NULL_BLOCK_ID
from offload_core.vllm.scheduler.placement_plan import PlacementPlan
from offload_core.vllm.scheduler.request_state import RequestState
from offload_core.vllm.scheduler.stores.waiting_stores import WaitingStore, WaitingStores

if TYPE_CHECKING:
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request


_Complete = tuple[RequestState, int, Sequence[Sequence[int]]]
"""A request, the number of its tokens that are computed after the step, and its block table of each group."""


class StorePlan:
    """Finds the chunks to store in each step.

    Workers copy blocks right after the step's forward pass. The engine guarantees a recurrent state's block only until
    the end of this step, so it is stored in the step that completes it. The blocks of full attention stay while the
    request runs, so they wait while there is no room. Windows, and full attention after the request's end, wait as long
    as the engine's prefix cache has their blocks (:class:`WaitingStores`).

    Args:
        counters: the place to count chunks that have waited too long.
        prompt_only: store no chunk with generated tokens.
    """

    def __init__(
        self,
        planner: HybridOffloadPlanner,
        placement: PlacementPlan,
        ledger: ChunkLedger,
        counters: Counters,
        *,
        prompt_only: bool,
    ) -> None:
        self._planner = planner
        self._ledger = ledger
        self._placement = placement
        self._prompt_only = prompt_only
        self.kv_events: KvEvents | None = None
        """The events for which each chunk is described when its store begins."""
        self._pace = StorePace(ledger.pending_packs)
        self._counters = counters
        self._waiting = WaitingStores(self._lost)
        placement.store_waits = self._waiting.__contains__
        self._attention_packs = tuple(pack for pack in planner.packs if pack.policy.kind != "state")
        self._lasting_packs = tuple(pack for pack in self._attention_packs if pack.policy.kind == "full")
        self._window_packs = tuple(pack for pack in self._attention_packs if pack.policy.kind != "full")
        self._state_packs = tuple(pack for pack in planner.packs if pack.policy.kind == "state")

    def set_workers(self, workers: Collection[WorkerIdentity]) -> None:
        """Take the sizes of the workers' objects, and the room that their stores have."""
        sizes = {pack: lease_bytes(nbytes) for pack, nbytes in largest_objects(workers).items()}
        # The device's buffer counts every store on its way: nobody reports when one has left it.
        self._pace.set_room(sizes, min(min(worker.store_bytes, worker.step_store_bytes) for worker in workers))

    def bind_block_pool(self, block_pool: BlockPool) -> None:
        """Let chunks wait whose blocks the engine's prefix cache has."""
        self._waiting.bind(block_pool)

    @property
    def keeps_engine_awake(self) -> bool:
        """True if an idle engine should make a step, since a chunk that waits may find room."""
        return self._waiting.keep_engine_awake

    def reset(self) -> None:
        """Forget the chunks that wait."""
        self._waiting.clear()

    def ended(self, state: RequestState, tables: Sequence[Sequence[int]]) -> None:
        """Let complete units of full attention wait that have not found room until their request has ended.

        Args:
            tables: the request's block table of each group; none if it has no blocks.
        """
        if not tables or not self._pace.is_limited or not _may_store(state):
            return
        tokens = min(state.request.num_computed_tokens, self._storable_tokens(state.request))
        for pack in self._lasting_packs:
            held = min(len(tables[group.index]) * group.block_size_tokens for group in pack.groups)
            for unit in range(state.next_unit[pack.name], self._end(pack, state, min(tokens, held))):
                store = self._waiting_store(state, pack, unit, tables)
                if store is not None and not self._waiting.add(store):
                    break  # nothing behind it can be reached
                state.next_unit[pack.name] = unit + 1

    def start_over(self, state: RequestState) -> None:
        """Examine all units of a request: at its start, and again after a failed load, since they are computed then."""
        state.next_unit = {pack.name: 0 for pack in self._attention_packs}
        state.tail_tokens = self._planner.tail_end(state.request.num_prompt_tokens)
        self._set_next_tokens(state)

    def stores(self, output: SchedulerOutput, requests: Mapping[str, RequestState]) -> list[ChunkTransfer]:
        """Return the chunks that this step stores, but for those that the ledger knows.

        First come chunks that cannot wait: states, tails, and windows that are not in the prefix cache. Then come the
        other windows, and full attention gets the room that is left. Spare chunks come last. Those that cannot wait are
        not counted: they find no room if the others need it.
        """
        block_state = output.kv_connector_block_state
        complete = [] if block_state is None else list(self._complete(output, requests))
        handed_over = {} if block_state is None else block_state.boundary_state_offloads
        if not complete and not handed_over and not self._waiting:
            return []
        self._pace.begin_step()
        states: list[ChunkTransfer] = []
        for request_id, boundary_states in handed_over.items():
            state = requests.get(request_id)
            if state is not None and _may_store(state):
                states += self._boundary_states(state, boundary_states)
        perishable = [list(self._perishable(*request)) for request in complete]
        states += self._begin_waiting(spare=False)
        stores: list[ChunkTransfer] = []
        for request, others in zip(complete, perishable, strict=True):
            stores += others
            for pack in self._lasting_packs:
                stores += self._units_of(pack, *request)
            self._set_next_tokens(request[0])
        stores += self._begin_waiting(spare=True)
        return sorted([*states, *stores], key=attrgetter("spare"))

    def _complete(self, output: SchedulerOutput, requests: Mapping[str, RequestState]) -> Iterator[_Complete]:
        """Yield each request of which this step completes units, or of which complete units wait."""
        for request_id, scheduled_tokens in output.num_scheduled_tokens.items():
            state = requests.get(request_id)
            if state is None:
                continue
            tokens = state.request.num_computed_tokens + scheduled_tokens
            if tokens < state.next_store_tokens:  # nearly always while decoding: keep it cheap
                continue
            tokens = min(tokens, self._storable_tokens(state.request))
            if tokens >= state.next_store_tokens and _may_store(state):
                tables = output.kv_connector_block_state.get_block_ids(request_id)
                assert tables is not None, "a scheduled request has a block table"
                yield state, tokens, tables

    def _storable_tokens(self, request: Request) -> int:
        """Return the token count that may be stored; speculated tokens past ``num_tokens`` may still be rejected."""
        return int(request.num_prompt_tokens if self._prompt_only else request.num_tokens)

    def _perishable(self, state: RequestState, tokens: int, tables: Sequence[Sequence[int]]) -> Iterator[ChunkTransfer]:
        """Yield the windows that are complete, and the tail of the prompt."""
        for pack in self._window_packs:
            yield from self._units_of(pack, state, tokens, tables)
        if 0 < state.tail_tokens <= tokens:
            yield from self._attention_tail(state, state.tail_tokens, tables)
            state.tail_tokens = 0

    def _units_of(
        self, pack: Pack, state: RequestState, tokens: int, tables: Sequence[Sequence[int]]
    ) -> Iterator[ChunkTransfer]:
        """Yield the complete units of one pack that cannot wait, or for which there is room."""
        end = self._end(pack, state, tokens)
        lasts = pack.policy.kind == "full"
        for unit in range(state.next_unit[pack.name], end):
            if lasts and not self._pace.admits(pack.name):
                end = unit
                break
            store = self._waiting_store(state, pack, unit, tables)
            if store is None or (not lasts and self._pace.is_limited and self._waiting.add(store)):
                continue  # the turn of a window that can wait is after those that cannot
            yield self._begin(state, pack, unit, store.ref, store.slices, spare=store.spare)
        state.next_unit[pack.name] = max(state.next_unit[pack.name], end)

    def _end(self, pack: Pack, state: RequestState, tokens: int) -> int:
        """Return the number of a request's leading units that are complete and have names."""
        return min(tokens // pack.unit_tokens, pack.named_units(len(state.request.block_hashes)))

    def _waiting_store(
        self, state: RequestState, pack: Pack, unit: int, tables: Sequence[Sequence[int]]
    ) -> WaitingStore | None:
        """Return a unit that is to be stored, now or later; ``None`` if it is not, or its blocks are gone."""
        ref = state.ref(pack, unit)
        if self._ledger.is_present(ref) or not self._is_wanted(state, pack, unit):
            return None
        slices = _stored_slices(pack, unit, tables)
        if slices is None:
            return None
        return WaitingStore(state, pack, unit, ref, slices, self._placement.is_spare(state, pack, unit))

    def _begin_waiting(self, *, spare: bool) -> Iterator[ChunkTransfer]:
        """Yield the chunks that have waited and find room now. Spare ones are counted here too."""

        def admits(ref: ChunkRef, pack: str) -> bool | None:
            return None if self._ledger.is_present(ref) else self._pace.admits(pack)

        for store in self._waiting.take(spare=spare, admits=admits):
            if spare:
                self._pace.take(store.pack.name)
            yield self._begin(store.state, store.pack, store.unit, store.ref, store.slices, spare=spare)

    def _lost(self, ref: ChunkRef) -> None:
        """Count a chunk whose blocks were reused, and note that nobody has it."""
        self._counters.add("store_blocks_reused", ALL_TIERS)
        if not self._ledger.is_present(ref):
            self._ledger.stores_ended({}, (ref,))

    def _attention_tail(
        self, state: RequestState, end: int, tables: Sequence[Sequence[int]]
    ) -> Iterator[ChunkTransfer]:
        """Yield the tail of a prompt but for its states, which the engine hands over when it has kept them."""
        for pack in self._planner.tail_packs:
            if pack.policy.kind == "state" or not self._placement.stores_tail(state):
                continue
            for unit in pack.needed_units(0, end):
                ref, slices = state.ref(pack, unit), _stored_slices(pack, unit, tables)
                if slices is not None and not self._ledger.is_present(ref):
                    yield self._begin(state, pack, unit, ref, slices, spare=self._placement.is_spare_tail(state))

    def _boundary_states(self, state: RequestState, states: Sequence[tuple[int, int, int]]) -> Iterator[ChunkTransfer]:
        """Yield recurrent states that the engine hands over, if all states of a pack are at one boundary."""
        limit = self._storable_tokens(state.request)
        by_boundary: dict[int, dict[int, int]] = {}
        for group_id, block_id, boundary in states:
            by_boundary.setdefault(boundary, {})[group_id] = block_id
        tail = self._planner.tail_end(state.request.num_prompt_tokens)
        for boundary, block_ids in by_boundary.items():
            if boundary == tail <= limit and self._placement.stores_tail(state):
                yield from self._state_tail(state, tail, block_ids)
            for pack in self._state_packs:
                unit = boundary // pack.unit_tokens - 1
                if boundary % pack.unit_tokens or boundary > limit or not self._is_wanted(state, pack, unit):
                    continue
                ids = [block_ids.get(group.index, NULL_BLOCK_ID) for group in pack.groups]
                ref = state.ref(pack, unit)
                if NULL_BLOCK_ID not in ids and not self._ledger.is_present(ref):
                    slices = tuple(BlockSlice(0, (block_id,)) for block_id in ids)
                    yield self._begin(state, pack, unit, ref, slices, spare=self._placement.is_spare(state, pack, unit))

    def _state_tail(self, state: RequestState, end: int, block_ids: Mapping[int, int]) -> Iterator[ChunkTransfer]:
        for pack in self._planner.tail_packs:
            ids = [block_ids.get(group.index, NULL_BLOCK_ID) for group in pack.groups]
            if pack.policy.kind != "state" or NULL_BLOCK_ID in ids:
                continue
            for unit in pack.needed_units(0, end):
                ref = state.ref(pack, unit)
                if not self._ledger.is_present(ref):
                    slices = tuple(BlockSlice(0, (block_id,)) for block_id in ids)
                    yield self._begin(state, pack, unit, ref, slices, spare=self._placement.is_spare_tail(state))

    def _begin(
        self, state: RequestState, pack: Pack, unit: int, ref: ChunkRef, slices: tuple[BlockSlice, ...], *, spare: bool
    ) -> ChunkTransfer:
        """Note the begin of a store, and return it."""
        if not spare:
            self._pace.take(pack.name)
        self._ledger.store_started(ref)
        if self.kv_events is not None:
            self.kv_events.storing(state.request, pack, unit, ref)
        return ChunkTransfer(ref, slices, spare)

    def _is_wanted(self, state: RequestState, pack: Pack, unit: int) -> bool:
        return self._planner.ever_needed(pack, unit) and self._placement.stores(state, pack, unit)

    def _set_next_tokens(self, state: RequestState) -> None:
        state.next_store_tokens = min(
            (
                state.tail_tokens or sys.maxsize,
                *((state.next_unit[pack.name] + 1) * pack.unit_tokens for pack in self._attention_packs),
            )
        )


def _stored_slices(pack: Pack, unit: int, tables: Sequence[Sequence[int]]) -> tuple[BlockSlice, ...] | None:
    """Return the blocks of a unit per group; ``None`` if one of them was freed, or was never held.

    A tail may have fewer blocks than slots. Its last block fills the others too, so that each byte of the object has a
    defined value. No load reads them.
    """
    slices = []
    for group in pack.groups:
        ids = [tables[group.index][position] for position in pack.block_range(group, unit)]
        if NULL_BLOCK_ID in ids:
            return None
        ids += ids[-1:] * (pack.stored_blocks(group) - len(ids))
        slices.append(BlockSlice(0, tuple(ids)))
    return tuple(slices)


def _may_store(state: RequestState) -> bool:
    return state.options.store and state.has_names
