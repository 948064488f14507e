"""The prefetches of a worker: loads for no blocks, whose objects the faster tiers take."""

from __future__ import annotations

import time
from collections.abc import Callable

from offload_core.api.keys import ObjectKey
from offload_core.memory.block_copier import BlockSlice
from offload_core.planning.chunk_keys import ChunkRef
from offload_core.planning.planner import HybridOffloadPlanner
from offload_core.transfer.batches import TransferObject
from offload_core.transfer.loads import LoadJob, LoadResult
from offload_core.vllm.metadata import Prefetch, StepReport

_LONGEST_STORE_SECONDS = 5.0
"""Longest wait of a report for the stores of promoted objects."""


class WorkerPrefetches:
    """Follows prefetches until they are reported. For the engine thread."""

    def __init__(self, planner: HybridOffloadPlanner) -> None:
        self._no_blocks = {pack.name: (BlockSlice(0, ()),) * len(pack.groups) for pack in planner.all_packs}
        self._loading: dict[int, Prefetch] = {}
        self._storing: dict[int, float] = {}
        """Per prefetch whose objects have been loaded, the time of its report at the latest."""

    def begin(self, prefetch: Prefetch, key: Callable[[ChunkRef], ObjectKey]) -> LoadJob:
        """Return the load of a prefetch."""
        self._loading[prefetch.job_id] = prefetch
        objects = tuple(TransferObject(key(ref), self._no_blocks[ref.pack]) for ref in prefetch.chunks)
        return LoadJob(prefetch.job_id, prefetch.tier, objects)

    def load_ended(self, result: LoadResult, report: StepReport, ref: Callable[[ObjectKey], ChunkRef]) -> bool:
        """Note the end of a load; returns ``False`` if it is not the load of a prefetch."""
        prefetch = self._loading.pop(result.job_id, None)
        if prefetch is None:
            return False
        report.failed_chunks.update((prefetch.tier, ref(failed)) for failed in result.failed_keys)
        if result.status != "loaded":
            report.prefetches_failed.add(prefetch.job_id)
        wait = _LONGEST_STORE_SECONDS if prefetch.last else 0.0
        self._storing[prefetch.job_id] = time.monotonic() + wait
        return True

    @property
    def is_storing(self) -> bool:
        """True if some report waits for stores."""
        return bool(self._storing)

    def report(self, report: StepReport, *, stores_pending: bool) -> None:
        """Report the prefetches that have ended."""
        if self._storing:
            now = time.monotonic()
            for job_id, latest in list(self._storing.items()):
                if not stores_pending or now >= latest:
                    del self._storing[job_id]
                    report.prefetches_ended[job_id] += 1
