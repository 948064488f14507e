"""The loads whose objects the workers keep at hand, so that a later load of them takes place within a step.

A tier that lends its memory has pinned these objects, and every rank has verified views of them. So a load of them
needs no call of the tier, and cannot fail. A decision to load within the step rests on this index alone.
"""

from __future__ import annotations

import time
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import count

from offload_core.config.model import OffloadConfig
from offload_core.planning.chunk_keys import ChunkRef
from offload_core.tiers.tier import Tier

KEPT_SHARE = 0.5
"""Part of a tier's capacity that kept objects may have. The tier cannot evict them."""
_UNUSED_SECONDS = 60.0
"""Time after which the objects of a load are given back, if no request has used them."""


@dataclass
class _Load:
    tier: str
    refs: Sequence[ChunkRef]
    nbytes: int
    ranks: int = 0
    used: float = 0.0


def kept_limits(config: OffloadConfig, tiers: Sequence[Tier], num_ranks: int) -> dict[str, float]:
    """Return, per name of a tier that lends, the most bytes that one rank keeps there: half of its capacity."""
    lends = {tier.name for tier in tiers if tier.capabilities.lends}
    sharing = num_ranks if config.settings.io_process != "off" else 1
    return {
        tier.common.name: KEPT_SHARE * tier.capacity_bytes / sharing
        for tier in config.tiers
        if tier.common.name in lends and tier.capacity_bytes is not None
    }


