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

from offload_core.api import ObjectKey, StoredObject

OBJECT_SUFFIX = ".kv"
TEMPORARY_SUFFIX = ".tmp"

_NAMESPACE = re.compile(r"[0-9a-f]{64}")
_PACK = re.compile(r"[a-z0-9-]{1,64}")
_PREFIX = re.compile(r"[0-9a-f]{2}")
_DIGEST = re.compile(r"(?:[0-9a-f]{2}){1,64}")
_OBJECT = re.compile(r"((?:[0-9a-f]{2}){1,64})\.kv")
_TEMPORARY = re.compile(r"\.[0-9a-f]+\.kv\.([0-9a-z]+)-[0-9a-f]{16}\.tmp")


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

    def status(self, key: ObjectKey) -> os.stat_result | None:
        """Return the status of ``key``'s file, or ``None`` where there is none."""
        try:
            return os.stat(self.name(key))  # noqa: PTH116 - making a Path costs more than the call
        except (FileNotFoundError, NotADirectoryError):
            return None

    def nbytes(self, key: ObjectKey) -> int | None:
        """Return the size of ``key``'s file, or ``None`` where there is none."""
        status = self.status(key)
        return None if status is None else status.st_size

    def unlink(self, key: ObjectKey) -> None:
        """Remove ``key``'s file; an absent one is no error."""
        with suppress(FileNotFoundError, NotADirectoryError):
            os.unlink(self.name(key))  # noqa: PTH108 - as above

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

    def is_empty(self) -> bool:
        """Return whether there is no folder that could hold objects."""
        return not any(_NAMESPACE.fullmatch(entry.name) for entry in _scan(self.root))

    @staticmethod
    def key(folder: Path, name: str) -> ObjectKey:
        """Return the key of an object, one of the names in one of :meth:`folders`."""
        namespace, pack = folder.parts[-3:-1]
        return ObjectKey(namespace, pack, bytes.fromhex(name.removesuffix(OBJECT_SUFFIX)))

    @staticmethod
    def names_in(folder: Path) -> tuple[list[str], list[tuple[str, str]]]:
        """Return what is in one of :meth:`folders`: the names of its objects, in order, and of those being written.

        The latter come with who writes them.
        """
        objects: list[str] = []
        temporary: list[tuple[str, str]] = []
        for entry in _scan(folder):
            if found := _OBJECT.fullmatch(entry.name):
                if found[1][:2] == folder.name and entry.is_file(follow_symlinks=False):
                    objects.append(entry.name)
            elif found := _TEMPORARY.fullmatch(entry.name):
                temporary.append((entry.name, found[1]))
        return sorted(objects), temporary

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


def hash_range(prefix: str) -> tuple[bytes, bytes]:
    """Return between what the hashes in a folder named ``prefix`` lie: above the first, at or below the second."""
    (first,) = bytes.fromhex(prefix)
    return bytes([first - 1]) + b"\xff" * 64 if first else b"", bytes([first]) + b"\xff" * 64


def _scan(folder: Path) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(folder) as entries:
            return list(entries)
    except (FileNotFoundError, NotADirectoryError):  # deleted meanwhile, or a foreign file
        return []
