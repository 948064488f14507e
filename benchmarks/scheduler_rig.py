"""The two scheduler halves that ``benchmarks/scheduler.py`` compares, driven by vLLM's own classes."""

from __future__ import annotations

import itertools
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from vllm.config import KVTransferConfig, VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import OffloadingWorkerMetadata
from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import OffloadingConnector
from vllm.engine.arg_utils import EngineArgs
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash, resolve_kv_cache_block_sizes
from vllm.v1.core.sched.output import CachedRequestData, KVConnectorBlockState, NewRequestData, SchedulerOutput
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpec,
    MambaSpec,
    SlidingWindowSpec,
)
from vllm.v1.kv_offload.base import ReqContext, make_offload_key
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import Request, RequestStatus

from offload_core.api.backend import Backend, BackendContext, BackendType, LoadOutcome, StoreOutcome
from offload_core.api.capabilities import Capabilities
from offload_core.api.keys import ObjectKey
from offload_core.api.options import BackendOptions
from offload_core.config.model import BackendConfig, OffloadConfig, OffloadSettings, TierConfig
from offload_core.objects.fingerprint import fingerprint
from offload_core.planning.chunk_keys import object_keys
from offload_core.tiers.changes import TierChange
from offload_core.vllm.metadata import StepReport, WorkerIdentity
from offload_core.vllm.model.groups import build_planner
from offload_core.vllm.scheduler.half import SchedulerHalf
from tests.support import tiny_models
from tests.support.engine.spec import stock_transfer_config

VOCABULARY = 512
ATTENTION = {"num_kv_heads": 1, "head_size": 8, "dtype": torch.float32}


def full(block_size: int) -> KVCacheSpec:
    return FullAttentionSpec(block_size=block_size, **ATTENTION)


def window(block_size: int, tokens: int) -> KVCacheSpec:
    return SlidingWindowSpec(block_size=block_size, sliding_window=tokens, **ATTENTION)


def state(block_size: int) -> KVCacheSpec:
    return MambaSpec(block_size=block_size, shapes=((4,),), dtypes=(torch.float32,), mamba_cache_mode="align")


@dataclass(frozen=True)
class Geometry:
    """A model's KV cache groups and the chunk size of our half; stock works block by block."""

    name: str
    specs: tuple[KVCacheSpec, ...]
    hybrid_chunk_size: int
    aim: float
    """Highest part of stock's time that ours may take."""

    def kv_cache_config(self) -> KVCacheConfig:
        groups = [KVCacheGroupSpec([f"layer{index}"], spec) for index, spec in enumerate(self.specs)]
        return KVCacheConfig(num_blocks=4, kv_cache_tensors=[], kv_cache_groups=groups)


def engine_config(folder: Path) -> VllmConfig:
    """Return a real engine's configuration; stock's connector stores generated tokens too, as ours does."""
    transfer = stock_transfer_config()
    transfer["kv_connector_extra_config"]["offload_prompt_only"] = False
    return EngineArgs(
        model=str(tiny_models.write_gemma3(folder)),
        enforce_eager=True,
        enable_prefix_caching=True,
        disable_hybrid_kv_cache_manager=False,
        kv_transfer_config=KVTransferConfig(**transfer),
    ).create_engine_config()


class Requests:
    """Factory of requests with the engine's block hashes; it counts the computed hashes."""

    def __init__(self, vllm_config: VllmConfig, geometry: Geometry) -> None:
        hash_function = get_hash_fn_by_name(vllm_config.cache_config.prefix_caching_hash_algo)
        init_none_hash(hash_function)

        def counted(value: Any) -> bytes:
            self.hashes += 1
            digest: bytes = hash_function(value)
            return digest

        self.hashes = 0
        _, hash_block_size = resolve_kv_cache_block_sizes(geometry.kv_cache_config(), vllm_config)
        self._hasher = get_request_block_hasher(hash_block_size, counted)
        self._numbers = itertools.count()

    def make(self, tokens: int, seed: int) -> Request:
        """Return a new request; the same seed means the same prompt of ``tokens`` tokens."""
        prompt = np.random.default_rng(seed).integers(VOCABULARY, size=tokens).tolist()
        return Request(
            f"request-{next(self._numbers)}", prompt, SamplingParams(max_tokens=1024), None, block_hasher=self._hasher
        )


class Answer(NamedTuple):
    """One lookup: tokens found, time until the answer, the engine thread's part of it, the process's CPU time."""

    tokens: int
    wall_seconds: float
    engine_seconds: float
    cpu_seconds: float


class Peer(Protocol):
    """A scheduler half under test."""

    def keep(self, request: Request) -> None:
        """Make all objects of the request's prompt present."""

    def ask(self, request: Request, *, new: bool) -> Answer:
        """Ask for the prefix; the measured time includes the announcement of a new request."""

    def step(self, output: SchedulerOutput) -> float:
        """Build a step's metadata, take the report that its stores have ended, and return the seconds of both."""

    def finish(self, request: Request) -> None:
        """Tell the half that a request has finished."""


