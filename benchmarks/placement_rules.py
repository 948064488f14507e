"""Rules to compare placement with: the rule of vLLM's connector, and a limit that no rule exceeds."""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable, Mapping

from offload_core.planning.packs import Pack
from offload_core.planning.placement import PathPlacement, Touch
from offload_core.planning.planner import HybridOffloadPlanner, PrefixDepth
from offload_core.simulation.object_names import ObjectNames
from offload_core.simulation.path_rules import Storing
from offload_core.simulation.trace import Trace


class StockRule:
    """The rule of vLLM's OffloadingConnector at its default retention (``--prefix-cache-retention-interval 0``).

    It stores full attention, and windows and states at the replay boundary and at junctions. Nothing is spare, and
    nothing is superseded. A hit makes its objects the most recently used ones, the deepest first. New objects are in
    the order of their completion. The objects are ours: stock's own are single blocks.
    """

    def __init__(self, planner: HybridOffloadPlanner, tokens: int) -> None:
        self._path = PathPlacement(planner, tokens)

    def start(self, found: PrefixDepth) -> Iterable[Touch]:
        if found.attention_tokens > found.usable_tokens:
            self._path.add_junction(found.attention_tokens)
        return ()

    def storing(self, pack: Pack, unit: int) -> Storing:
        return Storing.KEPT if self._path.keeps(pack, unit) else Storing.NOT

    def touches(self, tokens: int) -> Iterable[Touch]:
        return ()


def best_possible_hit_tokens(
    trace: Trace, planner: HybridOffloadPlanner, object_bytes: Mapping[str, int], capacity_bytes: int | None
) -> int:
    """Return an upper bound of the hit tokens that any rule of placement and eviction can have.

    The bound is that of Belady's rule (MIN, IBM Systems Journal 1966) on boundaries: it knows all later requests. It
    keeps the chunks whose next use is nearest, and a chunk without a next use is not stored at all. Windows and states
    cost it nothing. So it solves an easier problem exactly:

    * All chunks of full attention have one size, for which the rule gives the most hits on chunks.
    * A real hit of *n* chunks finds each of them, so no rule can have more hit tokens.

    The bound is not tight: a real tier must also hold the windows or states of each boundary that it serves.

    Raises:
        ValueError: the model has no full attention, so this bound says nothing.
    """
    step = planner.boundary_tokens
    full = [pack for pack in planner.packs if pack.policy.kind == "full"]
    if not full:
        raise ValueError("the bound needs a pack of full attention")
    chunk_bytes = sum(object_bytes[pack.name] * (step // pack.unit_tokens) for pack in full)
    slots = math.inf if capacity_bytes is None else capacity_bytes // chunk_bytes
    names = ObjectNames(full, trace.block_tokens)
    paths: list[tuple[list[int], int]] = []
    for request in trace.requests:
        if request.input_tokens <= planner.max_model_len:
            path = names.boundaries(request.ids, step, request.named_tokens(trace.block_tokens))
            paths.append((path, request.loadable_tokens(trace.block_tokens) // step))
    next_uses = _next_uses(paths)
    held: dict[int, int] = {}
    """The next use of each kept chunk."""
    farthest: list[tuple[int, int, int]] = []
    hits = 0
    for (path, usable), uses in zip(paths, next_uses, strict=True):
        hits += sum(name in held for name in path[:usable])
        for depth, (name, use) in enumerate(zip(path, uses, strict=True)):
            if use == _NEVER:
                held.pop(name, None)
            else:
                held[name] = use
                heapq.heappush(farthest, (-use, -depth, name))
        while len(held) > slots:
            use, _, name = heapq.heappop(farthest)
            if held.get(name) == -use:
                del held[name]
    return hits * step


_NEVER = 1 << 60


def _next_uses(paths: list[tuple[list[int], int]]) -> list[list[int]]:
    """Return, for each chunk of each path, the number of the next request that has it, if that one can load it.

    A request that has a chunk and cannot load it computes it anew. To hold the chunk until then would gain nothing.
    """
    later: dict[int, int] = {}
    found: list[list[int]] = []
    for number in reversed(range(len(paths))):
        path, usable = paths[number]
        found.append([later.get(name, _NEVER) for name in path])
        later.update((name, number if depth < usable else _NEVER) for depth, name in enumerate(path))
    return found[::-1]
