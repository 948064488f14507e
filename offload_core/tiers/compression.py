"""A tier's codec: the choice of objects to compress, encryption, their staging memory, and the way back.

Objects of one pack are alike, so the history of compression is kept per pack. A compressed or encrypted object needs a
second buffer of staging memory. A store is dropped if there is none; a load brings its own.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from offload_core.api.backend import Backend, LoadOutcome
from offload_core.api.capabilities import Capabilities
from offload_core.api.errors import ConfigError, ObjectFormatError
from offload_core.api.keys import ObjectKey
from offload_core.config.model import CODECS, BackendConfig, TierConfig
from offload_core.objects import compression as compressed_object
from offload_core.objects import format as object_format
from offload_core.objects.arriving_object import ArrivingBytes, ArrivingObject
from offload_core.objects.format import HEADER_BYTES, Codec, Header, WrongKeyError
from offload_core.objects.stored_names import StoredNames
from offload_core.tiers.staged_object import StagedObject, StoredForm

if TYPE_CHECKING:
    from offload_core.memory.staging_pool import Lease  # which imports torch; the command line does without
    from offload_core.memory.staging_shares import TierShare

logger = logging.getLogger(__name__)

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


def differ(first: Damage | None, second: Damage | None) -> bool:
    """Return whether two reads of a damaged object have brought different bytes. ``None``: the backend saw damage."""
    return (first and first.checksum) != (second and second.checksum)


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


class _Encoding(NamedTuple):
    """One object to encode, and the memory for the result."""

    name: ObjectKey
    """The name for the encoded object."""
    header: Header
    source: memoryview
    target: memoryview
    compress: bool


class _Encoded(NamedTuple):
    nbytes: int
    compressed: bool


class TierCodec:
    """Compresses and encrypts a tier's stores. Verifies, decrypts and decompresses its loads.

    Args:
        label: the words for the tier in log lines.

    Raises at construction:
        ConfigError: the tier encrypts, and has no key.
    """

    def __init__(self, config: TierConfig, label: str) -> None:
        common = config.common
        self._label = label
        self._codec = CODECS[common.compression]
        self._level = common.compression_level
        self._history = CompressionHistory()
        self._keys = config.encryption_keys
        if (common.encryption != "none") != (self._keys is not None):
            raise ConfigError([f"encryption: tier {common.name!r} has no key; load its configuration with one"])
        self.names = StoredNames(("",) if self._keys is None else self._keys.name_suffixes)
        self._reported_keys: set[str] = set()

    @property
    def compresses(self) -> bool:
        """True if stores are compressed. Compressed objects can be loaded in any case."""
        return self._codec is not Codec.NONE

    @property
    def encrypts(self) -> bool:
        """True if stores are encrypted. No other objects can then be loaded."""
        return self._keys is not None

    async def encode(
        self, objects: Sequence[StagedObject], backend: Backend[Any], staging: TierShare | None, scratch: list[Lease]
    ) -> list[StoredForm | None]:
        """Compress the objects that shrink enough, and encrypt all objects if the tier encrypts.

        Args:
            objects: sealed objects; others may read them at the same time.
            backend: provides the threads. When cancelled, this call waits for them to end.
            staging: provides memory for encoded objects.
            scratch: gets the leases of that memory, for the caller to release, also when this raises.

        Returns:
            Per object: its form for the medium, or ``None`` where there was no staging memory.
        """
        names = self.names.of([staged.key for staged in objects])
        forms: list[StoredForm | None] = []
        batch: dict[int, _Encoding] = {}
        for index, (staged, name) in enumerate(zip(objects, names, strict=True)):
            forms.append(StoredForm(staged, name, staged.lease.view))
            compress = self.compresses and self._history.worth_trying(staged.key.pack)
            if compress or self.encrypts:
                max_bytes = self._largest_bytes(staged.lease.nbytes)
                lease = None if staging is None else staging.try_scratch_for_store(max_bytes)
                if lease is None:
                    forms[index] = None
                else:
                    scratch.append(lease)
                    source = staged.lease.view.toreadonly()
                    header = object_format.read_header(source, staged.key)
                    batch[index] = _Encoding(name, header, source, lease.view, compress)
        if batch:
            results = await backend.run_blocking(self._encode_all, list(batch.values()))
            for (index, encoding), encoded in zip(batch.items(), results, strict=True):
                if encoding.compress:
                    self._history.record(encoding.header.key.pack, encoded is not None and encoded.compressed)
                if encoded is not None:
                    view = encoding.target[: encoded.nbytes]
                    forms[index] = StoredForm(objects[index], names[index], view, encoded.compressed)
        return forms

    def encoded_copies(self, keys: Sequence[ObjectKey], objects: Sequence[memoryview]) -> list[memoryview]:
        """Return sealed objects as the tier stores them, encoded ones in new memory; for tools.

        Args:
            keys: the names of the objects on the medium, under which they are sealed as well.
        """
        forms: list[memoryview] = []
        for key, source in zip(keys, objects, strict=True):
            target = memoryview(bytearray(self._largest_bytes(len(source))))
            header = object_format.read_header(source, key)
            (encoded,) = self._encode_all([_Encoding(key, header, source, target, self.compresses)])
            forms.append(source if encoded is None else target[: encoded.nbytes])
        return forms

    def load_target(
        self,
        staged: StagedObject,
        name: ObjectKey,
        nbytes: int | None,
        staging: TierShare | None,
        scratch: list[Lease],
        damage: dict[ObjectKey, Damage],
    ) -> StoredForm | LoadOutcome:
        """Return the memory into which the object's stored bytes are to be loaded.

        Args:
            name: the object's name on the medium.
            nbytes: size of the object on the medium, ``None`` if unknown.
            staging: provides memory for objects that are compressed although the tier does not compress now.
            scratch: gets the leases of that memory, for the caller to release.
            damage: gets the reason if the object is ``CORRUPT``.

        Returns:
            The form to fill, or the outcome of an object that cannot be loaded.
        """
        if nbytes is None and self.compresses:
            return LoadOutcome.MISS  # most objects of the tier are shorter than the buffer
        whole_bytes = staged.lease.nbytes
        nbytes = whole_bytes if nbytes is None else nbytes
        if nbytes == whole_bytes and not self.encrypts:
            return StoredForm(staged, name, staged.lease.view)
        if not min(HEADER_BYTES + 1, whole_bytes) <= nbytes <= whole_bytes:  # without a payload, a header is all
            reason = f"{name} has {nbytes} bytes on the medium; at most {whole_bytes} are expected"
            damage[staged.key] = Damage(reason)
            return LoadOutcome.CORRUPT
        lease = staged.scratch
        if lease is None and staging is not None:
            lease = staging.try_scratch_for_load(nbytes)  # without waiting: other jobs may wait for this batch
            if lease is not None:
                scratch.append(lease)
        if lease is None:
            return LoadOutcome.MISS
        return StoredForm(staged, name, lease.view[:nbytes], compressed=nbytes < whole_bytes)

    def arriving(self, form: StoredForm) -> ArrivingBytes:
        """Return the check of an object of full length that is about to be loaded.

        If it passes, the sealed object is in the lease.
        """
        if self._keys is None:
            return ArrivingObject(form.view, form.name)
        from offload_core.objects.arriving_encrypted_object import ArrivingEncryptedObject  # needs an extra

        return ArrivingEncryptedObject(self._keys, form.view, form.name, form.staged.lease.view, form.staged.key)

    async def decode(
        self,
        forms: Sequence[StoredForm],
        outcomes: Sequence[LoadOutcome],
        backend: Backend[Any],
        damage: dict[ObjectKey, Damage],
    ) -> list[LoadOutcome]:
        """Verify every hit, decrypt and decompress it. Damage becomes ``CORRUPT``, an object of another key ``MISS``.

        ``damage`` gets the reason of each.

        Small objects are verified on the event loop, part by part, so that the threads go on reading. Threads of
        ``backend`` verify large objects, decrypt and decompress. When cancelled, this call waits for them to end.
        """
        if self.encrypts or any(form.compressed or len(form.view) > _INLINE_CHECK_BYTES for form in forms):
            return await backend.run_load(self._decode_all, forms, outcomes, damage)
        checked: list[LoadOutcome] = []
        nbytes = 0
        for form, outcome in zip(forms, outcomes, strict=True):
            nbytes += len(form.view)
            if nbytes > _INLINE_CHECK_BYTES:
                await asyncio.sleep(0)
                nbytes = len(form.view)
            checked += self._decode_all([form], [outcome], damage)
        return checked

    def decode_copy(self, stored: memoryview, name: ObjectKey, target: memoryview) -> LoadOutcome:
        """Write the sealed form of a stored object into ``target``, which is as long; for tools.

        Args:
            stored: the object as the medium has it; its payload may be overwritten.
            name: the object's name on the medium, and in the sealed form.
        """
        try:
            if self._keys is not None:
                self._keys.decrypt(object_format.verify_stored(stored, name), stored, target, name)
            else:
                compressed_object.restore(stored, target, name)
        except (ObjectFormatError, WrongKeyError):
            return LoadOutcome.CORRUPT
        return LoadOutcome.HIT

    def check_stored(self, stored: memoryview, name: ObjectKey) -> bool:
        """Check every byte of an object as the medium has it; for tools. Its payload may be overwritten.

        Returns:
            ``False`` if only the checksums could be checked, since the object's key is not here.

        Raises:
            ObjectFormatError: the message names the first difference.
        """
        header = compressed_object.verify_any(stored, name)
        try:
            if self._keys is not None and (header.encryption is not None or self.names.has(name)):
                self._keys.authenticate(header, stored)
                return True
        except WrongKeyError:
            return False
        return header.encryption is None

    def _largest_bytes(self, object_bytes: int) -> int:
        """Return the size in bytes of the memory for the form of an object of ``object_bytes``."""
        return object_bytes if self.encrypts else compressed_object.largest_compressed_bytes(object_bytes)

    def _encode_all(self, batch: Sequence[_Encoding]) -> list[_Encoded | None]:
        """Return an entry per object: ``None`` if it is to be stored as it is."""
        return [self._encode(*encoding) for encoding in batch]

    def _encode(
        self, name: ObjectKey, header: Header, source: memoryview, target: memoryview, compress: bool
    ) -> _Encoded | None:
        used = None
        if compress:
            room = target[: compressed_object.largest_compressed_bytes(len(source))]
            used = compressed_object.compress(header, source, room, self._codec, self._level)
        if used is None and self._keys is None:
            return None
        form = target[: len(source) if used is None else used]
        if self._keys is not None:
            if used is not None:
                header, source = object_format.read_header(form, header.key), form
            self._keys.encrypt(header, name, source, form)
        return _Encoded(len(form), used is not None)

    def _decode_all(
        self, forms: Sequence[StoredForm], outcomes: Sequence[LoadOutcome], damage: dict[ObjectKey, Damage]
    ) -> list[LoadOutcome]:
        return [
            self._decode(form, damage) if outcome is LoadOutcome.HIT else outcome
            for form, outcome in zip(forms, outcomes, strict=True)
        ]

    def _decode(self, form: StoredForm, damage: dict[ObjectKey, Damage]) -> LoadOutcome:
        target, key = form.staged.lease.view, form.staged.key
        try:
            if self._keys is not None:
                self._keys.decrypt(object_format.verify_stored(form.view, form.name), form.view, target, key)
            elif form.compressed:
                compressed_object.restore(form.view, target, key)
            else:
                object_format.verify(form.view, key)
        except WrongKeyError as error:
            self._report_key(error.key_id)
            return LoadOutcome.MISS
        except ObjectFormatError as error:
            damage[key] = Damage(str(error), object_format.checksum(form.view))
            return LoadOutcome.CORRUPT
        return LoadOutcome.HIT

    def _report_key(self, key_id: str) -> None:
        """Log once that objects of a key id cannot be decrypted."""
        if key_id not in self._reported_keys:
            self._reported_keys.add(key_id)
            logger.warning(
                "%s: objects are encrypted with another key of the id %r than this engine's. They stay, and are "
                "misses here. Give one id to one key only, in OFFLOAD_CORE_…_ENCRYPTION_KEYS", self._label, key_id,
            )  # fmt: skip


def check_sizes(config: BackendConfig, capabilities: Capabilities) -> None:
    """Refuse compression on a backend that does not support it.

    Raises:
        ConfigError: the backend does not say how large stored objects are.
    """
    if config.compression != "none" and not capabilities.sizes:
        raise ConfigError(
            [
                f"compression: tier {config.name!r} cannot compress, since its backend does not say how large stored "
                "objects are (capability sizes, clause C19); set compression to none, or use another backend type"
            ],
            "backends",
        )
