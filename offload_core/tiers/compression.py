"""A tier's compression: the choice of objects to compress, their staging memory, and decompression.

Objects of one pack are alike, so the history of compression is kept per pack. A compressed object needs a second buffer
of staging memory. A store is dropped if there is none; a load brings its own.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from offload_core.api.backend import Backend, LoadOutcome
from offload_core.api.errors import ObjectFormatError
from offload_core.api.keys import ObjectKey
from offload_core.config.model import CODECS, BackendConfig
from offload_core.objects import compression as compressed_object
from offload_core.objects import format as object_format
from offload_core.objects.format import HEADER_BYTES, Codec
from offload_core.tiers.staged_object import StagedObject, StoredForm

if TYPE_CHECKING:
    from offload_core.memory.staging_pool import Lease  # which imports torch; the command line does without
    from offload_core.memory.staging_shares import TierShare

TRIALS = 4
"""Objects of a pack in a row that compression does not shrink enough, before the pack is stored uncompressed."""
RETRY_EVERY = 64
"""Of these uncompressed objects, one in so many is tried again, since later objects may compress better."""

# XXH3 checks this many bytes in about 0.2 ms; a thread costs 0.1 ms, and 2 ms on busy cores (measured). After each
# part of this size, the event loop serves others.
_INLINE_CHECK_BYTES = 4 * 1024 * 1024


class Damage(NamedTuple):
    """Damage that a read of an object has shown."""

    reason: str
    checksum: bytes | None = None
    """Checksum of the bytes that were read; ``None`` if the object's size is wrong."""


class CompressionHistory:
    """Results of earlier compressions, by pack. For one event loop."""

    def __init__(self) -> None:
        self._failures: dict[str, int] = {}
        self._uncompressed: dict[str, int] = {}

    def worth_trying(self, pack: str) -> bool:
        """Return whether to compress an object of ``pack``."""
        if self._failures.get(pack, 0) < TRIALS:
            return True
        self._uncompressed[pack] = (self._uncompressed.get(pack, 0) + 1) % RETRY_EVERY
        return self._uncompressed[pack] == 0

    def record(self, pack: str, shrunk: bool) -> None:
        """Record the result of a compression. After a success all objects of the pack are worth trying again."""
        self._failures[pack] = 0 if shrunk else self._failures.get(pack, 0) + 1


