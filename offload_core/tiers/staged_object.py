"""An object in staging memory or in lent memory, and its form on the medium."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from offload_core.api.keys import ObjectKey
from offload_core.objects import format as object_format
from offload_core.tiers.calls.lent_objects import LentObject

if TYPE_CHECKING:
    from offload_core.memory.staging_pool import Lease  # which imports torch; the command line does without


@dataclass(frozen=True)
class StagedObject:
    """An object and the memory for its bytes, header and payload: to be stored, or to be loaded."""

    key: ObjectKey
    lease: Lease | LentObject
    """Staging memory; for a store also memory that the tier's backend has lent for this object."""
    scratch: Lease | None = None
    """Second lease of a load from a tier that compresses or encrypts, as large as ``lease``, for the stored bytes."""
    spare: bool = False
    """For a store, whether it may use free capacity only. A tier without a limit stores it as any other object."""
    unsealed: bool = False
    """For a store, whether the storage still has to write the header and the checksum."""

    @property
    def nbytes(self) -> int:
        """The size of the object in bytes."""
        return self.lease.nbytes


def seal_all(objects: Iterable[StagedObject]) -> None:
    """Write the headers and checksums of objects whose payloads are complete. Blocks for the hashing.

    Raises:
        ObjectFormatError: see :func:`~offload_core.objects.format.seal`.
    """
    for staged in objects:
        object_format.seal(staged.lease.view, staged.key)


@dataclass(frozen=True)
class StoredForm:
    """An object and its bytes as the medium has them: those of its lease, or encoded ones in scratch memory.

    Args:
        name: the object's name on the medium.
        view: the bytes. Those of an object that is only ``present`` are not stored.
        compressed: they are compressed.
    """

    staged: StagedObject
    name: ObjectKey
    view: memoryview
    compressed: bool = False
    present: bool = False
