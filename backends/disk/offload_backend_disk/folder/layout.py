"""The places of objects under a tier's folder: ``namespace/pack/ab/abcdef….kv``.

``ab`` are the first two digits of the chunk hash, so that no folder grows beyond a 256th of a pack. An unfinished file
lies beside its final place; its name tells the process that writes it: ``.abcdef….kv.PROCESS-RANDOM.tmp``.
"""

from __future__ import annotations

import errno
import os
import re
import secrets
import stat
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

from offload_core.api import ObjectKey, StoredObject

OBJECT_SUFFIX = ".kv"
TEMPORARY_SUFFIX = ".tmp"

_OTHERS_MAY_WRITE = stat.S_IWGRP | stat.S_IWOTH
_ODD_PATH_ERRNOS = frozenset(
    {errno.EISDIR, errno.ENOTDIR, errno.EEXIST, errno.ENOTEMPTY, errno.ELOOP, errno.ENXIO, errno.EACCES, errno.EPERM}
)
"""Errors that may mean a thing in the place of a file or folder, such as a folder, a link or an unreadable file."""

_NAMESPACE = re.compile(r"[0-9a-f]{64}")
_PACK = re.compile(r"[a-z0-9-]{1,64}")
_PREFIX = re.compile(r"[0-9a-f]{2}")
_DIGEST = re.compile(r"(?:[0-9a-f]{2}){1,64}")
_OBJECT = re.compile(r"((?:[0-9a-f]{2}){1,64})\.kv")
_TEMPORARY = re.compile(r"\.[0-9a-f]+\.kv\.([0-9a-z]+)-[0-9a-f]{16}\.tmp")


