"""Host memory that stands for the memory of a device, for code that works with numpy in the place of kernels."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch


class Mirror:
    """One allocation in host memory and on a device.

    Args:
        unit_bytes: divides the position and the size of each page, so that no unit has bytes of two blocks.
    """

    def __init__(self, host: torch.Tensor, device: torch.Tensor, unit_bytes: int) -> None:
        self._host = host.view(-1, unit_bytes)
        self._device = device.view(-1, unit_bytes)
        self._read = self._host.clone()

    def read(self) -> None:
        """Bring the device's bytes to host memory, after all work of the current stream."""
        self._read.copy_(self._device)
        self._host.copy_(self._read)

    def write(self) -> None:
        """Send the units that have changed since they were read. Other streams may write to the others meanwhile."""
        changed = (self._host != self._read).any(dim=1).nonzero().flatten().tolist()
        for first, end in _runs(changed):
            self._device[first:end].copy_(self._host[first:end])


def mirrors(host: Mapping[str, torch.Tensor], device: Mapping[str, torch.Tensor]) -> list[Mirror]:
    """Return a mirror per allocation of two equal sets of tensors."""
    pairs = {}
    units: dict[int, int] = {}
    for name, tensor in host.items():
        storage = tensor.untyped_storage()
        start, width = tensor.storage_offset() * tensor.itemsize, tensor.stride(0) * tensor.itemsize
        unit = math.gcd(units.get(storage.data_ptr(), storage.nbytes()), start, width)
        units[storage.data_ptr()] = unit
        pairs[storage.data_ptr()] = _bytes(tensor), _bytes(device[name])
    return [Mirror(*pair, units[address]) for address, pair in pairs.items()]


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return the whole allocation of a tensor as bytes."""
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())


def _runs(numbers: list[int]) -> list[tuple[int, int]]:
    """Return ``(first, last + 1)`` for each run of consecutive numbers."""
    runs: list[tuple[int, int]] = []
    for number in numbers:
        if runs and runs[-1][1] == number:
            runs[-1] = runs[-1][0], number + 1
        else:
            runs.append((number, number + 1))
    return runs
