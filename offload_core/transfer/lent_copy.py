"""The copy of a lent object into its blocks, which verifies the object meanwhile."""

from __future__ import annotations

import torch

from offload_core.api.errors import ObjectFormatError
from offload_core.memory.block_copier import PartCopier
from offload_core.memory.payload_layout import PackLayout
from offload_core.objects import format as object_format
from offload_core.objects.arriving_object import ArrivingObject
from offload_core.objects.format import HEADER_BYTES
from offload_core.tiers.calls.lent_objects import LentObject
from offload_core.transfer.batches import TransferObject


def scatter_and_verify(copier: PartCopier, layout: PackLayout, item: TransferObject, lent: LentObject) -> str | None:
    """Copy an object into its blocks, and verify each part while it is in the processor's cache.

    Returns:
        ``None`` for a sound object. Otherwise the words for its damage, and its blocks are zero. A NaN in them could
        reach other tokens before the engine has computed the whole block.
    """
    check = ArrivingObject(lent.view, item.key)
    check.filled(HEADER_BYTES)
    copier.scatter_in_parts(layout, item.blocks, lent.tensor[HEADER_BYTES:], check.filled)
    if check.passed:
        return None
    nothing = torch.zeros(lent.nbytes - HEADER_BYTES, dtype=torch.int8)
    copier.scatter_in_parts(layout, item.blocks, nothing, lambda nbytes: None)
    try:
        object_format.verify(lent.view, item.key)
    except ObjectFormatError as error:
        return str(error)
    return f"{item.key}: its bytes have changed during the copy"
