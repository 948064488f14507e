"""The scheduler half of the connector: vLLM's scheduler calls in, loads and stores of each step out.

It translates vLLM's types. The planner and the lookups decide.
"""

from __future__ import annotations

import secrets
from collections import Counter
from collections.abc import Sequence
from itertools import chain
from typing import TYPE_CHECKING, Any

from offload_core.api.errors import PlanError
from offload_core.config.model import OffloadConfig
from offload_core.io_process.processes import IoProcesses
from offload_core.lookup.chunk_ledger import ChunkLedger
from offload_core.lookup.kept_loads import KeptLoads, kept_limits
from offload_core.lookup.load_choice import LoadChoice
from offload_core.lookup.service import LookupService
from offload_core.lookup.tier_index import TierIndex
from offload_core.objects.fingerprint import Json, fingerprint
from offload_core.planning.chunk_keys import ChunkRef
from offload_core.planning.placement import PathPlacement
from offload_core.planning.planner import HybridOffloadPlanner
from offload_core.runtime.io_loop import IoLoop
from offload_core.runtime.metrics import ALL_TIERS, Counters
from offload_core.tiers.opening import close_tiers, open_tiers
from offload_core.vllm.compat import keep_state_at
from offload_core.vllm.kv_events.events import KvEvents
from offload_core.vllm.kv_hints import KvHints
from offload_core.vllm.metadata import ChunkTouch, StepMetadata, StepReport, WorkerIdentity, largest_objects
from offload_core.vllm.model.lora import AdapterIdentities
from offload_core.vllm.scheduler.backfill import Backfill
from offload_core.vllm.scheduler.block_holders import BlockHolders
from offload_core.vllm.scheduler.ended_requests import EndedRequests
from offload_core.vllm.scheduler.load_offers import LoadOffers
from offload_core.vllm.scheduler.new_loads import NewLoads
from offload_core.vllm.scheduler.placement_plan import PlacementPlan
from offload_core.vllm.scheduler.request_options import RequestOptions
from offload_core.vllm.scheduler.request_state import RequestState
from offload_core.vllm.scheduler.step_times import StepTimes
from offload_core.vllm.scheduler.stores.store_plan import StorePlan
from offload_core.vllm.scheduler.streaming_sessions import StreamingSessions

if TYPE_CHECKING:
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.request import Request


