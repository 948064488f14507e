"""Batched copies: one call for many pieces of memory between host and device, where the installation has one."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch

from offload_core.memory.block_copier import BlockSlice
from offload_core.memory.payload_layout import GroupRuns, PackLayout

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


class CacheAddresses(NamedTuple):
    """The address of each tensor of a KV cache, and the bytes from a block to the next one."""

    starts: npt.NDArray[np.uint64]
    strides: npt.NDArray[np.uint64]

    @classmethod
    def of(cls, tensors: Sequence[torch.Tensor]) -> CacheAddresses:
        """Return the addresses of int8 tensors of shape ``(num_blocks, page_size_bytes)``."""
        return cls(
            np.array([tensor.data_ptr() for tensor in tensors], dtype=np.uint64),
            np.array([tensor.stride(0) for tensor in tensors], dtype=np.uint64),
        )


@dataclass(frozen=True)
class Scatter:
    """One object on its way into its blocks.

    Args:
        blocks: one slice per group of the pack.
        payload: its host memory.
    """

    layout: PackLayout
    blocks: Sequence[BlockSlice]
    payload: torch.Tensor


def pieces_to_blocks(scatters: Sequence[Scatter], caches: CacheAddresses) -> CopyPieces:
    """Return the copies from payloads to their blocks.

    Consecutive blocks are one piece where no padding lies between their pages. The time grows with the number of
    layouts and groups, and hardly with those of objects and pages, since the engine's thread makes this call.
    """
    pieces = [
        _pieces_of_runs(some, padded, [(one.blocks[runs.group], one.payload) for one in alike], caches)
        for alike in _by_layout(scatters)
        for runs in alike[0].layout.group_runs
        for padded, some in _by_padding(runs, caches)
    ]
    return CopyPieces(*map(np.concatenate, zip(*pieces, strict=True))) if pieces else CopyPieces.of([])


def _by_layout(scatters: Sequence[Scatter]) -> list[list[Scatter]]:
    """Return the scatters of each layout."""
    layouts: dict[str, list[Scatter]] = {}
    for scatter in scatters:
        layouts.setdefault(scatter.layout.name, []).append(scatter)
    return list(layouts.values())


def _by_padding(runs: GroupRuns, caches: CacheAddresses) -> Iterator[tuple[bool, GroupRuns]]:
    """Yield the runs with padding between their pages, and those without, if there are any."""
    is_padded = caches.strides[runs.tensor_indices] != runs.page_bytes
    for padded, chosen in ((True, is_padded), (False, ~is_padded)):
        if chosen.any():
            tensors, page_bytes, offsets = runs.tensor_indices[chosen], runs.page_bytes[chosen], runs.offsets[chosen]
            yield padded, GroupRuns(runs.group, tensors, page_bytes, offsets)


def _pieces_of_runs(
    runs: GroupRuns, padded: bool, parts: Sequence[tuple[BlockSlice, torch.Tensor]], caches: CacheAddresses
) -> CopyPieces:
    """Return the copies from each payload to a group's blocks in the tensors of these runs."""
    lengths = [len(part.block_ids) for part, _ in parts]
    ids = np.fromiter(chain.from_iterable(part.block_ids for part, _ in parts), np.uint64, sum(lengths))
    payloads = np.repeat(np.array([payload.data_ptr() for _, payload in parts], dtype=np.uint64), lengths)
    slots = np.fromiter(
        chain.from_iterable(range(part.first_slot, part.first_slot + len(part.block_ids)) for part, _ in parts),
        np.uint64,
        len(ids),
    )
    counts = np.ones(len(ids), dtype=np.uint64)
    if not padded and len(ids):
        one = np.uint64(1)
        follows = (ids[1:] == ids[:-1] + one) & (slots[1:] == slots[:-1] + one) & (payloads[1:] == payloads[:-1])
        firsts = np.flatnonzero(np.concatenate([[True], ~follows]))
        counts = np.diff(firsts, append=len(ids)).astype(np.uint64)
        ids, payloads, slots = ids[firsts], payloads[firsts], slots[firsts]
    page_bytes, offsets = runs.page_bytes[:, None], runs.offsets[:, None]
    starts, strides = caches.starts[runs.tensor_indices, None], caches.strides[runs.tensor_indices, None]
    return CopyPieces(
        (payloads + offsets + slots * page_bytes).ravel(),
        (starts + ids * strides).ravel(),
        (counts * page_bytes).ravel(),
    )


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
