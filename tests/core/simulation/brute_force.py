"""The simplest program for a simulated tier: prompts token by token, and lists that are searched from end to end."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from offload_core.planning.end_worth import MIN_PARTED_PATHS
from offload_core.planning.planner import HybridOffloadPlanner, Pack
from tests.support.geometries import needs
from tests.support.prompt_traces import Tokens

Prefix = tuple[Tokens, int]
"""A number of tokens, and all tokens up to the end of the block of the trace in which they end."""
Name = tuple[str, Prefix]


@dataclass
class SimpleTier:
    """LRU with spare objects. The last of each list is the one used last.

    Args:
        uses: per object, the number of its uses until it was stored, and ``None`` afterwards; for second-touch.
    """

    capacity: int | None
    sizes: dict[str, int]
    write_policy: str = "every"
    promote: bool = True
    load_weight: float = 1.0
    low_watermark: float = 1.0
    high_watermark: float = 1.0
    uses: dict[Name, int | None] = field(default_factory=dict)
    spare: list[Name] = field(default_factory=list)
    kept: list[Name] = field(default_factory=list)
    read: list[Name] = field(default_factory=list)
    written: list[Name] = field(default_factory=list)
    evicted: list[Name] = field(default_factory=list)
    peak: int = 0

    def bytes_of(self, names: list[Name]) -> int:
        return sum(self.sizes[pack] for pack, _ in names)

    def holds(self, name: Name) -> bool:
        return name in self.spare or name in self.kept

    def use(self, name: Name, *, spare: bool) -> None:
        for names in (self.spare, self.kept):
            if name in names:
                names.remove(name)
                (self.spare if spare else self.kept).append(name)
                return

    def offered(self, name: Name, *, spare: bool) -> None:
        """A store is offered, which is a use: from the second one on, second-touch takes it."""
        before = self.uses.get(name, 0)
        self.uses[name] = None if before is None else before + 1
        if self.write_policy == "every" or (self.write_policy == "second-touch" and before != 0):
            self.store(name, spare=spare)
            if self.holds(name):
                self.uses[name] = None

    def loaded_elsewhere(self, name: Name, *, from_slower: bool) -> None:
        """Another tier has served the object, which is a use. A tier that had it once takes it by promotion only."""
        before = self.uses.get(name, 0)
        self.uses[name] = None if before is None else before + 1
        if self.write_policy == "second-touch":
            wanted = before is not None and before >= 1
        else:
            wanted = self.write_policy == "every" and from_slower
        if wanted and (self.promote or not from_slower):
            if not self.holds(name):
                self.store(name, spare=False)
            if self.holds(name):
                self.uses[name] = None

    def store(self, name: Name, *, spare: bool) -> None:
        size = self.sizes[name[0]]
        if self.capacity is not None:
            if size > self.capacity:
                return
            wanted = self.bytes_of(self.spare + self.kept) + size
            if spare and wanted > self.low_watermark * self.capacity:
                return
            if wanted > self.high_watermark * self.capacity:
                most = min(self.low_watermark * self.capacity, self.capacity - size)
                while self.bytes_of(self.spare + self.kept) > most:
                    self.evicted.append((self.spare or self.kept).pop(0))
        (self.spare if spare else self.kept).append(name)
        self.written.append(name)
        self.peak = max(self.peak, self.bytes_of(self.spare + self.kept))


@dataclass
class BruteForce:
    """Serves prompts as the placement's definition says."""

    planner: HybridOffloadPlanner
    tiers: list[SimpleTier]
    placement: str
    block_tokens: int
    kept_boundaries: dict[Prefix, bool] = field(default_factory=dict)
    """Per kept boundary, whether several paths need it."""
    seen: set[Prefix] = field(default_factory=set)
    seen_depths: list[int] = field(default_factory=list)
    """Per path, its deepest loadable boundary that an earlier path had too."""
    worths: list[tuple[int, int, int, int]] = field(default_factory=list)
    """Per path: tokens resumed at an end and bytes of its end, then the same for the boundaries between."""
    hits: list[int] = field(default_factory=list)

    def serve(self, prompt: Tokens) -> None:
        whole = len(prompt) // self.block_tokens * self.block_tokens
        path, prompt_tokens = prompt[:whole], min(len(prompt), whole + 1)
        boundaries = range(self.planner.boundary_tokens, whole + 1, self.planner.boundary_tokens)
        loadable = [b for b in boundaries if b < prompt_tokens]
        depths = [max((b for b in loadable if self._satisfied(tier, path, b)), default=0) for tier in self.tiers]
        worths = [depth * tier.load_weight for depth, tier in zip(depths, self.tiers, strict=True)]
        best = worths.index(max(worths))
        usable = depths[best]
        common = self._common_tokens(path, boundaries, prompt_tokens)
        self._touch_head(path, boundaries, prompt_tokens)
        spare_ends = self._ends_are_spare(path, boundaries, prompt_tokens)
        kept = self.kept_boundaries.get(self._prefix(path, common))
        parts = (common > usable and kept is not False) or (common == self.seen_depths[-1] == usable and kept is None)
        junctions = {common} if parts and common else set()
        for pack in self.planner.packs:
            for end in reversed(self._ends(pack, usable)):
                if self._needs(pack, end, usable):
                    self._load((pack.name, self._prefix(path, end)), best)
        replay = (prompt_tokens - 1) // self.planner.boundary_tokens * self.planner.boundary_tokens
        for pack, end in self._in_order_of_completion(usable, whole):
            name = (pack.name, self._prefix(path, end))
            is_kept = pack.policy.kind == "full" or any(self._needs(pack, end, b) for b in junctions)
            is_kept |= not spare_ends and (end > replay or self._needs(pack, end, replay))
            is_spare = self.placement != "everything" and not is_kept
            if (
                not any(tier.holds(name) for tier in self.tiers)
                and self._ever_needed(pack, end)
                and not (is_spare and self.placement == "kept")
            ):
                for tier in self.tiers:
                    tier.offered(name, spare=is_spare)
        for name, spare in self._touches(
            path, usable, {replay, *boundaries[-1:], *junctions} - {0}, junctions, spare_ends=spare_ends
        ):
            self._use(name, spare=spare)
        self.hits.append(usable)

    def _load(self, name: Name, source: int) -> None:
        for place, tier in enumerate(self.tiers):
            if place == source:
                tier.use(name, spare=False)
                tier.read.append(name)
        for place, tier in enumerate(self.tiers):
            if place != source:
                tier.loaded_elsewhere(name, from_slower=place < source)

    def _use(self, name: Name, *, spare: bool) -> None:
        for tier in self.tiers:
            tier.use(name, spare=spare)

    def _prefix(self, path: Tokens, tokens: int) -> Prefix:
        return path[: -(-tokens // self.block_tokens) * self.block_tokens], tokens

    def _common_tokens(self, path: Tokens, boundaries: range, prompt_tokens: int) -> int:
        """Return the deepest boundary that an earlier path had too, or where attention is present."""
        loadable = [b for b in boundaries if b < prompt_tokens]
        common = max((b for b in loadable if self._prefix(path, b) in self.seen), default=0)
        self.seen_depths.append(common)
        self.seen |= {self._prefix(path, b) for b in boundaries}
        full = [pack for pack in self.planner.packs if pack.policy.kind == "full"]
        deep = (b for b in loadable if full and self._has_attention(path, b))
        return max(common, *deep, 0)

    def _has_attention(self, path: Tokens, boundary: int) -> bool:
        """Return whether some tier has all of full attention up to a boundary."""
        full = [pack for pack in self.planner.packs if pack.policy.kind == "full"]
        return any(all(self._pack_satisfied(tier, pack, path, boundary) for pack in full) for tier in self.tiers)

    def _touch_head(self, path: Tokens, boundaries: range, prompt_tokens: int) -> None:
        """Touch the full attention up to the deepest boundary at which it is present."""
        full = [pack for pack in self.planner.packs if pack.policy.kind == "full"]
        loadable = [b for b in boundaries if b < prompt_tokens]
        attention = max((b for b in loadable if self._has_attention(path, b)), default=0)
        for end in range(attention, 0, -1):
            for pack in full:
                if end % pack.unit_tokens == 0:
                    self._use((pack.name, self._prefix(path, end)), spare=False)

    def _ends_are_spare(self, path: Tokens, boundaries: range, prompt_tokens: int) -> bool:
        """Compare, over all paths, the tokens resumed per byte at ends with those at boundaries that nobody keeps."""
        replay = max((b for b in boundaries if b < prompt_tokens), default=0)
        seen = self.seen_depths[-1]
        kept = [b for b in range(seen + 1) if self._prefix(path, b) in self.kept_boundaries]
        shared = max((b for b in kept if self.kept_boundaries[self._prefix(path, b)]), default=0)
        deepest = max(kept, default=0)
        new = [
            (self.tiers[0].sizes[pack.name], self._needs(pack, end, replay))
            for pack in self.planner.packs
            if pack.policy.kind != "full"
            for end in self._ends(pack, max(boundaries, default=0))
            if end > seen
        ]
        end_bytes = sum(size for size, of_end in new if of_end)
        self.worths.append(
            (max(0, deepest - shared), end_bytes, seen - deepest, sum(size for size, _ in new) - end_bytes)
        )
        at_ends, end_bytes, between, between_bytes = map(sum, zip(*self.worths, strict=True))
        parted = sum(tokens > 0 for _, _, tokens, _ in self.worths)
        worth_less = at_ends * between_bytes < between * end_bytes
        return self.placement == "kept and spare" and parted >= MIN_PARTED_PATHS and worth_less

    def _touches(
        self, path: Tokens, usable: int, kept: set[int], junctions: set[int], *, spare_ends: bool
    ) -> Iterator[tuple[Name, bool]]:
        superseded: set[int] = set()
        if self.placement != "everything":
            known = {b for b in range(1, len(path) + 1) if self._prefix(path, b) in self.kept_boundaries} - kept
            superseded = {b for b in known if not self.kept_boundaries[self._prefix(path, b)]}
            kept |= known - superseded
            for boundary in kept:
                prefix = self._prefix(path, boundary)
                self.kept_boundaries[prefix] = boundary in junctions or prefix in self.kept_boundaries
            for boundary in superseded:
                del self.kept_boundaries[self._prefix(path, boundary)]
            if spare_ends:
                ends = {b for b in kept if not self.kept_boundaries[self._prefix(path, b)]}
                kept, superseded = kept - ends, superseded | ends
        for end in range(len(path), 0, -1):
            for pack in sorted(self.planner.packs, key=lambda pack: pack.policy.kind == "full"):
                if end % pack.unit_tokens:
                    continue
                name = (pack.name, self._prefix(path, end))
                if self.placement == "everything":
                    within = end <= len(path) // self.planner.boundary_tokens * self.planner.boundary_tokens
                    if within and (end > usable or self._needs(pack, end, usable)):
                        yield name, False
                elif pack.policy.kind == "full":
                    if end <= max(kept | superseded, default=0):
                        yield name, False
                elif any(self._needs(pack, end, boundary) for boundary in kept):
                    yield name, False
                elif any(self._needs(pack, end, boundary) for boundary in superseded):
                    yield name, True

    def _satisfied(self, tier: SimpleTier, path: Tokens, boundary: int) -> bool:
        return all(self._pack_satisfied(tier, pack, path, boundary) for pack in self.planner.packs)

    def _pack_satisfied(self, tier: SimpleTier, pack: Pack, path: Tokens, boundary: int) -> bool:
        ends = [end for end in self._ends(pack, boundary) if self._needs(pack, end, boundary)]
        return all(tier.holds((pack.name, self._prefix(path, end))) for end in ends)

    def _in_order_of_completion(self, computed: int, whole: int) -> Iterator[tuple[Pack, int]]:
        for end in range(computed + 1, whole + 1):
            for pack in self.planner.packs:
                if end % pack.unit_tokens == 0:
                    yield pack, end

    def _ever_needed(self, pack: Pack, end: int) -> bool:
        step = self.planner.boundary_tokens
        reach = end + 2 * (step + pack.policy.attention_chunk_tokens)
        return any(self._needs(pack, end, boundary) for boundary in range(-(-end // step) * step, reach, step))

    @staticmethod
    def _ends(pack: Pack, tokens: int) -> range:
        return range(pack.unit_tokens, tokens + 1, pack.unit_tokens)

    @staticmethod
    def _needs(pack: Pack, end: int, boundary: int) -> bool:
        unit = range(end - pack.unit_tokens, end)
        return end <= boundary and any(needs(pack.policy, token, boundary) for token in unit)
