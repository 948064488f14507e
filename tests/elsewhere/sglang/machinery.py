"""SGLang's prefix cache with our backend below it, on a CPU: its tree, its controller and its host pools."""

from __future__ import annotations

import json
import unittest
from array import array
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from sglang.srt.mem_cache.base_prefix_cache import CacheRequestHandle
from sglang.srt.mem_cache.unified_cache.components.base import ComponentType
from sglang.srt.runtime_context import get_parallel
from sglang.srt.server_args import ServerArgs, set_global_server_args_for_scheduler
from sglang.test.kits.unified_radix_cache.config import CacheConfig
from sglang.test.kits.unified_radix_cache.fixtures import (
    build_fixture,
    drop_hicache_atexit_pin,
    match_prefix,
    node_device_value,
)
from sglang.test.kits.unified_radix_cache.storage import UnifiedRadixCacheStorageFixtures

from tests.elsewhere.sglang import cpu  # noqa: F401

PLUGIN = {
    "backend_name": "offload-core",
    "module_path": "offload_core.elsewhere.sglang_hicache",
    "class_name": "OffloadCoreHiCache",
}
PAGE = 4
LAYERS = {"num_layers": 4, "full_attention_layer_ids": (1, 3)}
FULL = CacheConfig(page_size=PAGE, components=(ComponentType.FULL,), **LAYERS)
MAMBA = CacheConfig(
    page_size=PAGE, components=(ComponentType.FULL, ComponentType.MAMBA), enable_mamba_extra_buffer=True,
    mamba_cache_size=60, **LAYERS,
)  # fmt: skip
WINDOW = CacheConfig(
    page_size=PAGE, components=(ComponentType.FULL, ComponentType.SWA), sliding_window_size=PAGE, **LAYERS
)
MODELS = {"full": FULL, "mamba": MAMBA, "window": WINDOW}


