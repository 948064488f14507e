"""What media that only one process can see hold, as far as that process has told.

A medium such as a worker's own memory cannot be asked by the scheduler half, which lives in another process or holds
another instance of the backend. So each worker's tiers note what they store, evict and fail to load, and the scheduler
half keeps an index. It may be a little behind: what it offers and is no more there is a miss, which is recomputed.
"""

from __future__ import annotations

from collections.abc import Sequence

from offload_core.api.keys import ObjectKey


class TierIndex:
    """The objects of one tier in all workers, whose keys differ by their namespace."""

    def __init__(self) -> None:
        self._hashes: dict[tuple[str, str], set[bytes]] = {}

    def update(self, key: ObjectKey, present: bool) -> None:
        """Take a change; changes are to come in the order in which they happened."""
        hashes = self._hashes.setdefault((key.namespace, key.pack), set())
        if present:
            hashes.add(key.chunk_hash)
        else:
            hashes.discard(key.chunk_hash)
            if not hashes:
                del self._hashes[key.namespace, key.pack]

    def present(self, namespaces: Sequence[str], pack: str, chunk_hashes: Sequence[bytes]) -> list[bool]:
        """Return, per chunk, whether its object is there under every one of ``namespaces``."""
        nothing: set[bytes] = set()
        held = [self._hashes.get((namespace, pack), nothing) for namespace in namespaces]
        ranks = [map(hashes.__contains__, chunk_hashes) for hashes in held]
        return list(ranks[0]) if len(ranks) == 1 else list(map(all, zip(*ranks, strict=True)))
