"""vLLM's own plan of a KV cache, from wherever the installed version keeps it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from itertools import pairwise
from typing import Any

if find_spec("vllm.v1.core.kv_cache_planning") is not None:  # vLLM 0.33 and newer
    from vllm.v1.core.kv_cache_planning import (
        get_global_kv_cache_groups,
        get_kv_cache_config_from_groups,
        get_kv_cache_configs,
        get_kv_cache_groups,
    )
else:
    from vllm.v1.core.kv_cache_utils import (
        get_kv_cache_config_from_groups,
        get_kv_cache_configs,
        get_kv_cache_groups,
    )

    get_global_kv_cache_groups = None

__all__ = ["get_kv_cache_config_from_groups", "get_kv_cache_groups", "rank_configs"]


def rank_configs(vllm_config: Any, layers: Mapping[str, Any], ranks: int, nbytes: int, stages: int = 1) -> list[Any]:
    """Return every rank's plan for ``layers`` in ``nbytes`` of memory, as vLLM's engine core makes it.

    Args:
        ranks: tensor parallel workers of each pipeline stage.
        stages: pipeline stages; the layers are divided among them, in order.
    """
    names = list(layers)
    ends = [len(names) * stage // stages for stage in range(stages + 1)]
    parts = [names[first:end] for first, end in pairwise(ends)]
    specs: Sequence[dict[str, Any]] = [{name: layers[name] for name in part} for part in parts for _ in range(ranks)]
    memory = [nbytes] * len(specs)
    if get_global_kv_cache_groups is None:
        return list(get_kv_cache_configs(vllm_config, specs, memory))
    groups = get_global_kv_cache_groups(vllm_config, specs)
    return list(get_kv_cache_configs(vllm_config, specs, memory, groups))
