"""A CUDA GPU whose streams a test can hold, as it holds those of the simulated accelerator.

A held stream waits for a word of pinned host memory, by ``cuStreamWaitValue32`` of the CUDA driver API. The device is
free for other streams meanwhile. Work that began before is not held.

The first use of a kernel, and memory that torch's caches lack, may wait for all streams. So :class:`CudaControl` uses
the kernels of the tests once, and fills the caches.
"""

from __future__ import annotations

import ctypes
from itertools import count
from typing import Any

import torch

from offload_core.api.memory.pinned_memory import CudaPinning
from tests.support.accelerator import StreamControl

_GREATER_OR_EQUAL = 0
"""``CU_STREAM_WAIT_VALUE_GEQ``"""
_STREAMS = 4096
_CACHED_TENSORS = 2048


class CudaControl(CudaPinning, StreamControl):
    """The control of the current GPU's streams."""

    def __init__(self) -> None:
        super().__init__(torch)
        self._driver = ctypes.CDLL("libcuda.so.1")
        self._words = torch.zeros(_STREAMS, dtype=torch.int32).pin_memory()
        self._word_of: dict[int, int] = {}
        """Per stream, the index of its word."""
        self._held: dict[int, int] = {}
        """Per held stream, the value of its word that lets it go on."""
        self._values = count(1)
        _warm_up()

    def hold(self, stream: Any) -> None:
        """See :class:`StreamControl`."""
        name = _handle(stream)
        if name in self._held:
            return
        word = self._word_of.setdefault(name, len(self._word_of))
        value = next(self._values)
        address = self._words.data_ptr() + 4 * word
        code = self._driver.cuStreamWaitValue32_v2(
            ctypes.c_void_p(name), ctypes.c_uint64(address), ctypes.c_uint32(value), _GREATER_OR_EQUAL
        )
        assert code == 0, f"cuStreamWaitValue32 returned {code}"
        self._held[name] = value

    def release(self, stream: Any) -> None:
        """See :class:`StreamControl`."""
        name = _handle(stream)
        value = self._held.pop(name, None)
        if value is not None:
            self._words[self._word_of[name]] = value

    def swap_blocks_batch(
        self, sources: torch.Tensor, targets: torch.Tensor, sizes: torch.Tensor, is_src_access_order_any: bool = False
    ) -> None:
        """See :class:`StreamControl`: vLLM's own function."""
        from vllm import _custom_ops

        _custom_ops.swap_blocks_batch(sources, targets, sizes, is_src_access_order_any=is_src_access_order_any)


def _handle(stream: Any) -> int:
    """Return the ``cudaStream_t`` of a stream."""
    cuda = torch.cuda.Stream(  # type: ignore[no-untyped-call]
        stream_id=stream.stream_id, device_index=stream.device_index, device_type=stream.device_type
    )
    return int(cuda.cuda_stream)


def _warm_up() -> None:
    """Load the kernels that the tests use, and fill torch's caches of device memory and pinned memory."""
    pages = torch.zeros((16, 768), dtype=torch.int8, device="cuda")
    pages[0].fill_(1)
    pages[1:4, :512].copy_(pages[4:7, :512])
    pages[:, 5:7].copy_(pages[:, 1:3])
    torch.zeros((8, 64), dtype=torch.int64, device="cuda").copy_(torch.zeros((8, 64), dtype=torch.int64, device="cuda"))
    for word in (torch.int8, torch.int16, torch.int32, torch.int64):
        rows = pages[:, :512].view(word)
        for count_of_ids in (3, 17):
            ids = torch.zeros(count_of_ids, dtype=torch.int64, device="cuda")
            torch.index_select(rows, 0, ids, out=torch.empty_like(rows[ids]))
    kept = [torch.zeros(512 * 1024, dtype=torch.int8, device="cuda") for _ in range(64)]
    kept += [torch.zeros(size, dtype=torch.int8).pin_memory() for size in (512, 4096) for _ in range(_CACHED_TENSORS)]
    torch.cuda.synchronize()
    del kept