class SchedulerHalf:
    """Lives in the engine-core process; all methods run on the engine thread.

    Args:
        identity: the part of the fingerprint that all ranks share.
        num_blocks: number of blocks in the engine's pool.
        step_tokens: most tokens that the engine computes in one step.
        pipelined: whether the engine schedules a step before the one before it has ended.
        loads: whether this engine loads, according to its ``kv_role``.
        stores: whether this engine stores.
        loads_within_step: whether the engine can run a request in the step that loads its prefix.
        engine_name: unique for the engine; its processes share an I/O process by this name.
    """

    def __init__(
        self,
        config: OffloadConfig,
        planner: HybridOffloadPlanner,
        identity: dict[str, Json],
        num_ranks: int,
        num_blocks: int,
        step_tokens: int,
        *,
        pipelined: bool = False,
        loads: bool = True,
        stores: bool = True,
        loads_within_step: bool = True,
        engine_name: str = "engine",
    ) -> None:
        settings = config.settings
        self._close_seconds = settings.close_timeout_seconds
        self._planner = planner
        self._identity = identity
        self._num_ranks = num_ranks
        self._engine_options = RequestOptions(load=loads, store=stores)
        self._workers: dict[int, WorkerIdentity] = {}
        self._namespaces: dict[str, tuple[str, ...]] = {}
        self._reset_salt = ""
        self.counters = Counters()
        self._io: IoLoop | None = IoLoop.acquire()
        self._processes: IoProcesses | None = None
        if settings.io_process != "off":
            self._processes = IoProcesses(engine_name, self._io, config)
        self._tiers = open_tiers(
            config, self._io, self.counters, half="scheduler", only_shared=True, host=self._processes
        )
        self._tier_names = [tier.name for tier in self._tiers]
        self._ranks_refusing_loads: Counter[str] = Counter()
        self._indexes = {tier.name: TierIndex() for tier in self._tiers if not tier.capabilities.shared}
        self._choice = LoadChoice(settings.load_when, planner, self._tiers, step_tokens)
        self._step_times = StepTimes(self._choice.prefill, pipelined=pipelined)
        options = (self._indexes, settings.lookup_grace_seconds, self._ranks_refusing_loads, self._choice)
        lookups = LookupService(self._io, self._tiers, planner, self.counters, *options)
        self._adapters = AdapterIdentities(settings.lookup_timeout_seconds)
        self._ledger = ChunkLedger(num_ranks, settings.lookup_timeout_seconds)
        budget_bytes = settings.sync_load_budget_bytes if loads_within_step else 0
        self._kept_loads = KeptLoads(num_ranks, budget_bytes, kept_limits(config, self._tiers, num_ranks))
        self._block_holders = BlockHolders(num_blocks - 1)  # one block is vLLM's null block
        self.sessions = StreamingSessions(self._block_holders)
        self._placement = PlacementPlan(settings.placement, planner, self._ledger, self._tiers, self._ranks_namespaces)
        plans = (self._placement, self._ledger, self._ranks_namespaces)
        self._hints = KvHints(config, planner, self._tiers, lookups, *plans, self.counters, loads=loads)
        self._backfill = Backfill(planner)
        self._offers = LoadOffers(
            planner, self._tiers, lookups, self._choice, self._ledger, self._block_holders, self._placement,
            self._backfill, self._ranks_namespaces, self.counters,
        )  # fmt: skip
        records = (self._ledger, self.counters)
        self._new_loads = NewLoads(planner, self._offers, self._kept_loads, self._block_holders, *records)
        prompt_only = settings.offload_prompt_only
        self._store_plan = StorePlan(planner, self._placement, *records, prompt_only=prompt_only)
        self.kv_events: KvEvents | None = None
        self._ended = EndedRequests(config, planner, self._tiers, self._placement, self.counters)
        self._requests: dict[str, RequestState] = {}
        self._cancelled_jobs: list[int] = []
        self._finished_with_failed_load: set[str] = set()

    def set_workers(self, workers: dict[int, WorkerIdentity]) -> None:
        """Take each rank's layout, which completes every rank's identity, and the sizes of its objects.

        If the ranks have lost their KV cache and report again, as after a sleep, their weights may be others too. So
        nothing is served that was stored before.
        """
        if self._workers:
            self.reset()
        self._workers = workers
        self._choice.object_bytes = self._kept_loads.object_bytes = largest_objects(workers.values())
        self._store_plan.set_workers(workers.values())
        self._placement.set_object_bytes(self._choice.object_bytes)
        self._hints.set_object_bytes(self._choice.object_bytes)
        self._ended.start([worker.object_bytes for worker in workers.values()])
        self._namespaces.clear()

    def bind_block_pool(self, block_pool: BlockPool, num_groups: int, *, backfills: bool) -> None:
        """Use the engine's block pool for stores that wait and for loads: with ``backfills`` to load states alone."""
        self._store_plan.bind_block_pool(block_pool)
        if self._engine_options.load:
            self._offers.bind(block_pool, num_groups, backfills=backfills)
            self._new_loads.bind(block_pool, num_groups)

    def announce_content(self, kv_cache_config: KVCacheConfig, resync_seconds: float | None) -> None:
        """Make KV cache events from now on. Without this call they cost nothing."""
        assert self._io is not None
        arguments = (self._tiers, self._planner, kv_cache_config, self._ranks_namespaces, self._ledger, resync_seconds)
        self.kv_events = self._store_plan.kv_events = KvEvents(self._io, *arguments)

    @property
    def has_work_when_idle(self) -> bool:
        """True if an idle engine should step on, for prefetches, for stores that wait or because events will come."""
        announces = self.kv_events is not None and self.kv_events.has_events_to_come
        return self._hints.is_active or self._store_plan.keeps_engine_awake or announces

    @property
    def expects_attention_alone(self) -> bool:
        """True if the engine should report the depth of its full attention in the next question."""
        return self._backfill.expects_attention_alone

    def on_new_request(self, request: Request) -> None:
        """Start to follow a request, unless the request's and the engine's options exclude both loads and stores."""
        self.sessions.begin(request)
        options = RequestOptions.of(request, self._tier_names).within(self._engine_options)
        if not (options.load or options.store):
            return
        adapter = self._adapters.of(request.lora_request) if request.lora_request is not None else None
        path = PathPlacement(self._planner, request.num_prompt_tokens)
        state = RequestState(request, options, adapter, {}, path)
        self._store_plan.start_over(state)
        self._placement.begin(state)
        self._hints.begin(state)
        self._requests[request.request_id] = state

    def matched_tokens(self, request: Request, computed_tokens: int) -> int | None:
        """Return the number of tokens past ``computed_tokens`` that can be loaded, or ``None`` to be asked again."""
        state = self._requests.get(request.request_id)
        if state is None:
            return 0
        matched = self._offers.matched_tokens(state, computed_tokens)
        self._placement.keep_state_at_junction(state)
        if matched and state.offer is not None and state.offer.backfill:
            # The engine sees a junction at the end of its attention, but not if it was asked about attention alone.
            keep_state_at(request, state.offer.local_attention_tokens)
        return matched

    def may_load_within_step(self, request: Request) -> bool:
        """Return whether the load that was just offered takes place in the step that runs the request."""
        return self._new_loads.may_load_within_step(self._requests[request.request_id])

    def load_medium(self, request_id: str) -> str | None:
        """Return the kind of medium of the request's current offer."""
        state = self._requests.get(request_id)
        name = state.offer.tier if state and state.offer else None
        return next((tier.capabilities.medium for tier in self._tiers if tier.name == name), None)

    def blocks_allocated(self, request: Request, blocks: KVCacheBlocks, external_tokens: int) -> None:
        """Plan the load of ``external_tokens`` tokens into the blocks that the engine has allocated for them.

        Beside other connectors, a request without such tokens may hold its blocks for a load of theirs, until it runs.
        """
        if not external_tokens:
            self._new_loads.maybe_loaded_by_another(request, blocks)
            return
        state = self._requests[request.request_id]
        self._new_loads.add(state, blocks, external_tokens)
        if self.kv_events is not None and state.offer is not None:
            adapter = state.adapter.digest if state.adapter else ""
            self.kv_events.loading(request, adapter, state.offer.computed_tokens, state.resumed_tokens)

    def build_step(self, output: SchedulerOutput) -> StepMetadata:
        """Return the workers' loads and stores of this step."""
        self._step_times.begin(output)
        idle = output.total_num_scheduled_tokens == 0
        self._offers.no_longer_recomputed(output.num_scheduled_tokens.keys())
        self._block_holders.remove(output.num_scheduled_tokens.keys())
        stores = self._store_plan.stores(output, self._requests)
        loads = self._new_loads.take()
        again = [ChunkTouch(*touch) for touch in self._kept_loads.take_touches()]
        touches = [*again, *self._placement.take_touches()]
        renewed: list[ChunkRef] = []
        if stores or loads or touches:
            transfers = chain(stores, *(load.chunks for load in loads))
            renewed = [item.chunk for item in transfers] + [touch.chunk for touch in touches]
        retaining, prefetches = self._hints.take_step(renewed, idle=idle)
        namespaces: dict[str, tuple[str, ...]] = {}
        if renewed or retaining or prefetches:
            touches = self._hints.protected([*touches, *retaining])
            self._kept_loads.touched(touches)
            prefetched = chain.from_iterable(prefetch.chunks for prefetch in prefetches)
            chunks = chain(renewed, (touch.chunk for touch in retaining), prefetched)
            namespaces = {adapter: self._ranks_namespaces(adapter) for adapter in {chunk.adapter for chunk in chunks}}
        metadata = StepMetadata(
            namespaces,
            loads=loads,
            stores=stores,
            prefetches=prefetches,
            touches=touches,
            cancelled_jobs=self._cancelled_jobs,
            failures_to_report=[*self._block_holders.reportable_failures(), *self._finished_with_failed_load],
            given_back=self._kept_loads.end_step(),
            idle=idle,
            stores_wait=self._store_plan.keeps_engine_awake,
        )
        self._offers.end_step(may_wait=idle and not loads)
        self._cancelled_jobs = []
        self._finished_with_failed_load.clear()
        return metadata

    def take_output(self, finished: set[str], failed: set[str], report: StepReport | None) -> None:
        """Handle the ends of loads and stores.

        Args:
            finished: requests whose load has ended.
            failed: requests among them whose load has failed.
            report: the workers' report, if any.
        """
        self._step_times.end()
        if report is not None:
            self._take_report(report)
        for request_id in finished:
            state = self._requests.get(request_id)
            if state is None or state.job_id is None:  # the load of another connector, beside this one
                continue
            if request_id in failed:  # not one that has ended, or that has failed at another connector only
                self.counters.add("recomputed_requests", ALL_TIERS)
            else:
                self._ledger.loaded(set(state.loading) - {ref for _, ref in self._offers.excluded_chunks(state)})
            if request_id in failed or state.partial_load:
                self._store_plan.start_over(state)  # the engine computes the missing chunks, so they can be stored
                self._offers.load_incomplete(state)
            else:
                self._offers.load_complete(state)
            self._kept_loads.ended(state.job_id)
            self._offers.load_ended(state)
        if failed:
            self._offers.recompute(self._block_holders.needed_blocks(failed))
            self._block_holders.remove(failed)

    def request_finished(self, request: Request, tables: Sequence[Sequence[int]] = ()) -> list[dict[str, Any]] | None:
        """Forget a request and cancel its load, if any; the engine frees its blocks after the load has ended.

        Stores whose blocks are in its tables, one per group, may go on to wait for room.

        Returns:
            The answer to its hints, if it had any.
        """
        self.sessions.end(request.request_id)
        self._offers.no_longer_recomputed([request.request_id])
        if self._block_holders.withholds(request.request_id):
            self._finished_with_failed_load.add(request.request_id)
        self._block_holders.remove([request.request_id])
        state = self._requests.get(request.request_id)
        answer = self._hints.refused(request) if state is None else self._hints.ended(state)
        if state is not None:
            self._store_plan.ended(state, tables)
            self._placement.ended(state)
            self._ended.add(state)
        self._forget(request)
        return answer

    def reset(self) -> None:
        """Serve no object that was stored before this call.

        The caller may have changed the weights in place, which no fingerprint can show. So this process continues under
        a new namespace; objects on shared media stay valid for other engines. Requests that have begun are forgotten,
        since their blocks may hold data of the old weights. Their loads are dropped, and the engine recomputes them.
        """
        self._reset_salt = secrets.token_hex(16)
        self._namespaces.clear()
        self._ledger.clear()
        self._placement.reset()
        self._hints.reset()
        self._kept_loads.clear()
        self._store_plan.reset()
        self._ended.reset()
        if self.kv_events is not None:
            self.kv_events.reset()
        for state in list(self._requests.values()):
            if state.job_id is None and state.request.num_computed_tokens == 0:
                state.offer = state.lookup = None
                self._store_plan.start_over(state)
            else:
                self._forget(state.request)

    def shutdown(self) -> None:
        """Release the tiers. Idempotent; never waits for a hung medium."""
        if self._io is not None:
            self._adapters.shutdown()
            self._placement.shutdown(self._io)
            self._ended.close()
            close_tiers(self._tiers, self._io)
            if self._processes is not None:
                self._processes.release(self._close_seconds)
            self._io.release()
            self._io = None

    def _take_report(self, report: StepReport) -> None:
        for change in report.changes:
            if (index := self._indexes.get(change.tier)) is not None:
                index.update(change.key, change.present)
            if not change.present:
                self._kept_loads.gone(change.tier, change.key.pack, change.key.chunk_hash)
        self._kept_loads.reported(report.kept_jobs)
        self._hints.reported(report)
        if self.kv_events is not None:
            self.kv_events.reported(report.changes, report.ranks_storing)
        for tier, ranks in report.ranks_refusing_loads.items():
            self._ranks_refusing_loads[tier] += ranks
            if not self._ranks_refusing_loads[tier]:
                del self._ranks_refusing_loads[tier]
        self._ledger.load_failed(report.failed_chunks)
        self._ledger.stores_ended(report.stores_ended, report.not_stored)
        self._offers.stored(report.stores_ended.keys() - report.not_stored)
        for request_id in report.failed_requests:
            if request_id in self._block_holders:
                self._block_holders.load_fails(request_id)
            else:  # aborted: the engine frees its blocks only after its load has ended
                self._finished_with_failed_load.add(request_id)
        for request_id in report.partial_requests & self._requests.keys():
            self._requests[request_id].partial_load = True

    def _forget(self, request: Request) -> None:
        state = self._requests.pop(request.request_id, None)
        self._backfill.forget(request.request_id)
        if state is not None and state.job_id is not None:
            self._cancelled_jobs.append(state.job_id)
            self._kept_loads.ended(state.job_id)
            self._offers.load_ended(state)

    @property
    def fingerprints(self) -> tuple[str, ...]:
        """The fingerprint of each rank's objects, without an adapter."""
        return self._ranks_namespaces("")

    def _ranks_namespaces(self, adapter: str) -> tuple[str, ...]:
        """Return the namespace of each rank's keys, for an adapter's digest."""
        if adapter not in self._namespaces:
            missing = [rank for rank in range(self._num_ranks) if rank not in self._workers]
            if missing:
                raise PlanError(
                    f"workers {missing} did not report the layout of their KV cache, so their objects have no names; "
                    f"all ranks from 0 to {self._num_ranks - 1} must report it"
                )
            extra: dict[str, Json] = {"reset": self._reset_salt, **({"adapter": adapter} if adapter else {})}
            self._namespaces[adapter] = tuple(
                fingerprint({**self._identity, **extra, "rank": rank, "layout": self._workers[rank].layout})
                for rank in range(self._num_ranks)
            )
        return self._namespaces[adapter]
