"""The worker half of the connector: it copies between the KV cache and staging, and starts loads and stores."""

from __future__ import annotations

import atexit
import os
import time
from typing import TYPE_CHECKING

import torch
from vllm.v1.kv_cache_interface import KVCacheConfig

from offload_core.api.errors import ConfigError, UnsupportedLayoutError
from offload_core.api.keys import ObjectKey
from offload_core.api.memory.pinned_memory import pinning_in_use
from offload_core.api.memory.shared_memory import SharedMemory
from offload_core.config.model import OffloadConfig
from offload_core.io_process.processes import IoProcesses
from offload_core.memory.canonical import CanonicalKVCaches
from offload_core.memory.copiers import block_copier
from offload_core.memory.device.pinned_pieces import PinnedPieces
from offload_core.memory.payload_layout import PackLayout
from offload_core.memory.staging_pool import StagingPool, arena_bytes
from offload_core.memory.staging_size import STORE_SHARE, staging_problem
from offload_core.objects.fingerprint import Json
from offload_core.objects.format import object_bytes
from offload_core.planning.chunk_keys import ChunkRef
from offload_core.planning.planner import HybridOffloadPlanner
from offload_core.runtime.io_loop import IoLoop
from offload_core.runtime.metrics import Counters
from offload_core.tiers.opening import close_tiers, open_tiers
from offload_core.transfer.batches import TransferObject
from offload_core.transfer.engine import TransferEngine
from offload_core.transfer.loads import LoadJob, LoadResult
from offload_core.vllm.kv_events.vllm_events import kv_events_enabled
from offload_core.vllm.metadata import ChunkTransfer, RequestLoad, StepMetadata, StepReport
from offload_core.vllm.model.identity import engine_name, worker_identity
from offload_core.vllm.worker.batched_copy import installed_batched_copy
from offload_core.vllm.worker.geometry_export import engine_geometry, write_in_background
from offload_core.vllm.worker.layer_pages import layer_pages
from offload_core.vllm.worker.prefetches import WorkerPrefetches

if TYPE_CHECKING:
    from vllm.config import VllmConfig

_IDLE_WAIT_SECONDS = 0.002