class TierCodec:
    """Compresses a tier's stores, and verifies and decompresses its loads."""

    def __init__(self, config: BackendConfig) -> None:
        self._codec = CODECS[config.compression]
        self._level = config.compression_level
        self._history = CompressionHistory()

    @property
    def compresses(self) -> bool:
        """True if stores are compressed. Compressed objects can be loaded in any case."""
        return self._codec is not Codec.NONE

    async def compress(
        self, objects: Sequence[StagedObject], backend: Backend[Any], staging: TierShare | None, scratch: list[Lease]
    ) -> list[StoredForm | None]:
        """Compress the objects that shrink enough.

        Args:
            objects: sealed objects; others may read them at the same time.
            backend: provides the threads. When cancelled, this call waits for them to end.
            staging: provides memory for compressed objects.
            scratch: gets the leases of that memory, for the caller to release, also when this raises.

        Returns:
            Per object: its form, compressed or uncompressed, or ``None`` where there was no staging memory.
        """
        forms: list[StoredForm | None] = []
        targets: dict[int, Lease] = {}
        for index, staged in enumerate(objects):
            forms.append(StoredForm(staged, staged.lease.view))
            if self._history.worth_trying(staged.key.pack):
                max_bytes = compressed_object.largest_compressed_bytes(staged.lease.nbytes)
                lease = None if staging is None else staging.try_scratch_for_store(max_bytes)
                if lease is None:
                    forms[index] = None
                else:
                    scratch.append(lease)
                    targets[index] = lease
        if targets:
            batch = [
                (objects[index].key, objects[index].lease.view.toreadonly(), lease.view)
                for index, lease in targets.items()
            ]
            sizes = await backend.run_blocking(self._compress_all, batch)
            for (index, lease), nbytes in zip(targets.items(), sizes, strict=True):
                self._history.record(objects[index].key.pack, nbytes is not None)
                if nbytes is not None:
                    forms[index] = StoredForm(objects[index], lease.view[:nbytes], compressed=True)
        return forms

    def compressed_copies(self, keys: Sequence[ObjectKey], objects: Sequence[memoryview]) -> list[memoryview]:
        """Return sealed objects as the tier stores them, compressed ones in new memory; for tools."""
        forms: list[memoryview] = []
        for key, source in zip(keys, objects, strict=True):
            target = memoryview(bytearray(compressed_object.largest_compressed_bytes(len(source))))
            (nbytes,) = self._compress_all([(key, source, target)])
            forms.append(source if nbytes is None else target[:nbytes])
        return forms

    def load_target(
        self,
        staged: StagedObject,
        nbytes: int | None,
        staging: TierShare | None,
        scratch: list[Lease],
        damage: dict[ObjectKey, Damage],
    ) -> StoredForm | LoadOutcome:
        """Return the memory into which the object's stored bytes are to be loaded.

        Args:
            nbytes: size of the object on the medium, ``None`` if unknown.
            staging: provides memory for objects that are compressed although the tier does not compress now.
            scratch: gets the leases of that memory, for the caller to release.
            damage: gets the reason if the object is ``CORRUPT``.

        Returns:
            The form to fill, or the outcome of an object that cannot be loaded.
        """
        if nbytes is None and self.compresses:
            return LoadOutcome.MISS  # most objects of the tier are shorter than the buffer
        if nbytes is None or nbytes == staged.lease.nbytes:
            return StoredForm(staged, staged.lease.view)
        if not HEADER_BYTES < nbytes < staged.lease.nbytes:
            expected = f"at most {staged.lease.nbytes} are expected"
            damage[staged.key] = Damage(f"{staged.key} has {nbytes} bytes on the medium; {expected}")
            return LoadOutcome.CORRUPT
        lease = staged.scratch
        if lease is None and staging is not None:
            lease = staging.try_scratch_for_load(nbytes)  # without waiting: other jobs may wait for this batch
            if lease is not None:
                scratch.append(lease)
        return LoadOutcome.MISS if lease is None else StoredForm(staged, lease.view[:nbytes], compressed=True)

    async def verify(
        self,
        forms: Sequence[StoredForm],
        outcomes: Sequence[LoadOutcome],
        backend: Backend[Any],
        damage: dict[ObjectKey, Damage],
    ) -> list[LoadOutcome]:
        """Verify the header and checksums of every hit and decompress it; damage becomes ``CORRUPT``.

        ``damage`` gets the reason of each.

        Small objects are verified on the event loop, part by part, so that the threads go on reading. Threads of
        ``backend`` verify large objects and decompress. When cancelled, this call waits for them to end.
        """
        if any(form.compressed or len(form.view) > _INLINE_CHECK_BYTES for form in forms):
            return await backend.run_blocking(self._verify_all, forms, outcomes, damage)
        checked: list[LoadOutcome] = []
        nbytes = 0
        for form, outcome in zip(forms, outcomes, strict=True):
            nbytes += len(form.view)
            if nbytes > _INLINE_CHECK_BYTES:
                await asyncio.sleep(0)
                nbytes = len(form.view)
            checked += self._verify_all([form], [outcome], damage)
        return checked

    def _compress_all(self, batch: Sequence[tuple[ObjectKey, memoryview, memoryview]]) -> list[int | None]:
        return [
            compressed_object.compress(object_format.read_header(source, key), source, target, self._codec, self._level)
            for key, source, target in batch
        ]

    def _verify_all(
        self, forms: Sequence[StoredForm], outcomes: Sequence[LoadOutcome], damage: dict[ObjectKey, Damage]
    ) -> list[LoadOutcome]:
        checked: list[LoadOutcome] = []
        for form, outcome in zip(forms, outcomes, strict=True):
            if outcome is LoadOutcome.HIT:
                try:
                    if form.compressed:
                        compressed_object.restore(form.view, form.staged.lease.view, form.staged.key)
                    else:
                        object_format.verify(form.view, form.staged.key)
                except ObjectFormatError as error:
                    damage[form.staged.key] = Damage(str(error), object_format.checksum(form.view))
                    outcome = LoadOutcome.CORRUPT
            checked.append(outcome)
        return checked
