"""An out-of-tree vLLM ``OffloadingSpec`` that keeps blocks in unlimited plain RAM of the worker process.

vLLM's own CPU spec refuses to run without a GPU. With this spec the stock ``OffloadingConnector`` runs on a CPU-only
machine too, as a differential oracle and a performance peer::

    {"kv_connector": "OffloadingConnector", "kv_role": "kv_both", "kv_connector_extra_config":
     {"spec_name": "RamOffloadingSpec", "spec_module_path": "tests.support.engine.stock_ram_spec"}}

The scheduler side numbers the stored chunks 0, 1, 2, ... per KV cache group and never evicts. The worker side keeps one
row of ``page_size_bytes`` bytes per stored block, for each group and layer reference. Rows lie in slabs that grow on
demand. The worker copies synchronously inside ``submit_store`` and ``submit_load``.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from vllm.v1.kv_offload.base import (
    BlockIDsLoadStoreSpec,
    CanonicalKVCacheRef,
    CanonicalKVCaches,
    GPULoadStoreSpec,
    LoadStoreSpec,
    LookupResult,
    OffloadingManager,
    OffloadingSpec,
    OffloadingWorker,
    OffloadKey,
    PrepareStoreOutput,
    ReqContext,
    RequestOffloadingContext,
    TransferResult,
    get_offload_group_idx,
)
from vllm.v1.kv_offload.config import OffloadingConfig

from offload_core.vllm.compat import cache_hit_source

SLAB_BYTES = 32 * 1024 * 1024

ByteRows = npt.NDArray[np.int8]
Ids = npt.NDArray[np.int64]


class RamSlots(BlockIDsLoadStoreSpec):
    """Chunk numbers (``block_ids``) in RAM, ordered like the keys they stand for."""


class RamManager(OffloadingManager):
    """Scheduler side: key -> chunk number within the key's group; nothing is ever evicted."""

    def __init__(self) -> None:
        """Start empty."""
        self._slots: dict[OffloadKey, int] = {}
        self._pending: set[OffloadKey] = set()
        self._next_slot: dict[int, int] = {}

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupResult:
        """HIT for a stored key, HIT_PENDING while its store runs, MISS otherwise."""
        if key in self._pending:
            return LookupResult.HIT_PENDING
        return LookupResult.HIT if key in self._slots else LookupResult.MISS

    def get_load_source(self, key: OffloadKey, req_context: ReqContext) -> Any:
        """Every hit comes from host memory."""
        return cache_hit_source("host")

    def prepare_load(self, keys: Collection[OffloadKey], req_context: ReqContext) -> LoadStoreSpec:
        """Return the chunk numbers of ``keys``; KeyError if one was never stored."""
        return RamSlots([self._slots[key] for key in keys])

    def prepare_store(self, keys: Collection[OffloadKey], req_context: ReqContext) -> PrepareStoreOutput:
        """Number the keys that are new; keys already stored or in flight are left out."""
        fresh = [key for key in dict.fromkeys(keys) if key not in self._slots]
        for key in fresh:
            group = get_offload_group_idx(key)
            self._slots[key] = self._next_slot.get(group, 0)
            self._next_slot[group] = self._slots[key] + 1
        self._pending.update(fresh)
        return PrepareStoreOutput(fresh, RamSlots([self._slots[key] for key in fresh]), [])

    def complete_store(self, keys: Collection[OffloadKey], req_context: ReqContext, success: bool = True) -> None:
        """Make ``keys`` loadable, or forget them if the store failed."""
        for key in keys:
            if key in self._pending:
                self._pending.discard(key)
                if not success:
                    del self._slots[key]

    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        """Store new chunks only (the default policy)."""
        return RequestOffloadingContext()

    def reset_cache(self) -> None:
        """Forget every key and number again from 0, so that the worker's rows are used again."""
        self._slots.clear()
        self._pending.clear()
        self._next_slot.clear()