class StockHalf:
    """vLLM's ``OffloadingConnector`` in the scheduler's role, with a manager that keeps all objects in RAM."""

    def __init__(self, vllm_config: VllmConfig, geometry: Geometry) -> None:
        self._connector = OffloadingConnector(vllm_config, KVConnectorRole.SCHEDULER, geometry.kv_cache_config())
        self._groups = self._connector.scheduler.config.kv_group_configs

    @property
    def keys_per_1024_tokens(self) -> float:
        return float(sum(1024 / group.tokens_per_chunk for group in self._groups))

    def keep(self, request: Request) -> None:
        manager, context = self._connector.scheduler.manager, ReqContext(request.request_id)
        for group in self._groups:
            hashes = request.block_hashes[group.hashes_per_chunk - 1 :: group.hashes_per_chunk]
            keys = [make_offload_key(block_hash, group.group_idx) for block_hash in hashes]
            manager.prepare_store(keys, context)
            manager.complete_store(keys, context)

    def ask(self, request: Request, *, new: bool) -> Answer:
        cpu_started, started = time.process_time(), time.perf_counter()
        if new:
            self._connector.on_new_request(request)
        tokens, _ = self._connector.get_num_new_matched_tokens(request, 0)
        seconds = time.perf_counter() - started
        return Answer(tokens, seconds, seconds, time.process_time() - cpu_started)

    def step(self, output: SchedulerOutput) -> float:
        started = time.perf_counter()
        metadata = self._connector.build_connector_meta(output)
        seconds = time.perf_counter() - started
        jobs = OffloadingWorkerMetadata(dict.fromkeys(metadata.store_jobs, 1))
        report = KVConnectorOutput(kv_connector_worker_meta=jobs)
        started = time.perf_counter()
        self._connector.update_connector_output(report)
        return seconds + time.perf_counter() - started

    def finish(self, request: Request) -> None:
        request.status = RequestStatus.FINISHED_ABORTED
        self._connector.request_finished_all_groups(request, ())
        output = SchedulerOutput.make_empty()
        output.finished_req_ids = {request.request_id}
        self.step(output)
        self._connector.get_kv_connector_stats()


class SetOptions(BackendOptions):
    """Options of :class:`SetBackend`: none."""


class SetBackend(Backend[SetOptions]):
    """Backend that keeps the keys of its objects in a set, as an in-RAM manager does, but no bytes."""

    capabilities = Capabilities(medium="host", persistent=False, shared=True)

    def __init__(self, options: SetOptions, context: BackendContext) -> None:
        super().__init__(options, context)
        self.present: set[ObjectKey] = set()
        self.asked: list[Sequence[ObjectKey]] = []

    async def contains(self, keys: Sequence[ObjectKey]) -> list[bool]:
        self.asked.append(keys)
        return list(map(self.present.__contains__, keys))

    async def load_into(self, keys: Sequence[ObjectKey], buffers: Sequence[memoryview]) -> list[LoadOutcome]:
        return [LoadOutcome.MISS] * len(keys)

    async def store(self, keys: Sequence[ObjectKey], buffers: Sequence[memoryview]) -> list[StoreOutcome]:
        self.present.update(keys)
        return [StoreOutcome.STORED] * len(keys)

    async def delete(self, keys: Sequence[ObjectKey]) -> None:
        self.present.difference_update(keys)


class OurHalf:
    """Our scheduler half with one tier in RAM.

    Args:
        shared: whether the I/O thread asks the medium; if not, only a worker sees it, and the half keeps an index.
    """

    def __init__(self, vllm_config: VllmConfig, geometry: Geometry, *, shared: bool) -> None:
        made: list[SetBackend] = []

        class Recorded(SetBackend):
            capabilities = Capabilities(medium="host", persistent=False, shared=shared)

            def __init__(self, options: SetOptions, context: BackendContext) -> None:
                super().__init__(options, context)
                made.append(self)

        entry = BackendConfig(name="ram", type="set")
        tier = TierConfig(entry, BackendType("set", Recorded, SetOptions), SetOptions())
        settings = OffloadSettings(
            hybrid_chunk_size=geometry.hybrid_chunk_size,
            backends=[entry],
            io_process="off",  # the backend is made here
        )
        self.planner = build_planner(vllm_config, geometry.kv_cache_config(), geometry.hybrid_chunk_size)
        config = OffloadConfig(settings, (tier,))
        self._half = SchedulerHalf(config, self.planner, {}, num_ranks=1, num_blocks=1 << 20, step_tokens=1 << 13)
        self._half.set_workers({0: WorkerIdentity({}, {})})
        self.backend = made[0]
        self._shared = shared
        self._namespace = fingerprint({"reset": "", "rank": 0, "layout": {}})  # the half's name for its only rank
        self._idle = SchedulerOutput.make_empty()

    @property
    def objects_per_1024_tokens(self) -> float:
        return sum(1024 / pack.unit_tokens for pack in self.planner.packs)

    def keep(self, request: Request) -> None:
        for pack in self.planner.packs:
            hashes = request.block_hashes[pack.hash_factor - 1 :: pack.hash_factor]
            keys = list(object_keys(self._namespace, pack.name, hashes))
            if self._shared:
                self.backend.present.update(keys)
            else:
                changes = [TierChange("ram", key, True) for key in keys]
                self._half.take_output(set(), set(), StepReport(changes=changes))

    def ask(self, request: Request, *, new: bool) -> Answer:
        """Ask as an idle engine does: with an empty step between questions, in which the half waits for the answer."""
        waited = 0.0
        cpu_started, started = time.process_time(), time.perf_counter()
        if new:
            self._half.on_new_request(request)
        while (tokens := self._half.matched_tokens(request, 0)) is None:
            idle_from = time.perf_counter()
            self._half.build_step(self._idle)
            waited += time.perf_counter() - idle_from
        seconds = time.perf_counter() - started
        return Answer(tokens, seconds, seconds - waited, time.process_time() - cpu_started)

    def step(self, output: SchedulerOutput) -> float:
        started = time.perf_counter()
        metadata = self._half.build_step(output)
        seconds = time.perf_counter() - started
        report = StepReport(stores_ended=Counter(item.chunk for item in metadata.stores))
        started = time.perf_counter()
        self._half.take_output(set(), set(), report)
        return seconds + time.perf_counter() - started

    def finish(self, request: Request) -> None:
        self._half.request_finished(request)
        self._half.counters.take()

    def shutdown(self) -> None:
        self._half.shutdown()


