"""Prefetches: loads of prefixes from slower tiers that a faster tier keeps, without a request that waits.

One prefetch is under way at a time, in batches. A batch is loaded like the objects of a request, but for no blocks. So
deadlines, circuit breakers and checksums hold as ever, and the faster tiers take the objects as promotions.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import count

from offload_core.config.model import OffloadConfig
from offload_core.lookup.prefix_query import PrefixAnswer, PrefixQuery
from offload_core.lookup.service import Lookup, LookupService
from offload_core.planning.chunk_keys import ChunkRef
from offload_core.planning.planner import HybridOffloadPlanner

MAX_PREFETCHES = 64
"""Most prefetches that wait. Each holds the block hashes of one prompt."""
MAX_PREFETCHES_PER_TENANT = 8
CAPACITY_SHARE = 0.5
"""Part of the fastest tier that one prefetch may fill."""
_STAGING_SHARE = 0.125
"""Part of the staging memory that one batch may take, so that the stores' part has room for it."""
_IDLE_WAIT_SECONDS = 0.002


@dataclass(frozen=True)
class Batch:
    """Objects to load from ``tier`` now.

    Args:
        last: whether no further batch of this prefetch follows.
    """

    job_id: int
    tier: str
    chunks: tuple[ChunkRef, ...]
    last: bool


@dataclass(frozen=True)
class _Waiting:
    tenant: str
    query: PrefixQuery


class Prefetches:
    """The prefetches of one engine. For the engine thread.

    Args:
        num_ranks: ranks that report on each batch.
        loads: whether this engine loads at all.
    """

    def __init__(
        self,
        config: OffloadConfig,
        planner: HybridOffloadPlanner,
        lookups: LookupService,
        num_ranks: int,
        *,
        loads: bool = True,
    ) -> None:
        self._planner = planner
        self._lookups = lookups
        self._num_ranks = num_ranks
        self._names = [tier.common.name for tier in config.tiers]
        takes = [tier.common.promote and tier.common.write_policy != "never" for tier in config.tiers]
        self._target = takes.index(True) if loads and True in takes[:-1] else None
        """The place of the fastest tier that takes objects of slower ones; ``None``: none does."""
        self._capacity_bytes: float = float("inf")
        if self._target is not None:
            self._capacity_bytes = CAPACITY_SHARE * (config.tiers[self._target].capacity_bytes or float("inf"))
        self._batch_bytes = int(config.settings.staging_bytes * _STAGING_SHARE)
        self.object_bytes: Mapping[str, int] = {}
        """Bytes of one object of each pack."""
        self._waiting: deque[_Waiting] = deque()
        self._lookup: Lookup | None = None
        self._rest: deque[ChunkRef] = deque()
        self._source = ""
        self._job_ids = count(-1, -1)  # requests have positive ones
        self._job_id: int | None = None
        self._ranks_left = 0

    def add(self, tenant: str, query: PrefixQuery) -> str | None:
        """Add a prefetch of the prefix up to the query's ``limit_tokens``; returns the reason for a refusal."""
        if self._target is None:
            return "no tier takes objects from a slower tier; this needs two tiers, with promote on the faster one"
        nbytes = sum(self.object_bytes.get(ref.pack, 0) for ref in self._refs(query, 0, query.limit_tokens))
        if nbytes * self._num_ranks > self._capacity_bytes:
            return (
                f"its {nbytes * self._num_ranks} bytes are more than {CAPACITY_SHARE:.0%} of the capacity of tier "
                f"{self._names[self._target]!r}; give a smaller value for tokens"
            )
        own = sum(waiting.tenant == tenant for waiting in self._waiting)
        if own >= MAX_PREFETCHES_PER_TENANT or len(self._waiting) >= MAX_PREFETCHES:
            return f"{own} prefetches of this tenant wait, and {len(self._waiting)} in all; try again later"
        self._waiting.append(_Waiting(tenant, query))
        return None

    @property
    def is_active(self) -> bool:
        """True if an idle engine should step on for prefetches."""
        return bool(self._waiting or self._rest) or self._job_id is not None

    def take(self, *, idle: bool) -> Batch | None:
        """Return the batch that begins with this step, if any.

        Args:
            idle: whether the engine has nothing else to do, so that a brief wait for a lookup delays no request.
        """
        if self._job_id is not None:
            return None
        while not self._rest:
            if not self._waiting:
                return None
            query = self._waiting[0].query
            if self._lookup is None:
                self._lookup = self._lookups.start(query)
            if not self._lookup.has_ended() and idle:
                self._lookups.wait_for_answer(_IDLE_WAIT_SECONDS)
            if not self._lookup.has_ended():
                return None
            self._plan(query, self._lookup.answers())
            self._lookup = None
            self._waiting.popleft()
        return self._next_batch()

    def ended(self, ranks: Mapping[int, int], failed: Collection[int]) -> None:
        """Take the number of further ranks that have ended a batch, and the batches that did not get all objects."""
        if self._job_id is None or self._job_id not in ranks:
            return
        if self._job_id in failed:
            self._rest.clear()  # a deeper chunk is of no use without those before it
        self._ranks_left -= ranks[self._job_id]
        if self._ranks_left <= 0:
            self._job_id = None

    def clear(self) -> None:
        """Drop all prefetches that have not begun, since the names of chunks change."""
        self._waiting.clear()
        self._rest.clear()
        self._lookup = None

    def _plan(self, query: PrefixQuery, answers: Mapping[str, PrefixAnswer]) -> None:
        """Choose the slower tier with the deepest prefix, the fastest of equals, and the chunks to load from it."""
        assert self._target is not None
        depths = [answers[name].boundary_tokens if name in answers else 0 for name in self._names]
        there = max(depths[: self._target + 1])
        deepest = max(depths[self._target + 1 :])
        if deepest > there:
            self._source = self._names[depths.index(deepest, self._target + 1)]
            self._rest.extend(self._refs(query, there, deepest))

    def _refs(self, query: PrefixQuery, begin: int, end: int) -> Sequence[ChunkRef]:
        """Return the chunks that a prefix up to ``end`` needs, apart from those up to ``begin``; heads come first."""
        units = [(pack, unit) for pack in self._planner.all_packs for unit in pack.needed_units(begin, end)]
        units.sort(key=lambda item: item[0].tokens_in(item[1] + 1))
        return [ChunkRef(pack.name, query.hashes[pack.name][unit], query.adapter) for pack, unit in units]

    def _next_batch(self) -> Batch:
        chunks = [self._rest.popleft()]
        nbytes = self.object_bytes.get(chunks[0].pack, 0)
        while self._rest and nbytes + self.object_bytes.get(self._rest[0].pack, 0) <= self._batch_bytes:
            chunks.append(self._rest.popleft())
            nbytes += self.object_bytes.get(chunks[-1].pack, 0)
        self._job_id = next(self._job_ids)
        self._ranks_left = self._num_ranks
        return Batch(self._job_id, self._source, tuple(chunks), last=not self._rest)