class _RowStore:
    """Rows of ``row_bytes`` bytes, addressed by row number, in slabs of ``rows_per_slab`` rows."""

    def __init__(self, row_bytes: int) -> None:
        self.row_bytes = row_bytes
        self.rows_per_slab = max(1, SLAB_BYTES // row_bytes)
        self._slabs: list[ByteRows] = []

    def runs(self, rows: Ids) -> Iterator[tuple[slice, ByteRows]]:
        """Split ``rows`` into maximal runs of consecutive rows of one slab.

        Yields the run's place within ``rows`` and its rows as a view of shape (run length, row_bytes).
        """
        if not len(rows):
            return
        slabs = rows // self.rows_per_slab
        cuts = np.flatnonzero((np.diff(rows) != 1) | (np.diff(slabs) != 0)) + 1
        bounds = [0, *cuts.tolist(), len(rows)]
        for start, end in pairwise(bounds):
            first = int(rows[start]) % self.rows_per_slab
            yield slice(start, end), self._slab(int(slabs[start]))[first : first + end - start]

    def _slab(self, index: int) -> ByteRows:
        while len(self._slabs) <= index:
            self._slabs.append(np.empty((self.rows_per_slab, self.row_bytes), dtype=np.int8))
        return self._slabs[index]


class _Layer:
    """One layer reference: its pages in the KV cache and its rows in RAM."""

    def __init__(self, tensor: torch.Tensor, ref: CanonicalKVCacheRef) -> None:
        if tensor.device.type != "cpu" or tensor.dtype != torch.int8 or tensor.ndim != 2:
            raise ValueError("RamOffloadingSpec needs int8 KV cache tensors (blocks, bytes) in host memory")
        self.pages: ByteRows = tensor.numpy()[:, : ref.page_size_bytes]
        self.store = _RowStore(ref.page_size_bytes)

    def save(self, block_ids: Ids, rows: Ids) -> int:
        """Copy KV cache blocks to RAM rows; returns the bytes copied."""
        for part, target in self.store.runs(rows):
            if self.pages.flags.c_contiguous:
                np.take(self.pages, block_ids[part], axis=0, out=target, mode="clip")
            else:
                for row, block_id in zip(target, block_ids[part].tolist(), strict=True):
                    np.copyto(row, self.pages[block_id])
        return len(rows) * self.store.row_bytes

    def load(self, block_ids: Ids, rows: Ids) -> int:
        """Copy RAM rows to KV cache blocks; returns the bytes copied."""
        for part, source in self.store.runs(rows):
            self.pages[block_ids[part]] = source
        return len(rows) * self.store.row_bytes


class RamWorker(OffloadingWorker):
    """Worker side: copies between KV cache blocks and RAM rows, synchronously and in submission order."""

    def __init__(self, kv_caches: CanonicalKVCaches, blocks_per_chunk: int) -> None:
        """Reserve nothing yet; ValueError if a KV cache tensor is not an int8 matrix in host memory."""
        self._blocks_per_chunk = blocks_per_chunk
        self._groups = [
            [_Layer(kv_caches.tensors[ref.tensor_idx].tensor, ref) for ref in refs]
            for refs in kv_caches.group_data_refs
        ]
        self._finished: list[TransferResult] = []

    def submit_store(self, job_id: int, src_spec: GPULoadStoreSpec, dst_spec: LoadStoreSpec) -> bool:
        """Copy KV cache blocks to RAM; done when this returns."""
        return self._copy(job_id, src_spec, dst_spec, store=True)

    def submit_load(self, job_id: int, src_spec: LoadStoreSpec, dst_spec: GPULoadStoreSpec) -> bool:
        """Copy RAM rows to KV cache blocks; done when this returns."""
        return self._copy(job_id, dst_spec, src_spec, store=False)

    def get_finished(self) -> list[TransferResult]:
        """Results of the jobs submitted since the last call."""
        finished, self._finished = self._finished, []
        return finished

    def wait(self, job_ids: set[int]) -> None:
        """Nothing to wait for: every submitted job is finished."""

    def shutdown(self) -> None:
        """Release the RAM."""
        self._groups.clear()
        self._finished.clear()

    def _copy(self, job_id: int, gpu: GPULoadStoreSpec, ram: LoadStoreSpec, *, store: bool) -> bool:
        assert isinstance(ram, RamSlots)
        started = time.perf_counter()
        copied = 0
        for layers, block_ids, rows in self._plan(gpu, ram):
            for layer in layers:
                copied += layer.save(block_ids, rows) if store else layer.load(block_ids, rows)
        seconds = time.perf_counter() - started
        self._finished.append(TransferResult(job_id, True, copied, seconds))
        return True

    def _plan(self, gpu: GPULoadStoreSpec, ram: RamSlots) -> Iterator[tuple[list[_Layer], Ids, Ids]]:
        """Pair block ids with RAM rows, per group.

        A chunk holds ``blocks_per_chunk`` consecutive blocks; the first block may lie inside its chunk.
        """
        per_chunk = self._blocks_per_chunk
        block_ids = gpu.block_ids.astype(np.int64)
        slots = ram.block_ids.astype(np.int64)
        block_at = slot_at = 0
        for layers, size, first in zip(self._groups, gpu.group_sizes, gpu.block_indices, strict=True):
            if not size:
                continue
            inner = first % per_chunk + np.arange(size, dtype=np.int64)
            group_slots = slots[slot_at:]
            yield (
                layers,
                block_ids[block_at : block_at + size],
                group_slots[inner // per_chunk] * per_chunk + inner % per_chunk,
            )
            block_at += size
            slot_at += int(inner[-1]) // per_chunk + 1
        if block_at != len(block_ids) or slot_at != len(slots):
            raise ValueError("a transfer names blocks and chunks that do not match")


class RamOffloadingSpec(OffloadingSpec):
    """The pair of RAM manager and RAM worker; takes no settings of its own beside ``blocks_per_chunk``."""

    def __init__(self, config: OffloadingConfig) -> None:
        """Keep ``config``; manager and worker are made when asked for."""
        super().__init__(config)
        self._manager: RamManager | None = None
        self._worker: RamWorker | None = None

    def get_manager(self) -> OffloadingManager:
        """The scheduler-side manager (one per spec)."""
        if self._manager is None:
            self._manager = RamManager()
        return self._manager

    def get_worker(self, kv_caches: CanonicalKVCaches) -> OffloadingWorker:
        """The worker-side copier (one per spec); ValueError if the KV cache is not in host memory."""
        if self._worker is None:
            self._worker = RamWorker(kv_caches, self.blocks_per_chunk)
        return self._worker
