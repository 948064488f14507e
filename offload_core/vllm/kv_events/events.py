"""The scheduler half's KV cache events: changes of the tiers in, vLLM's events out."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from offload_core.api.keys import ObjectKey
from offload_core.lookup.announcing.announcements import Announcement, Announcements
from offload_core.lookup.announcing.resync import Resync
from offload_core.lookup.chunk_ledger import ChunkLedger
from offload_core.planning.chunk_keys import ChunkRef
from offload_core.planning.packs import Pack
from offload_core.planning.planner import HybridOffloadPlanner
from offload_core.runtime.io_loop import IoLoop
from offload_core.tiers.changes import TierChange
from offload_core.tiers.tier import Tier
from offload_core.vllm.kv_events.chunk_blocks import ChunkBlocks
from offload_core.vllm.kv_events.vllm_events import (
    block_removed,
    block_stored,
    event_block_hash,
    event_group_fields,
    event_medium,
    events_name_tiers,
)

if TYPE_CHECKING:
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.request import Request

_MAX_BYTES = 128 << 20
"""Limit for the memory of all announced chunks, about 50,000 of 256 tokens."""
_CHUNKS_PER_STEP = 64
"""Most chunks in the events of one step. The others wait for the next one."""
_AWAKE_SECONDS = 5.0
"""Longest time for which an idle engine makes steps because a store has not ended."""


class _Place(NamedTuple):
    """A place in the fields of vLLM's events."""

    medium: str
    locality: str
    ownership: str | None


