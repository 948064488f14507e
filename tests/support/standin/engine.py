"""An engine without a model, for KV cache geometries that no CPU engine can run.

These parts of vLLM are real: configuration, KV cache specs and groups, scheduler, KV cache managers and allocation of
the cache's tensors. Both halves of the connector and its tiers are real too. Only the model runner is a stand-in:

- It writes bytes that are a pure function of layer, rank and prefix (:mod:`tests.support.standin.content`).
- It checks in every step the bytes that the step would read.
- It poisons every block that the block pool hands out.

A byte that is missing, or was loaded into the wrong place, raises
:class:`~tests.support.standin.cache.WrongBytesError` with layer, group, position and request.
"""

from __future__ import annotations

import copy
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any

from vllm import SamplingParams
from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

from offload_core.vllm.connector import HybridOffloadConnector
from tests.support.standin.cache import RankCache
from tests.support.standin.config import make_vllm_config, plan_caches
from tests.support.standin.content import Prefix
from tests.support.standin.geometries import StandInModel
from tests.support.standin.io import loop_at_rest
from tests.support.standin.runner import StandInRunner

_GAUGES = ("breaker_open", "draining_leases", "pending_loads", "pending_stores", "stuck_threads")
_FIRST_TOKEN = 3


@dataclass(frozen=True)
class Served:
    """The sources of a request's prompt tokens at its first schedule."""

    prompt_tokens: int
    local_tokens: int
    external_tokens: int


