"""The names of objects on the medium: ``namespace/pack/ab/abcdef….kv``, where ``ab`` begins the chunk hash."""

from __future__ import annotations

import re

from offload_core.api import ObjectKey

_NAME = re.compile(r"([0-9a-f]{64})/([a-z0-9-]{1,64})/([0-9a-f]{2})/((?:[0-9a-f]{2}){1,64})\.kv")


def name_of(key: ObjectKey) -> str:
    """Return the name of the object for ``key``."""
    digest = key.chunk_hash.hex()
    return f"{key.namespace}/{key.pack}/{digest[:2]}/{digest}.kv"


def key_of(name: str) -> ObjectKey | None:
    """Return the key of a name on the medium, or ``None`` if it is not the name of an object."""
    match = _NAME.fullmatch(name)
    if match is None or not match[4].startswith(match[3]):
        return None
    return ObjectKey(match[1], match[2], bytes.fromhex(match[4]))
