"""Bytes in host memory as a tensor, without a copy."""

from __future__ import annotations

import ctypes

import torch

from offload_core.api.memory.addresses import address_of


def host_tensor(view: memoryview) -> torch.Tensor:
    """Return ``view`` as an int8 tensor of shape ``(len(view),)``.

    The caller keeps the memory until the last use of the tensor. It writes to the tensor only if the view is writable,
    since torch knows no tensors that are read-only.
    """
    if not len(view):
        return torch.empty(0, dtype=torch.int8)
    return torch.frombuffer((ctypes.c_int8 * len(view)).from_address(address_of(view)), dtype=torch.int8)
