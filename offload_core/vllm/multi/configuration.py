"""The configuration of ``WeightedMultiConnector`` as vLLM's MultiConnector takes it, and the refused connectors."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from vllm.config.kv_transfer import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

from offload_core.api.errors import ConfigError
from offload_core.config.connectors import MultiConnectorConfig, load_connectors

if TYPE_CHECKING:
    from vllm.config import VllmConfig

_ENGINE_KEYS = frozenset(item.name for item in dataclasses.fields(KVTransferConfig))
_STOCK_ONLY = {
    "HiSparseConnector": "vLLM finds it in its own MultiConnector only; use that one, or leave HiSparseConnector out",
}
"""Connectors that cannot be behind ours, with the reason and the cure."""


def multi_config(extra_config: dict[str, Any]) -> MultiConnectorConfig:
    """Return the checked configuration.

    Raises:
        ConfigError: with every problem.
    """
    config = load_connectors(extra_config, _ENGINE_KEYS)
    problems = [
        f"connectors.{place}.kv_connector: {reason}"
        for place, entry in enumerate(config.entries)
        if (reason := _STOCK_ONLY.get(entry["kv_connector"])) is not None
    ]
    if problems:
        raise ConfigError(problems)
    return config


def stock_extra_config(extra_config: dict[str, Any]) -> dict[str, Any]:
    """Return ``kv_connector_extra_config`` without the keys that vLLM does not know."""
    return {"connectors": list(multi_config(extra_config).entries)}


def stock_transfer_config(transfer_config: KVTransferConfig) -> KVTransferConfig:
    """Return a copy of the engine's transfer configuration as vLLM's MultiConnector takes it."""
    extra_config = stock_extra_config(transfer_config.kv_connector_extra_config)
    stock = copy.copy(transfer_config)
    stock.kv_connector_extra_config = extra_config
    return stock


def stock_config(vllm_config: VllmConfig) -> VllmConfig:
    """Return a copy of the engine's configuration as vLLM's MultiConnector takes it.

    Raises:
        ConfigError: with every problem; a connector that cannot serve hybrid models is one.
    """
    stock = copy.copy(vllm_config)
    stock.kv_transfer_config = stock_transfer_config(vllm_config.kv_transfer_config)
    if not vllm_config.scheduler_config.disable_hybrid_kv_cache_manager:
        problems = list(_without_hybrid_support(vllm_config.kv_transfer_config))
        if problems:
            raise ConfigError(problems)
    return stock


def _without_hybrid_support(transfer_config: KVTransferConfig) -> Iterator[str]:
    config = multi_config(transfer_config.kv_connector_extra_config)
    for place, (name, entry) in enumerate(zip(config.names, config.entries, strict=True)):
        child = KVTransferConfig(**{"engine_id": transfer_config.engine_id, **entry})
        if not KVConnectorFactory.supports_hma_config(child):
            yield (
                f"connectors.{place}: {name!r} ({entry['kv_connector']}) cannot serve hybrid models, since it does not "
                f"implement vLLM's SupportsHMA; remove it, or start vLLM with --disable-hybrid-kv-cache-manager "
                f"(then windows are kept as full attention, and models with recurrent states do not start)"
            )