class KvEvents:
    """Translates between chunks and vLLM's events. For the engine's thread; it waits for nothing.

    Args:
        namespaces: gives the namespace of each rank's keys for an adapter's digest.
        ledger: knows of stores that have not ended.
        resync_seconds: time between two resyncs; ``None`` for no resync.
    """

    def __init__(
        self,
        io: IoLoop,
        tiers: Sequence[Tier],
        planner: HybridOffloadPlanner,
        kv_cache_config: KVCacheConfig,
        namespaces: Callable[[str], tuple[str, ...]],
        ledger: ChunkLedger,
        resync_seconds: float | None,
    ) -> None:
        self._planner = planner
        self._namespaces = namespaces
        self._ledger = ledger
        self._places = {}
        for tier in tiers:
            is_local = tier.capabilities.medium != "remote"
            ownership = tier.name if events_name_tiers() else None
            place = _Place(event_medium(tier.capabilities.medium), "LOCAL" if is_local else "REMOTE", ownership)
            self._places[tier.name] = place
        self._by_name = {str(place): place for place in self._places.values()}
        places = {tier: str(place) for tier, place in self._places.items()}
        self._announcements: Announcements[ChunkBlocks] = Announcements(places, ledger.num_ranks, _MAX_BYTES)
        self._resync: Resync | None = None
        if resync_seconds is not None:
            self._resync = Resync(io, tiers, self._announcements, self._keys, resync_seconds)
        self._ranks: dict[str, tuple[str, int]] = {}
        """Adapter and rank of each namespace."""
        self._group_fields = {
            group.index: event_group_fields(kv_cache_config.kv_cache_groups[group.index].kv_cache_spec)
            for group in planner.groups
        }
        self._ranks_storing = 0
        self._awake_until = 0.0

    def storing(self, request: Request, pack: Pack, unit: int, ref: ChunkRef) -> None:
        """Describe a chunk whose store begins."""
        self._describe(request, pack, unit, ref)
        self._awake_until = time.monotonic() + _AWAKE_SECONDS

    def loading(self, request: Request, adapter: str, computed_tokens: int, boundary_tokens: int) -> None:
        """Describe the chunks of a load that begins."""
        for pack in self._planner.all_packs:
            for unit in pack.needed_units(computed_tokens, boundary_tokens):
                ref = ChunkRef(pack.name, request.block_hashes[pack.hash_index(unit)], adapter)
                self._describe(request, pack, unit, ref)

    @property
    def has_events_to_come(self) -> bool:
        """True if an idle engine should make a step: there are events, or a store will end soon."""
        storing = self._ledger.has_pending or self._ranks_storing > 0  # the ledger's stores end on the first tier
        return self._announcements.has_news or (storing and time.monotonic() < self._awake_until)

    def reported(self, changes: Iterable[TierChange], ranks_storing: int = 0) -> None:
        """Apply the workers' reports.

        Args:
            ranks_storing: the change in the number of ranks whose stores go on at some tier.
        """
        self._ranks_storing += ranks_storing
        for tier, key, present in changes:
            if (owner := self._ranks.get(key.namespace)) is not None:
                adapter, rank = owner
                ref = ChunkRef(key.pack, key.chunk_hash, adapter)
                self._announcements.changed(tier, ref, rank, present)

    def reset(self) -> None:
        """Announce that nothing is left, since no later request is served an earlier object."""
        self._ranks.clear()
        self._announcements.forget_all()
        if self._resync is not None:
            self._resync.forget()

    def take(self) -> list[Any]:
        """Return vLLM's events since the last call: removed blocks first, then stored ones.

        A repeated chunk is removed and stored, so readers that count stores do not count it twice. Chunks that part in
        the middle share their first blocks, and each announces them; vLLM asks readers to count.
        """
        if self._resync is not None:
            self._resync.step()
        taken = self._announcements.take(_CHUNKS_PER_STEP)
        if not taken:
            return []
        removed = self._removed(one for one in taken if one.again or not one.present)
        return [*removed, *self._stored(one for one in taken if one.present)]

    def _describe(self, request: Request, pack: Pack, unit: int, ref: ChunkRef) -> None:
        if not self._announcements.use(ref):
            blocks = ChunkBlocks.of(request, pack, unit)
            self._announcements.describe(ref, blocks, blocks.nbytes)
            for rank, namespace in enumerate(self._namespaces(ref.adapter)):
                self._ranks[namespace] = (ref.adapter, rank)

    def _keys(self, ref: ChunkRef) -> list[ObjectKey]:
        return [ObjectKey(namespace, ref.pack, ref.chunk_hash) for namespace in self._namespaces(ref.adapter)]

    def _removed(self, announcements: Iterable[Announcement[ChunkBlocks]]) -> list[Any]:
        """Return one event per place and group."""
        hashes: dict[tuple[str, int], list[Any]] = {}
        for one in announcements:
            for blocks in one.description.groups():
                found = hashes.setdefault((one.place, blocks.group.index), [])
                found.extend(map(event_block_hash, blocks.hashes))
        return [
            block_removed(block_hashes=found, group_idx=group, **self._by_name[place]._asdict())
            for (place, group), found in hashes.items()
        ]

    def _stored(self, announcements: Iterable[Announcement[ChunkBlocks]]) -> list[Any]:
        """Return one event per run of adjacent blocks, with parents before their children."""
        events: list[Any] = []
        runs: dict[tuple[str, int, bytes], Any] = {}
        """The events that end in a block, by place, group and the block's hash."""
        for one in sorted(announcements, key=lambda one: one.description.first_token):
            for blocks in one.description.groups():
                place, index = one.place, blocks.group.index
                before = place, index, blocks.parent or b""
                run = runs.get(before) if blocks.extra_keys is None else None
                if run is not None and run.block_size == blocks.block_size and getattr(run, "extra_keys", None) is None:
                    del runs[before]
                    run.block_hashes.extend(map(event_block_hash, blocks.hashes))
                    run.token_ids.extend(blocks.token_ids)
                else:
                    run = self._event(one, blocks)
                    events.append(run)
                runs[place, index, blocks.hashes[-1]] = run
        return events

    def _event(self, one: Announcement[ChunkBlocks], blocks: Any) -> Any:
        lora = one.description.lora
        return block_stored(
            block_hashes=[event_block_hash(block_hash) for block_hash in blocks.hashes],
            parent_block_hash=None if blocks.parent is None else event_block_hash(blocks.parent),
            token_ids=blocks.token_ids,
            block_size=blocks.block_size,
            lora_id=lora[0] if lora else None,
            lora_name=lora[1] if lora else None,
            extra_keys=blocks.extra_keys,
            group_idx=blocks.group.index,
            **self._group_fields[blocks.group.index],
            **self._by_name[one.place]._asdict(),
        )
