"""Our connector, with every block that the engine will take as loaded filled with a pattern before the load starts.

A byte that a load should have written and did not then stands out: as a key, value or state it is about 3e38. ::

    {"kv_connector": "PoisoningConnector", "kv_connector_module_path": "tests.support.engine.poisoning", ...}

The blocks to fill come from the engine's own block tables and tensors, not from our planner.
"""

from __future__ import annotations

import contextlib
import dataclasses
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

from offload_core.vllm.connector import HybridOffloadConnector
from offload_core.vllm.metadata import StepMetadata

if TYPE_CHECKING:
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.request import Request

POISON_BYTE = 0x7F


@dataclass
class PoisonedStepMetadata(StepMetadata):
    """A step whose loads go to blocks that must be filled first."""

    poisoned_blocks: dict[int, list[int]] = field(default_factory=dict)
    """Block ids by KV cache group."""


class PoisoningConnector(HybridOffloadConnector):
    """A connector that fills blocks with :data:`POISON_BYTE` before they are loaded; otherwise as its base class."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: KVCacheConfig) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._kv_caches: KVCacheConfig = kv_cache_config
        self._computed_tokens: dict[str, int] = {}
        self._poisoned_blocks: dict[int, list[int]] = {}
        self._tensors: dict[str, torch.Tensor] = {}

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int | None, bool]:
        """Remember where the load would start."""
        self._computed_tokens[request.request_id] = num_computed_tokens
        return super().get_num_new_matched_tokens(request, num_computed_tokens)

    def update_state_after_alloc(self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int) -> None:
        """Note the blocks of every group between the local prefix and the end of the external one."""
        super().update_state_after_alloc(request, blocks, num_external_tokens)
        computed = self._computed_tokens.pop(request.request_id, 0)
        end = computed + num_external_tokens
        for group_id in self._kv_caches.prefix_cacheable_group_ids if num_external_tokens else ():
            size = self._kv_caches.kv_cache_groups[group_id].kv_cache_spec.block_size
            loaded = blocks.blocks[group_id][-(-computed // size) : -(-end // size)]
            ids = [block.block_id for block in loaded if not block.is_null]
            self._poisoned_blocks.setdefault(group_id, []).extend(ids)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> PoisonedStepMetadata:
        """Send the block ids along."""
        step = super().build_connector_meta(scheduler_output)
        assert isinstance(step, StepMetadata)
        poisoned, self._poisoned_blocks = self._poisoned_blocks, {}
        values = {item.name: getattr(step, item.name) for item in dataclasses.fields(step)}
        return PoisonedStepMetadata(**values, poisoned_blocks=poisoned)

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Keep the engine's tensors."""
        super().register_kv_caches(kv_caches)
        self._tensors = kv_caches

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Fill the blocks, then start the loads."""
        step = self._step
        assert isinstance(step, PoisonedStepMetadata)
        for group_id, block_ids in step.poisoned_blocks.items():
            group = self._kv_caches.kv_cache_groups[group_id]
            for name in group.layer_names:
                self._fill(self._tensors[name], block_ids)
        super().start_load_kv(forward_context, **kwargs)

    def _fill(self, tensor: torch.Tensor, block_ids: list[int]) -> None:
        """Fill blocks of one layer; the first dimension counts blocks, or kernel blocks that divide them."""
        kernel_blocks, rest = divmod(tensor.shape[0], self._kv_caches.num_blocks)
        assert rest == 0, f"a tensor of shape {tuple(tensor.shape)} does not hold {self._kv_caches.num_blocks} blocks"
        for block_id in block_ids:
            tensor[block_id * kernel_blocks : (block_id + 1) * kernel_blocks].view(torch.uint8).fill_(POISON_BYTE)


with contextlib.suppress(ValueError):  # see offload_core.vllm.connector
    KVConnectorFactory.register_connector("PoisoningConnector", __name__, "PoisoningConnector")
