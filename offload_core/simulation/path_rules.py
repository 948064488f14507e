"""Rules for the objects of one path: the objects to store, and the touches at the end of its request."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from enum import Enum
from typing import Literal, Protocol, get_args

from offload_core.planning.packs import Pack
from offload_core.planning.placement import BoundaryHistory, PathPlacement, Touch
from offload_core.planning.planner import HybridOffloadPlanner, PrefixDepth

Placement = Literal["kept and spare", "kept", "everything"]
PLACEMENTS: tuple[Placement, ...] = get_args(Placement)


class Storing(Enum):
    """The way in which an object that was computed is stored."""

    KEPT = "kept"
    SPARE = "spare"
    NOT = "not"


class PathRule(Protocol):
    """Decisions about one path."""

    def start(self, found: PrefixDepth) -> None:
        """Note the result of the lookup."""

    def storing(self, pack: Pack, unit: int) -> Storing:
        """Return the way to store an object that was computed."""

    def touches(self, tokens: int) -> Iterable[Touch]:
        """Return the objects to touch at the end of the request, which has stored ``tokens`` tokens."""


MakePathRule = Callable[[int, Sequence[int]], PathRule]
"""Makes the rule of one path, from the number of its tokens and the names of its boundaries."""


def path_rules(placement: Placement, planner: HybridOffloadPlanner) -> MakePathRule:
    """Return the maker of rules for ``placement``. All paths have one history."""
    if placement == "everything":
        return lambda tokens, names: StoreEverything(planner)
    history = BoundaryHistory()
    with_spares = placement == "kept and spare"
    return lambda tokens, names: KeepBoundaries(planner, tokens, names, history, with_spares=with_spares)


class KeepBoundaries:
    """Store the objects of kept boundaries; all others are spare.

    Args:
        names: of the boundaries of the path.
        history: of all earlier paths.
        with_spares: store spare objects too, into free capacity.
    """

    def __init__(
        self,
        planner: HybridOffloadPlanner,
        prompt_tokens: int,
        names: Sequence[int],
        history: BoundaryHistory,
        *,
        with_spares: bool,
    ) -> None:
        self._path = PathPlacement(planner, prompt_tokens)
        self._names = names
        self._history = history
        self._otherwise = Storing.SPARE if with_spares else Storing.NOT

    def start(self, found: PrefixDepth) -> None:
        """See :meth:`PathRule.start`."""
        self._path.find_junction(found, self._names, self._history)

    def storing(self, pack: Pack, unit: int) -> Storing:
        """See :meth:`PathRule.storing`."""
        return Storing.KEPT if self._path.keeps(pack, unit) else self._otherwise

    def touches(self, tokens: int) -> Iterable[Touch]:
        """See :meth:`PathRule.touches`."""
        return self._path.touches(tokens, self._names, self._history)


class StoreEverything:
    """Store all objects alike. Touch the loaded ones and the stored ones, the deepest first.

    Objects of one depth are touched in the order of the planner's packs.
    """

    def __init__(self, planner: HybridOffloadPlanner) -> None:
        self._packs = planner.packs
        self._loaded_tokens = 0

    def start(self, found: PrefixDepth) -> None:
        """See :meth:`PathRule.start`."""
        self._loaded_tokens = found.usable_tokens

    def storing(self, pack: Pack, unit: int) -> Storing:
        """See :meth:`PathRule.storing`."""
        return Storing.KEPT

    def touches(self, tokens: int) -> Iterable[Touch]:
        """See :meth:`PathRule.touches`."""
        touched = [
            Touch(pack, unit, False)
            for pack in self._packs
            for unit in range(pack.needed_units(0, self._loaded_tokens).start, pack.units_in(tokens))
        ]
        return sorted(touched, key=lambda touch: touch.pack.tokens_in(touch.unit + 1), reverse=True)
