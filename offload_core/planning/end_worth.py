"""The worth of the ends of paths, compared with that of the boundaries between.

In conversations and in the steps of agents, most paths go on where an earlier one has ended. Then an end is worth far
more than any other boundary. In other traffic paths part from each other anywhere, and nobody comes back to an end.

The measure is the tokens that a path can resume per byte of windows and states. It is independent of the objects that a
tier holds: a path counts also if the boundary was evicted, or was never stored.
"""

from __future__ import annotations

from collections.abc import Mapping

from offload_core.planning.planner import HybridOffloadPlanner

MIN_PARTED_PATHS = 4
"""Ends are worth more, until so many paths have parted from an earlier one between its kept boundaries."""

WINDOW_PATHS = 1024
"""The sums never hold more paths. At this number, all paths so far count half from then on."""


class EndWorth:
    """Tokens resumed at ends and between kept boundaries, and the bytes of both, over the last paths.

    Attributes:
        object_bytes: of one object, by the name of its pack. An object of another pack counts as one byte.
    """

    def __init__(self, planner: HybridOffloadPlanner, object_bytes: Mapping[str, int] | None = None) -> None:
        self.object_bytes = object_bytes or {}
        self._packs = [pack for pack in planner.packs if pack.policy.kind != "full"]
        self.clear()

    @property
    def ends_pay(self) -> bool:
        """True if a byte of an end serves at least as many tokens as a byte of the boundaries between."""
        if self._parted < MIN_PARTED_PATHS:
            return True
        return self._end_tokens * self._between_bytes >= self._between_tokens * self._end_bytes

    def add(self, tokens: int, replay_tokens: int, shared: int, kept: int, seen: int) -> None:
        """Add a new path.

        Args:
            tokens: of its prompt.
            replay_tokens: its replay boundary.
            shared: its deepest kept boundary, in tokens, that several earlier paths have.
            kept: its deepest kept boundary that any earlier path has.
            seen: its deepest boundary that any earlier path has.
        """
        self._end_tokens += max(0, kept - shared)
        self._between_tokens += max(0, seen - kept)
        self._parted += seen > kept
        for pack in self._packs:
            nbytes = self.object_bytes.get(pack.name, 1)
            objects = max(0, pack.units_in(tokens) - pack.units_in(seen))
            of_end = min(objects, len(pack.needed_units(seen, replay_tokens)))
            self._end_bytes += of_end * nbytes
            self._between_bytes += (objects - of_end) * nbytes
        self._paths += 1
        if self._paths == WINDOW_PATHS:
            self._paths //= 2
            self._parted /= 2
            self._end_tokens /= 2
            self._between_tokens /= 2
            self._end_bytes /= 2
            self._between_bytes /= 2

    def clear(self) -> None:
        """Forget all paths."""
        self._paths = 0
        self._parted = 0.0
        self._end_tokens = self._between_tokens = 0.0
        self._end_bytes = self._between_bytes = 0.0
