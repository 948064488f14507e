"""The simulation of tiers. Requests are served one after the other, each at once.

Per request: the planner searches for the deepest usable boundary among the objects of each tier. The best tier loads
the objects that this boundary needs. The others of the prompt are stored in the order in which an engine computes them.
At the end the objects are touched.

These facts of a real engine are left out:

* its own prefix cache, which serves part of the hits without a tier;
* generated tokens, because a trace has ids for the prompt only;
* requests at the same time: neither can load objects that the other one has yet to store;
* steps of more tokens than a chunk, after which the engine hands over fewer recurrent states;
* tokens behind the last whole block of the trace. The id of a part of a block stands for one prompt, and no longer
  prompt has it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from offload_core.planning.placement import Touch
from offload_core.planning.planner import HybridOffloadPlanner, PrefixDepth, UnitRange
from offload_core.simulation.bounded_tier import Traffic
from offload_core.simulation.object_names import ObjectNames
from offload_core.simulation.path_rules import MakePathRule, Storing
from offload_core.simulation.tier_stack import TierCounts, TierStack
from offload_core.simulation.trace import Request


@dataclass
class SimulationResult:
    """Counts over all requests so far.

    Args:
        tiers: by the tier's name.
    """

    tiers: dict[str, TierCounts]
    requests: int = 0
    input_tokens: int = 0
    hit_tokens: int = 0
    refused_requests: int = 0
    """Requests longer than ``max_model_len``. They are in no other count."""

    @property
    def traffic(self) -> Traffic:
        """The traffic of the only tier."""
        (counts,) = self.tiers.values()
        return counts.traffic

    @property
    def hit_rate(self) -> float:
        """Hit tokens per input token."""
        return self.hit_tokens / self.input_tokens if self.input_tokens else 0.0


class Simulation:
    """Tiers that serve one request after the other.

    Args:
        object_bytes: of one object, by the name of its pack, on all ranks together.
        block_tokens: tokens per id of the trace.
        new_path: makes the rule of each path.
    """

    def __init__(
        self,
        planner: HybridOffloadPlanner,
        object_bytes: Mapping[str, int],
        block_tokens: int,
        stack: TierStack,
        new_path: MakePathRule,
    ) -> None:
        self._planner = planner
        self._names = ObjectNames(planner.packs, block_tokens)
        self._block_tokens = block_tokens
        self._object_bytes = object_bytes
        self._stack = stack
        self._new_path = new_path
        self.result = SimulationResult({tier.name: tier.counts for tier in stack.tiers})

    def serve(self, request: Request) -> None:
        """Serve the next request."""
        planner, result = self._planner, self.result
        if request.input_tokens > planner.max_model_len:
            result.refused_requests += 1
            return
        tokens = request.named_tokens(self._block_tokens)
        limit = request.loadable_tokens(self._block_tokens)
        objects = self._names.objects(request.ids, tokens)
        path = self._new_path(limit + 1, self._names.boundaries(request.ids, planner.boundary_tokens, tokens))
        source, found = self._stack.search(lambda holds: self._search(holds, objects, limit))
        self._touch(objects, path.start(found))
        for pack in planner.packs:
            needed = pack.needed_units(0, found.usable_tokens)
            deepest_first = objects[pack.name][needed.start : needed.stop][::-1]
            self._stack.load(source, deepest_first, self._object_bytes[pack.name])
        source.counts.hit_tokens += found.usable_tokens
        for _, index, unit in self._computed_units(objects, found.usable_tokens):
            pack = planner.packs[index]
            name = objects[pack.name][unit]
            if not self._stack.holds(name) and planner.ever_needed(pack, unit):
                storing = path.storing(pack, unit)
                if storing is not Storing.NOT:
                    self._stack.store(name, self._object_bytes[pack.name], spare=storing is Storing.SPARE)
        self._touch(objects, path.touches(tokens))
        result.requests += 1
        result.input_tokens += request.input_tokens
        result.hit_tokens += found.usable_tokens

    def _touch(self, objects: Mapping[str, Sequence[int]], touches: Iterable[Touch]) -> None:
        self._stack.touch((objects[pack.name][unit], spare) for pack, unit, spare in touches)

    def _search(
        self, holds: Callable[[int], bool], objects: Mapping[str, Sequence[int]], limit_tokens: int
    ) -> PrefixDepth:
        search = self._planner.search(0, limit_tokens)
        try:
            asked: tuple[UnitRange, ...] = next(search)
            while True:
                asked = search.send([[holds(objects[pack.name][unit]) for unit in units] for pack, units in asked])
        except StopIteration as end:
            found: PrefixDepth = end.value
            return found

    def _computed_units(self, objects: Mapping[str, Sequence[int]], computed_tokens: int) -> list[tuple[int, int, int]]:
        """Return the last token, the pack's place and the unit of all objects behind a prefix, in order."""
        return sorted(
            (pack.tokens_in(unit + 1), index, unit)
            for index, pack in enumerate(self._planner.packs)
            for unit in range(pack.units_in(computed_tokens), len(objects[pack.name]))
        )
