"""A tier's compression: what is tried, what was learnt from it, and where the bytes go meanwhile.

Objects of one pack are alike, so whether compression pays is remembered per pack. The second buffer that a compressed
object needs is staging memory too: what a store finds none for is dropped, and a load brings its own.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from offload_core.api.backend import Backend, LoadOutcome
from offload_core.api.errors import ObjectFormatError
from offload_core.api.keys import ObjectKey
from offload_core.config.model import CODECS, BackendConfig
from offload_core.objects import compression as compressed_object
from offload_core.objects import format as object_format
from offload_core.objects.format import HEADER_BYTES, Codec

if TYPE_CHECKING:
    from offload_core.memory.staging_pool import Lease  # which imports torch; the command line does without
    from offload_core.memory.staging_shares import TierShare

logger = logging.getLogger(__name__)

TRIALS = 4
"""Objects in a row that compression does not pay for, before those of their pack are stored as they are."""
RETRY_EVERY = 64
"""Of those, one in so many is tried again: a cache that is empty, or filled with other text, compresses differently."""

# XXH3 checks this much in some 0.2 ms; handing it to a thread was seen to cost 0.1 ms, and 2 ms on busy cores.
_INLINE_CHECK_BYTES = 4 * 1024 * 1024


@dataclass(frozen=True)
class StagedObject:
    """An object and the lease that holds, or is to hold, its bytes (header and payload)."""

    key: ObjectKey
    lease: Lease
    scratch: Lease | None = None
    """Of a load from a tier that compresses: as large as ``lease``, for the bytes as they are stored."""


@dataclass(frozen=True)
class StoredForm:
    """An object and where its bytes are, or are to come, as the medium has them: in its lease, or compressed beside."""

    staged: StagedObject
    view: memoryview
    compressed: bool = False


class CompressionMemory:
    """Whether compression pays, by pack. Only for the event loop."""

    def __init__(self) -> None:
        self._failures: dict[str, int] = {}
        self._skipped: dict[str, int] = {}

    def worth_trying(self, pack: str) -> bool:
        """Return whether to compress an object of ``pack``."""
        if self._failures.get(pack, 0) < TRIALS:
            return True
        self._skipped[pack] = (self._skipped.get(pack, 0) + 1) % RETRY_EVERY
        return self._skipped[pack] == 0

    def learn(self, pack: str, paid: bool) -> None:
        """Take up how a try has ended. One that paid makes all objects of the pack worth trying again."""
        self._failures[pack] = 0 if paid else self._failures.get(pack, 0) + 1


class TierCodec:
    """Compresses what a tier stores and restores what it loads."""

    def __init__(self, config: BackendConfig) -> None:
        self._tier = config.name
        self._codec = CODECS[config.compression]
        self._level = config.compression_level
        self._memory = CompressionMemory()

    @property
    def compresses(self) -> bool:
        """Whether stores are compressed at all. What was stored compressed before can be loaded in any case."""
        return self._codec is not Codec.NONE

    async def compressed(
        self, objects: Sequence[StagedObject], backend: Backend[Any], staging: TierShare | None, scratch: list[Lease]
    ) -> list[StoredForm | None]:
        """Compress objects where that pays.

        Args:
            objects: sealed; others may read them at the same time.
            backend: on whose threads it is done. Cancelled, this waits for them to end.
            staging: where room for compressed objects comes from.
            scratch: gets the leases that were taken, for the caller to release, also when this raises.

        Returns:
            Per object: its form, which may be the object as it is, or ``None`` where there was no staging memory.
        """
        forms: list[StoredForm | None] = []
        tries: dict[int, Lease] = {}
        for index, staged in enumerate(objects):
            forms.append(StoredForm(staged, staged.lease.view))
            if self._memory.worth_trying(staged.key.pack):
                most_bytes = compressed_object.largest_compressed_bytes(staged.lease.nbytes)
                lease = None if staging is None else staging.try_scratch_for_store(most_bytes)
                if lease is None:
                    forms[index] = None
                else:
                    scratch.append(lease)
                    tries[index] = lease
        if tries:
            batch = [
                (objects[index].key, objects[index].lease.view.toreadonly(), lease.view)
                for index, lease in tries.items()
            ]
            sizes = await backend.run_blocking(self._compress_all, batch)
            for (index, lease), nbytes in zip(tries.items(), sizes, strict=True):
                self._memory.learn(objects[index].key.pack, nbytes is not None)
                if nbytes is not None:
                    forms[index] = StoredForm(objects[index], lease.view[:nbytes], compressed=True)
        return forms

    def compressed_copies(self, keys: Sequence[ObjectKey], objects: Sequence[memoryview]) -> list[memoryview]:
        """Return sealed objects as the tier stores them, in memory of their own where compressed; for tools."""
        forms: list[memoryview] = []
        for key, source in zip(keys, objects, strict=True):
            target = memoryview(bytearray(compressed_object.largest_compressed_bytes(len(source))))
            (nbytes,) = self._compress_all([(key, source, target)])
            forms.append(source if nbytes is None else target[:nbytes])
        return forms

    def incoming(
        self, staged: StagedObject, nbytes: int | None, staging: TierShare | None, scratch: list[Lease]
    ) -> StoredForm | LoadOutcome:
        """Say where the object's bytes are to be loaded to.

        Args:
            nbytes: of the object on the medium, ``None`` where that is not known.
            staging: gives memory for objects that are compressed though the tier does not compress (any more).
            scratch: gets what was leased there, for the caller to release.

        Returns:
            The form to fill, or what became of the object when it cannot be loaded.
        """
        if nbytes is None or nbytes == staged.lease.nbytes:
            return StoredForm(staged, staged.lease.view)
        if not HEADER_BYTES < nbytes < staged.lease.nbytes:
            logger.warning(
                "tier %r: damaged object, deleting it: %s has %d bytes on the medium; at most %d are expected",
                self._tier, staged.key, nbytes, staged.lease.nbytes,
            )  # fmt: skip
            return LoadOutcome.CORRUPT
        lease = staged.scratch
        if lease is None and staging is not None:
            lease = staging.try_scratch_for_load(nbytes)  # never waited for: others may wait for this batch
            if lease is not None:
                scratch.append(lease)
        return LoadOutcome.MISS if lease is None else StoredForm(staged, lease.view[:nbytes], compressed=True)

    async def verified(
        self, forms: Sequence[StoredForm], outcomes: Sequence[LoadOutcome], backend: Backend[Any]
    ) -> list[LoadOutcome]:
        """Check every hit's header and checksums and restore what is compressed; damage becomes ``CORRUPT``.

        Small batches are checked at once; others, and all decoding, on threads of ``backend``. Cancelled, it waits for
        them to end.
        """
        if any(form.compressed for form in forms) or sum(len(form.view) for form in forms) > _INLINE_CHECK_BYTES:
            return await backend.run_blocking(self._verify_all, forms, outcomes)
        return self._verify_all(forms, outcomes)

    def _compress_all(self, batch: Sequence[tuple[ObjectKey, memoryview, memoryview]]) -> list[int | None]:
        return [
            compressed_object.compress(object_format.read_header(source, key), source, target, self._codec, self._level)
            for key, source, target in batch
        ]

    def _verify_all(self, forms: Sequence[StoredForm], outcomes: Sequence[LoadOutcome]) -> list[LoadOutcome]:
        checked: list[LoadOutcome] = []
        for form, outcome in zip(forms, outcomes, strict=True):
            if outcome is LoadOutcome.HIT:
                try:
                    if form.compressed:
                        compressed_object.restore(form.view, form.staged.lease.view, form.staged.key)
                    else:
                        object_format.verify(form.view, form.staged.key)
                except ObjectFormatError as error:
                    logger.warning("tier %r: damaged object, deleting it: %s", self._tier, error)
                    outcome = LoadOutcome.CORRUPT
            checked.append(outcome)
        return checked
