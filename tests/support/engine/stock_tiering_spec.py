"""vLLM's ``TieringOffloadingSpec`` with a worker that copies on a CPU, for models with one KV cache group.

vLLM's own worker for the primary tier refuses to run without a GPU. Scheduler, manager, primary tier and secondary
tiers are vLLM's own. Only the copies between the KV cache and the primary tier's shared region are made here.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from vllm.v1.kv_offload.base import CanonicalKVCaches, GPULoadStoreSpec, LoadStoreSpec, OffloadingWorker
from vllm.v1.kv_offload.cpu.common import CPULoadStoreSpec
from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec

from tests.support.engine.stock_ram_spec import ByteRows, Ids, RamSlots, RamWorker


class _RegionRows:
    """The rows of one layer in the shared region: ``blocks_per_chunk`` blocks per chunk."""

    def __init__(self, chunks: ByteRows, row_bytes: int) -> None:
        self.row_bytes = row_bytes
        self._chunks = chunks
        self._per_chunk = chunks.shape[1] // row_bytes

    def runs(self, rows: Ids) -> Iterator[tuple[slice, ByteRows]]:
        for place, row in enumerate(rows.tolist()):
            first = row % self._per_chunk * self.row_bytes
            chunk = self._chunks[row // self._per_chunk]
            yield slice(place, place + 1), chunk[first : first + self.row_bytes].reshape(1, -1)


class RegionWorker(RamWorker):
    """Copies between KV cache blocks and the primary tier's chunks."""

    def __init__(self, kv_caches: CanonicalKVCaches, blocks_per_chunk: int, region: SharedOffloadRegion) -> None:
        super().__init__(kv_caches, blocks_per_chunk)
        self._region = region
        (layers,) = self._groups
        for layer in layers:
            row_bytes = layer.store.row_bytes
            view: Any = region.create_next_worker_view(row_bytes * blocks_per_chunk)
            layer.store = _RegionRows(np.asarray(view.numpy()), row_bytes)  # type: ignore[assignment]

    def _copy(self, job_id: int, gpu: GPULoadStoreSpec, ram: LoadStoreSpec, *, store: bool) -> bool:
        assert isinstance(ram, CPULoadStoreSpec)
        return super()._copy(job_id, gpu, RamSlots(ram.block_ids.tolist()), store=store)

    def shutdown(self) -> None:
        super().shutdown()
        self._region.cleanup()


class CpuTieringSpec(TieringOffloadingSpec):
    """vLLM's spec for tiering, on a CPU."""

    def get_worker(self, kv_caches: CanonicalKVCaches) -> OffloadingWorker:
        region = SharedOffloadRegion(
            engine_id=self.config.engine_id,
            num_chunks=self.num_chunks,
            rank=self.config.parallel.rank,
            kv_bytes_per_chunk=self.kv_bytes_per_chunk,
            cpu_page_size=self.cpu_page_size_per_worker,
        )
        return RegionWorker(kv_caches, self.blocks_per_chunk, region)
