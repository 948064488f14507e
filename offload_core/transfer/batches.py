"""Transfer objects, and the batches in which the transfer engine moves them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

from offload_core.api.keys import ObjectKey
from offload_core.memory import staging_size
from offload_core.memory.block_copier import BlockSlice
from offload_core.memory.payload_layout import PackLayout


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
    """Yield ``objects`` in order, in batches by their payload bytes; see :func:`staging_size.in_batches`.

    Args:
        layouts: per pack name, the payload's layout.
        times: factor of a batch's limits.
    """
    return staging_size.in_batches(objects, lambda item: layouts[item.key.pack].payload_bytes, times)
