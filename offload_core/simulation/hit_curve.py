"""The live curve: the hits that a bounded tier would have at several capacities, estimated while an engine runs.

Each request's path is sampled (:mod:`offload_core.simulation.path_sample`), and one simulated tier per capacity serves
the sample. The number of sampled chunks in the largest tier is fixed, which fixes the rate: SHARDS with a fixed rate.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from offload_core.api.eviction_order import EvictionPolicy
from offload_core.planning.placement import PlacementPolicy
from offload_core.planning.planner import HybridOffloadPlanner
from offload_core.simulation.path_sample import PathSampler
from offload_core.simulation.sampled_tier import PathWeights, SampledTier

FACTORS = (0.5, 1, 2, 4)
"""The capacities of a curve, as multiples of the tier's own."""
MAX_SAMPLES = 4096
"""Sampled chunks in the tier of the largest capacity."""
MAX_KEPT = 12288
"""Kept boundaries in the tier of the largest capacity, and nearly as many paths."""
MAX_MEMORY_BYTES = 32 << 20
"""Limit on the memory of one curve."""
WINDOW_REQUESTS = 32768
"""The number of counted requests at which all of them begin to count half."""


class HitCurve:
    """An estimate of the hit ratio of one tier, at :data:`FACTORS` times its capacity.

    Its results are those of :class:`offload_core.simulation.simulator.Simulation` on the same requests, without those
    longer than ``max_model_len``. It takes at most :data:`MAX_MEMORY_BYTES`. It is not thread-safe.

    Args:
        object_bytes: of one object, by the name of its pack, on all ranks that share the capacity.
        placement: not ``everything``, for which there is no estimate.
        max_samples: for tests; see :data:`MAX_SAMPLES`.
        max_kept: for tests; see :data:`MAX_KEPT`.
    """

    def __init__(
        self,
        planner: HybridOffloadPlanner,
        object_bytes: Mapping[str, int],
        capacity_bytes: int,
        placement: PlacementPolicy,
        eviction: EvictionPolicy,
        max_samples: int = MAX_SAMPLES,
        max_kept: int = MAX_KEPT,
    ) -> None:
        weights = PathWeights(planner, dict(object_bytes))
        largest = max(FACTORS)
        sampled_bytes = weights.chunk_bytes or weights.spare_bytes
        self.rate = min(1.0, max_samples * sampled_bytes / (largest * capacity_bytes))
        """Part of the chunks that are sampled."""
        self._chunk_tokens = planner.boundary_tokens
        self._paths = PathSampler(self.rate, max_kept)
        self._keeps_boundaries = weights.spare_bytes > 0
        self._tiers = [
            SampledTier(
                weights,
                int(capacity_bytes * factor),
                placement,
                eviction,
                self.rate,
                max_objects=2 * max_samples + max_kept,
                max_kept=max_kept,
            )
            for factor in FACTORS
        ]
        self._requests = 0
        self._prompt_tokens = 0.0
        self._hit_tokens = [0.0] * len(FACTORS)

    def serve(self, names: Sequence[int], prompt_tokens: int, prompt_chunks: int, seen_chunks: int) -> None:
        """Add a request that has ended.

        Args:
            names: of all boundaries of its path, the shallowest first: numbers of 64 bits, evenly distributed.
            prompt_tokens: number of tokens in its prompt.
            prompt_chunks: number of leading boundaries from which its prompt can be resumed.
            seen_chunks: number of leading boundaries that an earlier path had too.
        """
        path = self._paths.sample(names, prompt_chunks, seen_chunks)
        for place, tier in enumerate(self._tiers):
            self._hit_tokens[place] += tier.serve(path) * self._chunk_tokens
        if self._keeps_boundaries:
            for name in path.names:
                self._mark(name)
        self._prompt_tokens += prompt_tokens
        self._requests += 1
        if self._requests == WINDOW_REQUESTS:
            self._requests //= 2
            self._prompt_tokens /= 2
            self._hit_tokens = [tokens / 2 for tokens in self._hit_tokens]

    def _mark(self, name: int) -> None:
        forgotten = self._paths.mark(name, kept=any(tier.keeps(name) for tier in self._tiers))
        if forgotten is not None:
            for tier in self._tiers:
                tier.forget(forgotten)

    def hit_ratios(self) -> list[float]:
        """Return the hit tokens per prompt token, for each of :data:`FACTORS`.

        It is NaN for a capacity at which the requests keep more boundaries than the curve can hold.
        """
        total = self._prompt_tokens
        return [
            float("nan") if tier.overflowed else tokens / total if total else 0.0
            for tier, tokens in zip(self._tiers, self._hit_tokens, strict=True)
        ]