class Server(UnifiedRadixCacheStorageFixtures, unittest.TestCase):  # type: ignore[misc]  # mypy skips SGLang
    """The cache of one SGLang server. Its steps are those of SGLang's own tests.

    Args:
        config: SGLang's description of a model's caches.
        extra: our keys in the extra configuration, or those of another backend.
        layout: SGLang's ``--hicache-mem-layout``.
        interface_v1: the key that makes SGLang move pages in place.
        backend: SGLang's name of the backend.
    """

    __test__ = False  # its base has the steps of tests, and none of its own

    def __init__(
        self,
        config: Any,
        extra: Mapping[str, Any],
        layout: str = "page_first",
        interface_v1: int = 1,
        backend: str = "dynamic",
    ) -> None:
        super().__init__()
        self.cfg = config
        scope = get_parallel().override(tp_rank=0, tp_size=1, pp_rank=0, pp_size=1)
        scope.__enter__()
        self.addCleanup(scope.__exit__, None, None, None)
        self.cache, self.allocator, self.requests = build_fixture(config)
        keys = {**PLUGIN, "interface_v1": interface_v1, "prefetch_threshold": 1, **extra}
        arguments = ServerArgs(
            model_path="dummy", served_model_name="a-model", page_size=config.page_size, hicache_io_backend="kernel",
            hicache_mem_layout=layout, hicache_write_policy="write_through", hicache_storage_backend=backend,
            hicache_storage_backend_extra_config=json.dumps(keys), hicache_storage_prefetch_policy="wait_complete",
        )  # fmt: skip
        arguments._mamba_cache_chunk_size = 64
        set_global_server_args_for_scheduler(arguments)
        self.cache.init_hicache(arguments, self.cache.cache_init_params)
        self.addCleanup(drop_hicache_atexit_pin, self.cache)
        self.addCleanup(self.cache.release_host_resources)
        self.controller = self.cache.cache_controller
        self.cache.write_through_threshold = 1 << 30
        self.cache.load_back_threshold = 0
        self.controller.prefetch_capacity_limit = max(
            self.controller.prefetch_capacity_limit, self.controller.mem_pool_host.size
        )
        self.addCleanup(self.controller.detach_storage_backend)
        self._prefetches = 0

    @property
    def backend(self) -> Any:
        """Our backend, as SGLang's factory has made it."""
        return self.controller.storage_backend

    def tokens(self, start: int, pages: int) -> list[int]:
        """Return a prompt of whole pages."""
        return list(self._make_seq(start, pages))

    def compute(self, tokens: Sequence[int], seed: int) -> list[torch.Tensor]:
        """Put a prompt into the tree with random bytes in all pools; returns the bytes of its pages."""
        self._insert(self.cache, self.allocator, self.requests, tokens)
        generator = torch.Generator().manual_seed(seed)
        for buffer in self._buffers():
            buffer.copy_(torch.randn(buffer.shape, generator=generator).to(buffer.dtype))
        return self._content(self.leaf(tokens))

    def store(self, tokens: Sequence[int]) -> None:
        """Back a prompt up to the host pools, and from there to the storage backend."""
        self.start_backup(tokens)
        self.end_backup()

    def leaf(self, tokens: Sequence[int]) -> Any:
        """Return the last node of a computed prompt in the tree."""
        return match_prefix(self.cache, tokens).last_device_node

    def page_names(self, tokens: Sequence[int]) -> list[str]:
        """Return SGLang's names of a computed prompt's pages."""
        return list(self._all_page_hashes(self.cache, self.leaf(tokens)))

    def start_prefetch(self, tokens: Sequence[int]) -> Any:
        """Begin to fetch a prompt from the storage backend, as SGLang's scheduler does."""
        self._prefetches += 1
        request = CacheRequestHandle(f"request-{self._prefetches}", self._prefetches)
        self.cache.prefetch_from_storage(request, self.cache.root_node_handle(), array("q", tokens), None, None)
        return request

    def end_prefetch(self, request: Any) -> None:
        """Wait for the end of a fetch."""
        self._run_prefetch_to_completion(self.cache, request, timeout=60)

    def start_backup(self, tokens: Sequence[int]) -> None:
        """Back a prompt up to the host pools, and start its way to the storage backend."""
        self._backup_node(self.cache, self.leaf(tokens))
        self._write_path_to_l3(self.cache, self.leaf(tokens))

    def end_backup(self) -> None:
        """Wait for the end of all stores."""
        self._flush_l3_backups(self.cache, timeout=60)

    def prefetch(self, tokens: Sequence[int]) -> int:
        """Fetch a prompt from the storage backend; returns the number of its tokens in the host pools."""
        self.end_prefetch(self.start_prefetch(tokens))
        return int(match_prefix(self.cache, tokens).host_hit_length)

    def load(self, tokens: Sequence[int]) -> list[torch.Tensor]:
        """Load a prompt from the host pools to the device pools; returns the bytes of its pages."""
        request = self._make_req(self.requests) if self.cfg.has_mamba else None
        match = match_prefix(self.cache, tokens)
        self._load_back_node(self.cache, match.best_match_node, req=request)
        return self._content(self.leaf(tokens))

    def close(self) -> None:
        """Detach the backend, as SGLang does at its end."""
        self.doCleanups()

    def _buffers(self) -> Iterator[torch.Tensor]:
        pool = self.allocator.get_kvcache()
        for part in (self._get_full_kv_pool(self.allocator), getattr(pool, "swa_kv_pool", None)):
            if part is not None:
                yield from (*part.k_buffer, *part.v_buffer)
        if self.cfg.has_mamba:
            states = self.requests.mamba_pool.mamba_cache
            yield states.temporal
            yield from states.conv

    def _content(self, leaf: Any) -> list[torch.Tensor]:
        """Return all bytes that a prompt needs: the whole prefix, the last window and the last state."""
        full = self._get_full_kv_pool(self.allocator)
        rows = self.cache.path_device_indices(leaf)
        content = [buffer[rows].clone() for buffer in (*full.k_buffer, *full.v_buffer)]
        if self.cfg.has_swa:
            part, window = self.allocator.get_kvcache().swa_kv_pool, self.cfg.sliding_window_size
            rows = torch.cat(
                [
                    value
                    for node in self._path_chain(self.cache, leaf)
                    if (value := node_device_value(self.cache, node, ComponentType.SWA)) is not None
                ]
            )[-window:]
            content += [buffer[rows].clone() for buffer in (*part.k_buffer, *part.v_buffer)]
        if self.cfg.has_mamba:
            states = self.requests.mamba_pool.mamba_cache
            rows = node_device_value(self.cache, leaf, ComponentType.MAMBA).reshape(-1)
            content += [states.temporal[:, rows].clone(), *(buffer[:, rows].clone() for buffer in states.conv)]
        return content


@contextmanager
def server(config: Any, extra: Mapping[str, Any], **arguments: Any) -> Iterator[Server]:
    """Run a server's cache, and close it at the end."""
    made = Server(config, extra, **arguments)
    try:
        yield made
    finally:
        made.close()


def same(one: Sequence[torch.Tensor], other: Sequence[torch.Tensor]) -> bool:
    """Return whether two contents are equal, byte for byte."""
    pairs = zip(one, other, strict=True)
    return all(torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in pairs)
