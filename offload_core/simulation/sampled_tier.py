"""A simulated tier of one capacity, which serves samples of paths.

It is the simulation of :mod:`offload_core.simulation.simulator` on fewer objects, a miniature simulation (Waldspurger
et al., "Cache Modeling and Optimization using Miniature Simulations", ATC'17). The placement, the search and the order
of eviction are the code that serves. To them, a point of the sample is a boundary of one token. It has two objects:

* the chunk of full attention before it, if the chunk is sampled. Its weight is that of ``1 / rate`` chunks;
* the windows and states that the boundary needs, with all their bytes. For a spare object the point must be a sampled
  one; the weight is then that of ``1 / rate`` spare objects.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from offload_core.api.eviction_order import EvictionPolicy
from offload_core.planning.end_worth import EndWorth
from offload_core.planning.packs import Pack
from offload_core.planning.placement import BoundaryHistory, PlacementPolicy, Touch
from offload_core.planning.planner import GroupGeometry, HitPolicy, HybridOffloadPlanner, PrefixDepth, UnitRange
from offload_core.simulation.bounded_tier import BoundedTier
from offload_core.simulation.path_rules import KeepBoundaries, PathRule, Storing
from offload_core.simulation.path_sample import PathSample

Flags = dict[str, list[bool]]
"""By kind of object, the presence of the object at each point."""


@dataclass(frozen=True)
class PathWeights:
    """The bytes of a path's objects.

    Args:
        object_bytes: of one object, by the name of its pack.
    """

    planner: HybridOffloadPlanner
    object_bytes: dict[str, int]

    @property
    def chunk_bytes(self) -> int:
        """Bytes of full attention from one boundary to the next."""
        return sum(self._units(pack) * self.object_bytes[pack.name] for pack in self._packs(full=True))

    @property
    def spare_bytes(self) -> int:
        """Bytes of windows and states from one boundary to the next, if all are stored."""
        return sum(self._units(pack) * self.object_bytes[pack.name] for pack in self._packs(full=False))

    def kept_bytes(self, before: int, boundary: int) -> int:
        """Return the bytes of windows and states that a boundary needs, without those that one before it needs too.

        Args:
            before: number of chunks up to the boundary before.
            boundary: number of chunks up to the boundary.
        """
        step = self.planner.boundary_tokens
        return sum(
            len(pack.needed_units(before * step, boundary * step)) * self.object_bytes[pack.name]
            for pack in self._packs(full=False)
        )

    def needs_nothing(self, boundary: int) -> bool:
        """Return whether a boundary needs neither windows nor states, as at the end of a chunk of local attention."""
        tokens = boundary * self.planner.boundary_tokens
        return all(pack.policy.first_needed_token(tokens) >= tokens for pack in self._packs(full=False))

    def _packs(self, *, full: bool) -> list[Pack]:
        return [pack for pack in self.planner.packs if (pack.policy.kind == "full") is full]

    def _units(self, pack: Pack) -> int:
        return 1 if pack.policy.kind == "state" else self.planner.boundary_tokens // pack.unit_tokens


class SampledTier:
    """One tier, which serves one path after the other.

    Args:
        capacity_bytes: of the real tier.
        placement: not ``everything``. Its objects are not touched together, so a sample of them tells too little.
        rate: part of the chunks that are sampled.
        max_objects: limit on the number of objects, for the memory that they take here.
        max_kept: limit on the number of kept boundaries to remember.
    """

    def __init__(
        self,
        weights: PathWeights,
        capacity_bytes: int,
        placement: PlacementPolicy,
        eviction: EvictionPolicy,
        rate: float,
        max_objects: int,
        max_kept: int,
    ) -> None:
        self._weights = weights
        self._some_need_nothing = any(pack.policy.kind == "chunked" for pack in weights.planner.packs)
        self._with_spares = placement != "kept"
        self._chunk_weight = round(weights.chunk_bytes / rate)
        self._spare_weight = round(weights.spare_bytes / rate)
        self._planner = _planner_of_points(full=self._chunk_weight > 0, others=self._spare_weight > 0)
        self._packs = {pack.policy.kind: pack for pack in self._planner.packs}
        self._tier = BoundedTier(capacity_bytes, eviction, max_objects)
        self._forgot_too_early = False
        self._history = BoundaryHistory(max_kept)
        self._worth = EndWorth(weights.planner, weights.object_bytes)

    @property
    def overflowed(self) -> bool:
        """True if a limit of the memory has made the estimate too low."""
        return self._forgot_too_early or self._tier.overflowed

    def forget(self, name: int) -> None:
        """Note that no later sample has the boundary of this name as a point, unless it is a sampled one."""
        self._forgot_too_early |= self._tier.holds(_name("state", name))

    def keeps(self, name: int) -> bool:
        """Return whether some path keeps the boundary of this name."""
        return self._history.is_shared(name) is not None

    def serve(self, path: PathSample) -> int:
        """Serve a path, and return the number of chunks that are hits."""
        ends_are_spare = self._with_spares and self._ends_are_spare(path)
        rule = KeepBoundaries(
            self._planner,
            path.prompt_points + 1,
            path.names,
            self._history,
            with_spares=self._with_spares,
            seen=path.seen_points,
            ends_are_spare=ends_are_spare,
        )
        flags: Flags = {kind: self._flags(kind, path) for kind in self._packs}
        inferred: set[int] = set()
        if self._with_spares and "state" in flags:
            inferred = self._inferred_spares(path, flags["state"], ends_are_spare)
        for point in inferred:
            flags["state"][point] = True
        found = self._search(flags, path.prompt_points)
        loads = found.usable_tokens  # points, which need no touch before their load
        self._touch(path, (touch for touch in rule.start(found) if touch.unit >= loads))
        self._load(path, loads)
        self._store(path, loads, inferred, rule)
        self._touch(path, rule.touches(len(path.names)))
        return path.boundaries[loads - 1] if loads else 0

    def _flags(self, kind: str, path: PathSample) -> list[bool]:
        holds = self._tier.holds
        if kind == "full":  # a chunk that is not sampled is as present as the sampled chunks before it
            facts = zip(path.names, path.sampled, path.known, strict=True)
            return [holds(_name("full", name)) if sampled else known for name, sampled, known in facts]
        present = [holds(_name(kind, name)) for name in path.names]
        if self._some_need_nothing:
            present = [
                flag or self._weights.needs_nothing(boundary)
                for flag, boundary in zip(present, path.boundaries, strict=True)
            ]
        return present

    def _ends_are_spare(self, path: PathSample) -> bool:
        """Compare the path with earlier ones, as :meth:`PathPlacement.begin` does."""
        depths = [boundary * self._weights.planner.boundary_tokens for boundary in (0, *path.boundaries)]
        resumable = min(path.seen_points, path.prompt_points)
        shared, kept = self._history.deepest_kept(path.names[:resumable])
        self._worth.add(depths[-1], depths[path.prompt_points], depths[shared], depths[kept], depths[resumable])
        return not self._worth.ends_pay

    def _follows(self, name: int, ends_are_spare: bool) -> bool:
        """Return whether the object of a boundary is followed although its point is not sampled."""
        shared = self._history.is_shared(name)
        return shared is not None and (shared or not ends_are_spare)

    def _inferred_spares(self, path: PathSample, present: Sequence[bool], ends_are_spare: bool) -> set[int]:
        """Return the points whose spare object is present, but not followed because the point is not sampled.

        Such an object was stored together with the one of the sampled point before it, and is present if that one is.
        Without a sampled point before it, it is present until the tier evicts.
        """
        found: set[int] = set()
        inferred = not self._tier.traffic.evicted_objects
        for point, (sampled, known) in enumerate(zip(path.sampled, path.known, strict=True)):
            if sampled:
                inferred = present[point]
            elif known and inferred and not present[point] and not self._follows(path.names[point], ends_are_spare):
                found.add(point)
        return found

    def _search(self, flags: Flags, limit: int) -> PrefixDepth:
        search = self._planner.search(0, limit)
        try:
            asked: tuple[UnitRange, ...] = next(search)
            while True:
                asked = search.send([flags[pack.policy.kind][units.start : units.stop] for pack, units in asked])
        except StopIteration as end:
            found: PrefixDepth = end.value
            return found

    def _load(self, path: PathSample, usable: int) -> None:
        tier = self._tier
        for kind, pack in self._packs.items():
            needed = pack.needed_units(0, usable)
            names = [_name(kind, path.names[point]) for point in reversed(needed)]
            tier.load([name for name in names if tier.holds(name)], 0)
            if kind == "state" and names and not tier.holds(names[0]):
                # A spare object that was not followed. It has been used, so it is spare no longer.
                tier.store(names[0], self._weights.kept_bytes(0, path.boundaries[usable - 1]), spare=False)

    def _store(self, path: PathSample, usable: int, inferred: Collection[int], rule: PathRule) -> None:
        before = path.boundaries[usable - 1] if usable else 0
        for point in range(usable, len(path.names)):
            for kind, pack in self._packs.items():
                name = _name(kind, path.names[point])
                if self._tier.holds(name) or (kind == "state" and point in inferred):
                    continue
                storing = rule.storing(pack, point)
                if kind == "state" and storing is Storing.KEPT:
                    weight = self._weights.kept_bytes(before, path.boundaries[point])
                    before = path.boundaries[point]
                elif storing is Storing.NOT or not path.sampled[point]:
                    continue
                else:
                    weight = self._chunk_weight if kind == "full" else self._spare_weight
                self._tier.store(name, weight, spare=storing is Storing.SPARE)

    def _touch(self, path: PathSample, touches: Iterable[Touch]) -> None:
        for pack, point, spare in touches:
            self._tier.touch(_name(pack.policy.kind, path.names[point]), spare=spare)


def _name(kind: str, name: int) -> int:
    return name if kind == "full" else ~name


def _planner_of_points(*, full: bool, others: bool) -> HybridOffloadPlanner:
    policies = [HitPolicy("full")] * full + [HitPolicy("state")] * others
    groups = [GroupGeometry(index, 1, policy) for index, policy in enumerate(policies)]
    return HybridOffloadPlanner.build(groups, hash_block_size=1, max_model_len=1 << 40, hybrid_chunk_size=1)
