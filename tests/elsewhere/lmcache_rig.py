"""LMCache's own parts around our L2 adapter, in this process: its factory, its controllers and its memory tier.

Import this module only where LMCache is installed.
"""

from __future__ import annotations

import argparse
import json
import os
import select
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from tests.support.polling import wait_until

os.environ.setdefault("LMCACHE_TRACK_USAGE", "false")
os.environ.setdefault("LMCACHE_LOG_LEVEL", "WARNING")

from lmcache.v1.distributed.api import GroupedObjectKeys, MemoryLayoutDesc, PrefetchTaskSpec
from lmcache.v1.distributed.api import ObjectKey as LMCacheKey
from lmcache.v1.distributed.config import parse_args
from lmcache.v1.distributed.l2_adapters import create_l2_adapter
from lmcache.v1.distributed.l2_adapters.config import parse_args_to_l2_adapters_config
from lmcache.v1.distributed.storage_manager import StorageManager
from lmcache.v1.memory_management import MemoryFormat, MemoryObjMetadata, TensorMemoryObj
from lmcache.v1.platform import consume_fd

NBYTES = 8192
SECONDS = 60

OUR_PLUGIN = {
    "type": "plugin",
    "module_path": "offload_core.elsewhere.lmcache_l2",
    "class_name": "OffloadCoreL2Adapter",
}


def lm_key(number: int, **fields: Any) -> Any:
    return LMCacheKey(**{"chunk_hash": number.to_bytes(32, "big"), "model_name": "a/model", "kv_rank": 1, **fields})


