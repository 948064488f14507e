"""The scheduler half's state of each request, and the options that a request may set."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from offload_core.lookup.hints.envelope import Envelope
from offload_core.lookup.service import Lookup
from offload_core.lookup.waiting_time import WaitingTime
from offload_core.planning.chunk_keys import ChunkRef
from offload_core.planning.placement import PathPlacement
from offload_core.planning.planner import HybridOffloadPlanner, Pack
from offload_core.vllm.model.lora import Adapter
from offload_core.vllm.scheduler.request_options import RequestOptions

if TYPE_CHECKING:
    from vllm.v1.request import Request


@dataclass(frozen=True)
class Offer:
    """An offer to the engine: to load the prefix up to ``boundary_tokens`` from ``tier``.

    Args:
        computed_tokens: prefix that the engine holds itself; for a backfill, its full attention only.
        expires: end of the offer, by the monotonic clock in seconds.
        local_tokens: prefix from which the engine would go on without the load.
        local_attention_tokens: for a backfill, the depth of full attention that the engine held before; else 0.
    """

    computed_tokens: int
    boundary_tokens: int
    tier: str
    expires: float
    local_tokens: int
    local_attention_tokens: int = 0

    @property
    def backfill(self) -> bool:
        """True if the engine must ask about its full attention alone."""
        return self.local_attention_tokens > 0


@dataclass
class RequestState:
    """One request that the scheduler half follows."""

    request: Request
    options: RequestOptions
    adapter: Adapter | None
    """The LoRA adapter; ``None`` for the model itself."""
    next_unit: dict[str, int]
    """Per pack name, the first unit that the store plan has not examined."""
    path: PathPlacement
    """The boundaries of its tokens that are worth keeping."""
    next_store_tokens: int = 0
    """The token count at which the next unexamined unit is complete."""
    tail_tokens: int = 0
    """The end of its tail while the store plan has not examined it, else 0."""
    arrived: float = field(default_factory=time.monotonic)
    """By the monotonic clock, in seconds."""
    resumed_tokens: int = 0
    """The prefix that the engine did not compute, its own and a loaded one."""
    seen_boundaries: int = 0
    """Number of leading boundaries of its prompt that an earlier prompt had too."""
    lookup: Lookup | None = None
    offer: Offer | None = None
    answered: bool = False
    """True if the engine's last question got an answer; false if it was told to ask again."""
    within_step: bool = False
    """True if its offered load takes place in the step that runs the request."""
    job_id: int | None = None
    loading: Sequence[ChunkRef] = field(default=())
    wait: WaitingTime = field(default_factory=WaitingTime)
    """Its waits for lookups and for loads: its own loads, and other requests' loads of the same chunks."""
    not_loaded: set[tuple[str, ChunkRef]] = field(default_factory=set)
    """Tier names, each with a chunk that a load of this request from there did not get; never offered to it again."""
    partial_load: bool = False
    """True if some rank's load has ended early and the engine uses the arrived part."""
    failed_once: bool = False
    """True if a load has failed or got only a part; one more may be offered."""
    declined: bool = False
    """True if a lookup or a load was not begun for it, because it was expected to take longer than to compute."""
    offers_left: int = 0
    """After a failed load: number of further offers. The engine may have no free blocks for an offer."""
    hints: Sequence[Envelope] = ()
    """The hints that it brought."""
    demoted_from: int | None = None
    """At its end, all its chunks behind so many tokens become spare; ``None``: as placement decides."""
    unanswered_backfills: int = 0
    """Number of questions that came from another depth than the one its backfill needs."""

    def ref(self, pack: Pack, unit: int) -> ChunkRef:
        """Return the chunk of this request at a unit's index."""
        chunk_hash = self.request.block_hashes[pack.hash_index(unit)]
        return ChunkRef(pack.name, chunk_hash, self.adapter.digest if self.adapter else "")

    @property
    def has_names(self) -> bool:
        """True if its chunks have names: it has no adapter, or the adapter's files were read."""
        return self.adapter is None or self.adapter.usable

    def refs_behind(self, planner: HybridOffloadPlanner, tokens: int) -> list[ChunkRef]:
        """Return every chunk of this request that has a hash and ends behind ``tokens``."""
        hash_blocks = len(self.request.block_hashes)
        refs = [
            self.ref(pack, unit)
            for pack in planner.packs
            for unit in range(pack.units_in(tokens), pack.named_units(hash_blocks))
        ]
        return [*refs, *self.tail_refs(planner)]

    def tail_refs(self, planner: HybridOffloadPlanner) -> list[ChunkRef]:
        """Return the chunks of this request's tail, if it has one."""
        end = planner.tail_end(self.request.num_prompt_tokens)
        return [self.ref(pack, unit) for pack in planner.tail_packs for unit in pack.needed_units(0, end)]

    def needed_refs(self, planner: HybridOffloadPlanner, computed_tokens: int, boundary_tokens: int) -> list[ChunkRef]:
        """Return every chunk that a load from ``computed_tokens`` to ``boundary_tokens`` needs."""
        return [
            self.ref(pack, unit)
            for pack in planner.all_packs
            for unit in pack.needed_units(computed_tokens, boundary_tokens)
        ]
