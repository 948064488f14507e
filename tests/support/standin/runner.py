"""A model runner without a model: it follows vLLM's own runner step by step, but writes and checks bytes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput

from tests.support.standin.cache import NULL_BLOCK, Layer, RankCache, is_recurrent
from tests.support.standin.content import Prefix


@dataclass
class _Running:
    computed_tokens: int
    known_tokens: int
    tables: list[list[int]]


class StandInRunner:
    """One rank's model runner.

    Args:
        cache: the rank's KV cache.
        connector: the rank's worker half, if any.
        prefixes: the requests' tokens by id, shared by all ranks; the first rank to run a step appends its samples.
    """

    def __init__(self, cache: RankCache, connector: KVConnectorBase_V1 | None, prefixes: Mapping[str, Prefix]) -> None:
        self.cache = cache
        self.connector = connector
        self._prefixes = prefixes
        self._requests: dict[str, _Running] = {}
        self._state_column: dict[str, int] = {}
        """Column of a request's running state in its block table, as vLLM's ``mamba_state_idx``."""

    def execute(self, output: SchedulerOutput, new_blocks: Sequence[int]) -> ModelRunnerOutput:
        """Run one step.

        Args:
            output: the step, as it reaches a worker.
            new_blocks: the blocks that the block pool has handed out for this step; their content is undefined.

        Raises:
            WrongBytesError: a forward pass would have read wrong bytes.
        """
        metadata, connector = output.kv_connector_metadata, self.connector
        stray = set(output.new_block_ids_to_zero or ()) - set(new_blocks)
        # A failed load's blocks are zeroed late; they are not new, and their content is not valid.
        with self.cache.in_host_memory():
            self.cache.poison([*new_blocks, *stray])
        if connector is not None:
            assert metadata is not None
            connector.handle_preemptions(metadata)
        with self.cache.in_host_memory():
            self.cache.poison(output.new_block_ids_to_zero or ())  # after the connector, as vLLM zeroes them
            self.cache.copy_blocks((copy[0], copy[1]) for copy in output.kv_cache_block_copies or ())
        fresh = self._update(output)
        with self.cache.in_host_memory():
            for req_id, scheduled in output.num_scheduled_tokens.items():
                self._read_states(req_id, scheduled)
        kv_output = KVConnectorOutput()
        if connector is not None:
            assert metadata is not None
            connector.bind_connector_metadata(metadata)
            if output.has_sync_kv_loads:
                connector.start_load_kv(None)
        with self.cache.in_host_memory():
            sampled = self._forward(output, fresh)
        if connector is not None:
            if not output.has_sync_kv_loads:
                connector.start_load_kv(None)
            connector.wait_for_save()
            results = connector.get_transfer_results(output.finished_req_ids)
            kv_output.finished_sending = results.finished_sending
            kv_output.finished_recving = results.finished_recving
            kv_output.failed_recving = results.failed_recving
            kv_output.invalid_block_ids = connector.get_block_ids_with_load_errors()
            kv_output.kv_connector_stats = connector.get_kv_connector_stats()
            kv_output.kv_cache_events = connector.get_kv_connector_kv_cache_events()
            kv_output.kv_connector_worker_meta = connector.build_connector_worker_meta()
            connector.clear_connector_metadata()
        req_ids = list(sampled)
        return ModelRunnerOutput(
            req_ids=req_ids,
            req_id_to_index={req_id: index for index, req_id in enumerate(req_ids)},
            sampled_token_ids=list(sampled.values()),
            kv_connector_output=kv_output,
        )

    def _update(self, output: SchedulerOutput) -> set[str]:
        """Apply the step's changes; returns the requests with new block tables."""
        cached = output.scheduled_cached_reqs
        for req_id in (*output.finished_req_ids, *(output.preempted_req_ids or ()), *cached.resumed_req_ids):
            self._state_column.pop(req_id, None)
        for req_id in output.finished_req_ids:
            self._requests.pop(req_id, None)
        fresh: set[str] = set()
        for new in output.scheduled_new_reqs:
            known = len(new.prefill_token_ids or new.prompt_token_ids)
            self._requests[new.req_id] = _Running(new.num_computed_tokens, known, [list(ids) for ids in new.block_ids])
            fresh.add(new.req_id)
        for index, req_id in enumerate(cached.req_ids):
            ids = cached.new_block_ids[index]
            if req_id in cached.resumed_req_ids:
                assert ids is not None
                self._requests[req_id] = _Running(0, 0, [list(group) for group in ids])
                fresh.add(req_id)
            elif ids is not None:
                for table, added in zip(self._requests[req_id].tables, ids, strict=True):
                    table.extend(added)
            running = self._requests[req_id]
            running.computed_tokens = cached.num_computed_tokens[index]
            running.known_tokens = self._prefixes[req_id].prompt_tokens + cached.num_output_tokens[index]
        return fresh

    def _forward(self, output: SchedulerOutput, fresh: set[str]) -> dict[str, list[int]]:
        """Check the bytes that scheduled requests read, then write their results; returns the sampled tokens."""
        sampled: dict[str, list[int]] = {}
        for req_id, scheduled in output.num_scheduled_tokens.items():
            sampled[req_id] = self._compute(req_id, scheduled)
        # Attention comes after all writes: vLLM lets a request hit blocks that another one computes in the same step.
        for req_id, scheduled in output.num_scheduled_tokens.items():
            self._attend(req_id, scheduled, req_id in fresh)
        return sampled

    def _attend(self, req_id: str, scheduled: int, fresh: bool) -> None:
        running, prefix = self._requests[req_id], self._prefixes[req_id]
        start = running.computed_tokens - scheduled
        why = f"request {req_id}, step from token {start} to {start + scheduled}{', just (re)started' if fresh else ''}"
        for layer in self.cache.all_layers():
            if is_recurrent(layer):
                continue
            table = running.tables[layer.group]
            if fresh:
                self._attend_to_all_blocks(layer, table, prefix, start, why)
            layer.check(prefix, table, layer.states(layer.first_attended(start), start), why)

    def _attend_to_all_blocks(self, layer: Layer, table: Sequence[int], prefix: Prefix, start: int, why: str) -> None:
        """Check every whole block that the engine takes as computed, even if this request does not attend to it."""
        size = layer.spec.block_size
        for index in range(start // size):
            if table[index] != NULL_BLOCK:
                layer.check(prefix, table, layer.states(index * size, (index + 1) * size), f"{why}, cached block")

    def _read_states(self, req_id: str, scheduled: int) -> None:
        """Move the running state to the column of this step, as vLLM's ``preprocess_mamba``, and check it.

        As in vLLM's runner for CPUs, this comes before the connector's ``start_load_kv``.
        """
        running, prefix = self._requests[req_id], self._prefixes[req_id]
        start = running.computed_tokens
        why = f"request {req_id}, step from token {start} to {start + scheduled}"
        for layer in filter(is_recurrent, self.cache.all_layers()):
            table, size = running.tables[layer.group], layer.spec.block_size
            before = self._state_column.get(req_id, (start - 1) // size)
            now = -(-(start + scheduled) // size) - 1
            if before not in (-1, now):
                layer.check_state(prefix, table[before], start, f"{why}, column {before}")
                layer.copy_block(table[before], table[now])
            if start:
                layer.check_state(prefix, table[now], start, f"{why}, column {now}")

    def _compute(self, req_id: str, scheduled: int) -> list[int]:
        running, prefix = self._requests[req_id], self._prefixes[req_id]
        start = running.computed_tokens
        end = start + scheduled
        for layer in self.cache.all_layers():
            table = running.tables[layer.group]
            if is_recurrent(layer):
                column = -(-end // layer.spec.block_size) - 1
                layer.write_state(prefix, table[column], end)
                self._state_column[req_id] = column
            else:
                done = start // layer.state_tokens
                layer.write(prefix, table, np.arange(done, end // layer.state_tokens, dtype=np.int64))
        running.computed_tokens = end
        if end < running.known_tokens:
            return []
        running.known_tokens += 1
        return [prefix.sample(end)]
