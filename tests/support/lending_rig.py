"""A transfer engine over a real ``cpu`` tier that lends its memory, in this process or in an I/O process."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from offload_core.api.memory.pinned_memory import HostPinning
from offload_core.api.memory.shared_memory import SharedMemory
from offload_core.config.loading import load_config
from offload_core.io_process.processes import IoProcesses
from offload_core.memory.canonical import CanonicalKVCaches
from offload_core.memory.staging_pool import Lease, LoadShare, StagingPool, arena_bytes
from offload_core.memory.staging_size import STORE_SHARE, lease_bytes
from offload_core.objects.format import object_bytes
from offload_core.runtime.io_loop import IoLoop
from offload_core.runtime.restart_pause import RestartPause
from offload_core.tiers.opening import open_tiers
from offload_core.transfer.batches import TransferObject
from tests.support.transfer_rig import SECONDS, Rig, WatchedCopier

STAGING_BYTES = 24 * 1024 * 1024


class CountingPool(StagingPool):
    """A pool that counts its leases."""

    leases = 0

    def try_acquire(self, nbytes: int, *, for_store: bool) -> Lease | None:
        self.leases += 1
        return super().try_acquire(nbytes, for_store=for_store)

    def try_acquire_all(self, sizes: Any, share: LoadShare | None = None) -> list[Lease] | None:
        self.leases += len(sizes)
        return super().try_acquire_all(sizes, share)


class LendingRig(Rig):
    """A transfer engine over a tier ``cpu``.

    Args:
        mode: the configuration key ``io_process``.
        capacity_objects: number of objects that the tier has room for.
        staging_bytes: size of the staging pool.
        options: more options of the tier.
        more: further tiers.
        pinning: pins the tier's memory, if the copier needs that.
    """

    def __init__(
        self, io: IoLoop, folder: Path, mode: str, *, capacity_objects: int = 16, num_blocks: int = 64,
        page_bytes: int = 5000, blocks_per_object: int = 1, staging_bytes: int = STAGING_BYTES,
        make_copier: Callable[[CanonicalKVCaches], Any] = WatchedCopier, more: tuple[dict[str, Any], ...] = (),
        device: str | torch.device = "cpu", pinning: HostPinning | None = None, **options: Any,
    ) -> None:  # fmt: skip
        super().__init__(
            io, page_bytes=page_bytes, num_blocks=num_blocks, make_copier=make_copier, device=device,
            blocks_per_object=blocks_per_object,
        )  # fmt: skip
        object_pages = lease_bytes(object_bytes(self.largest_payload_bytes))
        cpu = {"name": "cpu", "type": "cpu", "capacity": capacity_objects * object_pages, **options}
        self.config = load_config({"io_process": mode, "io_process_timeout_seconds": 2, "backends": [cpu, *more]})
        self.memory = SharedMemory.create("lending", arena_bytes(staging_bytes))
        self.processes: IoProcesses | None = None
        if mode != "off":
            self.processes = IoProcesses(f"lending {folder}", io, self.config)
            self.processes.share_staging(self.memory)
            for process in self.processes.all:
                process._pause = RestartPause(first_seconds=0.02, longest_seconds=0.05)
        self.tiers = open_tiers(self.config, io, self.counters, host=self.processes)
        self.pool = CountingPool(staging_bytes, STORE_SHARE, pinning, self.memory.view)
        self.start_with(self.pool, self.processes, pinning)

    def announce(self, *objects: TransferObject) -> None:
        """Announce stores, and wait for the tiers' answers."""
        self.engine.announce_stores(objects)
        self.wait_for_answers(*objects)

    def wait_for_answers(self, *objects: TransferObject) -> None:
        grants = self.engine._stores._grants
        self.step_until(lambda: all(one.key in grants._answers for one in objects if one.key in grants._expected))

    def close(self) -> None:
        try:
            self.finish()
            self.pool.close()
        finally:
            if self.processes is not None:
                self.processes.release(SECONDS)
            self.memory.close()
