"""The simplest program for a simulated tier: prompts token by token, and lists that are searched from end to end."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from offload_core.planning.planner import HybridOffloadPlanner, Pack
from tests.support.geometries import needs
from tests.support.prompt_traces import Tokens

Prefix = tuple[Tokens, int]
"""A number of tokens, and all tokens up to the end of the block of the trace in which they end."""
Name = tuple[str, Prefix]


@dataclass
class SimpleTier:
    """LRU with spare objects. The last of each list is the one used last."""

    capacity: int | None
    sizes: dict[str, int]
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

    def store(self, name: Name, *, spare: bool) -> None:
        size = self.sizes[name[0]]
        if self.capacity is not None:
            if size > self.capacity:
                return
            while self.bytes_of(self.spare + self.kept) + size > self.capacity:
                if spare:
                    return
                self.evicted.append((self.spare or self.kept).pop(0))
        (self.spare if spare else self.kept).append(name)
        self.written.append(name)
        self.peak = max(self.peak, self.bytes_of(self.spare + self.kept))


@dataclass
class BruteForce:
    """Serves prompts as the placement's definition says."""

    planner: HybridOffloadPlanner
    tier: SimpleTier
    placement: str
    block_tokens: int
    kept_boundaries: dict[Prefix, bool] = field(default_factory=dict)
    """Per kept boundary, whether several paths need it."""
    seen: set[Prefix] = field(default_factory=set)
    hits: list[int] = field(default_factory=list)

    def serve(self, prompt: Tokens) -> None:
        whole = len(prompt) // self.block_tokens * self.block_tokens
        path, prompt_tokens = prompt[:whole], min(len(prompt), whole + 1)
        boundaries = range(self.planner.boundary_tokens, whole + 1, self.planner.boundary_tokens)
        usable = max((b for b in boundaries if b < prompt_tokens and self._satisfied(path, b)), default=0)
        common = self._common_tokens(path, boundaries, prompt_tokens)
        self._touch_head(path, boundaries, prompt_tokens)
        continues = self.kept_boundaries.get(self._prefix(path, common)) is False
        junctions = {common} if common > usable and not continues else set()
        for pack in self.planner.packs:
            for end in reversed(self._ends(pack, usable)):
                if self._needs(pack, end, usable):
                    self.tier.use((pack.name, self._prefix(path, end)), spare=False)
                    self.tier.read.append((pack.name, self._prefix(path, end)))
        replay = (prompt_tokens - 1) // self.planner.boundary_tokens * self.planner.boundary_tokens
        for pack, end in self._in_order_of_completion(usable, whole):
            name = (pack.name, self._prefix(path, end))
            is_kept = pack.policy.kind == "full" or end > replay
            is_kept |= any(self._needs(pack, end, b) for b in {replay, *junctions})
            is_spare = self.placement != "everything" and not is_kept
            if (
                not self.tier.holds(name)
                and self._ever_needed(pack, end)
                and not (is_spare and self.placement == "kept")
            ):
                self.tier.store(name, spare=is_spare)
        for name, spare in self._touches(path, usable, {replay, *boundaries[-1:], *junctions} - {0}, junctions):
            self.tier.use(name, spare=spare)
        self.hits.append(usable)

    def _prefix(self, path: Tokens, tokens: int) -> Prefix:
        return path[: -(-tokens // self.block_tokens) * self.block_tokens], tokens

    def _common_tokens(self, path: Tokens, boundaries: range, prompt_tokens: int) -> int:
        """Return the deepest boundary that an earlier path had too, or where attention is present."""
        loadable = [b for b in boundaries if b < prompt_tokens]
        common = max((b for b in loadable if self._prefix(path, b) in self.seen), default=0)
        self.seen |= {self._prefix(path, b) for b in boundaries}
        full = [pack for pack in self.planner.packs if pack.policy.kind == "full"]
        deep = (b for b in loadable if full and all(self._pack_satisfied(pack, path, b) for pack in full))
        return max(common, *deep, 0)

    def _touch_head(self, path: Tokens, boundaries: range, prompt_tokens: int) -> None:
        """Touch the full attention up to the deepest boundary at which it is present."""
        full = [pack for pack in self.planner.packs if pack.policy.kind == "full"]
        loadable = [b for b in boundaries if b < prompt_tokens]
        attention = max((b for b in loadable if all(self._pack_satisfied(pack, path, b) for pack in full)), default=0)
        for end in range(attention, 0, -1):
            for pack in full:
                if end % pack.unit_tokens == 0:
                    self.tier.use((pack.name, self._prefix(path, end)), spare=False)

    def _touches(self, path: Tokens, usable: int, kept: set[int], junctions: set[int]) -> Iterator[tuple[Name, bool]]:
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
        for end in range(len(path), 0, -1):
            for pack in sorted(self.planner.packs, key=lambda pack: pack.policy.kind == "full"):
                if end % pack.unit_tokens:
                    continue
                name = (pack.name, self._prefix(path, end))
                if self.placement == "everything":
                    if end > usable or self._needs(pack, end, usable):
                        yield name, False
                elif pack.policy.kind == "full":
                    if end <= max(kept, default=0):
                        yield name, False
                elif any(self._needs(pack, end, boundary) for boundary in kept):
                    yield name, False
                elif any(self._needs(pack, end, boundary) for boundary in superseded):
                    yield name, True

    def _satisfied(self, path: Tokens, boundary: int) -> bool:
        return all(self._pack_satisfied(pack, path, boundary) for pack in self.planner.packs)

    def _pack_satisfied(self, pack: Pack, path: Tokens, boundary: int) -> bool:
        ends = [end for end in self._ends(pack, boundary) if self._needs(pack, end, boundary)]
        return all(self.tier.holds((pack.name, self._prefix(path, end))) for end in ends)

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
