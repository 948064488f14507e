"""Placement: the boundaries of a path that a later prompt will probably resume from.

A *path* is the sequence of tokens of one request. Packs of full attention serve every boundary, so all their objects
are kept. Windows and recurrent states serve single boundaries, and most boundaries are never resumed from. So a few are
*kept*, and the objects that only the others need are *spare*: a tier stores them into free capacity only.

Kept boundaries of a path are:

* the *replay boundary*, the deepest one that the same prompt can resume from, since its last token is always computed;
* the *end*, the deepest boundary of all tokens, from which the next turn of a conversation resumes;
* *junctions*, where an earlier path has parted from this one. The history shows them, and a lookup does: full attention
  is found deeper than windows or states. The objects of that boundary are then stored as they are computed.

The idea is that of Marconi (Pan et al., MLSys 2025, arXiv 2411.19379): keep ends, and junctions at their second
sight. The next turn of a conversation *supersedes* the kept boundaries of the turn before: they become
spare, unless another request has come back to them.

While ends are worth less than the boundaries between (:mod:`.end_worth`), they are spare too, and junctions alone are
kept. Such traffic parts anywhere and seldom comes back to an end.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Hashable, Iterable, Sequence
from typing import Literal, NamedTuple

from offload_core.planning.end_worth import EndWorth
from offload_core.planning.packs import Pack
from offload_core.planning.planner import HybridOffloadPlanner, PrefixDepth

PlacementPolicy = Literal["kept and spare", "kept", "everything"]
"""The objects to store: kept ones, and spare ones into free capacity; only kept ones; or all of them alike."""

MAX_BOUNDARIES = 1 << 16
"""Boundaries that a history remembers, of each kind; about 10 MiB. The ones used longest ago are forgotten first."""


class Touch(NamedTuple):
    """An object to make the most recently used one, and whether it is spare from now on."""

    pack: Pack
    unit: int
    spare: bool


class BoundaryHistory:
    """Boundaries of earlier paths, by name. A name stands for all tokens up to the boundary.

    Args:
        max_boundaries: maximum number of boundaries of each kind, kept ones and ones that were only seen.
    """

    def __init__(self, max_boundaries: int = MAX_BOUNDARIES) -> None:
        self._max_boundaries = max_boundaries
        self._kept: OrderedDict[Hashable, bool] = OrderedDict()
        """Per kept boundary, whether several paths need it."""
        self._seen: OrderedDict[Hashable, bool] = OrderedDict()

    def see(self, names: Sequence[Hashable]) -> int:
        """Return the number of leading boundaries of a path that an earlier path had too, and remember them all.

        Args:
            names: of all boundaries of the path, the shallowest first.
        """
        known = next((index + 1 for index in reversed(range(len(names))) if names[index] in self._seen), 0)
        for name in reversed(names):  # so that the heads are forgotten last
            _add(self._seen, name, True, self._max_boundaries)
        return known

    def keep(self, name: Hashable, *, junction: bool) -> None:
        """Note that a path keeps a boundary. The second such path makes it shared; a junction is shared at once."""
        _add(self._kept, name, junction or name in self._kept, self._max_boundaries)

    def is_shared(self, name: Hashable) -> bool | None:
        """Return whether several paths need a boundary; ``None`` if this history does not know it as a kept one."""
        return self._kept.get(name)

    def deepest_kept(self, names: Sequence[Hashable]) -> tuple[int, int]:
        """Return the numbers of leading boundaries up to the deepest shared one, and to the deepest kept one."""
        shared = kept = 0
        for count in range(len(names), 0, -1):
            several = self._kept.get(names[count - 1])
            kept = kept or (count if several is not None else 0)
            if several:
                shared = count
                break
        return shared, kept

    def supersede(self, name: Hashable) -> None:
        """Forget a kept boundary that a deeper one has replaced."""
        self._kept.pop(name, None)

    def clear(self) -> None:
        """Forget everything."""
        self._kept.clear()
        self._seen.clear()


class PathPlacement:
    """The kept boundaries of one path.

    Args:
        prompt_tokens: number of tokens in the prompt.
    """

    def __init__(self, planner: HybridOffloadPlanner, prompt_tokens: int) -> None:
        self._planner = planner
        self.replay_tokens = planner.replay_boundary(prompt_tokens)
        """The replay boundary in tokens."""
        self._junctions: set[int] = set()
        self.ends_are_spare = False
        """True if the replay boundary and the end are spare, unless several paths have them."""

    def begin(self, names: Sequence[Hashable], history: BoundaryHistory, worth: EndWorth | None = None) -> int:
        """Return the number of leading boundaries that earlier paths had too, and tell ``history`` about the path.

        Args:
            names: of all boundaries of the prompt, the shallowest first.
            worth: learns from the path, and decides whether its ends are spare; ``None`` to keep them.
        """
        step = self._planner.boundary_tokens
        seen = history.see(names)
        if worth is not None:
            resumable = names[: min(seen, self.replay_tokens // step)]
            shared, kept = history.deepest_kept(resumable)
            worth.add(len(names) * step, self.replay_tokens, shared * step, kept * step, len(resumable) * step)
            self.ends_are_spare = not worth.ends_pay
        return seen

    @property
    def deepest_junction(self) -> int:
        """The deepest junction in tokens, or 0."""
        return max(self._junctions, default=0)

    def add_junction(self, tokens: int) -> None:
        """Keep the deepest boundary at or below ``tokens``, because several paths have it."""
        self._junctions.add(self._planner.storable_prefix(tokens))

    def find_junction(self, found: PrefixDepth, names: Sequence[Hashable], seen: int, history: BoundaryHistory) -> None:
        """Keep the boundary at which earlier paths part from this one.

        The history knows this boundary, also if the attention there was evicted. If the history does not know the
        path, the depth of full attention shows the boundary. If it is where a single earlier path ends, this path only
        continues the other one, and no junction is there. If a spare object has served the boundary, it is kept from
        now on.

        Args:
            found: the result of the lookup.
            names: of all boundaries of the path, the shallowest first, at least up to the depth of the lookup.
            seen: number of leading boundaries that earlier paths had too, by :meth:`BoundaryHistory.see`.
        """
        step = self._planner.boundary_tokens
        common = parted = min(seen * step, self.replay_tokens)
        if any(pack.policy.kind == "full" for pack in self._planner.packs):
            common = max(common, self._planner.storable_prefix(found.attention_tokens))
        shared = history.is_shared(names[common // step - 1]) if common else False
        served_by_spare = common == parted == found.usable_tokens and shared is None
        if served_by_spare or (common > found.usable_tokens and shared is not False):
            self.add_junction(common)

    def keeps(self, pack: Pack, unit: int) -> bool:
        """Return whether a kept boundary needs ``unit``.

        Each boundary behind the replay boundary is the end of the path when it is reached.
        """
        if pack.policy.kind == "full":
            return True
        if not self.ends_are_spare and (
            pack.tokens_in(unit + 1) > self.replay_tokens or unit in pack.needed_units(0, self.replay_tokens)
        ):
            return True
        return any(unit in pack.needed_units(0, boundary) for boundary in self._junctions)

    def head_touches(self, tokens: int) -> list[Touch]:
        """Return the objects of full attention up to ``tokens``, in the order of :meth:`touches`.

        Touch them when a lookup has found them: else the stores of the path's rest could evict its head.
        """
        return self._in_touch_order(self._planner.storable_prefix(tokens), (), ())

    def touches(self, tokens: int, names: Sequence[Hashable], history: BoundaryHistory) -> list[Touch]:
        """Return the objects to touch when the request has ended, in this order, and tell ``history`` about the path.

        The deepest come first, so that a prefix loses its head last. Objects that only superseded boundaries need are
        spare from now on. Objects of boundaries that the history does not know are left out: others may need them.

        Args:
            tokens: number of tokens whose objects were stored or found.
            names: of all boundaries of the path, the shallowest first, at least up to ``tokens``.
        """
        step = self._planner.boundary_tokens
        end = self._planner.storable_prefix(tokens)
        kept = {boundary for boundary in self._junctions if 0 < boundary <= end}
        superseded: list[int] = []
        if end >= self.replay_tokens:  # else the request has ended early, and its path has no end to resume from
            kept |= {self.replay_tokens, end} - {0}
            for index, name in enumerate(names[: end // step]):
                boundary = (index + 1) * step
                shared = history.is_shared(name)
                if boundary in kept or (shared is None and boundary < self.replay_tokens):
                    continue
                if shared:
                    kept.add(boundary)
                else:
                    superseded.append(boundary)
                    history.supersede(name)
        for boundary in kept:
            history.keep(names[boundary // step - 1], junction=boundary in self._junctions)
        if self.ends_are_spare:
            spare_ends = {boundary for boundary in kept if history.is_shared(names[boundary // step - 1]) is False}
            kept -= spare_ends
            superseded += spare_ends
        return self._in_touch_order(end, kept, superseded)

    def touches_of_all(self, resumed_tokens: int, tokens: int) -> list[Touch]:
        """Return the objects that were loaded or stored, in the order of :meth:`touches`, if none of them is spare.

        Args:
            resumed_tokens: the prefix that was loaded.
            tokens: number of tokens whose objects were stored or found.
        """
        end = self._planner.storable_prefix(tokens)
        touches = [
            Touch(pack, unit, False)
            for pack in self._planner.packs
            for unit in range(pack.needed_units(0, resumed_tokens).start, pack.units_in(end))
        ]
        return sorted(touches, key=_depth, reverse=True)

    def demoting_touches(self, begin_tokens: int, tokens: int) -> list[Touch]:
        """Return all objects up to ``tokens`` as spare ones, but for those of the first ``begin_tokens`` tokens."""
        return [
            touch._replace(spare=True)
            for touch in self.touches_of_all(0, tokens)
            if touch.pack.tokens_in(touch.unit + 1) > begin_tokens
        ]

    def refreshing_touches(self, boundary_tokens: int) -> list[Touch]:
        """Return the objects that a boundary needs, in the same order. For a request that stores nothing."""
        return self._in_touch_order(boundary_tokens, [boundary_tokens], [])

    def _in_touch_order(self, end: int, kept: Collection[int], superseded: Collection[int]) -> list[Touch]:
        touches: list[Touch] = []
        for pack in self._planner.packs:
            if pack.policy.kind == "full":
                touches += (Touch(pack, unit, False) for unit in range(pack.units_in(end)))
                continue
            kept_units = _needed(pack, kept)
            touches += (Touch(pack, unit, False) for unit in kept_units)
            touches += (Touch(pack, unit, True) for unit in _needed(pack, superseded) - kept_units)
        return sorted(touches, key=_depth, reverse=True)


def _needed(pack: Pack, boundaries: Iterable[int]) -> set[int]:
    return {unit for boundary in boundaries for unit in pack.needed_units(0, boundary)}


def _depth(touch: Touch) -> tuple[int, bool]:
    """Sort by depth. At the same depth full attention outlives the rest, because it serves more boundaries."""
    return touch.pack.tokens_in(touch.unit + 1), touch.pack.policy.kind != "full"


def _add(entries: OrderedDict[Hashable, bool], name: Hashable, value: bool, limit: int) -> None:
    entries[name] = value
    entries.move_to_end(name)
    if len(entries) > limit:
        entries.popitem(last=False)
