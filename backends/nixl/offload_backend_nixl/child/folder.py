"""Objects as files in a folder. NIXL moves the bytes; names, sizes and deletions are the system's calls.

An object gets its name by a rename after its bytes are written and its file is closed, so it is whole or absent.
"""

from __future__ import annotations

import errno
import itertools
import os
import stat
from collections.abc import Iterator, Sequence
from contextlib import suppress

from offload_backend_nixl.child.engine import Target
from offload_backend_nixl.child.storage import Pending, Storage
from offload_backend_nixl.protocol import ABSENT, Entry, Outcome, can_carry

FOLDER_MODE = 0o700
FILE_MODE = 0o600
MARKER = ".offload-core-nixl"
"""A file in the root. It distinguishes the medium from an empty mount point."""
TEMPORARY_FOLDER = ".tmp-offload-core-nixl"
TEMPORARY_LIFE_SECONDS = 3600.0
"""Age at which a temporary file of an unknown writer is a leftover."""
_MARKER_TEXT = b"offload-core keeps KV caches here. Without this file it takes the medium for unmounted.\n"
_MISSING = (errno.ENOENT, errno.ENOTDIR, errno.ESTALE)


class FolderStorage(Storage):
    """A folder of objects.

    Args:
        root: the folder, absolute.
        writer: name of this backend instance, which begins the names of its temporary files.
        create: create the folder and its marker if they are missing.

    Raises:
        OSError: the folder cannot be used.
    """

    finishes_slowly = False

    def __init__(self, root: str, writer: str, create: bool) -> None:
        self._root = root
        self._writer = writer
        self._store_numbers = itertools.count(1)
        self._listed: tuple[str, list[Entry]] = ("", [])
        self._has_marker = self._open(create)
        self._check_root()
        _remove_leftovers(self._path(TEMPORARY_FOLDER), writer)

    def begin_load(self, name: str, nbytes: int) -> Pending | Outcome:
        """See :meth:`Storage.begin_load`."""
        try:
            descriptor = os.open(self._path(name), os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            if error.errno not in _MISSING:
                raise
            self._check_root()
            return Outcome.MISS
        try:
            status = os.fstat(descriptor)
        except OSError:
            os.close(descriptor)
            raise
        if not stat.S_ISREG(status.st_mode) or status.st_size != nbytes:
            os.close(descriptor)
            return Outcome.CORRUPT if stat.S_ISREG(status.st_mode) else Outcome.MISS
        return _FileLoad(descriptor, self._path(name), nbytes)

    def begin_store(self, name: str, nbytes: int) -> Pending:
        """See :meth:`Storage.begin_store`. A full file system is found before a byte is written."""
        folder = self._path(TEMPORARY_FOLDER)
        temporary = f"{folder}/{self._writer}-{os.getpid()}-{next(self._store_numbers)}"
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        try:
            descriptor = os.open(temporary, flags, FILE_MODE)
        except FileNotFoundError:
            self._check_root()
            _make_folder(folder)
            descriptor = os.open(temporary, flags, FILE_MODE)
        pending = _FileStore(descriptor, temporary, self._root, name, nbytes)
        try:
            system = os.fstatvfs(descriptor)
            if system.f_bavail * system.f_frsize < nbytes:
                raise OSError(errno.ENOSPC, f"no space left for {nbytes} bytes; free some", self._root)
        except OSError:
            pending.abandon()
            raise
        return pending

    def sizes(self, names: Sequence[str]) -> list[int]:
        """See :meth:`Storage.sizes`."""
        found = [_size(self._path(name)) for name in names]
        if ABSENT in found:
            self._check_root()
        return found

    def delete(self, names: Sequence[str]) -> None:
        """See :meth:`Storage.delete`."""
        failure: OSError | None = None
        for name in names:
            try:
                os.unlink(self._path(name))
            except OSError as error:
                if error.errno not in _MISSING:
                    failure = failure or error
                else:
                    self._check_root()
        if failure is not None:
            raise failure

    def list_after(self, name: str, limit: int) -> tuple[list[Entry], bool]:
        """See :meth:`Storage.list_after`. The order is that of the names' parts."""
        self._check_root()
        if not name:
            self._listed = ("", [])  # a new listing sees the folders anew
        found: list[Entry] = []
        after = tuple(name.split("/")) if name else ()
        for folder in self._folders(after):
            for entry in self._entries(folder):
                if tuple(entry.name.split("/")) > after:
                    if len(found) == limit:
                        return found, True
                    found.append(entry)
        return found, False

    def _folders(self, after: tuple[str, ...]) -> Iterator[str]:
        """Yield the folders of objects in order, without those that end before ``after``."""
        folders = [""]
        for depth in range(1, 4):
            above, folders = folders, []
            for folder in above:
                names = sorted(entry.name for entry in _scan(self._path(folder)) if entry.is_dir(follow_symlinks=False))
                inside = [f"{folder}/{name}".lstrip("/") for name in names if not name.startswith(".")]
                folders += [one for one in inside if tuple(one.split("/")) >= after[:depth]]
        yield from folders

    def _entries(self, folder: str) -> list[Entry]:
        """Return the files of a folder in order. The last folder is cached while a listing reads it in parts."""
        listed_folder, entries = self._listed
        if listed_folder == folder:
            return entries
        entries = []
        for file in _scan(self._path(folder)):
            if not can_carry(f"{folder}/{file.name}"):
                continue  # a foreign file
            with suppress(FileNotFoundError):  # deleted meanwhile
                status = file.stat(follow_symlinks=False)
                if stat.S_ISREG(status.st_mode):
                    entries.append(Entry(f"{folder}/{file.name}", status.st_size, status.st_mtime))
        entries.sort()
        self._listed = (folder, entries)
        return entries

    def _open(self, create: bool) -> bool:
        """Make the folder and its marker if they are missing; return whether there is a marker.

        A later child makes neither: a folder without a marker is then an empty mount point, or it is read-only.
        """
        marker = self._path(MARKER)
        if os.path.exists(marker):
            return True
        if not create:
            return os.access(self._root, os.W_OK)
        with suppress(FileExistsError):
            os.mkdir(self._root, FOLDER_MODE)
        try:
            descriptor = os.open(marker, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, FILE_MODE)
        except FileExistsError:
            return True
        except OSError as error:
            if error.errno not in (errno.EROFS, errno.EACCES, errno.EPERM):
                raise
            return False  # read-only: loads still work
        os.write(descriptor, _MARKER_TEXT)
        os.close(descriptor)
        return True

    def _check_root(self) -> None:
        """Raise if the medium is not mounted. Each miss of an object asks this.

        Raises:
            OSError: the folder or its marker is gone.
        """
        wanted = self._path(MARKER) if self._has_marker else self._root
        if not os.path.exists(wanted):
            self._listed = ("", [])
            raise OSError(errno.ENODEV, f"the medium is gone, {wanted} is missing; mount it", self._root)

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}"


