"""The check of an encrypted object while its bytes arrive: each part is decrypted from the processor's cache."""

from __future__ import annotations

import xxhash

from offload_core.api.errors import ObjectFormatError
from offload_core.api.keys import ObjectKey
from offload_core.objects import format as object_format
from offload_core.objects.arriving_object import ArrivingBytes
from offload_core.objects.encryption import Decryption, KeyRing
from offload_core.objects.format import HEADER_BYTES, Codec, WrongKeyError


class ArrivingEncryptedObject(ArrivingBytes):
    """An encrypted object without compression. Its sealed form is in ``target`` once it has passed.

    If it has not passed, ``target`` may hold bytes that nobody vouches for. Then the caller decrypts the whole object
    again, or uses ``target`` for something else.

    Args:
        ring: the keys that may decrypt it.
        view: the whole buffer for its stored bytes.
        name: the name that the stored object must have.
        target: writable, as long as ``view``, and apart from it.
        key: the name for the sealed object.
    """

    __slots__ = ("_decryption", "_has_failed", "_key", "_name", "_raw_digest", "_ring", "_stored_digest", "_target")

    def __init__(self, ring: KeyRing, view: memoryview, name: ObjectKey, target: memoryview, key: ObjectKey) -> None:
        super().__init__(view)
        self._ring = ring
        self._name = name
        self._target = target
        self._key = key
        self._decryption: Decryption | None = None
        self._stored_digest = xxhash.xxh3_128()
        self._raw_digest = xxhash.xxh3_128()
        self._has_failed = len(target) != len(view)

    def take(self, start: int, end: int) -> None:
        """Decrypt bytes of the payload, and hash them before and after."""
        if self._has_failed or end < HEADER_BYTES:
            return
        if self._decryption is None:
            try:
                self._decryption = self._ring.decryption(object_format.read_header(self.view, self._name), self.view)
            except (ObjectFormatError, WrongKeyError):
                self._has_failed = True
                return
            start = HEADER_BYTES
        part = slice(start, end)
        self._stored_digest.update(self.view[part])
        self._decryption.update_into(self.view[part], self._target[part])
        self._raw_digest.update(self._target[part])

    def is_valid(self) -> bool:
        """Return whether the object is authentic; write the header of its sealed form if it is."""
        if self._has_failed or self._decryption is None:
            return False
        stored_checksum = self._decryption.header.stored_checksum
        try:
            plain = self._decryption.finished()
        except ObjectFormatError:
            return False
        raw_checksum = self._raw_digest.digest()
        is_whole = self._stored_digest.digest() == stored_checksum and raw_checksum == plain.raw_checksum
        if not is_whole or plain.codec is not Codec.NONE:
            return False
        object_format.write_header(self._target, plain._replace(key=self._key, stored_checksum=raw_checksum))
        return True
