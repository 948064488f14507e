"""Where objects lie under the folder of a tier: ``namespace/pack/ab/abcdef….kv``.

``ab`` are the first two digits of the chunk hash, so that no folder grows beyond a 256th of a pack. A file that is
being written has a name of its own beside its final one, which tells who writes it: ``.abcdef….kv.OWNER-RANDOM.tmp``.
"""

from __future__ import annotations

import os
import re
import secrets
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from offload_core.backend import StoredObject
from offload_core.keys import ObjectKey

OBJECT_SUFFIX = ".kv"
TEMPORARY_SUFFIX = ".tmp"

_NAMESPACE = re.compile(r"[0-9a-f]{64}")
_PACK = re.compile(r"[a-z0-9-]{1,64}")
_PREFIX = re.compile(r"[0-9a-f]{2}")
_DIGEST = re.compile(r"(?:[0-9a-f]{2}){1,64}")


class Layout:
    """Names of files under ``root``, and what is found there. Everything but the names blocks."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._root = os.fspath(root)

    def name(self, key: ObjectKey) -> str:
        """Return where ``key``'s object lies, as a string: making a ``Path`` costs more than a system call."""
        digest = key.chunk_hash.hex()
        return f"{self._root}/{key.namespace}/{key.pack}/{digest[:2]}/{digest}{OBJECT_SUFFIX}"

    def path(self, key: ObjectKey) -> Path:
        """Return where ``key``'s object lies."""
        return Path(self.name(key))

    @staticmethod
    def temporary(name: str, owner: str) -> str:
        """Return a name that no other writer uses, for an object on its way to ``name``."""
        folder, slash, file = name.rpartition("/")
        return f"{folder}{slash}.{file}.{owner}-{secrets.token_hex(8)}{TEMPORARY_SUFFIX}"

    def nbytes(self, key: ObjectKey) -> int | None:
        """Return the size of ``key``'s file, or ``None`` where there is none."""
        try:
            return self.path(key).stat().st_size
        except (FileNotFoundError, NotADirectoryError):
            return None

    def unlink(self, key: ObjectKey) -> None:
        """Remove ``key``'s file; an absent one is no error."""
        self.path(key).unlink(missing_ok=True)

    def remove_debris(self, key: ObjectKey, owner: str) -> None:
        """Remove what ``owner`` had begun to write for ``key``."""
        path = self.path(key)
        for left in path.parent.glob(f".{path.name}.{owner}-*{TEMPORARY_SUFFIX}"):
            left.unlink(missing_ok=True)

    def folders(self) -> list[Path]:
        """Return the folders that may hold objects."""
        folders = [self.root]
        for name in (_NAMESPACE, _PACK, _PREFIX):
            folders = [Path(entry.path) for folder in folders for entry in _scan(folder) if name.fullmatch(entry.name)]
        return folders

    @staticmethod
    def objects_in(folder: Path) -> Iterator[StoredObject]:
        """Yield the objects in one of :meth:`folders`."""
        namespace, pack, prefix = folder.parts[-3:]
        for entry in _scan(folder):
            digest = entry.name.removesuffix(OBJECT_SUFFIX)
            if digest == entry.name or not _DIGEST.fullmatch(digest) or digest[:2] != prefix:
                continue
            with suppress(FileNotFoundError):  # deleted meanwhile
                if entry.is_file(follow_symlinks=False):
                    status = entry.stat(follow_symlinks=False)
                    key = ObjectKey(namespace, pack, bytes.fromhex(digest))
                    yield StoredObject(key, status.st_size, status.st_mtime)


def _scan(folder: Path) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(folder) as entries:
            return list(entries)
    except (FileNotFoundError, NotADirectoryError):  # deleted meanwhile, or a foreign file
        return []
