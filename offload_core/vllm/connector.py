"""``HybridOffloadConnector``: the class that vLLM loads, one instance in the scheduler and one in each worker."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    SupportsHMA,
)

from offload_core.api.errors import ConfigError
from offload_core.config.loading import load_config
from offload_core.transfer.write_policy import nothing_stored_problem
from offload_core.vllm.compat import cache_hit_source, for_this_engine, version_problem
from offload_core.vllm.metadata import StepMetadata, StepReport, WorkerIdentity
from offload_core.vllm.metrics import HybridOffloadPromMetrics, HybridOffloadStats
from offload_core.vllm.model.identity import (
    build_planner,
    engine_identity,
    hash_seed_problem,
    misaligned_states_problem,
)
from offload_core.vllm.scheduler.half import SchedulerHalf
from offload_core.vllm.worker.half import WorkerHalf

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

logger = logging.getLogger(__name__)


@for_this_engine
class HybridOffloadConnector(KVConnectorBase_V1, SupportsHMA):
    """Offloads the KV cache of hybrid models to the tiers named in ``kv_connector_extra_config``.

    Raises at construction:
        ConfigError: every problem of the configuration; also an engine that only stores, on tiers that never do.
        PlanError: the model or chunk size cannot be offloaded.
    """

    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        transfer_config = vllm_config.kv_transfer_config
        config = load_config(transfer_config.kv_connector_extra_config)
        planner = build_planner(vllm_config, kv_cache_config, config.settings.hybrid_chunk_size)
        self._scheduler_half: SchedulerHalf | None = None
        self._worker_half: WorkerHalf | None = None
        if role == KVConnectorRole.WORKER:
            self._worker_half = WorkerHalf(vllm_config, kv_cache_config, config, planner)
            return
        # A failed load is a miss, never a failed request (invariant I5). The scheduler reads this after the connector
        # has been built; vLLM's own default is "fail".
        if transfer_config.kv_load_failure_policy != "recompute":
            logger.info("setting kv_load_failure_policy to 'recompute': a failed load must not fail its request")
            transfer_config.kv_load_failure_policy = "recompute"
        loads, stores = transfer_config.is_kv_consumer, transfer_config.is_kv_producer
        nothing_stored = nothing_stored_problem(tier.common.write_policy for tier in config.tiers) if stores else None
        if nothing_stored is not None:
            if not loads:
                raise ConfigError([nothing_stored])
            stores = False
        problems = (
            nothing_stored,
            version_problem(),
            hash_seed_problem(vllm_config),
            misaligned_states_problem(vllm_config, kv_cache_config),
        )
        for warning in (*planner.warnings, *problems):
            if warning is not None:
                logger.warning("%s", warning)
        identity = engine_identity(vllm_config, kv_cache_config)
        self._scheduler_half = SchedulerHalf(
            config,
            planner,
            identity,
            vllm_config.parallel_config.world_size,
            kv_cache_config.num_blocks,
            loads=loads,
            stores=stores,
        )

    # Both halves

    def shutdown(self) -> None:
        """Finish stores within ``shutdown_timeout_seconds`` and let go of the tiers."""
        for half in (self._worker_half, self._scheduler_half):
            if half is not None:
                half.shutdown()

    def get_kv_connector_stats(self) -> HybridOffloadStats | None:
        """Return this half's counts since the last call."""
        half = self._scheduler_half or self._worker_half
        counts = half.counters.take() if half is not None else {}
        return HybridOffloadStats.from_counts(counts) if counts else None

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> HybridOffloadStats:
        """Rebuild statistics from their serialised form."""
        return HybridOffloadStats(data or {})

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: VllmConfig,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> HybridOffloadPromMetrics:
        """Register the Prometheus counters."""
        return HybridOffloadPromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    # Worker half

    @property
    def _worker(self) -> WorkerHalf:
        assert self._worker_half is not None, "called on the scheduler half"
        return self._worker_half

    @property
    def _step(self) -> StepMetadata:
        metadata = self._get_connector_metadata()
        assert isinstance(metadata, StepMetadata)
        return metadata

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Build the canonical caches from vLLM's tensors and open the tiers."""
        self._worker.register_kv_caches(kv_caches)

    def get_handshake_metadata(self) -> KVConnectorHandshakeMetadata | None:
        """Tell the scheduler half what this worker's bytes mean."""
        return WorkerIdentity(self._worker.layout)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Start this step's loads; they end between steps."""
        self._worker.start_loads(self._step)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing to wait for: a request runs only after its load has ended."""

    def save_kv_layer(self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any) -> None:
        """Nothing to do per layer: whole blocks are stored after the forward pass."""

    def wait_for_save(self) -> None:
        """Copy the blocks that this step has completed to staging."""
        self._worker.store(self._step)

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        """Report loads that have ended; failed ones by request, so that any group geometry can recompute.

        One of which the engine uses a part is none of the failed ones: the blocks that it did not fill are reported, in
        the same step, by :meth:`get_block_ids_with_load_errors`.
        """
        ended, failed = self._worker.collect(self._step)
        return KVConnectorTransferResults(finished_recving=ended, failed_recving=failed)

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Report the blocks that a load of which the engine uses a part did not fill; only where there is one group."""
        return self._worker.take_missing_blocks()

    def build_connector_worker_meta(self) -> StepReport | None:
        """Report chunks that failed or were stored."""
        return self._worker.take_report()

    # Scheduler half

    @property
    def _scheduler(self) -> SchedulerHalf:
        assert self._scheduler_half is not None, "called on the worker half"
        return self._scheduler_half

    @property
    def requires_kv_delivery(self) -> bool:
        """A cache, not a hand-off: a dropped store is only a later miss."""
        return False

    def set_xfer_handshake_metadata_pp_aware(
        self, metadata: dict[tuple[int, int], KVConnectorHandshakeMetadata]
    ) -> None:
        """Take every worker's layout."""
        self._scheduler.set_layouts(
            {tp_rank: item.layout for (_, tp_rank), item in metadata.items() if isinstance(item, WorkerIdentity)}
        )

    def on_new_request(self, request: Request) -> None:
        """Start to follow a request."""
        self._scheduler.on_new_request(request)

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int | None, bool]:
        """Return how many tokens can be loaded (``None``: ask again), and whether they load asynchronously."""
        matched = self._scheduler.matched_tokens(request, num_computed_tokens)
        return matched, bool(matched)

    def get_external_cache_hit_sources(self, request: Request, num_external_tokens: int) -> dict[Any, int]:
        """Attribute loaded tokens to the kind of medium they come from."""
        if num_external_tokens == 0:
            return {}
        medium = self._scheduler.medium(self._scheduler.load_tier(request.request_id))
        return {cache_hit_source(medium): num_external_tokens}

    def update_state_after_alloc(self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int) -> None:
        """Plan the load into the blocks the engine has allocated."""
        self._scheduler.blocks_allocated(request, blocks, num_external_tokens)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        """Return this step's work for the workers."""
        return self._scheduler.build_step(scheduler_output)

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        """Learn from the workers how loads and stores ended."""
        report = connector_output.kv_connector_worker_meta
        self._scheduler.take_output(
            connector_output.finished_recving or set(),
            connector_output.failed_recving or set(),
            report if isinstance(report, StepReport) else None,
        )

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Forget a request; its blocks may be freed at once, since stores have copied what they need."""
        self._scheduler.request_finished(request)
        return False, None

    def take_events(self) -> Iterable[Any]:
        """No KV cache events yet."""
        return ()

    def reset_cache(self) -> bool | None:
        """Serve nothing that was stored before, from now on."""
        self._scheduler.reset()
        return True


# MultiConnector looks its connectors up by registered name when it puts their statistics together.
with contextlib.suppress(ValueError):  # registered already, by a reload of this module
    KVConnectorFactory.register_connector("HybridOffloadConnector", "offload_core.vllm", "HybridOffloadConnector")
