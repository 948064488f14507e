"""Prefixes that hints protect from eviction, within a limit per tenant and one for all tenants."""

from __future__ import annotations

import math
import time
from collections import Counter, deque
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass

from offload_core.planning.chunk_keys import ChunkRef

MAX_CHUNKS = 1 << 16
"""Most chunks of all retentions, a chunk in several of them counted for each. They take about 30 MiB."""


@dataclass
class _Retention:
    refs: Sequence[ChunkRef]
    until: float


class Retentions:
    """The protected prefixes of all tenants. For the engine thread.

    A tenant is a cache salt. Prefixes of different salts have no chunk in common.

    Args:
        max_bytes_per_tenant: most bytes that one tenant may protect.
        max_bytes: most bytes that all tenants together may protect.
        clock: monotonic seconds.
    """

    def __init__(
        self, max_bytes_per_tenant: float, max_bytes: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._max_bytes_per_tenant = max_bytes_per_tenant
        self._max_bytes = max_bytes
        self._clock = clock
        self.chunk_bytes: Mapping[str, int] = {}
        """Bytes of one chunk of each pack on all ranks."""
        self._tenants: dict[str, dict[Hashable, _Retention]] = {}
        self._holders: dict[str, Counter[ChunkRef]] = {}
        """Per tenant and chunk, the number of its retentions."""
        self._protected: Counter[ChunkRef] = Counter()
        """Per chunk, the number of tenants that protect it."""
        self._bytes: Counter[str] = Counter()
        self._num_refs = 0
        self._next_end = math.inf

    def __bool__(self) -> bool:
        return bool(self._tenants)

    @property
    def nbytes(self) -> int:
        """The bytes that are protected."""
        return self._bytes.total()

    def protects(self, ref: ChunkRef) -> bool:
        """Return whether some retention has the chunk."""
        return ref in self._protected

    def add(self, tenant: str, name: Hashable, refs: Sequence[ChunkRef], until: float) -> str | None:
        """Protect a prefix, or protect it for longer.

        Args:
            name: of the prefix; the same name means the same chunks.
            refs: its chunks, the deepest first.
            until: end by the clock; infinity: until :meth:`remove`.

        Returns:
            ``None``, or the reason for a refusal.
        """
        self.expire()
        if (known := self._tenants.get(tenant, {}).get(name)) is not None:
            known.until = max(known.until, until)
            return None
        holders = self._holders.get(tenant, Counter())
        added = sum(self.chunk_bytes.get(ref.pack, 0) for ref in refs if ref not in holders)
        if self._bytes[tenant] + added > self._max_bytes_per_tenant:
            return (
                f"it needs {added} more bytes, and this tenant's hints protect {self._bytes[tenant]} of at most "
                f"{int(self._max_bytes_per_tenant)}; unpin a prefix, or raise retained_share_per_tenant"
            )
        if self.nbytes + added > self._max_bytes or self._num_refs + len(refs) > MAX_CHUNKS:
            return "the hints of all tenants together protect as much as they may; try again later"
        self._tenants.setdefault(tenant, {})[name] = _Retention(refs, until)
        self._holders.setdefault(tenant, holders).update(refs)
        self._protected.update(ref for ref in refs if holders[ref] == 1)
        self._bytes[tenant] += added
        self._num_refs += len(refs)
        self._next_end = min(self._next_end, until)
        return None

    def remove(self, tenant: str, names: Collection[Hashable]) -> int:
        """Protect some prefixes of a tenant no longer; returns how many it had protected."""
        own = self._tenants.get(tenant, {})
        gone = [name for name in names if name in own]
        for name in gone:
            self._forget(tenant, name)
        return len(gone)

    def expire(self) -> None:
        """Forget the retentions whose time is over."""
        now = self._clock()
        if now < self._next_end:
            return
        ended = [
            (tenant, name) for tenant, own in self._tenants.items() for name, one in own.items() if one.until <= now
        ]
        for tenant, name in ended:
            self._forget(tenant, name)
        self._next_end = min((one.until for own in self._tenants.values() for one in own.values()), default=math.inf)

    def refs(self) -> list[ChunkRef]:
        """Return every protected chunk once. Of one prefix, the deepest come first."""
        order: dict[ChunkRef, None] = {}
        for own in self._tenants.values():
            for retention in own.values():
                for ref in retention.refs:
                    order.pop(ref, None)  # so that the head that prefixes share comes last
                    order[ref] = None
        return list(order)

    def clear(self) -> None:
        """Forget everything."""
        self._tenants.clear()
        self._holders.clear()
        self._protected.clear()
        self._bytes.clear()
        self._num_refs = 0
        self._next_end = math.inf

    def _forget(self, tenant: str, name: Hashable) -> None:
        retention = self._tenants[tenant].pop(name)
        holders = self._holders[tenant]
        self._num_refs -= len(retention.refs)
        for ref in retention.refs:
            holders[ref] -= 1
            if not holders[ref]:
                del holders[ref]
                self._bytes[tenant] -= self.chunk_bytes.get(ref.pack, 0)
                self._protected[ref] -= 1
                if not self._protected[ref]:
                    del self._protected[ref]
        if not self._tenants[tenant]:
            del self._tenants[tenant], self._holders[tenant], self._bytes[tenant]


class TouchRounds:
    """The touches that keep protected chunks from being evicted. For the engine thread.

    A round touches every protected chunk. Stores, loads and touches make other chunks more recent than the protected
    ones. A round begins when those of this engine make enough bytes since the last one.
    Other engines on the same medium evict too, so it begins at the latest after some seconds.

    Args:
        bytes_between: bytes that this engine may store, load or touch between two rounds.
        seconds_between: longest time between two rounds.
        touches_per_step: most touches of one step.
    """

    def __init__(
        self,
        retentions: Retentions,
        bytes_between: float,
        seconds_between: float = 5.0,
        touches_per_step: int = 512,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._retentions = retentions
        self._bytes_between = bytes_between
        self._seconds_between = seconds_between
        self._touches_per_step = touches_per_step
        self._clock = clock
        self._renewed_bytes = 0
        self._last_round = -math.inf
        self._added: deque[ChunkRef] = deque()
        """Chunks that are protected since a moment ago."""
        self._round: deque[ChunkRef] = deque()
        """The rest of a round."""

    def added(self, refs: Sequence[ChunkRef]) -> None:
        """Touch the chunks of a prefix with the next steps, since it is protected from now on."""
        if len(self._added) + len(refs) <= MAX_CHUNKS:  # else the next round does it
            self._added += refs

    def take(self, renewed_bytes: int) -> list[ChunkRef]:
        """Return the chunks to touch before the stores of this step.

        Args:
            renewed_bytes: bytes that this step stores, loads or touches.
        """
        self._retentions.expire()
        self._renewed_bytes += renewed_bytes
        now = self._clock()
        due = self._renewed_bytes >= self._bytes_between or now >= self._last_round + self._seconds_between
        if due and not self._round and self._retentions:
            self._round += self._retentions.refs()
            self._last_round = now
            self._renewed_bytes = renewed_bytes  # its stores and loads come after the touches
        touches: list[ChunkRef] = []
        for waiting in (self._added, self._round):
            while waiting and len(touches) < self._touches_per_step:
                ref = waiting.popleft()
                if self._retentions.protects(ref):
                    touches.append(ref)
        return touches

    def clear(self) -> None:
        """Drop all touches that wait, since the names of chunks change."""
        self._added.clear()
        self._round.clear()
