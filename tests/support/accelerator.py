"""The device that ``tests/accelerator`` runs on: the simulated accelerator, or a CUDA GPU where there is one.

The fixture ``control`` of the tests is a :class:`StreamControl`, which holds and releases the device's streams.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

OWN_PROCESS = "OFFLOAD_CORE_TEST_ACCELERATOR"
"""The environment variable that names the device. Without it these tests are not collected."""
SIMULATED, CUDA = "simulated", "cuda"
DEVICE = os.environ.get(OWN_PROCESS, SIMULATED)

only_simulated = pytest.mark.skipif(DEVICE != SIMULATED, reason="it looks into the simulated accelerator")


class StreamControl(ABC):
    """The control of a device's streams, and its pinned memory."""

    @abstractmethod
    def hold(self, stream: Any) -> None:
        """Let the stream begin no further work. A stream that is held already stays so."""

    @abstractmethod
    def release(self, stream: Any) -> None:
        """Let the stream work again."""

    @abstractmethod
    def register(self, address: int, nbytes: int) -> None:
        """Pin host memory; see :class:`~offload_core.api.memory.pinned_memory.HostPinning`."""

    @abstractmethod
    def unregister(self, address: int) -> None:
        """Unpin host memory; see :class:`~offload_core.api.memory.pinned_memory.HostPinning`."""

    @abstractmethod
    def swap_blocks_batch(
        self, sources: torch.Tensor, targets: torch.Tensor, sizes: torch.Tensor, is_src_access_order_any: bool = False
    ) -> None:
        """Copy many pieces by one call on the current stream, as vLLM's function of this name does on CUDA."""

    @contextmanager
    def held(self, *streams: Any) -> Iterator[None]:
        """Hold streams for the time of a block."""
        for stream in streams:
            self.hold(stream)
        try:
            yield
        finally:
            for stream in streams:
                self.release(stream)


def start() -> StreamControl:
    """Make the device ready in this process, and return its control."""
    if DEVICE == CUDA:
        from tests.support.cuda_accelerator import CudaControl

        return CudaControl()
    from tests.support import simulated_accelerator

    return simulated_accelerator.register()
