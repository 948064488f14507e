"""An index of the objects on media that only one process sees.

The scheduler half cannot look up objects in a worker's own memory, for example. It runs in another process, or has
another instance of the backend. So each worker's tiers report the objects that they store, evict and fail to load, and
the scheduler half keeps an index. The index may lag behind: a load of an object that has gone is a miss, and the engine
recomputes it.
"""

from __future__ import annotations

from collections.abc import Sequence

from offload_core.api.keys import ObjectKey


class TierIndex:
    """The objects of one tier in all workers. Their keys differ by namespace."""

    def __init__(self) -> None:
        self._hashes: dict[tuple[str, str], set[bytes]] = {}

    def update(self, key: ObjectKey, present: bool) -> None:
        """Apply a change. Changes must come in the order in which they happened."""
        hashes = self._hashes.setdefault((key.namespace, key.pack), set())
        if present:
            hashes.add(key.chunk_hash)
        else:
            hashes.discard(key.chunk_hash)
            if not hashes:
                del self._hashes[key.namespace, key.pack]

    def present(self, namespaces: Sequence[str], pack: str, chunk_hashes: Sequence[bytes]) -> list[bool]:
        """Return, per chunk, whether its object is present under each of ``namespaces``."""
        none: set[bytes] = set()
        present = [self._hashes.get((namespace, pack), none) for namespace in namespaces]
        ranks = [map(hashes.__contains__, chunk_hashes) for hashes in present]
        return list(ranks[0]) if len(ranks) == 1 else list(map(all, zip(*ranks, strict=True)))
