"""Bytes in host memory as a tensor, without a copy."""

from __future__ import annotations

import ctypes

import numpy as np
import torch


def host_tensor(view: memoryview) -> torch.Tensor:
    """Return ``view`` as an int8 tensor of shape ``(len(view),)``.

    The caller keeps the memory until the last use of the tensor. It writes to the tensor only if the view is writable,
    since torch knows no tensors that are read-only.
    """
    if not len(view):
        return torch.empty(0, dtype=torch.int8)
    address = np.frombuffer(view, dtype=np.uint8).ctypes.data
    return torch.frombuffer((ctypes.c_int8 * len(view)).from_address(address), dtype=torch.int8)
