"""The layout of objects under the root: ``namespace/pack/ab/abcdef….kv``.

``ab`` are the first two digits of the chunk hash. So no folder holds more than a 256th of a pack, and a listing by
folder has short pages.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from offload_backend_nfs.storage.base import Entry
from offload_core.api import ObjectKey, StoredObject

OBJECT_SUFFIX = ".kv"

FOLDERS = (re.compile(r"[0-9a-f]{64}"), re.compile(r"[a-z0-9-]{1,64}"), re.compile(r"[0-9a-f]{2}"))
"""Patterns for the names of the folders above an object, from the root down."""
_HEX = "0123456789abcdef"
_ALPHABETS = (
    [*[_HEX] * 64, "/"],
    [*["-/0123456789abcdefghijklmnopqrstuvwxyz"] * 64, "/"],
    [*[_HEX] * 2, "/"],
    [f".{_HEX}kv"] * 200,
)
"""Per depth of a folder, the characters at each place of a name in it. A folder's name ends in ``/``."""
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


def holds_folders(folder: str) -> bool:
    """Return whether the layout has only folders in a folder under the root, ``""`` for the root itself."""
    parts = folder.split("/") if folder else []
    return len(parts) < len(FOLDERS) and _is_of_layout(parts)


def last_impossible_name(folder: str, name: str) -> str | None:
    """Return the place in the order of names behind which the next name of the layout can come.

    Args:
        folder: a folder under the root, ``""`` for the root itself.
        name: the last name seen; that of a folder ends in ``/``.

    Returns:
        ``name`` itself if a name of the layout may follow at once, or if the folder is not one of the layout; ``None``
        if no name of the layout can follow.
    """
    parts = folder.split("/") if folder else []
    if not _is_of_layout(parts):
        return name
    alphabets = _ALPHABETS[len(parts)]
    good = next((at for at, char in enumerate(name) if at >= len(alphabets) or char not in alphabets[at]), len(name))
    if good == len(name) or "/" in name[:good]:
        return name
    for at in range(min(good, len(alphabets) - 1), -1, -1):
        larger = next((char for char in alphabets[at] if char > name[at]), None)
        if larger is not None:
            return max(name, f"{name[:at]}{chr(ord(larger) - 1)}~")
    return None


def _is_of_layout(folders: Sequence[str]) -> bool:
    """Return whether the layout has a folder with these parts."""
    return len(folders) <= len(FOLDERS) and all(map(re.Pattern.fullmatch, FOLDERS, folders))
