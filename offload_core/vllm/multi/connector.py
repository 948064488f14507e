"""``WeightedMultiConnector``: the class that vLLM loads, one instance in the scheduler and one in each worker.

It is vLLM's MultiConnector, which forwards all calls to all connectors. Only the choice is different.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorHandshakeMetadata, KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats
from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiConnector, MultiKVConnectorStats

from offload_core.runtime.metrics import CONNECTOR_COUNTERS, CONNECTOR_GAUGES, Counters
from offload_core.vllm.compat import adapt_to_installed_vllm
from offload_core.vllm.metrics import HybridOffloadStats
from offload_core.vllm.multi.configuration import (
    multi_config,
    stock_config,
    stock_extra_config,
    stock_transfer_config,
)
from offload_core.vllm.multi.messages import MultiHandshakeMetadata, parts_of
from offload_core.vllm.multi.metrics import OWN_STATS, ConnectorPromMetrics, WeightedMultiPromMetrics
from offload_core.vllm.multi.questions import Questions

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.config.kv_transfer import KVTransferConfig
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks, KVCacheManager
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

logger = logging.getLogger(__name__)


@adapt_to_installed_vllm
class WeightedMultiConnector(MultiConnector):
    """Loads each request's prefix from the connector with the most matched tokens times weight; stores go to all.

    Raises at construction:
        ConfigError: the configuration has problems, or a connector cannot serve hybrid models.
    """

    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig) -> None:
        transfer_config = vllm_config.kv_transfer_config
        config = multi_config(transfer_config.kv_connector_extra_config)
        super().__init__(stock_config(vllm_config), role, kv_cache_config)
        self._counters = Counters(CONNECTOR_COUNTERS, CONNECTOR_GAUGES)
        self._questions = Questions(config, self._connectors, self._requests_to_connector, self._counters)
        # The policy is one of the whole engine. The scheduler reads it after the connector has been built.
        policies = {child.kv_load_failure_policy for child in self._ktc_kv_transfer_config}
        if "recompute" in policies and transfer_config.kv_load_failure_policy != "recompute":
            logger.info("setting kv_load_failure_policy to 'recompute', since one of the connectors needs it")
            transfer_config.kv_load_failure_policy = "recompute"

    # Configuration: vLLM's MultiConnector reads it in several places, and does not know our keys

    @classmethod
    def _get_connector_classes_and_configs(cls, vllm_config: VllmConfig) -> list[tuple[Any, VllmConfig]]:
        classes_and_configs: list[tuple[Any, VllmConfig]] = super()._get_connector_classes_and_configs(
            stock_config(vllm_config)
        )
        return classes_and_configs

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:
        """Return whether any connector requires piecewise CUDA graphs."""
        return bool(super().requires_piecewise_for_cudagraph(stock_extra_config(extra_config)))

    @classmethod
    def all_children_support_hma(cls, kv_transfer_config: KVTransferConfig) -> bool:
        """Return whether every connector can serve hybrid models."""
        return bool(super().all_children_support_hma(stock_transfer_config(kv_transfer_config)))

    @classmethod
    def supports_sleep_mode(cls, kv_transfer_config: KVTransferConfig) -> bool:
        """Return whether every connector can follow sleep mode; only vLLM 0.33 and newer ask."""
        return bool(super().supports_sleep_mode(stock_transfer_config(kv_transfer_config)))

    # Both halves

    def get_kv_connector_stats(self) -> KVConnectorStats | None:
        """Return the statistics of all connectors, and on the scheduler our own counts, since the last call."""
        stats = super().get_kv_connector_stats()
        counts = self._counters.take()
        if counts:
            stats = stats or MultiKVConnectorStats()
            stats[OWN_STATS] = HybridOffloadStats.from_counts(counts)
        return stats

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> KVConnectorStats | None:
        """Rebuild statistics from their serialised form. Those of classes that vLLM does not know are left out."""
        if data is None:
            return MultiKVConnectorStats()
        known = {
            name: item
            for name, item in data.items()
            if name != OWN_STATS and (isinstance(item, KVConnectorStats) or _is_registered(name))
        }
        stats = super().build_kv_connector_stats(known)
        if (own := data.get(OWN_STATS)) is not None:
            stats[OWN_STATS] = own if isinstance(own, HybridOffloadStats) else HybridOffloadStats(own)
        return stats

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: VllmConfig,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> KVConnectorPromMetrics:
        """Register the metrics of all connectors and our own. Connectors of one kind share theirs."""
        arguments = (metric_types, labelnames, per_engine_labelvalues)
        shown: dict[str, KVConnectorPromMetrics] = {OWN_STATS: ConnectorPromMetrics(vllm_config, *arguments)}
        by_kind: dict[Any, KVConnectorPromMetrics | None] = {}
        for connector_cls, child_config in cls._get_connector_classes_and_configs(vllm_config):
            kind = connector_cls.build_prom_metrics.__func__
            if kind not in by_kind:
                by_kind[kind] = connector_cls.build_prom_metrics(child_config, *arguments)
            if (metrics := by_kind[kind]) is not None:
                shown[connector_cls.__name__] = metrics
        return WeightedMultiPromMetrics(vllm_config, *arguments, shown)

    # Worker half

    def get_handshake_metadata(self) -> KVConnectorHandshakeMetadata | None:
        """Return the metadata of all connectors; vLLM's MultiConnector sends those of the first one only."""
        parts = tuple(connector.get_handshake_metadata() for connector in self._connectors)
        return MultiHandshakeMetadata(parts) if any(part is not None for part in parts) else None

    def get_kv_connector_kv_cache_events(self) -> Any:
        """Return the KV cache events of all connectors in one container, the first one's."""
        containers = [connector.get_kv_connector_kv_cache_events() for connector in self._connectors]
        first, *others = [container for container in containers if container is not None] or [None]
        for other in others:
            first.add_events(other.get_all_events())
        return first

    # Scheduler half

    def set_xfer_handshake_metadata(self, metadata: dict[int, KVConnectorHandshakeMetadata]) -> None:
        """Give each connector its part of the workers' metadata."""
        self._set_handshake(metadata, lambda connector, parts: connector.set_xfer_handshake_metadata(parts))

    def set_xfer_handshake_metadata_pp_aware(
        self, metadata: dict[tuple[int, int], KVConnectorHandshakeMetadata]
    ) -> None:
        """Give each connector its part of the workers' metadata."""
        self._set_handshake(metadata, lambda connector, parts: connector.set_xfer_handshake_metadata_pp_aware(parts))

    def _set_handshake(self, metadata: dict[Any, Any], give: Callable[[Any, dict[Any, Any]], None]) -> None:
        for place, connector in enumerate(self._connectors):
            if parts := parts_of(metadata, place):
                give(connector, parts)

    def bind_kv_cache_manager(self, kv_cache_manager: KVCacheManager) -> None:
        """Give the engine's block pool to all connectors, and use it to see room for loads."""
        super().bind_kv_cache_manager(kv_cache_manager)
        block_sizes = [group.kv_cache_spec.block_size for group in self._kv_cache_config.kv_cache_groups]
        self._questions.bind(kv_cache_manager.block_pool, block_sizes)

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int | None, bool]:
        """Return the offer of the connector with the most tokens times weight (``None``: ask again)."""
        return self._questions.ask(request, num_computed_tokens)

    def update_state_after_alloc(self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int) -> None:
        """Tell the chosen connector to load, and all others that they do not."""
        self._questions.blocks_allocated(request, blocks, num_external_tokens)
        super().update_state_after_alloc(request, blocks, num_external_tokens)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> Any:
        """Return this step's work of all connectors."""
        self._questions.ran(scheduler_output.num_scheduled_tokens.keys())
        return super().build_connector_meta(scheduler_output)

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        """Take the workers' reports."""
        self._questions.loads_ended(connector_output.finished_recving or (), connector_output.failed_recving or ())
        super().update_connector_output(connector_output)

    def request_finished(self, request: Request, blocks: list[int]) -> tuple[bool, dict[str, Any] | None]:
        """Forget a request on an engine without the hybrid KV cache manager."""
        self._questions.request_ended(request.request_id)
        finished: tuple[bool, dict[str, Any] | None] = super().request_finished(request, blocks)
        return finished

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Forget a request."""
        self._questions.request_ended(request.request_id)
        finished: tuple[bool, dict[str, Any] | None] = super().request_finished_all_groups(request, block_ids)
        return finished


def _is_registered(name: str) -> bool:
    try:
        KVConnectorFactory.get_connector_class_by_name(name)
    except ValueError:
        return False
    return True


# A connector that is itself one of several is found by this name, see offload_core.vllm.connector.
with contextlib.suppress(ValueError):  # a reload of this module has registered it already
    KVConnectorFactory.register_connector(
        "WeightedMultiConnector", "offload_core.vllm.multi.connector", "WeightedMultiConnector"
    )
