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
from offload_core.planning.write_policy import nothing_stored_problem
from offload_core.vllm.compat import (
    adapt_to_installed_vllm,
    cache_hit_source,
    can_load_within_step,
    can_report_attention_alone,
    sleep_problem,
    version_problem,
)
from offload_core.vllm.kv_events.vllm_events import kv_events_enabled
from offload_core.vllm.kv_hints import transfer_params
from offload_core.vllm.metadata import StepMetadata, StepReport, WorkerIdentity
from offload_core.vllm.metrics import HybridOffloadPromMetrics, HybridOffloadStats
from offload_core.vllm.model.groups import build_planner, handed_over
from offload_core.vllm.model.identity import engine_identity, engine_name
from offload_core.vllm.model.refusals import (
    block_hash_problem,
    changing_weights_problem,
    misaligned_states_problem,
    refuse_unhashed_media,
)
from offload_core.vllm.scheduler.half import SchedulerHalf
from offload_core.vllm.worker.half import WorkerHalf

if TYPE_CHECKING:
    from vllm.config import KVTransferConfig, VllmConfig
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

logger = logging.getLogger(__name__)


@adapt_to_installed_vllm
class HybridOffloadConnector(KVConnectorBase_V1, SupportsHMA):
    """Offloads the KV cache of hybrid models to the tiers named in ``kv_connector_extra_config``.

    Raises at construction:
        ConfigError: the configuration has problems, or an engine that only stores has no tier that stores.
        PlanError: offloading does not support the model, the chunk size, or vLLM's settings for images.
    """

    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        transfer_config, parallel = vllm_config.kv_transfer_config, vllm_config.parallel_config
        self._ranks_per_stage: int = parallel.tensor_parallel_size
        config = load_config(transfer_config.kv_connector_extra_config)
        refuse_unhashed_media(vllm_config)
        planner = build_planner(vllm_config, kv_cache_config, config.settings.hybrid_chunk_size)
        self._scheduler_half: SchedulerHalf | None = None
        self._worker_half: WorkerHalf | None = None
        if role == KVConnectorRole.WORKER:
            self._worker_half = WorkerHalf(vllm_config, kv_cache_config, config, planner)
            return
        # A failed load is a miss, never a failed request (invariant I5). The scheduler reads this after the connector
        # has been built; vLLM's own default is "fail". MultiConnector gives each connector a copy of its own, though.
        if transfer_config.kv_load_failure_policy != "recompute":
            logger.info(
                "setting kv_load_failure_policy to 'recompute': a failed load must not fail its request. Behind "
                "vLLM's MultiConnector this has no effect: set it in MultiConnector's own entry, or a failed load "
                "fails its request"
            )
            transfer_config.kv_load_failure_policy = "recompute"
        loads, stores = transfer_config.is_kv_consumer, transfer_config.is_kv_producer
        nothing_stored = nothing_stored_problem(tier.common.write_policy for tier in config.tiers) if stores else None
        if nothing_stored is not None:
            if not loads:
                raise ConfigError([nothing_stored])
            stores = False
        changing_weights = changing_weights_problem(vllm_config)
        problems = (
            nothing_stored,
            version_problem(),
            sleep_problem(vllm_config),
            block_hash_problem(vllm_config),
            changing_weights,
            misaligned_states_problem(vllm_config, kv_cache_config),
        )
        for warning in (*planner.warnings, *problems):
            if warning is not None:
                logger.warning("%s", warning)
        logger.info("placement is %r; %s", config.settings.placement, handed_over(vllm_config, planner))
        identity = engine_identity(vllm_config, kv_cache_config, config.settings.model_identity)
        self._scheduler_half = SchedulerHalf(
            config,
            planner,
            identity,
            parallel.world_size,
            kv_cache_config.num_blocks,
            vllm_config.scheduler_config.max_num_batched_tokens,
            pipelined=bool(vllm_config.scheduler_config.async_scheduling) or parallel.pipeline_parallel_size > 1,
            loads=loads,
            stores=stores,
            loads_within_step=can_load_within_step() and vllm_config.speculative_config is None,
            engine_name=engine_name(vllm_config),
        )
        if kv_events_enabled(vllm_config):
            self._scheduler_half.announce_content(kv_cache_config, config.settings.kv_events_resync_seconds)
        if changing_weights is not None:
            self._scheduler_half.reset()  # the identity names the files' weights, which it will not have

    # Both halves

    def shutdown(self) -> None:
        """Wait for pending stores, at most ``shutdown_timeout_seconds``, and release the tiers."""
        for half in (self._worker_half, self._scheduler_half):
            if half is not None:
                half.shutdown()

    def get_kv_connector_stats(self) -> HybridOffloadStats | None:
        """Return this half's counts since the last call."""
        half = self._scheduler_half or self._worker_half
        if half is None:
            return None
        counts = {**half.counters.take(), **half.counters.take_histograms()}
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

    @classmethod
    def supports_sleep_mode(cls, kv_transfer_config: KVTransferConfig) -> bool:
        """True: see :meth:`unregister_kv_caches`. vLLM asks from 0.33 on."""
        return True

    def unregister_kv_caches(self) -> None:
        """Let go of the KV cache before sleep mode takes its memory. vLLM calls it from 0.33 on.

        Nothing touches that memory until :meth:`restore_kv_caches`. Loads that have not ended fail.
        """
        self._worker.unregister_kv_caches()

    def restore_kv_caches(self) -> None:
        """Use the KV cache again after the engine has woken up."""
        self._worker.restore_kv_caches()

    def get_handshake_metadata(self) -> KVConnectorHandshakeMetadata | None:
        """Send the scheduler half the layout of this worker's KV cache, its objects' sizes, and the room for stores."""
        return WorkerIdentity(self._worker.layout, self._worker.object_bytes, *self._worker.store_room)

    def handle_preemptions(self, kv_connector_metadata: KVConnectorMetadata) -> None:
        """Load the recurrent states of requests that run in this step, before vLLM moves states between blocks."""
        if isinstance(kv_connector_metadata, StepMetadata):  # older versions give the names of preempted requests
            self._worker.load_states(kv_connector_metadata)

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        """Take a step's work, before vLLM computes the step, and announce the stores after it."""
        super().bind_connector_metadata(connector_metadata)
        self._worker.announce_stores(self._step)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Start this step's loads, and make those of requests that run in this step. The others end between steps."""
        self._worker.start_loads(self._step)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Do nothing: no step begins before the loads of its requests have ended."""

    def save_kv_layer(self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any) -> None:
        """Do nothing per layer: whole blocks are stored after the forward pass."""

    def wait_for_save(self) -> None:
        """Copy the blocks that this step has completed."""
        self._worker.store()

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        """Report ended loads, with failed ones by request, so that any group geometry can recompute.

        A partial load does not count as failed. :meth:`get_block_ids_with_load_errors` reports its unfilled blocks in
        the same step.
        """
        ended, failed = self._worker.collect(self._step)
        return KVConnectorTransferResults(finished_recving=ended, failed_recving=failed)

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Report the unfilled blocks of partial loads, which exist only with a single group."""
        return self._worker.take_missing_blocks()

    def build_connector_worker_meta(self) -> StepReport | None:
        """Report failed loads, ended stores and changes of the tiers."""
        return self._worker.take_report()

    # Scheduler half

    @property
    def _scheduler(self) -> SchedulerHalf:
        assert self._scheduler_half is not None, "called on the worker half"
        return self._scheduler_half

    @property
    def fingerprints(self) -> tuple[str, ...]:
        """The fingerprint of each rank's objects, without an adapter."""
        return self._scheduler.fingerprints

    @property
    def requires_kv_delivery(self) -> bool:
        """False: this is a cache, not a hand-off, and a dropped store is only a later miss."""
        return False

    def set_xfer_handshake_metadata_pp_aware(
        self, metadata: dict[tuple[int, int], KVConnectorHandshakeMetadata]
    ) -> None:
        """Take every worker's layout and the sizes of its objects. vLLM 0.33 sends them again after a sleep."""
        self._scheduler.set_workers(
            {
                pp_rank * self._ranks_per_stage + tp_rank: item
                for (pp_rank, tp_rank), item in metadata.items()
                if isinstance(item, WorkerIdentity)
            }
        )

    def bind_gpu_block_pool(self, gpu_block_pool: BlockPool) -> None:
        """Take the engine's block pool, to see its tails, its attention beyond its states, and the fate of blocks."""
        backfills = can_report_attention_alone(self._kv_cache_config)
        num_groups = len(self._kv_cache_config.kv_cache_groups)
        self._scheduler.bind_block_pool(gpu_block_pool, num_groups, backfills=backfills)

    @property
    def supports_divergent_local_hybrid_hits(self) -> bool:
        """True if the next question should be about local full attention alone, because a load brings the states."""
        return self._scheduler_half is not None and self._scheduler_half.expects_attention_alone

    def on_new_request(self, request: Request) -> None:
        """Start to follow a request."""
        self._scheduler.on_new_request(request)

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int | None, bool]:
        """Return the number of tokens to load (``None``: ask again), and whether they load asynchronously."""
        if self._scheduler.sessions.must_wait(request.request_id):
            return None, False
        matched = self._scheduler.matched_tokens(request, num_computed_tokens)
        if not matched or self._scheduler.may_load_within_step(request):
            return matched, False
        return (matched, True) if self._scheduler.sessions.may_load(request.request_id) else (0, False)

    def get_external_cache_hit_sources(self, request: Request, num_external_tokens: int) -> dict[Any, int]:
        """Return the loaded tokens by the kind of medium that they come from."""
        if num_external_tokens == 0:
            return {}
        return {cache_hit_source(self._scheduler.load_medium(request.request_id)): num_external_tokens}

    def update_state_after_alloc(self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int) -> None:
        """Plan the load into the blocks that the engine has allocated."""
        self._scheduler.blocks_allocated(request, blocks, num_external_tokens)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        """Return this step's work for the workers."""
        return self._scheduler.build_step(scheduler_output)

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        """Take the workers' reports on ended loads and stores."""
        report = connector_output.kv_connector_worker_meta
        self._scheduler.take_output(
            connector_output.finished_recving or set(),
            connector_output.failed_recving or set(),
            report if isinstance(report, StepReport) else None,
        )

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Forget a request, and answer its hints.

        The engine may free its blocks at once: stores have copied their data, or wait only while it is still there.
        """
        return False, transfer_params(request, self._scheduler.request_finished(request, block_ids))

    def take_events(self) -> Iterable[Any]:
        """Return vLLM's KV cache events for the tiers, if the engine publishes events."""
        events = self._scheduler.kv_events
        return () if events is None else events.take()

    def has_pending_push_work(self) -> bool:
        """Return whether an idle engine should step on: for a prefetch, a store or its end, or events that wait."""
        return self._scheduler.has_work_when_idle

    def reset_cache(self) -> bool | None:
        """Serve no object that was stored before this call."""
        self._scheduler.reset()
        return True


# MultiConnector finds its connectors by registered name when it combines their statistics.
with contextlib.suppress(ValueError):  # a reload of this module has registered it already
    KVConnectorFactory.register_connector("HybridOffloadConnector", "offload_core.vllm", "HybridOffloadConnector")
