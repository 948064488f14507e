"""The layout of objects under the root: ``namespace/pack/ab/abcdef….kv``.

``ab`` are the first two digits of the chunk hash. So no folder holds more than a 256th of a pack, and a listing by
folder has short pages.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from offload_backend_nfs.storage.base import Entry
from offload_core.api import ObjectKey, StoredObject

OBJECT_SUFFIX = ".kv"

FOLDERS = (re.compile(r"[0-9a-f]{64}"), re.compile(r"[a-z0-9-]{1,64}"), re.compile(r"[0-9a-f]{2}"))
"""Patterns for the names of the folders above an object, from the root down."""
_SHOWN_CHARACTERS = 200
_DIGEST = re.compile(r"(?:[0-9a-f]{2}){1,64}")


def name_of(key: ObjectKey) -> str:
    """Return the name of the object for ``key``."""
    digest = key.chunk_hash.hex()
    return f"{key.namespace}/{key.pack}/{digest[:2]}/{digest}{OBJECT_SUFFIX}"


def key_of(path: str) -> ObjectKey:
    """Return the key with this :attr:`ObjectKey.path`.

    Raises:
        ValueError: no key has this path. So a path from the medium cannot lead out of the root.
    """
    namespace, _, rest = path.partition("/")
    pack, _, digest = rest.partition("/")
    if FOLDERS[0].fullmatch(namespace) and FOLDERS[1].fullmatch(pack) and _DIGEST.fullmatch(digest):
        return ObjectKey(namespace, pack, bytes.fromhex(digest))
    raise ValueError(f"{path[:_SHOWN_CHARACTERS]!r} is no object's path, which is NAMESPACE/PACK/HASH")


def objects_in(folder: str, entries: Iterable[Entry]) -> list[StoredObject]:
    """Return the objects among the entries of the folder ``namespace/pack/ab``. Other entries are skipped."""
    namespace, pack, prefix = folder.split("/")
    found = []
    for entry in entries:
        digest = entry.name.removesuffix(OBJECT_SUFFIX)
        if entry.is_folder or digest == entry.name or not _DIGEST.fullmatch(digest) or digest[:2] != prefix:
            continue
        key = ObjectKey(namespace, pack, bytes.fromhex(digest))
        found.append(StoredObject(key, entry.nbytes, entry.modified_seconds))
    return found
