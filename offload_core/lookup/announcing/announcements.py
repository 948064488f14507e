"""The difference between the chunks that tiers hold and the chunks that readers have been told about.

Readers get differences, not a log. A chunk that came and went between two steps is never announced, and no queue of
events can overflow. A limit on the descriptions of chunks bounds all memory: beyond it, the least recently used chunk
is announced as removed. The readers' view is then smaller than the tier, and never wrong about a chunk in it.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Generic, NamedTuple, TypeVar

from offload_core.planning.chunk_keys import ChunkRef

DescriptionT = TypeVar("DescriptionT")

_ENTRY_BYTES = 600
"""Memory of one chunk without its description."""


class Announcement(NamedTuple, Generic[DescriptionT]):
    """A chunk that is in a place now, or has left it.

    Args:
        place: the tier, or several tiers that readers cannot tell apart.
        present: false if the chunk has left the place.
        again: true if it was announced before, and is repeated for readers that have missed it.
    """

    place: str
    chunk: ChunkRef
    description: DescriptionT
    present: bool
    again: bool = False


@dataclass(slots=True)
class _Entry(Generic[DescriptionT]):
    description: DescriptionT
    nbytes: int
    version: int
    """Differs after each change, and from all earlier entries of the chunk."""
    ranks: dict[str, int] = field(default_factory=dict)
    """Per tier that has a part of the chunk, one bit per rank."""
    announced: set[str] = field(default_factory=set)
    """The places in which readers see the chunk."""


class Announcements(Generic[DescriptionT]):
    """The chunks that were described, their presence on each tier, and the news for readers. For one thread.

    Args:
        places: per tier, the place by which readers know it.
        num_ranks: ranks that must have their part of a chunk before it is present.
        max_bytes: limit for the memory of all chunks.
    """

    def __init__(self, places: Mapping[str, str], num_ranks: int, max_bytes: int) -> None:
        self._places = dict(places)
        self._tiers: dict[str, list[str]] = {}
        for tier, place in places.items():
            self._tiers.setdefault(place, []).append(tier)
        self._all_ranks = (1 << num_ranks) - 1
        self._max_bytes = max_bytes
        self._nbytes = 0
        self._version = 0
        self._entries: OrderedDict[ChunkRef, _Entry[DescriptionT]] = OrderedDict()
        """The chunks whose changes count, the least recently used first."""
        self._leaving: dict[ChunkRef, _Entry[DescriptionT]] = {}
        """Forgotten chunks that readers still see."""
        self._news: dict[tuple[ChunkRef, str], None] = {}
        """Chunk and place wherever presence and the readers' view differ, in the order in which that began."""
        self._repeats: deque[tuple[ChunkRef, str]] = deque()

    def __len__(self) -> int:
        return len(self._entries) + len(self._leaving)

    @property
    def nbytes(self) -> int:
        """Estimated memory of all chunks."""
        return self._nbytes

    @property
    def has_news(self) -> bool:
        """True if readers see another content than the tiers have."""
        return bool(self._news)

    @property
    def has_repeats(self) -> bool:
        """True if repetitions wait."""
        return bool(self._repeats)

    def use(self, ref: ChunkRef) -> bool:
        """Make a chunk the most recently used one. Return false if it must be described first."""
        if ref not in self._entries:
            return False
        self._entries.move_to_end(ref)
        return True

    def describe(self, ref: ChunkRef, description: DescriptionT, nbytes: int) -> None:
        """Count the changes of a chunk from now on, unless the limit is reached.

        Args:
            nbytes: memory of the description.
        """
        if self.use(ref):
            return
        if (entry := self._leaving.pop(ref, None)) is not None:  # readers never learn that it was forgotten
            self._entries[ref] = entry
            return
        nbytes += _ENTRY_BYTES
        while self._nbytes + nbytes > self._max_bytes and self._entries:
            self._forget(next(iter(self._entries)))
        if self._nbytes + nbytes > self._max_bytes:  # readers must hear of removals first
            return
        self._nbytes += nbytes
        self._version += 1
        self._entries[ref] = _Entry(description, nbytes, self._version)

    def changed(self, tier: str, ref: ChunkRef, rank: int, present: bool) -> None:
        """Apply a change of one rank's part of a chunk. Chunks that were not described do not count."""
        if (entry := self._entries.get(ref)) is not None:
            ranks = entry.ranks.get(tier, 0)
            self._set_ranks(ref, entry, tier, ranks | 1 << rank if present else ranks & ~(1 << rank))

    def forget_all(self) -> None:
        """Announce all chunks as removed, and count no change until they are described again."""
        for ref in list(self._entries):
            self._forget(ref)

    def chunks(self) -> list[ChunkRef]:
        """Return all chunks whose changes count."""
        return list(self._entries)

    def version(self, ref: ChunkRef) -> int | None:
        """Return a number that differs after each change of a chunk; ``None`` if its changes do not count."""
        entry = self._entries.get(ref)
        return None if entry is None else entry.version

    def checked(self, tier: str, ref: ChunkRef, version: int | None, present: Sequence[bool]) -> None:
        """Apply an answer of the medium itself. It does not count if the chunk has changed since the question.

        Args:
            version: :meth:`version` at the time of the question.
            present: one flag per rank.
        """
        entry = self._entries.get(ref)
        if entry is not None and entry.version == version:
            self._set_ranks(ref, entry, tier, sum(there << rank for rank, there in enumerate(present)))

    def repeat(self, refs: Iterable[ChunkRef]) -> None:
        """Announce chunks again, wherever readers should see them."""
        for ref in refs:
            if (entry := self._entries.get(ref)) is not None:
                self._repeats.extend((ref, place) for place in self._tiers if place in entry.announced)

    def take(self, limit: int) -> list[Announcement[DescriptionT]]:
        """Return at most ``limit`` announcements: news first, then repetitions.

        No chunk comes twice in one place. Readers that got every announcement then see exactly the chunks that are
        present, except for news beyond the limit.
        """
        taken: list[Announcement[DescriptionT]] = []
        fresh: set[tuple[ChunkRef, str]] = set()
        while self._news and len(taken) < limit:
            ref, place = next(iter(self._news))
            del self._news[ref, place]
            fresh.add((ref, place))
            taken.append(self._announce(ref, place))
        while self._repeats and len(taken) < limit:
            ref, place = self._repeats.popleft()
            entry = self._entries.get(ref)
            if entry is None or place not in entry.announced or (ref, place) in fresh:
                continue
            fresh.add((ref, place))
            taken.append(Announcement(place, ref, entry.description, present=True, again=True))
        return taken

    def _announce(self, ref: ChunkRef, place: str) -> Announcement[DescriptionT]:
        entry = self._entries.get(ref) or self._leaving[ref]
        present = self._is_present(entry, place)
        (entry.announced.add if present else entry.announced.discard)(place)
        if ref in self._leaving and not entry.announced:
            del self._leaving[ref]
            self._nbytes -= entry.nbytes
        return Announcement(place, ref, entry.description, present)

    def _is_present(self, entry: _Entry[DescriptionT], place: str) -> bool:
        return any(entry.ranks.get(tier) == self._all_ranks for tier in self._tiers[place])

    def _set_ranks(self, ref: ChunkRef, entry: _Entry[DescriptionT], tier: str, ranks: int) -> None:
        if entry.ranks.get(tier, 0) == ranks:
            return
        self._version += 1
        entry.version = self._version
        entry.ranks[tier] = ranks
        self._compare(ref, entry, self._places[tier])

    def _compare(self, ref: ChunkRef, entry: _Entry[DescriptionT], place: str) -> None:
        if self._is_present(entry, place) != (place in entry.announced):
            self._news[ref, place] = None
        else:
            self._news.pop((ref, place), None)

    def _forget(self, ref: ChunkRef) -> None:
        entry = self._entries.pop(ref)
        entry.ranks.clear()
        self._version += 1
        entry.version = self._version
        for place in self._tiers:
            self._compare(ref, entry, place)
        if entry.announced:
            self._leaving[ref] = entry
        else:
            self._nbytes -= entry.nbytes
