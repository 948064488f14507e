"""The scheduler half: which prefix to load, which blocks to store, in vLLM's terms; the planner decides."""

from __future__ import annotations

import logging
import secrets
import time
from collections import Counter, OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from offload_core.config import OffloadConfig
from offload_core.errors import PlanError
from offload_core.fingerprint import Json, fingerprint
from offload_core.keys import ObjectKey
from offload_core.lookup import Lookup, LookupService
from offload_core.packs import BlockSlice
from offload_core.planner import GroupGeometry, HybridOffloadPlanner, Pack
from offload_core.runtime import IoLoop
from offload_core.stats import Counters
from offload_core.tier import close_tiers, open_tiers
from offload_core.vllm.metadata import ChunkRef, ChunkTransfer, RequestLoad, StepMetadata, StepReport

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request

logger = logging.getLogger(__name__)

_NULL_BLOCK_ID = 0
_IDLE_WAIT_SECONDS = 0.002
_ANSWER_LIFE_SECONDS = 1.0
_MISTRUST_SECONDS = 60.0
_KNOWN_CHUNKS = 1 << 16
_MAX_FAILED_LOADS = 2


@dataclass(frozen=True)
class _Offer:
    """What was offered to the engine: a prefix up to ``boundary_tokens``, from ``tier``."""

    computed_tokens: int
    boundary_tokens: int
    tier: str
    expires: float


@dataclass
class _RequestState:
    request: Request
    next_unit: dict[str, int]
    lookup: Lookup | None = None
    looked_up: tuple[int, list[tuple[Pack, int, list[ChunkRef]]]] = (0, [])
    offer: _Offer | None = None
    job_id: int | None = None
    loading: list[ChunkRef] = field(default_factory=list)
    failed_loads: int = 0


