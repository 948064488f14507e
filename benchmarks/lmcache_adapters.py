"""L2 adapters of LMCache as its controllers drive them: its own one on files, which verifies nothing, and ours."""

from __future__ import annotations

import hashlib
import time
from pathlib import Path
from typing import Any

from benchmarks.elsewhere_keys import disk_keys
from tests.elsewhere.lmcache_rig import OUR_PLUGIN, Controllers, adapter_of, lm_key, memory


def adapters(folder: Path) -> dict[str, dict[str, Any]]:
    """Return the configuration of each adapter under test."""

    def ours(io_process: str, direct_io: str) -> dict[str, Any]:
        return {**OUR_PLUGIN, "adapter_params": disk_keys(folder, io_process=io_process, direct_io=direct_io)}

    return {
        "LMCache's fs adapter, unchecked": {"type": "fs", "base_path": str(folder / "lmcache-fs")},
        "ours, direct I/O": ours("engine", "on"),
        "ours, page cache": ours("engine", "off"),
        "ours, page cache, on threads": ours("off", "off"),
    }


class Adapter:
    """One adapter under test."""

    def __init__(self, config: dict[str, Any], nbytes: int) -> None:
        self._controllers = Controllers(adapter_of(config), nbytes)
        self._nbytes = nbytes

    def measure(self, numbers: range) -> tuple[float, float]:
        """Return the seconds of one store and one lookup with load of all chunks; every chunk must be a hit."""
        adapter, keys = self._controllers.adapter, list(map(lm_key, numbers))
        contents = [
            hashlib.shake_128(number.to_bytes(8, "big")).digest(1 << 16) * (self._nbytes >> 16) for number in numbers
        ]
        objects = [memory(content) for content in contents]
        started = time.perf_counter()
        assert self._controllers.stored(adapter.submit_store_task(keys, objects)).is_successful(), "not stored"
        stored = time.perf_counter() - started
        for one in objects:
            one.raw_data.zero_()
        started = time.perf_counter()
        assert all(self._controllers.look_up(numbers)), "lost"
        got = self._controllers.are_loaded(adapter.submit_load_task(keys, objects), len(keys))
        loaded = time.perf_counter() - started
        adapter.submit_unlock(keys)
        assert all(got), "lost"
        assert [bytes(one.byte_array) for one in objects] == contents, "wrong bytes"
        return stored, loaded

    def close(self) -> None:
        self._controllers.adapter.close()
