"""Rules for the objects of one path: the objects to store, and the touches at the end of its request."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from enum import Enum
from typing import Protocol, get_args

from offload_core.planning.end_worth import EndWorth
from offload_core.planning.packs import Pack
from offload_core.planning.placement import BoundaryHistory, PathPlacement, PlacementPolicy, Touch
from offload_core.planning.planner import HybridOffloadPlanner, PrefixDepth

PLACEMENTS: tuple[PlacementPolicy, ...] = get_args(PlacementPolicy)


class Storing(Enum):
    """The way in which an object that was computed is stored."""

    KEPT = "kept"
    SPARE = "spare"
    NOT = "not"


class PathRule(Protocol):
    """Decisions about one path."""

    def start(self, found: PrefixDepth) -> Iterable[Touch]:
        """Note the result of the lookup, and return the objects to touch at once."""

    def storing(self, pack: Pack, unit: int) -> Storing:
        """Return the way to store an object that was computed."""

    def touches(self, tokens: int) -> Iterable[Touch]:
        """Return the objects to touch at the end of the request, which has stored ``tokens`` tokens."""


MakePathRule = Callable[[int, Sequence[int]], PathRule]
"""Makes the rule of one path, from the number of its tokens and the names of its boundaries."""


def path_rules(
    placement: PlacementPolicy, planner: HybridOffloadPlanner, object_bytes: Mapping[str, int]
) -> MakePathRule:
    """Return the maker of rules for ``placement``. All paths have one history.

    Args:
        object_bytes: of one object, by the name of its pack.
    """
    if placement == "everything":
        return lambda tokens, names: StoreEverything(planner, tokens)
    history = BoundaryHistory()
    with_spares = placement == "kept and spare"
    worth = EndWorth(planner, object_bytes) if with_spares else None
    return lambda tokens, names: KeepBoundaries(planner, tokens, names, history, with_spares=with_spares, worth=worth)


class KeepBoundaries:
    """Store the objects of kept boundaries; all others are spare.

    Args:
        names: of the boundaries of the path.
        history: of all earlier paths.
        with_spares: store spare objects too, into free capacity.
        worth: learns from the path, and decides whether its ends are spare; ``None`` to keep them.
        seen: number of leading boundaries that earlier paths had too; by default the history tells.
        ends_are_spare: the decision, if ``seen`` is given.
    """

    def __init__(
        self,
        planner: HybridOffloadPlanner,
        prompt_tokens: int,
        names: Sequence[int],
        history: BoundaryHistory,
        *,
        with_spares: bool,
        worth: EndWorth | None = None,
        seen: int | None = None,
        ends_are_spare: bool = False,
    ) -> None:
        self._path = PathPlacement(planner, prompt_tokens)
        self._path.ends_are_spare = ends_are_spare
        self._names = names
        self._history = history
        self._worth = worth
        self._seen = seen
        self._otherwise = Storing.SPARE if with_spares else Storing.NOT

    def start(self, found: PrefixDepth) -> Iterable[Touch]:
        """See :meth:`PathRule.start`."""
        seen = self._path.begin(self._names, self._history, self._worth) if self._seen is None else self._seen
        self._path.find_junction(found, self._names, seen, self._history)
        return self._path.head_touches(found.attention_tokens)

    def storing(self, pack: Pack, unit: int) -> Storing:
        """See :meth:`PathRule.storing`."""
        return Storing.KEPT if self._path.keeps(pack, unit) else self._otherwise

    def touches(self, tokens: int) -> Iterable[Touch]:
        """See :meth:`PathRule.touches`."""
        return self._path.touches(tokens, self._names, self._history)


class StoreEverything:
    """Store all objects alike. Touch the loaded ones and the stored ones."""

    def __init__(self, planner: HybridOffloadPlanner, prompt_tokens: int) -> None:
        self._path = PathPlacement(planner, prompt_tokens)
        self._loaded_tokens = 0

    def start(self, found: PrefixDepth) -> Iterable[Touch]:
        """See :meth:`PathRule.start`."""
        self._loaded_tokens = found.usable_tokens
        return self._path.head_touches(found.attention_tokens)

    def storing(self, pack: Pack, unit: int) -> Storing:
        """See :meth:`PathRule.storing`."""
        return Storing.KEPT

    def touches(self, tokens: int) -> Iterable[Touch]:
        """See :meth:`PathRule.touches`."""
        return self._path.touches_of_all(self._loaded_tokens, tokens)
