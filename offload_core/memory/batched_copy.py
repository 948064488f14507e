"""Batched copies: one call for many pieces of memory between host and device, where the installation has one."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch

logger = logging.getLogger(__name__)

_TRIAL_PAGES, _TRIAL_PAGE_BYTES = 5, 4096


class CopyPieces(NamedTuple):
    """Pieces of memory: addresses to copy from and to, and sizes in bytes."""

    sources: npt.NDArray[np.uint64]
    targets: npt.NDArray[np.uint64]
    sizes: npt.NDArray[np.uint64]

    @classmethod
    def of(cls, pieces: Iterable[tuple[int, int, int]]) -> CopyPieces:
        """Return the pieces of ``(source, target, bytes)``."""
        return cls(*np.array(list(pieces), dtype=np.uint64).reshape(-1, 3).T.copy())


class BatchedCopy(Protocol):
    """A function that copies many pieces on the current stream, which is not the device's default stream."""

    def __call__(self, pieces: CopyPieces, *, from_host: bool) -> object:
        """Begin the copies. The device may read host memory at once, and the device's memory in the stream's order.

        Args:
            from_host: whether the pieces go from host memory to the device, or the other way.

        Returns:
            The descriptors, which the caller keeps until the copies have ended.
        """


def copies_right(copy: BatchedCopy, device: torch.device) -> bool:
    """Return whether a batched copy brings the right bytes to a device and back. Waits for it, and logs a failure."""
    pages = np.random.default_rng(1).integers(-128, 128, (_TRIAL_PAGES, _TRIAL_PAGE_BYTES), np.int8)
    host = torch.from_numpy(pages).pin_memory()
    there = torch.zeros_like(host, device=device)
    back = torch.zeros_like(host).pin_memory()
    turned = list(reversed(range(_TRIAL_PAGES)))
    stream = torch.Stream(device=device)
    stream.wait_event(torch.accelerator.current_stream(device).record_event())
    try:
        with stream:
            used = [copy(_between(host, there, turned), from_host=True)]
            used.append(copy(_between(there, back, turned), from_host=False))
        stream.synchronize()
    except (RuntimeError, TypeError, NotImplementedError) as error:
        logger.warning("vLLM's batched copy fails on %s, so torch copies page by page: %s", device, error)
        return False
    if torch.equal(back, host) and torch.equal(there.cpu(), host[turned]):
        return True
    logger.warning("vLLM's batched copy brings wrong bytes on %s, so torch copies page by page", device)
    return False


def _between(source: torch.Tensor, target: torch.Tensor, order: list[int]) -> CopyPieces:
    """Return the copies of each row of ``source`` to the row of ``target`` that ``order`` names for it."""
    return CopyPieces.of(
        (source[row].data_ptr(), target[other].data_ptr(), _TRIAL_PAGE_BYTES) for row, other in enumerate(order)
    )