class WorkerHalf:
    """Lives in a worker process; all methods run on that worker's engine thread. I/O runs on the I/O loop."""

    def __init__(
        self,
        vllm_config: VllmConfig,
        kv_cache_config: KVCacheConfig,
        config: OffloadConfig,
        planner: HybridOffloadPlanner,
    ) -> None:
        self._vllm_config = vllm_config
        self._kv_cache_config = kv_cache_config
        self._config = config
        self._planner = planner
        self._rank: int = vllm_config.parallel_config.rank
        self.counters = Counters()
        self._pid = os.getpid()
        self._io: IoLoop | None = None
        self._processes: IoProcesses | None = None
        self._staging_memory: SharedMemory | None = None
        self._engine: TransferEngine | None = None
        self._kv_caches: dict[str, torch.Tensor] = {}
        """The tensors of each layer, as vLLM registered them."""
        self._registered = False
        """True while the tensors have memory, so that copies may use it."""
        self._namespaces: dict[str, str] = {}
        self._adapters: dict[str, str] = {}
        self._loads: dict[int, RequestLoad] = {}
        self._prefetches = WorkerPrefetches(planner)
        self._stores: tuple[TransferObject, ...] = ()
        """Objects that this step completes."""
        groups = kv_cache_config.kv_cache_groups
        self._uses_partial_loads = len(groups) == 1 and all(pack.policy.kind == "full" for pack in planner.packs)
        """True if the engine can use a part of a load: vLLM accepts missing blocks for a single group only."""
        self._missing_blocks: set[int] = set()
        self._state_packs = {pack.name for pack in planner.all_packs if pack.policy.kind == "state"}
        self._states_loaded_for: StepMetadata | None = None
        self._ended_requests: list[tuple[str, bool]] = []
        self._failed_requests: set[str] = set()
        self._report = StepReport()
        self._keeps_changes = False
        self._was_storing = False
        self.layout: dict[str, Json] = {}
        self.object_bytes: dict[str, int] = {}

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Build the canonical caches and open the tiers. If it is called again, go on with other tensors.

        Raises:
            UnsupportedLayoutError: a layer's layout cannot be offloaded, or it has changed.
            ConfigError: a tier cannot be opened, or the memory for copies is too small for this model's objects.
        """
        self._kv_caches = kv_caches
        if self._engine is not None:
            self.unregister_kv_caches()
            self.restore_kv_caches()
            return
        caches, self.layout = self._canonical_caches()
        group_ids = self._kv_cache_config.prefix_cacheable_group_ids
        position = {group_id: index for index, group_id in enumerate(group_ids)}
        layouts = {
            pack.name: PackLayout.build(pack, caches, [position[group.index] for group in pack.groups])
            for pack in self._planner.all_packs
        }
        settings = self._config.settings
        largest = max(layout.payload_bytes for layout in layouts.values())
        chunk_size, uses = self._planner.hybrid_chunk_size, settings.staging_uses
        if problem := staging_problem(settings.staging_bytes, largest, chunk_size, uses):
            raise ConfigError([problem])
        self.object_bytes = {name: object_bytes(layout.payload_bytes) for name, layout in layouts.items()}
        if settings.geometry_file is not None and self._rank == 0:
            geometry = engine_geometry(self._vllm_config, self._kv_cache_config, self._planner, caches)
            write_in_background(geometry, settings.geometry_file)
        atexit.register(self.shutdown)  # a script may end without shutting its engine down
        self._io = IoLoop.acquire()
        pinning = pinning_in_use()
        pinned = None if pinning is None else PinnedPieces(pinning)
        if settings.io_process == "off":
            self._staging = StagingPool(settings.staging_bytes, STORE_SHARE, pinning)
        else:
            self._processes = IoProcesses(engine_name(self._vllm_config), self._io, self._config)
            self._staging_memory = memory = SharedMemory.create("offload-staging", arena_bytes(settings.staging_bytes))
            self._staging = StagingPool(settings.staging_bytes, STORE_SHARE, pinning, memory.view)
            self._processes.share_staging(memory)
        ranks = self._vllm_config.parallel_config.world_size
        half = f"worker {self._rank}" if ranks > 1 else "worker"
        self._tiers = open_tiers(self._config, self._io, self.counters, half=half, host=self._processes)
        self._keeps_changes = kv_events_enabled(self._vllm_config)
        if self._keeps_changes:
            for tier in self._tiers:
                tier.keep_changes()
        self._copier = block_copier(
            caches,
            largest,
            device_buffer_bytes=settings.device_buffer_bytes,
            batched_copy=installed_batched_copy(),
            pinned=pinned,
        )
        self._engine = TransferEngine(
            io=self._io,
            tiers=self._tiers,
            staging=self._staging,
            copier=self._copier,
            layouts=layouts,
            counters=self.counters,
            processes=self._processes,
            pinning=pinned,
        )
        self._registered = True

    def unregister_kv_caches(self) -> None:
        """Let go of the KV cache before its memory goes, as in a sleep of the engine. Idempotent.

        Loads that have not ended fail; the next :meth:`collect` reports them. Stores whose blocks have been copied go
        on. Until :meth:`restore_kv_caches`, every load fails at once, and every store is dropped.
        """
        if self._engine is not None and self._registered:
            self._copier.detach()
            self._engine.detach()
            self._registered = False
            self.store()  # drops and reports announced objects; after the sleep their blocks would hold other bytes

    def restore_kv_caches(self) -> None:
        """Use the registered tensors again, which have memory with undefined content. Idempotent.

        Raises:
            UnsupportedLayoutError: the tensors have another layout than at the start.
        """
        if self._engine is None or self._registered:
            return
        caches, layout = self._canonical_caches()
        if layout != self.layout:
            raise UnsupportedLayoutError(
                f"the KV cache has come back with the layout {layout}; objects of this engine have the layout "
                f"{self.layout}. Restart the engine"
            )
        self._copier.attach(caches)
        self._engine.attach()
        self._registered = True

    def load_states(self, metadata: StepMetadata) -> None:
        """Copy the recurrent states of loads within this step. Call it before vLLM moves states between blocks."""
        if not metadata.loads:
            return
        self._take_namespaces(metadata)
        self._states_loaded_for = metadata
        for load in metadata.loads:
            if load.within_step:
                states = [item for item in load.chunks if item.chunk.pack in self._state_packs]
                self._transfer_engine.copy_kept(load.tier, self._objects(states))

    def announce_stores(self, metadata: StepMetadata) -> None:
        """Let the tiers prepare for this step's stores. Call it before everything else of a step, but the states."""
        self._stores = ()
        if metadata.is_quiet:  # nearly always while decoding: keep it cheap
            return
        self._take_namespaces(metadata)
        if metadata.touches:  # before the stores, which may evict
            keys = [self._key(touch.chunk) for touch in metadata.touches]
            self._transfer_engine.touch(keys, [touch.spare for touch in metadata.touches])
        self._stores = self._objects(metadata.stores)
        if self._stores:
            self._transfer_engine.announce_stores(self._stores)

    def start_loads(self, metadata: StepMetadata) -> None:
        """Start this step's loads and cancel the loads that this step no longer needs. Loads within the step end here.

        Raises:
            RuntimeError: the request of a load within the step would run without its recurrent states.
        """
        if metadata.is_quiet:
            return
        engine = self._transfer_engine
        for load in metadata.loads:
            if load.impossible:
                self._load_failed(load.request_id)
                continue
            if load.within_step:
                self._load_within_step(load, metadata)
                continue
            self._loads[load.job_id] = load
            objects = self._objects(load.chunks)
            engine.submit_load(LoadJob(load.job_id, load.tier, objects, load.waited_seconds, load.keep))
        for prefetch in metadata.prefetches:
            engine.submit_load(self._prefetches.begin(prefetch, self._key))
        engine.give_back(metadata.given_back)
        for request_id in metadata.failures_to_report:
            if request_id in self._failed_requests:  # the load may have succeeded on this rank
                self._failed_requests.discard(request_id)
                self._ended_requests.append((request_id, True))
        for job_id in metadata.cancelled_jobs:  # after the loads: a request can finish in the step that starts its load
            engine.cancel_load(job_id)

    def store(self) -> None:
        """Copy the completed blocks that :meth:`announce_stores` has announced.

        Call it after the forward pass, before any block is reused.
        """
        stores, self._stores = self._stores, ()
        if stores:
            self._transfer_engine.submit_stores(stores)

    def collect(self, metadata: StepMetadata) -> tuple[set[str], set[str]]:
        """Copy arrived objects into the KV cache and collect the results of loads and stores.

        Returns:
            The requests whose load has ended, and those among them whose load has failed.
        """
        engine = self._transfer_engine
        results = engine.poll()
        if metadata.idle and not self._ended_requests:
            # Copy each object as it arrives; a step of the engine in between would only delay it.
            end = time.monotonic() + _IDLE_WAIT_SECONDS
            while not results and self._waits_for_storage(metadata) and (seconds := end - time.monotonic()) > 0:
                engine.wait_for_arrival(seconds)
                results = engine.poll()
        for result in results:
            if not self._prefetches.load_ended(result, self._report, self._ref):
                self._load_ended(result)
        self._prefetches.report(self._report, stores_pending=engine.has_pending_stores)
        for store in engine.take_store_results():
            ref = self._ref(store.key)
            self._report.stores_ended[ref] += 1
            if not store.stored:
                self._report.not_stored.add(ref)
        if self._keeps_changes and (storing := engine.has_pending_stores) != self._was_storing:
            self._was_storing = storing
            self._report.ranks_storing += 1 if storing else -1
        for tier in self._tiers:  # after the question for stores, so that the last store's change is not missed
            self._report.changes += tier.take_changes()
            if change := tier.health.take_refusal_change():
                self._report.ranks_refusing_loads[tier.name] += change
        if not self._ended_requests:
            return set(), set()
        ended, self._ended_requests = self._ended_requests, []
        return {request for request, _ in ended}, {request for request, failed in ended if failed}

    def take_missing_blocks(self) -> set[int]:
        """Return the blocks that partial loads have left unfilled since the last call."""
        missing, self._missing_blocks = self._missing_blocks, set()
        return missing

    def take_report(self) -> StepReport | None:
        """Return the report for the scheduler half, or ``None`` if it would be empty."""
        if self._report.is_empty:  # in most steps
            return None
        report, self._report = self._report, StepReport()
        return report

    def shutdown(self) -> None:
        """Wait for pending stores, at most ``shutdown_timeout_seconds``, and release the tiers.

        Idempotent; a hung medium cannot delay it longer. Does nothing in a fork of the worker, as at the fork's end.
        """
        if self._engine is None or self._io is None or self._pid != os.getpid():
            return
        self._engine.drain_stores(self._config.settings.shutdown_timeout_seconds)
        self._engine.close()
        close_tiers(self._tiers, self._io)
        if self._processes is not None:
            self._processes.release(self._config.settings.close_timeout_seconds)
        self._staging.close()
        if self._staging_memory is not None:
            self._staging_memory.close()
        self._io.release()
        self._engine = self._io = None
        atexit.unregister(self.shutdown)

    def _canonical_caches(self) -> tuple[CanonicalKVCaches, dict[str, Json]]:
        """Return the registered tensors as canonical caches, and their layout, which is part of the fingerprint."""
        groups = [
            layer_pages(self._kv_cache_config, index, self._kv_caches)
            for index in self._kv_cache_config.prefix_cacheable_group_ids
        ]
        caches = CanonicalKVCaches.build(groups)
        return caches, {"layers": worker_identity(self._vllm_config, self._kv_caches), "pages": caches.describe()}

    @property
    def store_room(self) -> tuple[float, float]:
        """The bytes of stores that may be on their way at once, and those that may begin in one step."""
        return self._transfer_engine.store_room

    def _waits_for_storage(self, metadata: StepMetadata) -> bool:
        engine = self._transfer_engine
        waits_for_stores = self._prefetches.is_storing or metadata.stores_wait
        return engine.has_active_loads or (waits_for_stores and engine.has_pending_stores)

    @property
    def _transfer_engine(self) -> TransferEngine:
        assert self._engine is not None, "vLLM registers the KV caches before the first step"
        return self._engine

    def _load_ended(self, result: LoadResult) -> None:
        load = self._loads.pop(result.job_id)
        self._report.failed_chunks.update((load.tier, self._ref(key)) for key in result.failed_keys)
        if result.kept:
            self._report.kept_jobs[load.job_id] += 1
        if result.status == "loaded":
            self._ended_requests.append((load.request_id, False))
        elif self._uses_partial_loads and result.arrived_objects and result.status != "cancelled":
            for item in load.chunks[result.arrived_objects :]:
                self._missing_blocks.update(*(part.block_ids for part in item.blocks))
            self._report.partial_requests.add(load.request_id)
            self.counters.add("load_partial", load.tier)
            self._ended_requests.append((load.request_id, False))
        else:
            self._load_failed(load.request_id)

    def _load_within_step(self, load: RequestLoad, metadata: StepMetadata) -> None:
        """Copy all objects but recurrent states, which :meth:`load_states` has copied."""
        if self._state_packs and self._states_loaded_for is not metadata:
            raise RuntimeError(
                f"request {load.request_id}: this vLLM has not announced the step, so the states of a load within it "
                "are missing; set sync_load_budget_bytes to 0"
            )
        others = [item for item in load.chunks if item.chunk.pack not in self._state_packs]
        self._transfer_engine.copy_kept(load.tier, self._objects(others))

    def _take_namespaces(self, metadata: StepMetadata) -> None:
        for adapter, namespaces in metadata.namespaces.items():
            self._namespaces[adapter] = namespaces[self._rank]
            self._adapters[namespaces[self._rank]] = adapter

    def _load_failed(self, request_id: str) -> None:
        """Report a failed load to the scheduler half, which decides when to report it to the engine."""
        self._failed_requests.add(request_id)
        self._report.failed_requests.add(request_id)

    def _objects(self, chunks: list[ChunkTransfer] | tuple[ChunkTransfer, ...]) -> tuple[TransferObject, ...]:
        return tuple(TransferObject(self._key(item.chunk), item.blocks, item.spare) for item in chunks)

    def _key(self, ref: ChunkRef) -> ObjectKey:
        return ObjectKey(self._namespaces[ref.adapter], ref.pack, ref.chunk_hash)

    def _ref(self, key: ObjectKey) -> ChunkRef:
        return ChunkRef(key.pack, key.chunk_hash, self._adapters[key.namespace])