class SchedulerHalf:
    """Lives in the engine-core process; all methods run on the engine thread."""

    def __init__(
        self, config: OffloadConfig, planner: HybridOffloadPlanner, identity: dict[str, Json], num_ranks: int
    ) -> None:
        self._planner = planner
        self._identity = identity
        self._num_ranks = num_ranks
        self._layouts: dict[int, dict[str, Json]] = {}
        self._namespaces: tuple[str, ...] | None = None
        self._reset_salt = ""
        self.counters = Counters()
        self._io: IoLoop | None = IoLoop.acquire()
        self._tiers = open_tiers(config, self._io, self.counters)
        self._lookups = LookupService(self._io, self._tiers, config.settings.lookup_timeout_seconds, self.counters)
        self._requests: dict[str, _RequestState] = {}
        self._jobs = 0
        self._loads: list[RequestLoad] = []
        self._cancelled: list[int] = []
        self._waiting_lookups = False
        self._loading: Counter[ChunkRef] = Counter()
        self._mistrusted: dict[ChunkRef, float] = {}
        self._known: OrderedDict[ChunkRef, None] = OrderedDict()

    def set_layouts(self, layouts: dict[int, dict[str, Json]]) -> None:
        """Take each rank's layout; with it every rank's identity is complete."""
        self._layouts = layouts
        self._namespaces = None

    @property
    def namespaces(self) -> tuple[str, ...]:
        """Namespace of each rank's keys."""
        if self._namespaces is None:
            missing = [rank for rank in range(self._num_ranks) if rank not in self._layouts]
            if missing:
                raise PlanError(f"workers {missing} did not report the layout of their KV cache; cannot name objects")
            self._namespaces = tuple(
                fingerprint({**self._identity, "rank": rank, "layout": self._layouts[rank], "reset": self._reset_salt})
                for rank in range(self._num_ranks)
            )
        return self._namespaces

    def on_new_request(self, request: Request) -> None:
        """Start to follow a request. LoRA requests are left alone: an adapter's name does not identify its weights."""
        if request.lora_request is None:
            next_unit = {pack.name: 0 for pack in self._planner.packs}
            self._requests[request.request_id] = _RequestState(request, next_unit)

    def matched_tokens(self, request: Request, computed_tokens: int) -> int | None:
        """Return how many tokens past ``computed_tokens`` can be loaded, or ``None`` to be asked again."""
        state = self._requests.get(request.request_id)
        if state is None or request.skip_reading_prefix_cache or state.failed_loads >= _MAX_FAILED_LOADS:
            return 0
        if state.offer and not self._still_valid(state.offer, computed_tokens):
            state.offer = None
        if state.offer is None:
            stale = state.lookup is None or state.looked_up[0] != computed_tokens
            if stale and not self._start_lookup(state, computed_tokens):
                return 0
            assert state.lookup is not None
            if not state.lookup.done():
                self._waiting_lookups = True
                return None
            state.offer = self._take_answer(state, computed_tokens)
        boundary = state.offer.boundary_tokens
        if any(self._loading[ref] for ref in self._needed_refs(request, computed_tokens, boundary)):
            return None  # another request loads them already; soon they are in the local prefix cache
        return boundary - computed_tokens

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
        state.job_id = self._jobs = self._jobs + 1
        chunks = self._plan_load(request, blocks, offer.computed_tokens, boundary)
        state.loading = [item.chunk for item in chunks or ()]
        self._loading.update(state.loading)
        self._loads.append(
            RequestLoad(state.job_id, request.request_id, offer.tier, tuple(chunks or ()), impossible=chunks is None)
        )
        state.lookup = None
        for pack in self._planner.packs:
            state.next_unit[pack.name] = max(state.next_unit[pack.name], boundary // pack.unit_tokens)

    def build_step(self, output: SchedulerOutput) -> StepMetadata:
        """Return what the workers shall do in this step."""
        idle = output.total_num_scheduled_tokens == 0
        metadata = StepMetadata(
            self.namespaces,
            loads=self._loads,
            stores=list(self._stores(output)),
            cancelled_jobs=self._cancelled,
            idle=idle,
        )
        if idle and self._waiting_lookups and not self._loads:
            self._lookups.wait_for_answer(_IDLE_WAIT_SECONDS)
        self._waiting_lookups = False
        self._loads, self._cancelled = [], []
        return metadata

    def take_output(self, finished: set[str], failed: set[str], report: StepReport | None) -> None:
        """Learn how loads and stores ended."""
        for request_id in finished:
            state = self._requests.get(request_id)
            if state is not None:
                self._load_ended(state)
                if request_id in failed:  # what was not loaded is computed, and stored again
                    state.next_unit = dict.fromkeys(state.next_unit, 0)
                    state.failed_loads += 1
        self.counters.add("recomputed_requests", "all", len(failed))
        if report is None:
            return
        now = time.monotonic()
        if report.failed:
            self._mistrusted = {ref: expiry for ref, expiry in self._mistrusted.items() if expiry > now}
        for ref in report.failed:
            self._mistrusted[ref] = now + _MISTRUST_SECONDS
            self._known.pop(ref, None)
        for ref in report.stored:
            self._mistrusted.pop(ref, None)
        for ref in report.not_stored:
            self._known.pop(ref, None)

    def request_finished(self, request: Request) -> None:
        """Forget a request; a load it still waits for is cancelled, and the engine frees its blocks afterwards."""
        state = self._requests.pop(request.request_id, None)
        if state is not None and state.job_id is not None:
            self._cancelled.append(state.job_id)
            self._load_ended(state)

    def reset(self) -> None:
        """Serve nothing that was stored before.

        The caller may have changed the weights in place, which no fingerprint could see, so this process goes on under
        a namespace of its own; what lies on shared media stays valid for other engines. Requests under way are followed
        no longer: a load of theirs is dropped and recomputed, and blocks they still hold may be of the old weights.
        """
        self._reset_salt = secrets.token_hex(16)
        self._namespaces = None
        self._known.clear()
        self._mistrusted.clear()
        for state in list(self._requests.values()):
            self.request_finished(state.request)

    def shutdown(self) -> None:
        """Let go of the tiers. Idempotent; never waits for a hung medium."""
        if self._io is not None:
            close_tiers(self._tiers, self._io)
            self._io.release()
            self._io = None

    # Lookups

    def _start_lookup(self, state: _RequestState, computed_tokens: int) -> bool:
        """Ask for every unit that could matter; returns whether there is anything to ask."""
        request = state.request
        limit = request.num_tokens - 1
        asked: list[tuple[Pack, int, list[ChunkRef]]] = []
        for pack in self._planner.packs:
            first = computed_tokens // pack.unit_tokens
            last = min(limit // pack.unit_tokens, len(request.block_hashes) // pack.hash_factor)
            asked.append((pack, first, [_ref(request, pack, unit) for unit in range(first, last)]))
        refs = [ref for _, _, pack_refs in asked for ref in pack_refs]
        if limit // self._planner.boundary_tokens * self._planner.boundary_tokens <= computed_tokens or not refs:
            return False
        keys = [ObjectKey(namespace, *ref) for namespace in self.namespaces for ref in refs]
        state.lookup = self._lookups.start(keys)
        state.looked_up = (computed_tokens, asked)
        return True

    def _take_answer(self, state: _RequestState, computed_tokens: int) -> _Offer:
        """Choose the tier with the highest matched tokens times weight."""
        lookup, (_, asked) = state.lookup, state.looked_up
        assert lookup is not None
        self._lookups.give_up(lookup)
        present = lookup.present()
        limit = state.request.num_tokens - 1
        now = time.monotonic()
        best = (0.0, computed_tokens, self._tiers[0].name)
        for _, _, refs in asked:
            for ref in refs:
                self._known.pop(ref, None)  # what has gone since is to be stored again
        for tier in self._tiers:
            flags = self._on_every_rank(present[tier.name])
            by_pack: dict[str, list[bool]] = {}
            for pack, _, refs in asked:
                by_pack[pack.name] = [next(flags) and self._mistrusted.get(ref, 0.0) < now for ref in refs]
                self._remember(ref for ref, there in zip(refs, by_pack[pack.name], strict=True) if there)
            boundary = self._planner.usable_prefix(by_pack, computed_tokens, limit)
            score = (boundary - computed_tokens) * tier.load_weight
            if score > best[0]:
                best = (score, boundary, tier.name)
        state.lookup = None
        return _Offer(computed_tokens, best[1], best[2], now + _ANSWER_LIFE_SECONDS)

    def _on_every_rank(self, flags: Sequence[bool]) -> Iterator[bool]:
        """Yield, per chunk, whether all ranks have their part; flags come rank by rank."""
        per_rank = len(flags) // self._num_ranks
        return (all(flags[rank * per_rank + i] for rank in range(self._num_ranks)) for i in range(per_rank))

    @staticmethod
    def _still_valid(offer: _Offer, computed_tokens: int) -> bool:
        return offer.computed_tokens == computed_tokens and time.monotonic() < offer.expires

    # Loads

    def _needed_refs(self, request: Request, computed_tokens: int, boundary_tokens: int) -> Iterator[ChunkRef]:
        for pack in self._planner.packs:
            for unit in pack.needed_units(computed_tokens, boundary_tokens):
                yield _ref(request, pack, unit)

    def _plan_load(
        self, request: Request, blocks: KVCacheBlocks, computed_tokens: int, boundary_tokens: int
    ) -> list[ChunkTransfer] | None:
        """Match stored units with allocated blocks; ``None`` when some allocated block would stay unfilled."""
        chunks: list[ChunkTransfer] = []
        for pack in self._planner.packs:
            filled = {group.index: set[int]() for group in pack.groups}
            for unit in pack.needed_units(computed_tokens, boundary_tokens):
                slices: list[BlockSlice] = []
                for group in pack.groups:
                    positions = pack.block_range(group, unit)
                    table = blocks.blocks[group.index]
                    wanted = [
                        position
                        for position in positions
                        if position >= computed_tokens // group.block_size_tokens and not table[position].is_null
                    ]
                    filled[group.index].update(wanted)
                    first_slot = wanted[0] - positions.start if wanted else 0
                    if wanted and len(wanted) != positions.stop - wanted[0]:
                        return None
                    slices.append(BlockSlice(first_slot, tuple(table[position].block_id for position in wanted)))
                if any(part.block_ids for part in slices):
                    chunks.append(ChunkTransfer(_ref(request, pack, unit), tuple(slices)))
            for group in pack.groups:
                unfilled = _unfilled(group, blocks, filled[group.index], computed_tokens, boundary_tokens)
                if unfilled:
                    logger.error(
                        "request %s: blocks %s of group %d were allocated for a load to token %d but pack %s does not "
                        "hold them; the request is recomputed. Please report this with the model's name.",
                        request.request_id, unfilled, group.index, boundary_tokens, pack.name,
                    )  # fmt: skip
                    return None
        return chunks

    def _load_ended(self, state: _RequestState) -> None:
        self._loading -= Counter(state.loading)
        state.loading = []
        state.job_id = None
        state.offer = state.lookup = None

    # Stores

    def _stores(self, output: SchedulerOutput) -> Iterator[ChunkTransfer]:
        """Yield the units that this step's forward pass completes.

        Their blocks are read right after the forward pass, so they must be taken now: the engine may reuse a
        sliding-window block in the next step, and a recurrent state's block is only promised until the end of this one.
        """
        block_state = output.kv_connector_block_state
        if block_state is None:
            return
        for request_id, scheduled_tokens in output.num_scheduled_tokens.items():
            state = self._requests.get(request_id)
            if state is None:
                continue
            # Speculated tokens past num_tokens may be rejected: their blocks are stored once they are known.
            tokens = min(state.request.num_computed_tokens + scheduled_tokens, state.request.num_tokens)
            if any(self._has_new_unit(state, pack, tokens) for pack in self._planner.packs):
                tables = block_state.get_block_ids(request_id)
                assert tables is not None, "a scheduled request has a block table"
                for pack in self._planner.packs:
                    yield from self._complete_units(state, pack, tokens, tables)
        for request_id, states in block_state.boundary_state_offloads.items():
            state = self._requests.get(request_id)
            if state is not None:
                yield from self._boundary_states(state.request, states)

    def _has_new_unit(self, state: _RequestState, pack: Pack, tokens: int) -> bool:
        return pack.policy.kind != "state" and self._planner.storable_units(pack, tokens) > state.next_unit[pack.name]

    def _complete_units(
        self, state: _RequestState, pack: Pack, tokens: int, tables: Sequence[Sequence[int]]
    ) -> Iterator[ChunkTransfer]:
        if not self._has_new_unit(state, pack, tokens):
            return
        hashed = len(state.request.block_hashes) // pack.hash_factor
        end = min(self._planner.storable_units(pack, tokens), hashed)
        for unit in range(state.next_unit[pack.name], end):
            slices = [
                BlockSlice(0, tuple(tables[group.index][position] for position in pack.block_range(group, unit)))
                for group in pack.groups
            ]
            if not any(_NULL_BLOCK_ID in part.block_ids for part in slices):  # freed or never held: cannot be stored
                yield from self._store_once(ChunkTransfer(_ref(state.request, pack, unit), tuple(slices)))
        state.next_unit[pack.name] = max(state.next_unit[pack.name], end)

    def _boundary_states(self, request: Request, states: Sequence[tuple[int, int, int]]) -> Iterator[ChunkTransfer]:
        """Yield the recurrent states that the engine hands over, where a whole pack's states are at one boundary."""
        by_boundary: dict[int, dict[int, int]] = {}
        for group_id, block_id, boundary in states:
            by_boundary.setdefault(boundary, {})[group_id] = block_id
        for boundary, block_ids in by_boundary.items():
            for pack in self._planner.packs:
                if pack.policy.kind != "state" or boundary % pack.unit_tokens or boundary > request.num_tokens:
                    continue
                ids = [block_ids.get(group.index, _NULL_BLOCK_ID) for group in pack.groups]
                if _NULL_BLOCK_ID not in ids:
                    ref = _ref(request, pack, boundary // pack.unit_tokens - 1)
                    yield from self._store_once(ChunkTransfer(ref, tuple(BlockSlice(0, (i,)) for i in ids)))

    def _store_once(self, item: ChunkTransfer) -> Iterator[ChunkTransfer]:
        if item.chunk not in self._known:
            self._remember([item.chunk])
            yield item

    def _remember(self, refs: Iterator[ChunkRef] | Sequence[ChunkRef]) -> None:
        """Remember chunks that are stored or on their way, so that they are not copied again."""
        for ref in refs:
            self._known[ref] = None
            self._known.move_to_end(ref)
        while len(self._known) > _KNOWN_CHUNKS:
            self._known.popitem(last=False)


def _ref(request: Request, pack: Pack, unit: int) -> ChunkRef:
    return ChunkRef(pack.name, request.block_hashes[pack.hash_index(unit)])


def _unfilled(
    group: GroupGeometry, blocks: KVCacheBlocks, filled: set[int], computed_tokens: int, boundary_tokens: int
) -> list[int]:
    """Return positions of blocks that the engine will take as loaded and that no object fills."""
    size = group.block_size_tokens
    table = blocks.blocks[group.index]
    return [
        position
        for position in range(computed_tokens // size, boundary_tokens // size)
        if position not in filled and not table[position].is_null
    ]