def content(number: int, nbytes: int = NBYTES) -> bytes:
    return ((number * 7 + 1).to_bytes(8, "big") * (nbytes // 8 + 1))[:nbytes]


def memory(data: bytes) -> Any:
    """Return memory of LMCache that holds some bytes."""
    tensor = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    shape = torch.Size([len(data)])
    return TensorMemoryObj(
        tensor, MemoryObjMetadata(shape, torch.uint8, tensor.data_ptr(), len(data), 1, 0, MemoryFormat.BINARY), None
    )


def adapter_of(description: dict[str, Any]) -> Any:
    """Make an adapter as LMCache's server does."""
    arguments = argparse.Namespace(l2_adapter=[json.dumps(description)])
    (config,) = parse_args_to_l2_adapters_config(arguments).adapters
    return create_l2_adapter(config)


def make_adapter(**adapter_params: Any) -> Any:
    """Make our adapter."""
    return adapter_of({**OUR_PLUGIN, "adapter_params": adapter_params})


def answer(event_fd: int, take: Callable[[], Any]) -> Any:
    """Wait for a result as a controller does: sleep on the descriptor, and look after each wake."""
    poller = select.poll()
    poller.register(event_fd, select.POLLIN)
    end = time.monotonic() + SECONDS
    while (result := take()) is None:
        assert poller.poll(max(0.0, end - time.monotonic()) * 1000), "no result wakes the controller"
        consume_fd(event_fd)
    return result


class Controllers:
    """The calls of LMCache's two controllers, on chunks that have numbers."""

    def __init__(self, adapter: Any, nbytes: int = NBYTES) -> None:
        self.adapter = adapter
        self.nbytes = nbytes

    def submit_store(self, numbers: Sequence[int]) -> int:
        objects = [memory(content(number, self.nbytes)) for number in numbers]
        return int(self.adapter.submit_store_task(list(map(lm_key, numbers)), objects))

    def stored(self, task: int) -> Any:
        results: dict[int, Any] = {}

        def take() -> Any:
            results.update(self.adapter.pop_completed_store_tasks())
            return results.get(task)

        return answer(self.adapter.get_store_event_fd(), take)

    def store(self, numbers: Sequence[int]) -> bool:
        return bool(self.stored(self.submit_store(numbers)).is_successful())

    def found(self, task: int, count: int) -> list[bool]:
        fd = self.adapter.get_lookup_and_lock_event_fd()
        bitmap = answer(fd, lambda: self.adapter.query_lookup_and_lock_result(task))
        return [bitmap.test(index) for index in range(count)]

    def look_up(self, numbers: Sequence[int]) -> list[bool]:
        task = self.adapter.submit_lookup_and_lock_task(list(map(lm_key, numbers)), {})
        return self.found(task, len(numbers))

    def are_loaded(self, task: int, count: int) -> list[bool]:
        bitmap = answer(self.adapter.get_load_event_fd(), lambda: self.adapter.query_load_result(task))
        return [bitmap.test(index) for index in range(count)]

    def loaded(self, task: int, objects: Sequence[Any]) -> list[bytes | None]:
        pairs = zip(objects, self.are_loaded(task, len(objects)), strict=True)
        return [bytes(one.byte_array) if there else None for one, there in pairs]

    def load(self, numbers: Sequence[int]) -> list[bytes | None]:
        objects = [memory(bytes(self.nbytes)) for _ in numbers]
        return self.loaded(self.adapter.submit_load_task(list(map(lm_key, numbers)), objects), objects)

    def fetch(self, numbers: Sequence[int]) -> list[bytes | None]:
        """Look chunks up, load those that are there, and unlock them, as LMCache's prefetch does."""
        present = [number for number, there in zip(numbers, self.look_up(numbers), strict=True) if there]
        got = dict(zip(present, self.load(present), strict=True))
        self.adapter.submit_unlock(list(map(lm_key, present)))
        return [got.get(number) for number in numbers]


class Server:
    """LMCache's storage manager with our adapter: its memory tier, its controllers and its eviction."""

    def __init__(self, l1_gib: float = 0.1, **adapter_params: Any) -> None:
        plugin = json.dumps({**OUR_PLUGIN, "adapter_params": adapter_params})
        flags = ["--l1-size-gb", str(l1_gib), "--eviction-policy", "LRU", "--l2-adapter", plugin]
        self.manager = StorageManager(parse_args(flags))
        self._written = self._decided = 0
        self._count_decided()
        self._layout = MemoryLayoutDesc([torch.Size([NBYTES])], [torch.uint8])

    @property
    def adapter(self) -> Any:
        ((_, adapter),) = self.manager.l2_adapters()
        return adapter

    def write(self, numbers: Sequence[int]) -> None:
        """Write chunks to the memory tier, whose controller stores them below it."""
        reserved = self.manager.reserve_write(list(map(lm_key, numbers)), self._layout)
        for number in numbers:
            memoryview(reserved[lm_key(number)].byte_array).cast("B")[:] = content(number)
        self._written += len(reserved)
        self.manager.finish_write(list(reserved))

    def settle(self) -> None:
        """Wait until the adapter has decided on all chunks, and LMCache has noted that."""
        wait_until(lambda: self._decided == self._written, "stores do not end")
        (controller,) = self.manager._store_controllers.values()
        wait_until(lambda: not controller.report_status()["in_flight_task_count"], "LMCache takes no results")

    def _count_decided(self) -> None:
        adapter, chunks = self.adapter, {}
        submit, pop = adapter.submit_store_task, adapter.pop_completed_store_tasks

        def counted_submit(keys: list[Any], objects: list[Any]) -> int:
            task = int(submit(keys, objects))
            chunks[task] = len(keys)
            return task

        def counted_pop() -> Any:
            results = pop()
            self._decided += sum(map(chunks.__getitem__, results))
            return results

        adapter.submit_store_task, adapter.pop_completed_store_tasks = counted_submit, counted_pop

    def fetch(self, numbers: Sequence[int]) -> tuple[list[bytes | None], int]:
        """Prefetch chunks; returns their bytes, and the number that came from our tiers."""
        keys = list(map(lm_key, numbers))
        spec = PrefetchTaskSpec([GroupedObjectKeys(keys, 0, self._layout, -1)], fetching_policy="full")
        handle = self.manager.submit_prefetch_task(spec)
        assert self.manager.wait_prefetch_status(handle, SECONDS), "the prefetch does not end"
        result = self.manager.query_prefetch_status(handle)
        (cells,) = result.hit_cells
        hits = [key for index, key in enumerate(keys) if cells.test(index)]
        with self.manager.read_prefetched_results(hits) as objects:
            got = {key: bytes(one.byte_array) for key, one in zip(hits, objects or (), strict=True)}
        self.manager.finish_read_prefetched(hits)
        return [got.get(key) for key in keys], result.l2_hit_count

    def evict(self, numbers: Sequence[int]) -> None:
        """Take chunks out of the memory tier."""
        self.manager.delete_l1_keys(list(map(lm_key, numbers)))


@contextmanager
def server(**adapter_params: Any) -> Iterator[Server]:
    made = Server(**adapter_params)
    try:
        yield made
    finally:
        made.manager.close()
