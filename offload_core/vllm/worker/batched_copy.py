"""vLLM's own batched copy, ``swap_blocks_batch``, where it is installed: on CUDA, ROCm and Intel's GPUs.

It takes tensors of addresses and sizes in host memory, and copies on the current stream. On CUDA 12.8 and newer that is
one call of the driver. A trial at the start of the engine checks its bytes.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch

from offload_core.memory.device.batched_copy import BatchedCopy, CopyPieces

ROCM_DESCRIPTORS = 8192
"""Descriptors of a call on ROCm, whose batched copy faults on more."""


class SwapBlocksBatch:
    """A :class:`~offload_core.memory.device.batched_copy.BatchedCopy` by vLLM's function.

    Args:
        swap: ``vllm._custom_ops.swap_blocks_batch``.
        dtype: type of the descriptors: int64 on CUDA and ROCm, uint64 on Intel's GPUs.
        call_descriptors: largest number of descriptors of one call; ``None`` for no limit.
    """

    def __init__(self, swap: Callable[..., None], dtype: torch.dtype, call_descriptors: int | None = None) -> None:
        self._swap = swap
        self._dtype = dtype
        self._call_descriptors = call_descriptors

    def __call__(self, pieces: CopyPieces, *, from_host: bool) -> list[tuple[torch.Tensor, ...]]:
        """Begin the copies, and return the descriptors; see the class."""
        count = len(pieces.sizes)
        step = min(count, self._call_descriptors or count)
        descriptors = []
        for first in range(0, count, step or 1):
            some = tuple(torch.from_numpy(part[first : first + step]).view(self._dtype) for part in pieces)
            # Host memory is complete before the call, so it may be read at once. The device's memory may be not.
            self._swap(*some, is_src_access_order_any=from_host)
            descriptors.append(some)
        return descriptors


def installed_batched_copy() -> BatchedCopy | None:
    """Return the batched copy of the installed vLLM for its platform; ``None`` if there is none."""
    from vllm.platforms import current_platform

    if not (current_platform.is_cuda() or current_platform.is_rocm() or current_platform.is_xpu()):
        return None
    from vllm import _custom_ops

    return batched_copy_for(current_platform, getattr(_custom_ops, "swap_blocks_batch", None))


def batched_copy_for(platform: Any, swap: Callable[..., None] | None) -> BatchedCopy | None:
    """Return vLLM's function for a platform as a batched copy; ``None`` for a function of another shape.

    Args:
        platform: vLLM's description of the platform.
    """
    if swap is None or "is_src_access_order_any" not in inspect.signature(swap).parameters:
        return None
    dtype = torch.uint64 if platform.is_xpu() else torch.int64
    return SwapBlocksBatch(swap, dtype, ROCM_DESCRIPTORS if platform.is_rocm() else None)
