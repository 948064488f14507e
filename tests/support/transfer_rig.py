"""A transfer engine over a real KV cache tensor and real tiers, driven step by step by the test."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
from offload_backend_disk import DiskBackend, DiskOptions

from offload_core.api.backend import BackendType
from offload_core.api.memory.pinned_memory import HostPinning
from offload_core.config.model import BackendConfig, TierConfig
from offload_core.io_process.processes import IoProcesses
from offload_core.memory.block_copier import BlockSlice, CpuBlockCopier, OnPart
from offload_core.memory.canonical import CanonicalKVCaches, LayerPages
from offload_core.memory.payload_layout import PackLayout
from offload_core.memory.staging_pool import StagingPool
from offload_core.memory.staging_size import STORE_SHARE, smallest_pool_bytes, staging_uses
from offload_core.planning.planner import GroupGeometry, HitPolicy, HybridOffloadPlanner
from offload_core.runtime.io_loop import IoLoop
from offload_core.runtime.metrics import Counters
from offload_core.tiers.opening import close_tiers
from offload_core.tiers.tier import Tier
from offload_core.transfer.batches import TransferObject
from offload_core.transfer.engine import TransferEngine
from offload_core.transfer.loads import LoadJob, LoadResult
from offload_core.transfer.stores.pending_store import StoreResult
from tests.support.memory_backend import LIMITS, MemoryBackend, key, memory_tier

SECONDS = 30
PACK = "full-u16"


class WatchedCopier(CpuBlockCopier):
    """A copier that records the threads that touch the KV cache."""

    def __init__(self, caches: CanonicalKVCaches) -> None:
        super().__init__(caches)
        self.threads: set[threading.Thread] = set()

    def gather_in_parts(
        self, layout: PackLayout, blocks: Sequence[BlockSlice], payload: torch.Tensor, on_part: OnPart
    ) -> bool:
        self.threads.add(threading.current_thread())
        return super().gather_in_parts(layout, blocks, payload, on_part)

    def scatter_in_parts(
        self, layout: PackLayout, blocks: Sequence[BlockSlice], payload: torch.Tensor, on_part: OnPart
    ) -> None:
        self.threads.add(threading.current_thread())
        super().scatter_in_parts(layout, blocks, payload, on_part)


class WholeCopier(WatchedCopier):
    """A copier that tells of no parts, as for a device. Objects are sealed after their copies."""

    in_parts = None  # type: ignore[assignment]


def disk_tier(name: str, path: str) -> TierConfig:
    config = BackendConfig.model_validate({"name": name, "type": "disk", "path": path})
    return TierConfig(config, BackendType("disk", DiskBackend, DiskOptions), DiskOptions.model_validate({"path": path}))


def item(number: int, block: int) -> TransferObject:
    return TransferObject(key(number, PACK), (BlockSlice(0, (block,)),))


class Rig:
    """One group with blocks of 16 tokens; an object is one block, or as many as told."""

    def __init__(
        self,
        io: IoLoop,
        *,
        page_bytes: int = 512,
        num_blocks: int = 16,
        make_copier: Callable[[CanonicalKVCaches], Any] = WatchedCopier,
        device: str | torch.device = "cpu",
        blocks_per_object: int = 1,
    ) -> None:
        self.io = io
        self.counters = Counters()
        generator = torch.Generator().manual_seed(1)
        shape = num_blocks, page_bytes
        self.kv_cache = torch.randint(-128, 128, shape, dtype=torch.int8, generator=generator).to(device)
        caches = CanonicalKVCaches.build([[LayerPages("layer", self.kv_cache, num_blocks, page_bytes, page_bytes)]])
        planner = HybridOffloadPlanner.build(
            [GroupGeometry(0, 16, HitPolicy("full"))],
            hash_block_size=16,
            max_model_len=max(1024, 2 * 16 * blocks_per_object),
            hybrid_chunk_size=16 * blocks_per_object,
        )
        self.layouts = {pack.name: PackLayout.build(pack, caches, [0]) for pack in planner.packs}
        self.copier: Any = make_copier(caches)
        self.tiers: list[Tier] = []
        self.backends: dict[str, MemoryBackend] = {}
        self._jobs = 0
        self._engine: TransferEngine | None = None
        self.staging: StagingPool

    def add_tier(self, config: TierConfig) -> None:
        tier = Tier(config, LIMITS, self.counters)
        self.io.submit(tier.open()).result(SECONDS)
        self.tiers.append(tier)

    def add_memory_tier(
        self,
        name: str = "memory",
        *,
        medium: Literal["host", "disk", "remote"] = "host",
        prepare: Callable[[MemoryBackend], None] | None = None,
        **common: Any,
    ) -> MemoryBackend:
        """Add a tier.

        Args:
            prepare: gets the tier's backend before the tier opens.
            common: configuration keys.
        """

        def set_up(backend: MemoryBackend) -> None:
            backend.medium = medium
            if prepare is not None:
                prepare(backend)

        config, made = memory_tier(name, set_up, **common)
        self.add_tier(config)
        self.backends[name] = made[0]
        return made[0]

    @property
    def largest_payload_bytes(self) -> int:
        return max(layout.payload_bytes for layout in self.layouts.values())

    def start(self, staging_bytes: int = 0, pool: type[StagingPool] = StagingPool) -> TransferEngine:
        uses = staging_uses((tier.config.staging_share, tier.encodes) for tier in self.tiers)
        staging_bytes = staging_bytes or smallest_pool_bytes(self.largest_payload_bytes, uses)
        return self.start_with(pool(staging_bytes, STORE_SHARE))

    def start_with(
        self, staging: StagingPool, processes: IoProcesses | None = None, pinning: HostPinning | None = None
    ) -> TransferEngine:
        self.staging = staging
        self._engine = TransferEngine(
            io=self.io,
            tiers=self.tiers,
            staging=staging,
            copier=self.copier,
            layouts=self.layouts,
            counters=self.counters,
            processes=processes,
            pinning=pinning,
        )
        return self._engine

    @property
    def engine(self) -> TransferEngine:
        assert self._engine is not None
        return self._engine

    def load(self, *objects: TransferObject, tier: str = "memory") -> int:
        self._jobs += 1
        self.engine.submit_load(LoadJob(self._jobs, tier, objects))
        return self._jobs

    def store_all(self, *objects: TransferObject) -> dict[int, bool]:
        """Store and wait for the end; return, by key number, whether the object is on a tier."""
        self.engine.submit_stores(objects)
        assert self.engine.drain_stores(SECONDS)
        return self.store_results()

    def store_results(self) -> dict[int, bool]:
        return {number_of(result): result.stored for result in self.engine.take_store_results()}

    def results(self, count: int) -> dict[int, LoadResult]:
        """Step the engine until ``count`` loads have ended."""
        ended: dict[int, LoadResult] = {}
        self.step_until(lambda: len(ended) >= count, ended)
        return ended

    def result(self) -> LoadResult:
        (result,) = self.results(1).values()
        return result

    def step_until(self, done: Callable[[], bool], ended: dict[int, LoadResult] | None = None) -> None:
        limit = time.monotonic() + SECONDS
        while not done():
            assert time.monotonic() < limit, "the engine has stepped for long enough"
            self.engine.wait_for_arrival(0.01)
            for result in self.engine.poll():
                assert ended is not None, f"unexpected {result}"
                assert result.job_id not in ended, "a load ended twice"
                ended[result.job_id] = result

    def all_leases_are_back(self) -> None:
        self.step_until(lambda: self.staging.used_bytes == 0)

    def counted(self, name: str, tier: str = "memory", *, keep: bool = False) -> float:
        """Return a count since the last call for it; ``keep`` leaves it for another call."""
        counts = self.counters.take()
        for (other, of), count in counts.items():
            if keep or (other, of) != (name, tier):
                self.counters.add(other, of, count)
        return counts.get((name, tier), 0)

    def finish(self) -> None:
        for backend in self.backends.values():
            backend.faults = {}
            for gate in backend.gates.values():
                gate.open()
        if self._engine is not None:
            assert self.engine.drain_stores(SECONDS)
            self.engine.close()
        close_tiers(self.tiers, self.io, SECONDS)
        if isinstance(self.copier, WatchedCopier):
            assert self.copier.threads <= {threading.current_thread()}, "I2: another thread touched the KV cache"


def number_of(result: StoreResult) -> int:
    return int.from_bytes(result.key.chunk_hash, "big")
