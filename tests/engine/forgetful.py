"""Connectors with a fault: a part of every load is left out, and the load is reported as whole all the same."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import torch

from offload_core.vllm.connector import HybridOffloadConnector
from offload_core.vllm.metadata import ChunkTransfer
from tests.support.engine.poisoning import POISON_BYTE, PoisonedStepMetadata, PoisoningConnector

if TYPE_CHECKING:
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole, KVConnectorTransferResults
    from vllm.v1.kv_cache_interface import KVCacheConfig


class _Forgetful(HybridOffloadConnector):
    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        step = self._step
        step.loads = [dataclasses.replace(load, chunks=self.kept(load.chunks)) for load in step.loads]
        super().start_load_kv(forward_context, **kwargs)

    @staticmethod
    def kept(chunks: tuple[ChunkTransfer, ...]) -> tuple[ChunkTransfer, ...]:
        raise NotImplementedError


class ForgetsFirstChunkOverOldBytes(_Forgetful):
    """In its place is what the blocks held before: numbers like any others."""

    @staticmethod
    def kept(chunks: tuple[ChunkTransfer, ...]) -> tuple[ChunkTransfer, ...]:
        return chunks[1:]


class ForgetsFirstChunk(ForgetsFirstChunkOverOldBytes, PoisoningConnector):
    """In its place is the pattern."""


class ForgetsLastChunk(_Forgetful, PoisoningConnector):
    @staticmethod
    def kept(chunks: tuple[ChunkTransfer, ...]) -> tuple[ChunkTransfer, ...]:
        return chunks[:-1]


class ForgetsDraftLayers(PoisoningConnector):
    """After every load, the layers of a draft model hold zeros."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: KVCacheConfig) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._forgotten: list[torch.Tensor] = []

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        step = self._step
        assert isinstance(step, PoisonedStepMetadata)
        super().start_load_kv(forward_context, **kwargs)
        for group_id, block_ids in step.poisoned_blocks.items():
            for name in self._kv_caches.kv_cache_groups[group_id].layer_names:
                if name.startswith("draft_model."):
                    tensor = self._tensors[name]
                    kernel_blocks = tensor.shape[0] // self._kv_caches.num_blocks
                    rows = [tensor[one * kernel_blocks : (one + 1) * kernel_blocks] for one in block_ids]
                    self._forgotten += rows

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        results = super().get_transfer_results(finished_req_ids)
        if results.finished_recving:  # requests run one at a time
            for rows in self._forgotten:
                rows.zero_()
            self._forgotten.clear()
        return results


class ForgetsOneByte(PoisoningConnector):
    """The highest byte of the first number in the first block of every load keeps the pattern."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: KVCacheConfig) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._forgotten: list[torch.Tensor] = []

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        step = self._step
        assert isinstance(step, PoisonedStepMetadata)
        super().start_load_kv(forward_context, **kwargs)
        for group_id, block_ids in step.poisoned_blocks.items():
            tensor = self._tensors[self._kv_caches.kv_cache_groups[group_id].layer_names[0]]
            kernel_blocks = tensor.shape[0] // self._kv_caches.num_blocks
            self._forgotten += [tensor[block_id * kernel_blocks] for block_id in block_ids[:1]]

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        results = super().get_transfer_results(finished_req_ids)
        if results.finished_recving:  # requests run one at a time
            for block in self._forgotten:
                number = block[(slice(0, 1),) * block.dim()]
                number.view(torch.uint8)[..., -1] = POISON_BYTE
            self._forgotten.clear()
        return results
