"""vLLM's batched copy: descriptors, their type and their number per platform. No GPU has run it in this project."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from vllm import _custom_ops

from offload_core.memory.device.batched_copy import CopyPieces
from offload_core.vllm.worker.batched_copy import SwapBlocksBatch, batched_copy_for, installed_batched_copy

HIGH = 2**63 + 4096
"""An address as those of Intel's GPUs, beyond int64."""


class Swap:
    """vLLM's function, which records its calls."""

    def __init__(self) -> None:
        self.calls: list[tuple[list[int], list[int], list[int], bool]] = []
        self.dtypes: set[torch.dtype] = set()

    def __call__(
        self, src_ptrs: torch.Tensor, dst_ptrs: torch.Tensor, sizes: torch.Tensor, is_src_access_order_any: bool = False
    ) -> None:
        tensors = (src_ptrs, dst_ptrs, sizes)
        assert all(tensor.is_cpu and tensor.is_contiguous() and tensor.dim() == 1 for tensor in tensors)
        self.dtypes |= {tensor.dtype for tensor in tensors}
        sources, targets, lengths = (tensor.numpy().view(np.uint64).tolist() for tensor in tensors)
        self.calls.append((sources, targets, lengths, is_src_access_order_any))


def platform(name: str) -> SimpleNamespace:
    return SimpleNamespace(is_xpu=lambda: name == "xpu", is_rocm=lambda: name == "rocm")


@pytest.mark.parametrize(
    ("name", "dtype", "calls"), [("cuda", torch.int64, 1), ("rocm", torch.int64, 3), ("xpu", torch.uint64, 1)]
)
def test_descriptors_have_the_type_and_the_number_that_a_platform_takes(
    name: str, dtype: torch.dtype, calls: int
) -> None:
    swap = Swap()
    copy = batched_copy_for(platform(name), swap)
    assert copy is not None
    pieces = [(HIGH + 8 * place, 16 * place, place) for place in range(2 * 8192 + 1)]
    copy(CopyPieces.of(pieces), from_host=True)
    assert swap.dtypes == {dtype}
    assert [len(sizes) for _, _, sizes, _ in swap.calls] == ([8192, 8192, 1] if calls == 3 else [len(pieces)])
    assert [piece for call in swap.calls for piece in zip(*call[:3], strict=True)] == pieces


@pytest.mark.parametrize("from_host", [False, True])
def test_only_host_memory_may_be_read_before_the_stream_is_there(from_host: bool) -> None:
    swap = Swap()
    SwapBlocksBatch(swap, torch.int64)(CopyPieces.of([(1, 2, 3)]), from_host=from_host)
    assert [early for *_, early in swap.calls] == [from_host]


def test_the_descriptors_of_all_calls_are_returned_to_be_kept() -> None:
    kept = SwapBlocksBatch(Swap(), torch.int64, 2)(CopyPieces.of([(1, 2, 3)] * 5), from_host=False)
    assert [len(part[0]) for part in kept] == [2, 2, 1]


def test_no_pieces_are_no_call() -> None:
    swap = Swap()
    assert SwapBlocksBatch(swap, torch.int64)(CopyPieces.of([]), from_host=True) == []
    assert swap.calls == []


def test_a_function_of_another_shape_is_not_used() -> None:
    assert batched_copy_for(platform("cuda"), None) is None
    assert batched_copy_for(platform("cuda"), lambda src, dst, sizes: None) is None


def test_the_installed_vllm_has_the_function_in_the_known_shape_and_no_use_for_it_on_a_cpu() -> None:
    assert batched_copy_for(platform("cuda"), _custom_ops.swap_blocks_batch) is not None
    assert installed_batched_copy() is None