class _FileLoad(Pending):
    """A file that is read."""

    def __init__(self, descriptor: int, path: str, nbytes: int) -> None:
        self.target = Target(descriptor)
        self._descriptor = descriptor
        self._path = path
        self._nbytes = nbytes

    def finish(self, succeeded: bool) -> Outcome:
        """See :meth:`Pending.finish`. A file that was cut meanwhile is corrupt."""
        try:
            if succeeded:
                return Outcome.DONE
            if os.fstat(self._descriptor).st_size != self._nbytes:
                return Outcome.CORRUPT
            raise OSError(errno.EIO, "NIXL could not read a file", self._path)
        finally:
            os.close(self._descriptor)


class _FileStore(Pending):
    """A file that is written under a temporary name."""

    def __init__(self, descriptor: int, temporary: str, root: str, name: str, nbytes: int) -> None:
        self.target = Target(descriptor)
        self._descriptor = descriptor
        self._temporary = temporary
        self._root = root
        self._name = name
        self._nbytes = nbytes

    def abandon(self) -> None:
        """Remove the file."""
        with suppress(OSError):
            os.close(self._descriptor)
        with suppress(OSError):
            os.unlink(self._temporary)

    def finish(self, succeeded: bool) -> Outcome:
        """See :meth:`Pending.finish`."""
        try:
            try:
                written = os.fstat(self._descriptor).st_size
                if not succeeded or written != self._nbytes:
                    raise OSError(errno.EIO, f"NIXL wrote {written} of {self._nbytes} bytes; is the file system full?")
            finally:
                os.close(self._descriptor)  # some network file systems report errors only here
            self._rename()
        except OSError as error:
            with suppress(OSError):
                os.unlink(self._temporary)
            if isinstance(error, IsADirectoryError | NotADirectoryError):
                return Outcome.REJECTED  # something else has the place of this object or of its folder
            raise
        return Outcome.DONE

    def _rename(self) -> None:
        final = f"{self._root}/{self._name}"
        try:
            os.rename(self._temporary, final)
        except FileNotFoundError:
            _make_folders(self._root, self._name)
            os.rename(self._temporary, final)


def _size(path: str) -> int:
    try:
        status = os.stat(path)
    except OSError as error:
        if error.errno not in _MISSING:
            raise
        return ABSENT
    return status.st_size if stat.S_ISREG(status.st_mode) else ABSENT


def _scan(folder: str) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(folder) as entries:
            return list(entries)
    except OSError as error:
        if error.errno not in _MISSING:
            raise
        return []


def _make_folders(root: str, name: str) -> None:
    """Make the folders of an object below the root, which must exist."""
    path = root
    for part in name.split("/")[:-1]:
        path = f"{path}/{part}"
        _make_folder(path)


def _make_folder(path: str) -> None:
    with suppress(FileExistsError):
        os.mkdir(path, FOLDER_MODE)


def _remove_leftovers(folder: str, writer: str) -> None:
    """Remove the temporary files of earlier children of this backend, which are dead, and old ones of others."""
    found = _scan(folder)
    if not found:
        return
    now = _time_there(f"{folder}/{writer}-{os.getpid()}-0")
    for entry in found:
        with suppress(OSError):
            old = entry.stat(follow_symlinks=False).st_mtime < now - TEMPORARY_LIFE_SECONDS
            if old or entry.name.startswith(f"{writer}-"):
                os.unlink(entry.path)


def _time_there(temporary: str) -> float:
    """Return the time by the clock of the medium, which may be a server's; 0 where no file can be made."""
    try:
        os.close(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, FILE_MODE))
        now = os.stat(temporary).st_mtime
        os.unlink(temporary)
    except OSError:
        return 0.0
    return now
