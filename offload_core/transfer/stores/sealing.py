"""The seals of objects from the KV cache: with the copy, after the copy, or by the object's only tier."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Sequence

from offload_core.api.errors import ObjectFormatError
from offload_core.memory.block_copier import BlockCopier
from offload_core.memory.payload_layout import PackLayout
from offload_core.memory.staging_pool import Lease
from offload_core.objects.departing_object import DepartingObject
from offload_core.objects.format import HEADER_BYTES
from offload_core.runtime.threads import DaemonExecutor
from offload_core.tiers.calls.lent_objects import LentObject
from offload_core.tiers.opening import TierProcesses
from offload_core.tiers.staged_object import StagedObject, seal_all
from offload_core.tiers.storage import StorageAwayError
from offload_core.transfer.batches import TransferObject

logger = logging.getLogger(__name__)


class Sealing:
    """The copies of objects into their memory, and their seals.

    Args:
        processes: the processes of the tiers, which seal objects; ``None`` if the tiers are in this process.
    """

    def __init__(self, copier: BlockCopier, processes: TierProcesses | None) -> None:
        self._copier = copier
        self._processes = processes
        self._threads = DaemonExecutor(2, "offload-seal")

    def gather(
        self, item: TransferObject, layout: PackLayout, memory: Lease | LentObject, *, by_tier: bool
    ) -> tuple[StagedObject, bool] | None:
        """Copy an object's blocks into its memory. Only the engine thread calls it.

        If the copier tells of parts, the object is sealed meanwhile. Its bytes are then in the processor's cache, and
        nobody reads them once more from memory.

        Args:
            by_tier: whether the object's only tier seals it, in the same way.

        Returns:
            The object, and whether it is sealed; ``None`` if the copier refuses, or if no header can name the object.
        """
        staged = StagedObject(item.key, memory, spare=item.spare, unsealed=by_tier)
        payload = memory.tensor[HEADER_BYTES:]
        in_parts = None if by_tier else self._copier.in_parts
        if in_parts is None:
            return (staged, False) if self._copier.gather(layout, item.blocks, payload) else None
        seal = DepartingObject(memory.view, item.key)
        if not in_parts.gather_in_parts(layout, item.blocks, payload, seal.stored):
            return None
        try:
            seal.seal()
        except ObjectFormatError as error:
            logger.error("an object is dropped; this is a defect, please report it: %s", error)
            return None
        return staged, True

    async def seal(self, objects: Sequence[StagedObject]) -> None:
        """Seal objects whose bytes are there."""
        if self._processes is not None:
            with contextlib.suppress(StorageAwayError, RuntimeError):  # it has ended, or can start no thread
                await self._processes.seal(objects)
                return
        await asyncio.get_running_loop().run_in_executor(self._threads, seal_all, objects)

    def close(self) -> None:
        """End the threads once they are idle."""
        self._threads.shutdown()