class KeptLoads:
    """Index of the kept objects, and the budget of loads within a step. For the engine thread.

    The workers keep the objects of a load from their report until they are told to give them back. Only this class
    decides on that. So every object in the index is at hand on all ranks.

    Args:
        num_ranks: ranks that report on each load.
        budget_bytes: bytes that each rank may load within one step; 0: nothing is kept.
        limits: per name of a tier that lends, the most bytes that one rank keeps there.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        num_ranks: int,
        budget_bytes: int,
        limits: Mapping[str, float],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._num_ranks = num_ranks
        self._budget_bytes = self._left_bytes = budget_bytes
        self._limits = limits if budget_bytes else {}
        self._clock = clock
        self.object_bytes: Mapping[str, int] = {}
        """Bytes of one object of each pack."""
        self._begun: dict[int, _Load] = {}
        self._kept: OrderedDict[int, _Load] = OrderedDict()
        """By the time of their last use, the longest unused first."""
        self._bytes: dict[str, int] = dict.fromkeys(self._limits, 0)
        self._jobs: dict[tuple[str, ChunkRef], int] = {}
        """Per tier and chunk, the latest load that keeps it."""
        self._holders: defaultdict[tuple[str, str, bytes], set[int]] = defaultdict(set)
        """Per tier, pack and hash of a chunk, the begun and the kept loads that have it."""
        self._last_touches: dict[ChunkRef, tuple[int, bool]] = {}
        """The number of each kept chunk's last touch, and whether it made the chunk spare."""
        self._touch_numbers = count()
        self._given_back: list[int] = []
        self._touches: list[tuple[ChunkRef, bool]] = []

    def begins(self, job_id: int, tier: str, refs: Sequence[ChunkRef]) -> bool:
        """Note the begin of a load, and return whether the workers are to keep its objects."""
        nbytes = self._size(refs)
        if not refs or not 0 < nbytes <= self._limits.get(tier, 0):
            return False
        self._begun[job_id] = load = _Load(tier, refs, nbytes)
        for holder in _holder_keys(load):
            self._holders[holder].add(job_id)
        return True

    def reported(self, ranks: Mapping[int, int]) -> None:
        """Take the number of further ranks that keep the objects of each load."""
        for job_id, more in ranks.items():
            if (load := self._begun.get(job_id)) is not None:
                load.ranks += more
            else:
                self._given_back.append(job_id)  # its request has gone

    def ended(self, job_id: int) -> None:
        """Note the end of a load on all ranks. It is kept if all ranks have reported that."""
        load = self._begun.get(job_id)
        if load is None:
            return
        if load.ranks < self._num_ranks:
            self._drop(job_id)
            return
        del self._begun[job_id]
        load.used = self._clock()
        self._kept[job_id] = load
        self._bytes[load.tier] += load.nbytes
        for ref in load.refs:
            self._jobs[load.tier, ref] = job_id
        while self._bytes[load.tier] > self._limits[load.tier]:
            self._give_back(next(job for job, kept in self._kept.items() if kept.tier == load.tier))

    def try_use(self, tier: str, refs: Sequence[ChunkRef]) -> bool:
        """Use kept objects for a load within this step, if all are kept and the step's budget has room for them."""
        jobs = {self._jobs.get((tier, ref)) for ref in refs}
        if not refs or None in jobs:
            return False
        nbytes = self._size(refs)
        if nbytes > self._left_bytes:
            return False
        self._left_bytes -= nbytes
        now = self._clock()
        for job_id in jobs:
            assert job_id is not None
            self._kept[job_id].used = now
            self._kept.move_to_end(job_id)
        return True

    def gone(self, tier: str, pack: str, chunk_hash: bytes) -> None:
        """Give back an object that has left its tier, with all objects of the loads that have it, ended or not."""
        for job_id in tuple(self._holders.get((tier, pack, chunk_hash), ())):
            if job_id in self._kept:
                self._give_back(job_id)
            else:
                self._drop(job_id)

    def touched(self, touches: Iterable[tuple[ChunkRef, bool]]) -> None:
        """Note touches, for which a tier does not care while an object is kept."""
        if self._kept:
            for ref, spare in touches:
                if any((tier, ref) in self._jobs for tier in self._limits):
                    self._last_touches[ref] = next(self._touch_numbers), spare

    def take_touches(self) -> list[tuple[ChunkRef, bool]]:
        """Return the touches to repeat, since their objects were given back in an earlier step."""
        touches, self._touches = self._touches, []
        return touches

    def end_step(self) -> list[int]:
        """End a step: renew the budget, and return the loads whose objects the workers give back."""
        self._left_bytes = self._budget_bytes
        if self._kept:
            oldest = self._clock() - _UNUSED_SECONDS
            while self._kept and next(iter(self._kept.values())).used < oldest:
                self._give_back(next(iter(self._kept)))
        given_back, self._given_back = self._given_back, []
        return given_back

    def clear(self) -> None:
        """Give everything back, also the objects of loads that have not ended."""
        for job_id in list(self._kept):
            self._give_back(job_id)
        self._given_back += (job_id for job_id, load in self._begun.items() if load.ranks)
        self._begun.clear()
        self._holders.clear()
        self._touches.clear()  # the names of chunks change

    def _drop(self, job_id: int) -> None:
        """Keep nothing of a load that has begun. A rank that reports it later is told to give its objects back."""
        load = self._begun.pop(job_id)
        self._forget_holder(job_id, load)
        if load.ranks:
            self._given_back.append(job_id)

    def _forget_holder(self, job_id: int, load: _Load) -> None:
        for holder in _holder_keys(load):
            holders = self._holders[holder]
            holders.discard(job_id)
            if not holders:
                del self._holders[holder]

    def _give_back(self, job_id: int) -> None:
        load = self._kept.pop(job_id)
        self._forget_holder(job_id, load)
        self._bytes[load.tier] -= load.nbytes
        self._given_back.append(job_id)
        touches = []
        for ref in load.refs:
            if self._jobs.get((load.tier, ref)) == job_id:
                del self._jobs[load.tier, ref]
                if (last := self._last_touches.pop(ref, None)) is not None:
                    touches.append((last, ref))
        self._touches += ((ref, spare) for (_, spare), ref in sorted(touches))

    def _size(self, refs: Sequence[ChunkRef]) -> int:
        return sum(self.object_bytes.get(ref.pack, 0) for ref in refs)


def _holder_keys(load: _Load) -> set[tuple[str, str, bytes]]:
    return {(load.tier, ref.pack, ref.chunk_hash) for ref in load.refs}
