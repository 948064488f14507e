"""Small objects in staging memory, in the form that tiers expect."""

from __future__ import annotations

from offload_core.memory.staging_pool import StagingPool
from offload_core.objects import format as object_format
from offload_core.objects.format import HEADER_BYTES
from offload_core.tiers.staged_object import StagedObject
from tests.support.memory_backend import key

PAYLOAD_BYTES = 100
OBJECT_BYTES = HEADER_BYTES + PAYLOAD_BYTES


class StagedObjects:
    def __init__(self) -> None:
        self.pool = StagingPool(1 << 20, 1.0)

    def staged(self, number: int) -> StagedObject:
        """Return an object of dirty staging memory."""
        lease = self.pool.try_acquire(OBJECT_BYTES, for_store=False)
        assert lease is not None
        lease.tensor.fill_(0x5A)
        return StagedObject(key(number), lease)

    def sealed(self, number: int) -> StagedObject:
        """Return an object whose payload is its number, over and over."""
        staged = self.staged(number)
        staged.lease.tensor[HEADER_BYTES:] = number
        object_format.seal(staged.lease.view, staged.key)
        return staged
