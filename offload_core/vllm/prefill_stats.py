"""The statistics of each request's first scheduling, which vLLM shows to its own log only."""

from __future__ import annotations

from typing import Any


def keep_prefill_stats(engine_core: Any) -> dict[str, Any]:
    """Keep the first prefill statistics of each request from now on.

    Args:
        engine_core: the client of an engine's core, ``LLMEngine.engine_core``.

    Returns:
        The statistics by the core's own request id, filled as outputs arrive. The caller removes them.
    """
    kept: dict[str, Any] = {}
    get_output = engine_core.get_output

    def get_and_keep() -> Any:
        outputs = get_output()
        for output in outputs.outputs:
            if output.prefill_stats is not None:
                kept.setdefault(output.request_id, output.prefill_stats)
        return outputs

    engine_core.get_output = get_and_keep
    return kept
