"""vLLM's own tiering manager with our tier below it, driven as vLLM's scheduler drives it, on host memory only."""

from __future__ import annotations

import itertools
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from vllm.v1.kv_offload.base import LookupResult, ReqContext, ScheduleEndContext, make_offload_key
from vllm.v1.kv_offload.config import (
    OffloadingCacheConfig,
    OffloadingConfig,
    OffloadingGroupConfig,
    OffloadingModelConfig,
    OffloadingParallelConfig,
)
from vllm.v1.kv_offload.factory import OffloadingSpecFactory

CHUNK_BYTES = 8192
CHUNKS = 16
SECONDS = 60
STEP_SECONDS = 0.002

OUR_TIER = {"type": "OffloadCoreTier", "module_path": "offload_core.elsewhere.vllm_tiering"}


def offload_key(number: int) -> Any:
    return make_offload_key(number.to_bytes(32, "big"), 0)


def content(number: int, nbytes: int = CHUNK_BYTES) -> bytes:
    return (number * 7 + 1).to_bytes(8, "big") * (nbytes // 8)


def offloading_config(
    tier: dict[str, Any], *, chunk_bytes: int = CHUNK_BYTES, chunks: int = CHUNKS
) -> OffloadingConfig:
    return OffloadingConfig(
        groups=(OffloadingGroupConfig(16, ("layers.0",), 0),),
        worker_kv_bytes_per_block=chunk_bytes,
        enable_kv_cache_events=True,
        extra_config={
            "spec_name": "TieringOffloadingSpec",
            "cpu_bytes_to_use": chunks * chunk_bytes,
            "secondary_tiers": [tier],
        },
        engine_id=uuid.uuid4().hex,
        model=OffloadingModelConfig("a-model", "float16"),
        cache=OffloadingCacheConfig(16, 1),
        parallel=OffloadingParallelConfig(0, 1, 1, 1, 1, 1, 0, 1, None, is_parallelism_agnostic=True),
    )


class Engine:
    """The scheduler's part and, in place of the worker's copies, direct writes into the chunks."""

    def __init__(self, config: OffloadingConfig) -> None:
        self.spec = OffloadingSpecFactory.create_spec(config)
        self.manager: Any = self.spec.get_manager()
        self.tier = self.manager.secondary_tiers[0]
        self._requests = itertools.count()

    @property
    def rows(self) -> memoryview:
        rows: memoryview = self.manager.primary_tier.get_kv_memoryview()
        return rows.cast("B")

    def row(self, chunk: int) -> memoryview:
        nbytes = self.tier.block_size_bytes
        return self.rows[chunk * nbytes : (chunk + 1) * nbytes]

    @contextmanager
    def request(self) -> Iterator[ReqContext]:
        context = ReqContext(str(next(self._requests)))
        self.manager.on_new_request(context)
        yield context
        self.manager.on_request_finished(context)

    def step(self) -> None:
        self.manager.on_schedule_end(ScheduleEndContext((), ()))

    def offer(self, numbers: Sequence[int], context: ReqContext) -> list[int]:
        """Store chunks to the primary tier, which starts the store below it; returns their places."""
        keys = list(map(offload_key, numbers))
        prepared = self.manager.prepare_store(keys, context)
        assert prepared is not None
        places = [int(chunk) for chunk in prepared.store_spec.chunk_ids]
        for key, place in zip(prepared.keys_to_store, places, strict=True):
            number = int.from_bytes(key[:32], "big")
            self.row(place)[:] = content(number, self.tier.block_size_bytes)
        self.manager.complete_store(prepared.keys_to_store, context)
        return places

    def store(self, numbers: Sequence[int]) -> None:
        """Store chunks, and wait until the tiers have decided."""
        with self.request() as context:
            self.offer(numbers, context)
            self.settle()

    def settle(self) -> None:
        end = time.monotonic() + SECONDS
        while self.manager.has_pending_work():
            assert time.monotonic() < end, "jobs do not end"
            self.step()
            time.sleep(STEP_SECONDS)

    def forget_primary(self) -> None:
        """Empty the primary tier, as a sleep of the engine does."""
        self.manager.reset_cache()
        if hasattr(self.manager, "on_reset_flushed"):  # vLLM 0.33: the workers write no more
            self.manager.on_reset_flushed()
        self.rows[:] = bytes(len(self.rows))

    def look_up(self, numbers: Sequence[int], context: ReqContext) -> list[LookupResult]:
        return [self.manager.lookup(offload_key(number), context) for number in numbers]

    def resolve(self, numbers: Sequence[int], context: ReqContext) -> list[LookupResult]:
        """Step until each chunk is there or is a miss."""
        open_results = (LookupResult.RETRY, LookupResult.HIT_PENDING)
        end = time.monotonic() + SECONDS
        while True:
            found = self.look_up(numbers, context)
            if not set(open_results) & set(found):
                return found
            assert time.monotonic() < end, f"no answer: {found}"
            self.step()
            time.sleep(STEP_SECONDS)

    def fetch(self, numbers: Sequence[int]) -> list[bytes | None]:
        """Return the chunks' bytes as a request gets them; ``None`` for a miss."""
        with self.request() as context:
            found = self.resolve(numbers, context)
            got: list[bytes | None] = []
            for number, result in zip(numbers, found, strict=True):
                if result is LookupResult.MISS:
                    got.append(None)
                    continue
                (place,) = self.manager.prepare_load([offload_key(number)], context).chunk_ids
                got.append(bytes(self.row(int(place))))
                self.manager.complete_load([offload_key(number)], context)
        return got

    def close(self) -> None:
        self.manager.shutdown()


@contextmanager
def engine(tier: dict[str, Any], **sizes: int) -> Iterator[Engine]:
    made = Engine(offloading_config(tier, **sizes))
    try:
        yield made
    finally:
        made.close()
