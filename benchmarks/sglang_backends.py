"""Storage backends of SGLang's HiCache as its controller calls them: its own on files, unchecked, and ours."""

from __future__ import annotations

import hashlib
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from benchmarks.elsewhere_keys import disk_keys
from tests.elsewhere.sglang.machinery import MODELS, Server

_TOKENS = 64
_LAYERS, _HEADS = 8, 8
_BATCH_PAGES = 128
"""Pages in one call of SGLang's controller."""


def backends(folder: Path) -> dict[str, dict[str, Any]]:
    """Return the arguments of each server under test."""

    def ours(io_process: str, direct_io: str) -> dict[str, Any]:
        return {"extra": disk_keys(folder, io_process=io_process, direct_io=direct_io)}

    return {
        "SGLang's file backend, unchecked": {
            "extra": {"file_storage_path": str(folder / "sglang-file")}, "backend": "file", "interface_v1": 0,
        },
        "ours, direct I/O": ours("engine", "on"),
        "ours, page cache": ours("engine", "off"),
        "ours, page cache, on threads": ours("off", "off"),
    }  # fmt: skip


class Backend:
    """One backend under test, below a cache of SGLang."""

    def __init__(self, arguments: dict[str, Any], page_bytes: int, pages: int) -> None:
        width = page_bytes // (_TOKENS * _LAYERS * _HEADS * 2 * torch.bfloat16.itemsize)
        config = replace(
            MODELS["full"], page_size=_TOKENS, num_layers=_LAYERS, head_num=_HEADS, head_dim=width,
            kv_size=pages * _TOKENS, max_context_len=pages * _TOKENS,
        )  # fmt: skip
        self._server = Server(config, **arguments)
        self._pool = self._server.controller.storage_host_pool

    def measure(self, numbers: range) -> tuple[float, float]:
        """Return the seconds of one store and one lookup with load of all pages; every page must be a hit."""
        controller = self._server.controller
        names = [hashlib.sha256(number.to_bytes(8, "big")).hexdigest() for number in numbers]
        rows = torch.arange(len(names) * _TOKENS)
        content = torch.randn(self._pool.kv_buffer.shape, generator=torch.Generator().manual_seed(numbers.start))
        self._pool.kv_buffer.copy_(content)
        expected = self._pool.kv_buffer[:, : len(rows)].clone()
        started = time.perf_counter()
        for start in range(0, len(names), _BATCH_PAGES):
            part = slice(start * _TOKENS, (start + _BATCH_PAGES) * _TOKENS)
            assert controller.page_set_func(names[start : start + _BATCH_PAGES], rows[part]), "not stored"
        stored = time.perf_counter() - started
        self._pool.kv_buffer.zero_()
        request = SimpleNamespace(request_id="benchmark", is_terminated=lambda: False)
        started = time.perf_counter()
        for start in range(0, len(names), _BATCH_PAGES):
            batch, part = names[start : start + _BATCH_PAGES], slice(start * _TOKENS, (start + _BATCH_PAGES) * _TOKENS)
            assert controller.storage_backend.batch_exists(batch) == len(batch), "lost"
            assert controller.page_get_func(request, batch, rows[part]) == len(batch), "lost"
        loaded = time.perf_counter() - started
        assert torch.equal(self._pool.kv_buffer[:, : len(rows)], expected), "wrong bytes"
        return stored, loaded

    def close(self) -> None:
        """Detach the backend."""
        self._server.close()
