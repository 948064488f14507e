"""The live curves of an engine's tiers, as gauges: the hits at other capacities, estimated from its own prompts."""

from __future__ import annotations

import logging
import secrets
from collections.abc import Mapping, Sequence

from offload_core.config.model import OffloadConfig
from offload_core.planning.planner import HybridOffloadPlanner
from offload_core.runtime.metrics import HIT_RATIO_GAUGES, Counters
from offload_core.simulation.hit_curve import HitCurve
from offload_core.tiers.tier import Tier

logger = logging.getLogger(__name__)

_NAME_BYTES = 8
"""Bytes of a hash that name a boundary. Among a million names, two are equal once in 37 million engines."""


class LiveCurves:
    """One :class:`~offload_core.simulation.hit_curve.HitCurve` per tier with a capacity, each within 32 MiB.

    A tier has a capacity if its backend is bounded and has an option ``capacity``, as the bundled ones do. There is no
    curve for a tier that stores nothing, and none with ``placement: everything``.

    An error ends the estimates and nothing else. All calls but :meth:`start` come from one thread.
    """

    def __init__(
        self, config: OffloadConfig, planner: HybridOffloadPlanner, tiers: Sequence[Tier], counters: Counters
    ) -> None:
        self._planner = planner
        self._placement = config.settings.placement
        self._counters = counters
        one_process = config.settings.io_process != "off"
        shared = {tier.name: one_process or tier.capabilities.shared for tier in tiers if tier.capabilities.bounded}
        self._tiers = [
            (tier, capacity, shared[tier.common.name])
            for tier in config.tiers
            if tier.common.name in shared
            and (capacity := tier.capacity_bytes) is not None
            and tier.common.write_policy != "never"
            and self._placement != "everything"
        ]
        self._curves: dict[str, HitCurve] = {}
        self._shown: dict[tuple[str, str], float] = {}
        self._salt = 0

    @property
    def exist(self) -> bool:
        """True if there is a curve."""
        return bool(self._curves)

    def start(self, ranks: Sequence[Mapping[str, int]]) -> None:
        """Begin the estimates.

        Args:
            ranks: for each rank, the bytes of one object by the name of its pack. On a shared medium and in an I/O
                process, the objects of all ranks have one capacity; those of other hosts are counted too. Otherwise
                each rank has its own, and the rank with the most bytes decides.
        """
        packs = [pack.name for pack in self._planner.packs]
        if self._curves or not ranks or any(name not in sizes for sizes in ranks for name in packs):
            return
        for tier, capacity, shared in self._tiers:
            total = sum if shared else max
            sizes = {name: total(sizes[name] for sizes in ranks) for name in packs}
            self._curves[tier.common.name] = HitCurve(self._planner, sizes, capacity, self._placement, tier.eviction)
            self._show("capacity_bytes", tier.common.name, capacity)

    def add(self, hashes: Sequence[bytes], prompt_tokens: int, seen_chunks: int) -> None:
        """Add a request that has ended, and update the gauges.

        Args:
            hashes: of all chunks that its path has stored or loaded, in order.
            prompt_tokens: number of tokens in its prompt.
            seen_chunks: number of leading chunks that an earlier path had too.
        """
        if not self._curves:
            return
        try:
            salt = self._salt
            names = [int.from_bytes(chunk_hash[:_NAME_BYTES], "little") ^ salt for chunk_hash in hashes]
            prompt_chunks = min(self._planner.chunk_count(max(prompt_tokens - 1, 0)), len(names))
            for tier, curve in self._curves.items():
                curve.serve(names, prompt_tokens, prompt_chunks, min(seen_chunks, len(names)))
                self._counters.add("estimated_prompt_tokens", tier, prompt_tokens)
                for gauge, ratio in zip(HIT_RATIO_GAUGES, curve.hit_ratios(), strict=True):
                    self._show(gauge, tier, ratio)
        except Exception:
            logger.exception("the live curve has failed; its gauges stay as they are, and the engine runs on")
            self._curves.clear()
            self._tiers.clear()

    def reset(self) -> None:
        """Treat all chunks so far as ones that no later request can have."""
        self._salt = secrets.randbits(8 * _NAME_BYTES)

    def _show(self, gauge: str, tier: str, value: float) -> None:
        self._counters.add(gauge, tier, value - self._shown.get((gauge, tier), 0.0))
        self._shown[gauge, tier] = value
