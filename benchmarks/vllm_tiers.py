"""Tiers below vLLM's own ``TieringOffloadingManager``: vLLM's file tier, which verifies nothing, and ours."""

from __future__ import annotations

import hashlib
import time
from pathlib import Path
from typing import Any

from benchmarks.elsewhere_keys import disk_keys
from tests.elsewhere.tiering_rig import OUR_TIER, Engine, offload_key, offloading_config

_PAUSE_SECONDS = 0.001
"""Pause between two steps of the scheduler."""


def tiers(folder: Path) -> dict[str, dict[str, Any]]:
    """Return the configuration of each tier under test."""

    def ours(io_process: str, direct_io: str) -> dict[str, Any]:
        return {**OUR_TIER, **disk_keys(folder, io_process=io_process, direct_io=direct_io)}

    return {
        "vLLM's fs tier, unchecked": {"type": "fs", "root_dir": str(folder / "theirs")},
        "ours, direct I/O": ours("engine", "on"),
        "ours, direct I/O, on threads": ours("off", "on"),
        "ours, page cache": ours("engine", "off"),
    }


class Tier:
    """One tier under test."""

    def __init__(self, config: dict[str, Any], chunk_bytes: int, chunks: int) -> None:
        self._engine = Engine(offloading_config(config, chunk_bytes=chunk_bytes, chunks=chunks))

    def measure(self, numbers: range) -> tuple[float, float]:
        """Return the seconds of one store and one load of all chunks; every chunk must be a hit."""
        engine = self._engine
        with engine.request() as context:
            places = engine.manager.prepare_store([offload_key(number) for number in numbers], context)
            for number, place in zip(numbers, places.store_spec.chunk_ids, strict=True):
                engine.row(int(place))[:] = hashlib.shake_128(number.to_bytes(8, "big")).digest(1 << 16) * (
                    engine.tier.block_size_bytes >> 16
                )
            started = time.perf_counter()
            engine.manager.complete_store(places.keys_to_store, context)
            while engine.manager.has_pending_work():
                engine.step()
                time.sleep(_PAUSE_SECONDS)
            stored = time.perf_counter() - started
        engine.forget_primary()
        with engine.request() as context:
            started = time.perf_counter()
            found = engine.resolve(numbers, context)
            loaded = time.perf_counter() - started
            assert {result.name for result in found} == {"HIT"}, f"lost: {found}"
        engine.forget_primary()
        return stored, loaded

    def close(self) -> None:
        """End the engine."""
        self._engine.close()
