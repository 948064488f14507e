"""The plugin that vLLM loads at its start: it registers the short name of our tier for vLLM's own tiering."""

from __future__ import annotations

import logging

logger = logging.getLogger(__name__)

TIER = "OffloadCoreTier"
MODULE = "offload_core.elsewhere.vllm_tiering"


def register() -> None:
    """Register :class:`~offload_core.elsewhere.vllm_tiering.OffloadCoreTier`, so that no ``module_path`` is needed.

    vLLM calls this in each of its processes, whether or not anything of ours is configured. So nothing of ours is
    imported here, and no error leaves: a vLLM without this registry starts as before.
    """
    try:
        from vllm.v1.kv_offload.tiering.factory import SecondaryTierFactory

        SecondaryTierFactory.register_tier(TIER, MODULE, TIER)
    except ValueError as error:  # vLLM may load its plugins twice
        logger.debug("the tier %s is not registered again: %s", TIER, error)
    except Exception as error:
        logger.debug("this vLLM takes no tiers by name: %s; use module_path", error)