class Decoding:
    """Requests that decode one token per step, and each step's ``SchedulerOutput`` as from vLLM's scheduler."""

    def __init__(self, geometry: Geometry, requests: Sequence[Request]) -> None:
        self._specs = geometry.specs
        self._requests = {request.request_id: request for request in requests}
        self._block_ids = itertools.count(1)
        self._tables: dict[str, tuple[list[int], ...]] = {
            name: tuple([] for _ in self._specs) for name in self._requests
        }

    def prefill(self) -> SchedulerOutput:
        """Return the step that computes all prompts."""
        scheduled = {name: request.num_prompt_tokens for name, request in self._requests.items()}
        new = [
            NewRequestData.from_request(request, self._grow(request, scheduled[name]) or ())
            for name, request in self._requests.items()
        ]
        return self._output(scheduled, new, CachedRequestData.make_empty())

    def decode(self) -> SchedulerOutput:
        """Return the step that computes one token of each request."""
        requests = list(self._requests.values())
        cached = CachedRequestData(
            req_ids=list(self._requests),
            resumed_req_ids=set(),
            new_token_ids=[],
            all_token_ids={},
            new_block_ids=[self._grow(request, 1) for request in requests],
            num_computed_tokens=[request.num_computed_tokens for request in requests],
            num_output_tokens=[request.num_output_tokens for request in requests],
        )
        return self._output(dict.fromkeys(self._requests, 1), [], cached)

    def computed(self, output: SchedulerOutput) -> None:
        """Count the step's tokens as computed, and append a sampled token to each request, which makes the hashes."""
        for name, tokens in output.num_scheduled_tokens.items():
            request = self._requests[name]
            request.status = RequestStatus.RUNNING
            request.num_computed_tokens += tokens
            request.append_output_token_ids(request.num_computed_tokens % VOCABULARY)

    def _grow(self, request: Request, tokens: int) -> tuple[list[int], ...] | None:
        """Allocate blocks for ``tokens`` more tokens and return the new ones by group; ``None`` means no new block."""
        end = request.num_computed_tokens + tokens
        tables = self._tables[request.request_id]
        new = tuple(
            [next(self._block_ids) for _ in range(len(table), -(-end // spec.block_size))]
            for table, spec in zip(tables, self._specs, strict=True)
        )
        for table, blocks in zip(tables, new, strict=True):
            table.extend(blocks)
        return new if any(new) else None

    def _output(
        self, scheduled: dict[str, int], new: list[NewRequestData], cached: CachedRequestData
    ) -> SchedulerOutput:
        return SchedulerOutput(
            scheduled_new_reqs=new,
            scheduled_cached_reqs=cached,
            num_scheduled_tokens=scheduled,
            total_num_scheduled_tokens=sum(scheduled.values()),
            scheduled_spec_decode_tokens={},
            scheduled_encoder_inputs={},
            finished_req_ids=set(),
            free_encoder_mm_hashes=[],
            kv_connector_block_state=KVConnectorBlockState(
                req_ids=set(scheduled),
                resolve_block_ids=lambda name: tuple(map(list, self._tables[name])),
                boundary_state_offloads=self._states(scheduled),
            ),
        )

    def _states(self, scheduled: dict[str, int]) -> dict[str, list[tuple[int, int, int]]]:
        """Return the recurrent states that the step leaves at the end of blocks: (group, block id, boundary)."""
        states: dict[str, list[tuple[int, int, int]]] = {}
        for name, tokens in scheduled.items():
            end = self._requests[name].num_computed_tokens + tokens
            for index, spec in enumerate(self._specs):
                if isinstance(spec, MambaSpec) and end % spec.block_size == 0:
                    block_id = self._tables[name][index][end // spec.block_size - 1]
                    states.setdefault(name, []).append((index, block_id, end))
        return states
