"""Transfer objects, and the batches in which the transfer engine moves them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

from offload_core.api.keys import ObjectKey
from offload_core.memory.block_copier import BlockSlice
from offload_core.memory.payload_layout import PackLayout
from offload_core.memory.staging_size import BATCH_BYTES, BATCH_OBJECTS


@dataclass(frozen=True)
class TransferObject:
    """One object to load or store: its key and, per group of its pack, its blocks in the KV cache.

    Args:
        spare: for a store, whether it may use free capacity only (:mod:`offload_core.planning.placement`).
    """

    key: ObjectKey
    blocks: tuple[BlockSlice, ...]
    spare: bool = False


class Keyed(Protocol):
    """Anything with an object's key."""

    @property
    def key(self) -> ObjectKey:
        """The object's key."""


Item = TypeVar("Item", bound=Keyed)


def in_batches(objects: Sequence[Item], layouts: Mapping[str, PackLayout], times: int = 1) -> Iterator[list[Item]]:
    """Yield ``objects`` in order, in batches.

    A batch ends at ``BATCH_OBJECTS`` objects, or with the object that brings it to ``BATCH_BYTES`` payload bytes.

    Args:
        layouts: per pack name, the payload's layout.
        times: factor of both limits.
    """
    batch: list[Item] = []
    nbytes = 0
    for item in objects:
        batch.append(item)
        nbytes += layouts[item.key.pack].payload_bytes
        if len(batch) == times * BATCH_OBJECTS or nbytes >= times * BATCH_BYTES:
            yield batch
            batch, nbytes = [], 0
    if batch:
        yield batch