class StandInEngine:
    """One engine's lifetime.

    Args:
        model: its KV cache.
        folder: a model folder with a config that vLLM accepts and a vocabulary; its weights give the identity.
        connector: ``kv_connector_extra_config`` of the connector, or ``None`` for an engine without one.
        ranks: tensor parallel workers, each with its own cache and connector half.
        stages: pipeline stages, each with its own layers and as many workers.
        async_scheduling: schedule a step before the output of the previous step is known, as vLLM does by default.
        device: the device of the KV cache, as torch names it.
        changes: fields of vLLM's ``EngineArgs`` or of ``KVTransferConfig`` (those that begin with ``kv_``).
    """

    def __init__(
        self,
        model: StandInModel,
        folder: Path,
        connector: dict[str, Any] | None,
        *,
        ranks: int = 1,
        stages: int = 1,
        async_scheduling: bool = False,
        device: str = "cpu",
        **changes: Any,
    ) -> None:
        self.model = model
        self._device = device
        self.vllm_config = make_vllm_config(model, folder, connector, async_scheduling, changes)
        self._ranks = ranks
        if ranks * stages > 1:  # the platform cannot start two ranks here, but the scheduler only needs to know of them
            parallel = self.vllm_config.parallel_config
            parallel.tensor_parallel_size, parallel.pipeline_parallel_size = ranks, stages
            parallel.world_size = ranks * stages
        plans, self.kv_cache_config, block_size, hash_block_size = plan_caches(self.vllm_config, model, ranks, stages)
        self.prefixes: dict[str, Prefix] = {}
        self.workers: list[StandInRunner] = []
        for rank, plan in enumerate(plans):
            rank_config = copy.copy(self.vllm_config)
            rank_config.parallel_config = copy.copy(self.vllm_config.parallel_config)
            rank_config.parallel_config.rank = rank
            self.workers.append(self._worker(rank, rank_config, plan))
        try:
            self.scheduler = self.vllm_config.scheduler_config.get_scheduler_cls()(
                vllm_config=self.vllm_config,
                kv_cache_config=self.kv_cache_config,
                structured_output_manager=StructuredOutputManager(self.vllm_config),
                log_stats=True,
                block_size=block_size,
                hash_block_size=hash_block_size,
            )
        except BaseException:
            self._shut_workers_down()
            raise
        self.connector = self.scheduler.get_kv_connector()
        self._aggregator: KVOutputAggregator | None = None
        if self.connector is not None:
            self._aggregator = KVOutputAggregator.from_connector(self.connector, ranks * stages)
            self._send_handshake()
        hash_function = get_hash_fn_by_name(self.vllm_config.cache_config.prefix_caching_hash_algo)
        init_none_hash(hash_function)
        self._block_hasher = get_request_block_hasher(hash_block_size, hash_function)
        self.new_blocks: list[int] = []
        """Blocks that the block pool has handed out in the latest step."""
        self._watch_allocations()
        self._queue: deque[tuple[SchedulerOutput, ModelRunnerOutput]] = deque()
        self._queue_size = self.vllm_config.max_concurrent_batches
        self._weights = 0
        self._salts: dict[str, str] = {}
        self.outputs: dict[str, list[int]] = {}
        self.served: dict[str, Served] = {}
        self.transfer_params: dict[str, dict[str, Any]] = {}
        """The ``kv_transfer_params`` of each output that has some."""
        self.finished: dict[str, str] = {}
        self.counters: Counter[str] = Counter()
        self._gauges: Counter[str] = Counter()
        self.steps = 0
        self.sleeps = 0
        self._ids = 0

    # Requests

    def add(
        self,
        prompt: Sequence[int],
        max_tokens: int,
        *,
        salt: str = "",
        options: Mapping[str, Any] | None = None,
        **changes: Any,
    ) -> str:
        """Add a request and return its id.

        Args:
            options: the request's own options of our connector.
            changes: further arguments of vLLM's ``Request``.
        """
        self._ids += 1
        request_id = f"r{self._ids}"
        request = Request(
            request_id=request_id,
            prompt_token_ids=list(prompt),
            sampling_params=SamplingParams(
                max_tokens=max_tokens,
                ignore_eos=True,
                temperature=0.0,
                extra_args={"kv_transfer_params": {"hybrid_offload": dict(options)}} if options else None,
            ),
            pooling_params=None,
            cache_salt=salt or None,
            block_hasher=self._block_hasher,
            **changes,
        )
        request.sampling_params.update_from_generation_config({}, eos_token_id=1)
        vocabulary = self.vllm_config.model_config.get_vocab_size()
        self._salts[request_id] = salt
        self.prefixes[request_id] = Prefix(prompt, self._seed(request_id), vocabulary, _FIRST_TOKEN)
        self.outputs[request_id] = []
        self.scheduler.add_request(request)
        return request_id

    def abort(self, *request_ids: str) -> None:
        """Abort requests, as when their clients hang up."""
        for request in self.scheduler.finish_requests(request_ids, RequestStatus.FINISHED_ABORTED):
            self.finished[request.request_id] = "abort"

    def states(self) -> dict[str, str]:
        """Return the status of every request that the scheduler knows."""
        return {request_id: request.status.name for request_id, request in self.scheduler.requests.items()}

    def unfinished(self) -> list[str]:
        """Return the requests that have neither finished nor been aborted."""
        return [request_id for request_id in self.outputs if request_id not in self.finished]

    def reset_prefix_cache(self, *, running: bool, connector: bool) -> bool:
        """Reset vLLM's prefix cache; a complete reset stands for new weights, so all bytes change with it."""
        try:
            done = bool(self.scheduler.reset_prefix_cache(running, connector))
        except RuntimeError:  # vLLM refuses to preempt a request that waits for a load, and resets nothing
            done = False
        if done and connector:
            self._new_weights()
        return done

    def sleep(self, level: int) -> bool:
        """Let the engine sleep, as vLLM 0.33 does with ``mode="keep"``: requests are computed again after it.

        Level 1 keeps the weights. Level 2 stands for other weights after it, so all bytes change.

        Returns:
            ``False`` if vLLM refuses, since a request waits for a load; the engine stays awake.
        """
        while self._queue:
            output, result = self._queue.popleft()
            self._take(self.scheduler.update_from_output(output, result))
        try:
            if not self.scheduler.reset_prefix_cache(True, True):
                return False
        except RuntimeError:
            return False
        self.take_memory()
        self.sleeps += 1
        if level == 2:
            self._new_weights()
        return True

    def take_memory(self) -> None:
        """Take the memory of the KV cache away, and tell the workers' connectors before."""
        for worker in self.workers:
            if worker.connector is not None:
                worker.connector.unregister_kv_caches()
            worker.cache.sleep()

    def wake_up(self, *, moved: bool = False) -> None:
        """Give the KV cache memory again; see :meth:`RankCache.wake_up`."""
        for worker in self.workers:
            worker.cache.wake_up(moved=moved)
            if worker.connector is not None:
                worker.connector.restore_kv_caches()
        self._send_handshake()

    # Steps

    def step(self) -> None:
        """Run one step of the engine core, in the order in which vLLM's does. No answer comes in the middle of it."""
        self.steps += 1
        with loop_at_rest():
            self._step()

    def _step(self) -> None:
        if self.scheduler.has_requests() and len(self._queue) < self._queue_size:
            self.new_blocks.clear()
            output = self.scheduler.schedule()
            self._queue.append((output, self._execute(output)))
            if len(self._queue) < self._queue_size and (
                output.total_num_scheduled_tokens or self.scheduler.has_requests()
            ):
                return
        if self._queue:
            output, result = self._queue.popleft()
            self._take(self.scheduler.update_from_output(output, result))

    @property
    def busy(self) -> bool:
        """True if vLLM's engine core would go on stepping."""
        return bool(self._queue) or self.scheduler.has_requests()

    def shutdown(self) -> None:
        """Shut the connector's halves down, the workers' first."""
        self._shut_workers_down()
        self.scheduler.shutdown()

    def _shut_workers_down(self) -> None:
        for worker in self.workers:
            if worker.connector is not None:
                worker.connector.shutdown()

    @property
    def stores_pending(self) -> bool:
        """True if a store of some worker has begun and not ended."""
        workers = (half._worker_half for worker in self.workers for half in halves(worker.connector))
        return any(one is not None and one._engine is not None and one._engine.has_pending_stores for one in workers)

    def leftovers(self) -> list[str]:
        """Return the resources that an idle engine should have released."""
        pool = self.scheduler.kv_cache_manager.block_pool
        left: list[str] = []
        if self.scheduler.requests or self.scheduler.running or self.scheduler.waiting:
            left.append(f"requests {sorted(self.scheduler.requests)}")
        if pool.get_num_free_blocks() != pool.num_gpu_blocks - 1:
            left.append(f"{pool.num_gpu_blocks - 1 - pool.get_num_free_blocks()} blocks")
        for rank, worker in enumerate(self.workers):
            for half in halves(worker.connector):
                left.extend(f"rank {rank}: {name} {value}" for name, value in _worker_leftovers(half))
        for half in halves(self.connector):
            if followed := half._scheduler._requests:
                left.append(f"followed requests {sorted(followed)}")
        for connector in (self.connector, *(worker.connector for worker in self.workers)):
            if connector is not None and (stats := connector.get_kv_connector_stats()) is not None:
                self._count(stats.data)
        left.extend(f"{name} {value}" for name, value in self._gauges.items() if value and name.startswith("pending"))
        return left

    def _execute(self, output: SchedulerOutput) -> ModelRunnerOutput:
        results = []
        for worker in self.workers:
            results.append(worker.execute(_sent(output), self.new_blocks))
        if self._aggregator is None:
            return results[0]
        aggregated = self._aggregator.aggregate(results)
        assert aggregated is not None
        return aggregated

    def _take(self, by_client: dict[int, Any]) -> None:
        for outputs in by_client.values():
            stats = outputs.scheduler_stats
            if stats is not None and stats.kv_connector_stats:
                self._count(stats.kv_connector_stats)
            for item in outputs.outputs:
                self.outputs[item.request_id].extend(item.new_token_ids)
                if item.prefill_stats is not None:
                    got = item.prefill_stats
                    self.served[item.request_id] = Served(
                        got.num_prompt_tokens, got.num_local_cached_tokens, got.num_external_cached_tokens
                    )
                if item.kv_transfer_params is not None:
                    self.transfer_params[item.request_id] = item.kv_transfer_params
                if item.finish_reason is not None:
                    self.finished[item.request_id] = str(item.finish_reason)

    def _count(self, nested: Mapping[str, Any]) -> None:
        """Add a report to the counters, and check that no gauge of whole things is negative.

        Beside other connectors, each has a report of its own inside.
        """
        report: dict[str, float] = {}
        for name, value in nested.items():
            if isinstance(value, float | int):
                report[name] = value
            else:
                self._count(getattr(value, "data", value))
        self.counters.update(report)
        self._gauges.update({name: change for name, change in report.items() if name.split("|")[0] in _GAUGES})
        negative = {name: value for name, value in self._gauges.items() if value < 0}
        assert not negative, f"negative gauges: {negative}"

    def _worker(self, rank: int, vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> StandInRunner:
        size = self.model.kernel_block_size
        kernel_blocks = [size or group.kv_cache_spec.block_size for group in kv_cache_config.kv_cache_groups]
        cache = RankCache(kv_cache_config, self.model.layout, rank, kernel_blocks, self._device)
        connector = None
        if vllm_config.kv_transfer_config is not None:
            connector = KVConnectorFactory.create_connector(vllm_config, KVConnectorRole.WORKER, kv_cache_config)
            connector.register_kv_caches(cache.tensors)
        return StandInRunner(cache, connector, self.prefixes)

    def _send_handshake(self) -> None:
        if self.connector is not None:
            halves = [worker.connector for worker in self.workers if worker.connector is not None]
            handshake = {divmod(rank, self._ranks): half.get_handshake_metadata() for rank, half in enumerate(halves)}
            self.connector.set_xfer_handshake_metadata_pp_aware(_sent(handshake))

    def _new_weights(self) -> None:
        self._weights += 1
        for request_id, prefix in self.prefixes.items():
            prefix.reseed(self._seed(request_id))

    def _watch_allocations(self) -> None:
        pool = self.scheduler.kv_cache_manager.block_pool
        get_new_blocks = pool.get_new_blocks

        def watched(num_blocks: int) -> list[Any]:
            blocks: list[Any] = get_new_blocks(num_blocks)
            self.new_blocks.extend(block.block_id for block in blocks)
            return blocks

        pool.get_new_blocks = watched

    def _seed(self, request_id: str) -> str:
        return f"{self._salts[request_id]}/{self._weights}"


def _sent(message: Any) -> Any:
    """Return the message as it arrives in another process."""
    return ForkingPickler.loads(ForkingPickler.dumps(message))


def halves(connector: Any) -> list[HybridOffloadConnector]:
    """Return a connector of ours, or those among several."""
    return [one for one in getattr(connector, "sub_connectors", [connector]) if isinstance(one, HybridOffloadConnector)]


def _worker_leftovers(connector: Any) -> list[tuple[str, object]]:
    """Return the resources that the worker half holds, which its public interface does not show."""
    if connector is None or connector._worker_half is None or connector._worker_half._engine is None:
        return []
    engine = connector._worker_half._engine
    held = {"loads": engine.has_active_loads, "staging bytes": connector._worker_half._staging.used_bytes}
    return [(name, value) for name, value in held.items() if value]
