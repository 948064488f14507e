"""Encryption of whole objects with AES-256-GCM, and the keys for it. ``docs/object-format.md`` defines the bytes.

Each object has a key of its own, derived by HKDF-SHA256 from the operator's key and 32 random bytes. It encrypts one
message, so the limits on messages per key and on random nonces (NIST SP 800-38D, section 8) are never met.

The authentication covers the payload and the whole header: name, codec, lengths and key.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers import AEADEncryptionContext, Cipher
from cryptography.hazmat.primitives.ciphers.algorithms import AES
from cryptography.hazmat.primitives.ciphers.modes import GCM
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from offload_core.api.errors import ObjectFormatError
from offload_core.api.keys import ObjectKey
from offload_core.objects import compression, format
from offload_core.objects.format import CHECKSUM_BYTES, HEADER_BYTES, Codec, Encryption, Header

KEY_BYTES = 32

_SALT_BYTES = 32
_NONCE_BYTES = 12
_KEY_INFO = b"OFFLCORE object version 3"
_CHECK_INFO = b"OFFLCORE key check"
_NO_CHECKSUM = bytes(CHECKSUM_BYTES)
_PIECE_BYTES = 1024 * 1024


class _ObjectSecrets(NamedTuple):
    key: bytes
    nonce: bytes
    mask: bytes
    """Hides the raw checksum, which would let a reader without the key confirm a guessed payload."""


@dataclass(frozen=True)
class EncryptionKey:
    """One of an operator's keys.

    Args:
        id: its name, 1 to 16 characters of ``[a-z0-9-]``. It stands in names and headers of objects.
        secret: 32 bytes.
    """

    id: str
    secret: bytes = field(repr=False)

    @cached_property
    def check(self) -> bytes:
        """16 bytes that tell this key from others with the same id. They do not give the key away."""
        return HKDF(SHA256(), CHECKSUM_BYTES, salt=None, info=_CHECK_INFO).derive(self.secret)

    def object_secrets(self, salt: bytes) -> _ObjectSecrets:
        """Derive the secrets of one object."""
        derived = HKDF(SHA256(), KEY_BYTES + _NONCE_BYTES + CHECKSUM_BYTES, salt, _KEY_INFO).derive(self.secret)
        end = KEY_BYTES + _NONCE_BYTES
        return _ObjectSecrets(derived[:KEY_BYTES], derived[KEY_BYTES:end], derived[end:])


class Decryption:
    """The decryption of one payload, part by part. The bytes may be used once :meth:`finished` has returned.

    Attributes:
        header: the header of the encrypted object.
    """

    def __init__(self, header: Header, encryption: Encryption, key: EncryptionKey, authenticated: bytes) -> None:
        self.header = header
        self._encryption = encryption
        self._key_id = key.id
        self._secrets = key.object_secrets(encryption.salt)
        self._context = Cipher(AES(self._secrets.key), GCM(self._secrets.nonce)).decryptor()
        self._context.authenticate_additional_data(authenticated)

    def update(self, part: memoryview) -> bytes:
        """Decrypt the next part."""
        return self._context.update(part)

    def update_into(self, part: memoryview, target: memoryview) -> int:
        """Decrypt the next part into ``target``, which is as long and apart from it; return its length."""
        return self._context.update_into(part, target)

    def finished(self) -> Header:
        """Return the header of the object without encryption.

        Raises:
            ObjectFormatError: the object is not authentic.
        """
        try:
            self._context.finalize_with_tag(self._encryption.tag)
        except InvalidTag:
            raise ObjectFormatError(
                f"{self.header.key}: not authentic under the key {self._key_id!r}, although the checksums match: its "
                "writer does not have the key"
            ) from None
        return self.header._replace(raw_checksum=_masked(self.header.raw_checksum, self._secrets), encryption=None)


@dataclass(frozen=True)
class KeyRing:
    """A tier's keys, at least one. The first one encrypts, all of them decrypt."""

    keys: tuple[EncryptionKey, ...]

    @property
    def name_suffixes(self) -> tuple[str, ...]:
        """Per key, the end of the pack names of its objects."""
        return tuple(format.name_suffix(key.id) for key in self.keys)

    def encrypt(self, header: Header, name: ObjectKey, source: memoryview, target: memoryview) -> None:
        """Write the encrypted form of an object. It is as long as the object.

        Args:
            header: the header of the object in ``source``.
            name: the name for the encrypted object. It has the suffix of the first key.
            source: the whole object, sealed or compressed; it is only read.
            target: writable, as long as ``source``, or ``source`` itself.

        Raises:
            ObjectFormatError: the name does not fit into a header.
        """
        key, salt = self.keys[0], os.urandom(_SALT_BYTES)
        secrets = key.object_secrets(salt)
        header = header._replace(
            key=name,
            stored_checksum=_NO_CHECKSUM,
            raw_checksum=_masked(header.raw_checksum, secrets),
            encryption=Encryption(key.id, key.check, salt, _NO_CHECKSUM),
        )
        context = Cipher(AES(secrets.key), GCM(secrets.nonce)).encryptor()
        format.write_header(target, header)
        context.authenticate_additional_data(format.authenticated_bytes(target))
        payload = target[HEADER_BYTES:]
        _transform(context, source[HEADER_BYTES:], payload, in_place=source is target)
        context.finalize()
        encryption = Encryption(key.id, key.check, salt, context.tag)
        format.write_header(target, header._replace(stored_checksum=format.checksum(payload), encryption=encryption))

    def decrypt(self, header: Header, stored: memoryview, target: memoryview, key: ObjectKey) -> None:
        """Authenticate and decrypt an object, decompress it, and write its sealed form into ``target``.

        Args:
            header: the verified header of the object in ``stored``; its stored checksum is verified, too.
            stored: the whole object as it came from the medium; its payload is overwritten if it is compressed.
            target: writable, of exactly the size of the sealed object, apart from ``stored``.
            key: the name for the sealed object.

        Raises:
            ObjectFormatError: the object is not encrypted, not authentic or of another size. If it is not authentic,
                ``target`` has no byte of it.
            WrongKeyError: the object's key is not among these.
        """
        raw_bytes = len(target) - HEADER_BYTES
        if header.raw_bytes != raw_bytes:
            raise ObjectFormatError(f"{header.key}: {header.raw_bytes} raw bytes, but {raw_bytes} are expected")
        plain = self._decrypt_payload(header, stored, target if header.codec is Codec.NONE else stored)
        compression.restore_verified(plain._replace(key=key), stored, target)

    def authenticate(self, header: Header, stored: memoryview) -> None:
        """Authenticate and decode an object for its checks only, with memory for a few blocks.

        Args:
            header: the verified header of the object in ``stored``; its stored checksum is verified, too.
            stored: the whole object. Its payload is overwritten.

        Raises:
            ObjectFormatError: the object is not encrypted, not authentic, or does not decode to its raw bytes.
            WrongKeyError: the object's key is not among these.
        """
        compression.check_decoded(self._decrypt_payload(header, stored, stored), stored)

    def decryption(self, header: Header, stored: memoryview) -> Decryption:
        """Begin to decrypt the payload of an object.

        Args:
            header: the verified header of the object in ``stored``.
            stored: the whole object; only its header is read.

        Raises:
            ObjectFormatError: the object is not encrypted.
            WrongKeyError: the object's key is not among these.
        """
        encryption = header.encryption
        if encryption is None:
            raise ObjectFormatError(f"{header.key}: an object without encryption, in place of an encrypted one")
        return Decryption(header, encryption, self._key_of(encryption), format.authenticated_bytes(stored))

    def _decrypt_payload(self, header: Header, stored: memoryview, target: memoryview) -> Header:
        """Decrypt a payload into ``target``, and return the header of the object without encryption."""
        decryption = self.decryption(header, stored)
        payload = target[HEADER_BYTES : HEADER_BYTES + header.stored_bytes]
        _transform(decryption, stored[HEADER_BYTES:], payload, in_place=stored is target)
        try:
            return decryption.finished()
        except ObjectFormatError:
            payload[:] = bytes(len(payload))  # decrypted, but nobody vouches for it
            raise

    def _key_of(self, encryption: Encryption) -> EncryptionKey:
        for key in self.keys:
            if key.id == encryption.key_id and key.check == encryption.key_check:
                return key
        raise format.WrongKeyError(encryption.key_id)


def _transform(
    context: AEADEncryptionContext | Decryption, source: memoryview, target: memoryview, *, in_place: bool
) -> None:
    """Encrypt or decrypt bytes, without the interpreter's lock."""
    if not in_place:
        context.update_into(source, target)
        return
    for start in range(0, len(source), _PIECE_BYTES):  # the library does not promise to work in place
        piece = slice(start, start + _PIECE_BYTES)
        target[piece] = context.update(source[piece])


def _masked(checksum: bytes, secrets: _ObjectSecrets) -> bytes:
    """Encrypt or decrypt a raw checksum."""
    return bytes(one ^ other for one, other in zip(checksum, secrets.mask, strict=True))
