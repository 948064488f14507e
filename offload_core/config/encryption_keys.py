"""A tier's encryption keys, read from an environment variable. No message shows any part of a key."""

from __future__ import annotations

import base64
import binascii
import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from offload_core.objects.encryption import KeyRing  # which imports a package of the extra `encryption`

FIELD = "encryption_keys"
"""The part of the variable's name behind the tier's name."""

_FORM = "write ID:KEY, or several with commas between them, the one that encrypts first"
_KEY_FORM = "a key is 32 random bytes in base64 or hexadecimal digits, as `openssl rand -base64 32` prints them"
_ID = re.compile(r"[a-z0-9]([a-z0-9-]{0,14}[a-z0-9])?")


def parse_keys(text: str) -> KeyRing:
    """Return the keys of a text such as ``2026-11:BASE64,2026-05:BASE64``.

    Raises:
        ValueError: the text has another form, or the package for encryption is not installed.
    """
    try:
        from offload_core.objects.encryption import KEY_BYTES, EncryptionKey, KeyRing
    except ImportError:
        raise ValueError(
            "the package `cryptography` is not installed; install offload-core with its extra, "
            "`pip install 'offload-core[encryption]'`"
        ) from None
    keys: list[EncryptionKey] = []
    for place, entry in enumerate(text.split(","), 1):
        key_id, colon, encoded = entry.strip().partition(":")
        if not colon:
            raise ValueError(f"entry {place} has no colon; {_FORM}")
        if not _ID.fullmatch(key_id):
            raise ValueError(
                f"the id of entry {place} is not valid; use 1 to 16 characters of a-z, 0-9 and -, such as 2026-11"
            )
        if any(key_id == key.id for key in keys):
            raise ValueError(f"the id {key_id!r} stands there twice; give each key an id of its own")
        secret = _decoded(encoded.strip())
        if secret is None:
            raise ValueError(f"the key {key_id!r} is neither base64 nor hexadecimal digits; {_KEY_FORM}")
        if len(secret) != KEY_BYTES:
            raise ValueError(f"the key {key_id!r} has {len(secret)} bytes in place of {KEY_BYTES}; {_KEY_FORM}")
        if any(secret == key.secret for key in keys):
            raise ValueError(f"the key {key_id!r} stands there twice, under two ids; remove one")
        keys.append(EncryptionKey(key_id, secret))
    return KeyRing(tuple(keys))


def _decoded(text: str) -> bytes | None:
    try:
        if re.fullmatch(r"[0-9A-Fa-f]{64}", text):
            return bytes.fromhex(text)
        return base64.b64decode(text, validate=True)
    except (ValueError, binascii.Error):
        return None
