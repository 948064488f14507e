"""Transfer objects, and the batches in which the transfer engine moves them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from offload_core.api.keys import ObjectKey
from offload_core.memory.block_copier import BlockSlice
from offload_core.memory.payload_layout import PackLayout
from offload_core.memory.staging_size import in_batches
from offload_core.objects.format import object_bytes


@dataclass(frozen=True)
class TransferObject:
    """One object to load or store: its key and, per group of its pack, its blocks in the KV cache.

    Args:
        spare: for a store, whether it may use free capacity only (:mod:`offload_core.planning.placement`).
        layout: its payload's own layout; ``None`` if that is the layout of its pack.
    """

    key: ObjectKey
    blocks: tuple[BlockSlice, ...]
    spare: bool = False
    layout: PackLayout | None = None


class Layouts:
    """The layouts of payloads.

    Args:
        of_packs: per pack name, the layout of its objects. Objects of other packs bring their own.
    """

    def __init__(self, of_packs: Mapping[str, PackLayout]) -> None:
        self._of_packs = of_packs

    def of(self, item: TransferObject) -> PackLayout:
        """Return the layout of an object's payload."""
        return item.layout if item.layout is not None else self._of_packs[item.key.pack]

    def stored_bytes(self, item: TransferObject) -> int:
        """Return the size of an object in bytes, with its header and before compression."""
        return object_bytes(self.of(item).payload_bytes)

    def in_batches(self, objects: Sequence[TransferObject]) -> Iterator[list[TransferObject]]:
        """Yield ``objects`` in order, in batches by their payload bytes."""
        return in_batches(objects, lambda item: self.of(item).payload_bytes)