class Layout:
    """Paths of files under ``root``, and the files found there. Everything blocks, except making a path."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._root = os.fspath(root)
        self._private_folders: set[str] = set()

    def path_string(self, key: ObjectKey) -> str:
        """Return the path of ``key``'s file as a string: making a ``Path`` costs more than a system call."""
        digest = key.chunk_hash.hex()
        return f"{self._root}/{key.namespace}/{key.pack}/{digest[:2]}/{digest}{OBJECT_SUFFIX}"

    def path(self, key: ObjectKey) -> Path:
        """Return the path of ``key``'s file."""
        return Path(self.path_string(key))

    @staticmethod
    def temporary(path: str, process: str) -> str:
        """Return a unique path for an unfinished file that ``process`` will rename to ``path``."""
        folder, slash, file = path.rpartition("/")
        return f"{folder}{slash}.{file}.{process}-{secrets.token_hex(8)}{TEMPORARY_SUFFIX}"

    def status(self, key: ObjectKey) -> os.stat_result | None:
        """Return the status of ``key``'s file, or ``None`` if it is missing. No link is followed to it."""
        path = self.path_string(key)
        try:
            status = os.lstat(path)
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:
            self.raise_unless_odd(error)
            return None
        return status if stat.S_ISREG(status.st_mode) and self.is_private(path) else None

    def is_private(self, path: str) -> bool:
        """Return whether no other user can change the folders between the root and an object's file.

        A link is none of them, and a missing one counts as private. It looks only once at each folder: nobody but this
        process's user can replace it.
        """
        folder = path.rpartition("/")[0]
        if folder in self._private_folders:
            return True
        try:
            owners = (os.geteuid(), os.stat(self._root).st_uid)  # noqa: PTH116 - strings are used throughout
        except (FileNotFoundError, NotADirectoryError):
            return True  # removed, with all that was in it
        below, are_there = folder, True
        while below != self._root:
            try:
                status = os.lstat(below)
            except (FileNotFoundError, NotADirectoryError):
                are_there = False
            else:
                is_good = stat.S_ISDIR(status.st_mode) and status.st_uid in owners
                if not is_good or status.st_mode & _OTHERS_MAY_WRITE:
                    return False
            below = below.rpartition("/")[0]
        if are_there:
            self._private_folders.add(folder)
        return True

    def raise_unless_odd(self, error: OSError, mode: int = os.R_OK | os.X_OK) -> None:
        """Raise the error unless it comes from one odd thing in the root, such as a folder in the place of a file.

        Args:
            mode: the access to the root that this process must have. Otherwise the error concerns all objects.
        """
        if error.errno not in _ODD_PATH_ERRNOS or not os.access(self._root, mode):
            raise error

    def nbytes(self, key: ObjectKey) -> int | None:
        """Return the size of ``key``'s file, or ``None`` if it is missing."""
        status = self.status(key)
        return None if status is None else status.st_size

    def unlink(self, key: ObjectKey) -> None:
        """Remove ``key``'s file; a missing one is no error, nor is a folder in its place, which stays."""
        with suppress(FileNotFoundError, NotADirectoryError, IsADirectoryError):
            os.unlink(self.path_string(key))  # noqa: PTH108 - making a Path costs more than the call

    def remove_temporaries(self, key: ObjectKey, process: str) -> None:
        """Remove the unfinished files of ``process`` for ``key``."""
        path = self.path(key)
        for left in path.parent.glob(f".{path.name}.{process}-*{TEMPORARY_SUFFIX}"):
            left.unlink(missing_ok=True)

    def folders(self, skipped: Callable[[Path, OSError], None] | None = None) -> list[Path]:
        """Return the folders that may contain objects.

        Args:
            skipped: is called for each sub-folder that cannot be read, which is left out.

        Raises:
            OSError: the root cannot be read. Without ``skipped``, also a sub-folder that this process may read.
        """
        folders = [self.root]
        for name in (_NAMESPACE, _PACK, _PREFIX):
            found: list[Path] = []
            for folder in folders:
                try:
                    entries = _list(folder)
                except OSError as error:
                    if folder == self.root or not (skipped is not None or isinstance(error, PermissionError)):
                        raise
                    if skipped is not None:
                        skipped(folder, error)
                    continue
                found += [
                    Path(entry.path)
                    for entry in entries
                    if name.fullmatch(entry.name) and entry.is_dir(follow_symlinks=False)
                ]
            folders = found
        return folders

    def is_gone(self, folder: Path) -> bool:
        """Return whether one of :meth:`folders` exists no longer. One that cannot be reached may exist."""
        try:
            return not stat.S_ISDIR(os.lstat(folder).st_mode)
        except (FileNotFoundError, NotADirectoryError):
            return True
        except OSError:
            return False

    def is_empty(self) -> bool:
        """Return whether no folder could contain objects."""
        return not any(_NAMESPACE.fullmatch(entry.name) for entry in _list(self.root))

    @staticmethod
    def key(folder: Path, name: str) -> ObjectKey:
        """Return the key of the object ``name`` in one of :meth:`folders`."""
        namespace, pack = folder.parts[-3:-1]
        return ObjectKey(namespace, pack, bytes.fromhex(name.removesuffix(OBJECT_SUFFIX)))

    @staticmethod
    def names_in(folder: Path) -> tuple[list[str], list[tuple[str, str]]]:
        """Return the names of the files in one of :meth:`folders`.

        Returns:
            The names of the objects, sorted; and the names of the unfinished files, each with its process.
        """
        objects: list[str] = []
        temporaries: list[tuple[str, str]] = []
        for entry in _list(folder):
            if found := _OBJECT.fullmatch(entry.name):
                if found[1][:2] == folder.name and entry.is_file(follow_symlinks=False):
                    objects.append(entry.name)
            elif found := _TEMPORARY.fullmatch(entry.name):
                temporaries.append((entry.name, found[1]))
        return sorted(objects), temporaries

    @staticmethod
    def objects_in(folder: Path) -> Iterator[StoredObject]:
        """Yield the objects in one of :meth:`folders`; none if this process may not read it."""
        namespace, pack, prefix = folder.parts[-3:]
        entries: list[os.DirEntry[str]] = []
        with suppress(PermissionError):
            entries = _list(folder)
        for entry in entries:
            digest = entry.name.removesuffix(OBJECT_SUFFIX)
            if digest == entry.name or not _DIGEST.fullmatch(digest) or digest[:2] != prefix:
                continue
            with suppress(FileNotFoundError):  # deleted meanwhile
                if entry.is_file(follow_symlinks=False):
                    status = entry.stat(follow_symlinks=False)
                    key = ObjectKey(namespace, pack, bytes.fromhex(digest))
                    yield StoredObject(key, status.st_size, status.st_mtime)


def hash_range(prefix: str) -> tuple[bytes, bytes]:
    """Return the range of hashes in a folder named ``prefix``: above the first, at or below the second."""
    (first,) = bytes.fromhex(prefix)
    return bytes([first - 1]) + b"\xff" * 64 if first else b"", bytes([first]) + b"\xff" * 64


def _list(folder: Path) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(folder) as entries:
            return list(entries)
    except (FileNotFoundError, NotADirectoryError):  # deleted meanwhile, or a foreign file
        return []
