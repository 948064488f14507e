"""Complete chunks that wait for room while the engine may reuse their blocks.

A window's blocks are free as soon as the window has moved on, and all blocks of a request at its end. But the engine's
prefix cache keeps a free block as it is until it needs the memory. A block loses its name there when it is reused. So a
chunk can be stored as long as each of its blocks still has the name that it had.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from offload_core.memory.block_copier import BlockSlice
from offload_core.planning.chunk_keys import ChunkRef
from offload_core.planning.packs import Pack
from offload_core.vllm.scheduler.request_state import RequestState

if TYPE_CHECKING:
    from vllm.v1.core.block_pool import BlockPool

_AWAKE_SECONDS = 2.0
"""Longest time for which an idle engine makes steps. A pause or a shutdown of vLLM waits for them."""
_MAX_CHUNKS = 4096


@dataclass(frozen=True)
class WaitingStore:
    """A chunk that waits.

    Args:
        slices: its blocks per group of the pack.
        spare: whether it may use free capacity only.
    """

    state: RequestState
    pack: Pack
    unit: int
    ref: ChunkRef
    slices: tuple[BlockSlice, ...]
    spare: bool


class WaitingStores:
    """The chunks that wait, the oldest first. For the engine thread.

    Args:
        on_lost: gets each chunk whose blocks the engine has reused.
    """

    def __init__(self, on_lost: Callable[[ChunkRef], None]) -> None:
        self._on_lost = on_lost
        self._pool: BlockPool | None = None
        self._kept: OrderedDict[ChunkRef, tuple[WaitingStore, Sequence[object]]] = OrderedDict()
        """Chunks that are not spare, each with the names of its blocks."""
        self._spare: OrderedDict[ChunkRef, tuple[WaitingStore, Sequence[object]]] = OrderedDict()
        self._awake_until = 0.0

    def bind(self, block_pool: BlockPool) -> None:
        """Use the engine's block pool. Without it, no chunk waits."""
        self._pool = block_pool

    def __len__(self) -> int:
        return len(self._kept) + len(self._spare)

    def __contains__(self, ref: ChunkRef) -> bool:
        return ref in self._kept or ref in self._spare

    @property
    def keep_engine_awake(self) -> bool:
        """True if an idle engine should make a step, since a chunk may soon find room."""
        return bool(self) and time.monotonic() < self._awake_until

    def add(self, store: WaitingStore) -> bool:
        """Let a chunk wait, and return true, unless the prefix cache lacks one of its blocks."""
        names = self._names(store)
        if names is None or None in names or len(self) == _MAX_CHUNKS:
            return False
        stores = self._spare if store.spare else self._kept
        earlier = stores.get(store.ref)
        if earlier is None or self._names(earlier[0]) != earlier[1]:
            stores[store.ref] = store, names
        self._awake_until = time.monotonic() + _AWAKE_SECONDS
        return True

    def take(self, *, spare: bool, admits: Callable[[ChunkRef, str], bool | None]) -> Iterator[WaitingStore]:
        """Yield chunks that are stored now, in their order, until there is no room for one.

        Args:
            spare: whether to take spare chunks, or the others.
            admits: gets a chunk and the name of its pack; returns whether there is room, or ``None`` if the chunk needs
                no store any more.
        """
        stores = self._spare if spare else self._kept
        while stores:
            ref, (store, names) = next(iter(stores.items()))
            is_lost = self._names(store) != names
            admitted = None if is_lost else admits(ref, store.pack.name)
            if admitted is False:
                break
            del stores[ref]
            if is_lost:
                self._on_lost(ref)
            elif admitted:
                yield store

    def clear(self) -> None:
        """Forget all chunks."""
        self._kept.clear()
        self._spare.clear()

    def _names(self, store: WaitingStore) -> Sequence[object] | None:
        if self._pool is None:
            return None
        blocks = self._pool.blocks
        return [blocks[block_id].block_hash for part in store.slices for block_id in part.block_ids]
