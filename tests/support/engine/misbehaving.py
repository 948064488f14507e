"""Connectors that do not behave, to stand beside ours in a ``WeightedMultiConnector``."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorMetadata, SupportsHMA

from tests.support.engine.poisoning import PoisoningConnector

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request


class WithoutHybridSupport(KVConnectorBase_V1):
    """Stores nothing and finds nothing."""

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None: ...

    def wait_for_layer_load(self, layer_name: str) -> None: ...

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None: ...

    def wait_for_save(self) -> None: ...

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int | None, bool]:
        return 0, False

    def update_state_after_alloc(self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int) -> None:
        assert num_external_tokens == 0

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        return KVConnectorMetadata()


class FindsNothing(WithoutHybridSupport, SupportsHMA):
    """The same for all models."""

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        return False, None


class NeverDecides(FindsNothing):
    """Is undecided for ever."""

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int | None, bool]:
        return None, False


class RaisesErrors(FindsNothing):
    """Raises an error for every question."""

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int | None, bool]:
        raise ConnectionError("no answer from the store")


class FailsLoads(PoisoningConnector):
    """Ours, but two of three loads fail, after their blocks have been filled with the pattern."""

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        step = self._step
        step.loads = [
            dataclasses.replace(load, chunks=(), impossible=True) if load.job_id % 3 else load for load in step.loads
        ]
        super().start_load_kv(forward_context, **kwargs)
