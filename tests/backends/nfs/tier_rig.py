"""An ``nfs`` tier with the core's own circuit breaker, on one event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeVar

from offload_core.api.backend import LoadOutcome
from offload_core.config.loading import load_config
from offload_core.memory.staging_pool import StagingPool
from offload_core.objects import format as object_format
from offload_core.objects.format import HEADER_BYTES
from offload_core.runtime.metrics import Counters
from offload_core.tiers.staged_object import StagedObject
from offload_core.tiers.tier import Tier
from tests.backends.nfs.conftest import key

T = TypeVar("T")
PAYLOAD_BYTES = 8_000
OBJECT_BYTES = HEADER_BYTES + PAYLOAD_BYTES


class TierRig:
    """A tier whose breaker opens after three failures. Object ``n`` has the payload ``n``, over and over."""

    def __init__(self, **options: Any) -> None:
        config = load_config({"backends": [{"name": "shared", "type": "nfs", **options}], "breaker_failures": 3})
        self.tier = Tier(config.tiers[0], config.settings.limits, Counters())
        self._pool = StagingPool(64 << 20, 1.0)

    def run(self, work: Callable[[TierRig], Awaitable[T]]) -> T:
        """Open the tier, do ``work`` and close it, all on one loop."""

        async def main() -> T:
            await self.tier.open()
            try:
                return await work(self)
            finally:
                await self.tier.close()

        return asyncio.run(main())

    async def store(self, *numbers: int) -> list[bool]:
        staged = [self._staged(number, number % 127) for number in numbers]
        try:
            return list(await self.tier.store(staged))
        finally:
            self._release(staged)

    async def load(self, *numbers: int) -> list[LoadOutcome | None]:
        staged = [self._staged(number, 0x7F) for number in numbers]
        try:
            outcomes = list(await self.tier.load(staged))
            for number, one, outcome in zip(numbers, staged, outcomes, strict=True):
                if outcome is LoadOutcome.HIT:
                    payload = bytes(one.lease.view[HEADER_BYTES:])
                    assert payload == bytes([number % 127]) * PAYLOAD_BYTES, f"wrong bytes for object {number}"
            return outcomes
        finally:
            self._release(staged)

    async def lookup(self, *numbers: int) -> list[bool]:
        return list(await self.tier.lookup([key(number) for number in numbers]))

    def _staged(self, number: int, content: int) -> StagedObject:
        lease = self._pool.try_acquire(OBJECT_BYTES, for_store=False)
        assert lease is not None
        lease.tensor[HEADER_BYTES:] = content
        object_format.seal(lease.view, key(number))
        return StagedObject(key(number), lease)

    def _release(self, staged: Sequence[StagedObject]) -> None:
        for one in staged:
            one.lease.release()
