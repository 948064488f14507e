"""The metrics of a live curve, as vLLM shows them."""

from __future__ import annotations

from offload_core.runtime.metrics import HIT_RATIO_GAUGES
from tests.support.metrics_page import lines

Ratios = tuple[float, float, float, float]
"""Hit ratios at half, one, two and four times the capacity."""


def shown(
    ratios: Ratios, tier: str = "nvme", engine: str = "0", tokens: int = 5000, capacity: int = 200 * 1024**3
) -> str:
    """Return the metrics of one tier."""
    values = {
        "capacity_bytes": float(capacity),
        "estimated_prompt_tokens_total": float(tokens),
        **dict(zip(HIT_RATIO_GAUGES, ratios, strict=True)),
    }
    return "# HELP vllm:hybrid_offload_capacity_bytes offload-core: …\n" + lines(values, tier, engine)
