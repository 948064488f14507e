"""Shared storage that is mounted: NFS, or any other mount with the calls of a file system.

The code relies only on the guarantees of NFS:

- Close-to-open consistency: after a file is closed, its bytes are on the server, and a later open sees them. So a file
  gets its final name only after it is closed.
- A file that another host replaced or deleted may fail with ESTALE. The file is then opened once more; a second failure
  is a miss.

It uses no locks, no mmap, no O_DIRECT and no inotify. It forces bytes to the server before the rename. On NFS, closing
does so anyway and reports errors. On other mounts, another host could otherwise see a name without its bytes.

A local file system, for example on the file server itself, needs no such force, since all processes see the same page
cache. After a crash of that host, an object may be damaged. Its checksum shows that, as on the ``disk`` backend.
"""

from __future__ import annotations

import errno
import math
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from offload_backend_nfs.storage import temporaries
from offload_backend_nfs.storage.base import (
    MAX_SMALL_BYTES,
    TEMPORARY_FOLDER,
    Entry,
    Medium,
)
from offload_backend_nfs.storage.failures import (
    BAD_PATH_ERRNOS,
    FULL_ERRNOS,
    BadPathError,
    DeletionErrors,
    UnreadableObjectError,
)
from offload_backend_nfs.storage.mounts import is_local
from offload_backend_nfs.storage.posix_files import (
    MISSING_ERRNOS,
    NO_FOLDER_ERRNOS,
    holds_no_file,
    list_folder,
    make_private_folder,
    read_object,
    read_small_file,
    size_of,
    unlink,
    unlink_quietly,
)
from offload_core.api import LoadCheck, LoadOutcome, StoreSeal, check_ownership, preallocate

FILE_MODE = 0o600
MARKER = ".offload-core-share"
"""A file in the root. It distinguishes the share from an empty mount point."""
_MARKER_TEXT = b"offload-core keeps KV caches here. Without this file it takes the share for unmounted.\n"
_DISK_ACCOUNT = ".offload-core/account.sqlite"
_BAD_FILE_ERRNOS = (errno.EIO, errno.EUCLEAN)
"""Errors of a read that may concern one file only: a bad sector, or a damaged entry of the server's file system."""
_NO_LINK_ERRNOS = (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK)


class PosixShare(Medium):
    """A folder on a mounted share.

    Args:
        root: the folder, absolute. Only :meth:`open` creates it, if its parent exists.
    """

    def __init__(self, root: Path) -> None:
        self._root = str(root)
        self._is_local = False
        self._has_marker = False

    def open(self) -> None:
        """See :meth:`Medium.open`. A read-only or full share is no error: loads still work.

        Raises:
            PermissionError: another user could change the content of the share's folder.
            OSError: the share is gone, or the folder belongs to a ``disk`` tier.
        """
        if not os.path.isdir(self._root):  # noqa: PTH112 - Path.is_dir is slower, and strings are used throughout
            if not os.path.isdir(os.path.dirname(self._root)):  # noqa: PTH112, PTH120
                raise OSError(errno.ENOENT, "the parent folder does not exist; mount the share", self._root)
            make_private_folder(self._root)
        check_ownership(Path(self._root))
        self._is_local = is_local(self._root)
        marker = self._path(MARKER)
        if os.path.lexists(self._path(_DISK_ACCOUNT)):
            raise OSError(errno.EEXIST, "the folder has the account of a disk tier; choose another folder", self._root)
        try:
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
            descriptor = os.open(marker, flags, FILE_MODE)
        except FileExistsError:
            self._has_marker = True
        except OSError as error:
            if error.errno not in (errno.EROFS, errno.EACCES, errno.EPERM, *FULL_ERRNOS):
                raise
            self._has_marker = size_of(marker) is not None
        else:
            self._has_marker = True
            try:
                os.write(descriptor, _MARKER_TEXT)
            except OSError as error:  # on a full share it stays empty, and does its work
                if error.errno not in FULL_ERRNOS:
                    raise
            finally:
                os.close(descriptor)

    def close(self) -> None:
        """See :meth:`Medium.close`."""

    def sizes(self, names: Sequence[str]) -> list[int | None]:
        """See :meth:`Medium.sizes`."""
        found = [self._size(name) for name in names]
        if None in found:
            self._check_root()
        return found

    def load(self, name: str, buffer: memoryview, check: LoadCheck | None = None) -> LoadOutcome:
        """See :meth:`Medium.load`. Reads directly into ``buffer``.

        If another host deletes the object during the read (ESTALE), it is opened once more, and then it is a miss. Only
        in this case has a miss written to its buffer.
        """
        path = self._path(name)
        for _ in range(2):
            try:
                return read_object(path, buffer, check)
            except OSError as error:
                if error.errno in BAD_PATH_ERRNOS:
                    self._check_root()
                    return LoadOutcome.MISS
                if error.errno in _BAD_FILE_ERRNOS:
                    raise UnreadableObjectError(error) from error
                if error.errno not in MISSING_ERRNOS:
                    raise
                if error.errno != errno.ESTALE:
                    break
                check = None  # the next file is read from its beginning
        self._check_root()
        return LoadOutcome.MISS

    def store(self, name: str, buffer: memoryview, seal: StoreSeal | None = None) -> None:
        """See :meth:`Medium.store`."""
        temporary = self._write_temporary(buffer, seal)
        try:
            with self._bad_path_told(name):
                self._rename(temporary, self._path(name), len(buffer))
        except BaseException:
            unlink_quietly(temporary)
            raise

    def create(self, name: str, data: bytes) -> bool:
        """See :meth:`Medium.create`. Uses a hard link, which exists whole or not at all."""
        temporary = self._write_temporary(memoryview(data))
        try:
            linked = self._link(temporary, self._path(name))
        finally:
            unlink_quietly(temporary)
        return self._create_without_links(self._path(name), data) if linked is None else linked

    def store_new(self, name: str, buffer: memoryview, seal: StoreSeal | None = None) -> bool:
        """See :meth:`Medium.store_new`.

        On a share without hard links, if several callers store at the same moment, each may get ``True``.
        """
        path = self._path(name)
        with self._bad_path_told(name):
            if size_of(path) is not None:
                return False
        temporary = self._write_temporary(buffer, seal)
        try:
            with self._bad_path_told(name):
                linked = self._link(temporary, path)
                if linked is None:
                    self._rename(temporary, path, len(buffer))
                    return True
                if not linked and holds_no_file(path):
                    raise FileExistsError(errno.EEXIST, "it is in the way of an object, and is none", path)
        except BaseException:
            unlink_quietly(temporary)
            raise
        unlink_quietly(temporary)
        return linked

    def delete(self, names: Sequence[str]) -> None:
        """See :meth:`Medium.delete`. Something that is no file stays."""
        errors = DeletionErrors()
        are_there = True
        for name in names:
            try:
                are_there = unlink(self._path(name)) and are_there
            except OSError as error:
                are_there = False
                errors.add(name, error)
        if not are_there:
            self._check_root()
        errors.raise_any(len(names))

    def entries(self, folder: str, progress: Callable[[], None] = lambda: None) -> list[Entry]:
        """See :meth:`Medium.entries`. Names that begin with a dot are skipped.

        If a file is deleted while a process has it open, NFS keeps it as ``.nfs…``. A folder without permission has no
        entries, except for the root.
        """
        try:
            listed = list_folder(self._path(folder), progress)
            found = [entry for entry in listed if not entry.name.startswith(".")]
        except PermissionError:
            if not folder:
                raise
            found = []
        if not found:
            self._check_root()
        return found

    def names(self, folder: str) -> list[str]:
        """See :meth:`Medium.names`. Does not ask for the files' attributes."""
        try:
            return [name for name in os.listdir(self._path(folder)) if not name.startswith(".")]  # noqa: PTH208
        except OSError as error:
            if error.errno not in NO_FOLDER_ERRNOS:
                raise
        self._check_root()
        return []

    def read_small(self, name: str, max_bytes: int = MAX_SMALL_BYTES) -> bytes | None:
        """See :meth:`Medium.read_small`."""
        for _ in range(2):
            try:
                return read_small_file(self._path(name), max_bytes)
            except OSError as error:
                if error.errno not in MISSING_ERRNOS:
                    raise
        self._check_root()
        return None

    def move(self, name: str, target: str) -> None:
        """See :meth:`Medium.move`."""
        path = self._path(target)
        self._make_folders_above(path)
        try:
            os.replace(self._path(name), path)  # noqa: PTH105
        except OSError as error:
            if error.errno not in MISSING_ERRNOS:
                raise

    def remove_leftovers(self, stopped: Callable[[], bool]) -> int:
        """See :meth:`Medium.remove_leftovers`: temporaries of this host's dead processes, and any older than a day."""
        count = 0
        for name in temporaries.leftovers(list_folder(self._path(TEMPORARY_FOLDER)), self._now_seconds):
            if stopped():
                break
            unlink_quietly(self._path(f"{TEMPORARY_FOLDER}/{name}"))
            count += 1
        return count

    def _now_seconds(self) -> float:
        """Return the server's time, from a new file. A share without room for one has no old temporaries."""
        try:
            temporary = self._write_temporary(memoryview(b"x"))
        except OSError as error:
            if error.errno not in (errno.EROFS, *BAD_PATH_ERRNOS, *FULL_ERRNOS):
                raise
            return -math.inf
        try:
            return os.stat(temporary).st_mtime  # noqa: PTH116
        finally:
            unlink_quietly(temporary)

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}" if name else self._root

    def _size(self, name: str) -> int | None:
        try:
            return size_of(self._path(name))
        except OSError as error:
            if error.errno not in BAD_PATH_ERRNOS:
                raise
            self._check_root()
            return None

    @contextmanager
    def _bad_path_told(self, name: str) -> Iterator[None]:
        """Raise ``BadPathError`` for errors that concern one object. The share itself was just written to."""
        try:
            yield
        except OSError as error:
            if error.errno not in BAD_PATH_ERRNOS:
                raise
            self._check_root()
            raise BadPathError(error.errno, error.strerror, self._path(name)) from error

    def _write_temporary(self, buffer: memoryview, seal: StoreSeal | None = None) -> str:
        """Write a temporary file and return its path. On a share, its bytes are on the server then."""
        temporary = self._path(f"{TEMPORARY_FOLDER}/{temporaries.temporary_name()}")
        descriptor = self._create_in_folder(temporary)
        try:
            try:
                if self._is_local:
                    preallocate(descriptor, len(buffer))
                for offset, part in [(0, buffer)] if seal is None else seal.parts(buffer):
                    done = 0
                    while done < len(part):
                        done += os.pwrite(descriptor, part[done:], offset + done)
                if not self._is_local:
                    os.fsync(descriptor)
            finally:
                os.close(descriptor)  # on NFS it may report that a write has failed
        except BaseException:
            unlink_quietly(temporary)
            raise
        return temporary

    def _create_in_folder(self, path: str) -> int:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        try:
            return os.open(path, flags, FILE_MODE)
        except OSError as error:
            if error.errno not in MISSING_ERRNOS:
                raise
        self._make_folders_above(path)
        return os.open(path, flags, FILE_MODE)

    def _rename(self, temporary: str, path: str, nbytes: int) -> None:
        try:
            os.replace(temporary, path)  # noqa: PTH105
            return
        except OSError as error:
            if error.errno not in MISSING_ERRNOS:
                raise
        if size_of(temporary) is None and size_of(path) == nbytes:
            return  # the rename was done, but its answer was lost and the client repeated it
        self._make_folders_above(path)
        os.replace(temporary, path)  # noqa: PTH105

    def _link(self, temporary: str, path: str) -> bool | None:
        """Give a file a second name if that is free. Return whether it was, or ``None`` without hard links."""
        for after_making_folders in (False, True):
            try:
                os.link(temporary, path)
                return True
            except FileExistsError:
                return os.stat(temporary).st_nlink == 2  # noqa: PTH116 - a lost answer, and a repeated call
            except OSError as error:
                if error.errno in _NO_LINK_ERRNOS:
                    return None
                if error.errno not in MISSING_ERRNOS or after_making_folders:
                    raise
            self._make_folders_above(path)
        raise AssertionError("the loop returns or raises")

    def _create_without_links(self, path: str, data: bytes) -> bool:
        try:
            descriptor = self._create_in_folder(path)
        except FileExistsError:
            return False
        try:
            try:
                done = 0
                while done < len(data):
                    done += os.write(descriptor, data[done:])
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
        except BaseException:
            unlink_quietly(path)
            raise
        return True

    def _make_folders_above(self, path: str) -> None:
        """Make the folders between the root and ``path``. A missing root is an error; it is never made again."""
        self._check_root()
        folder = self._root
        for part in path.removeprefix(f"{self._root}/").split("/")[:-1]:
            folder = f"{folder}/{part}"
            make_private_folder(folder)

    def _check_root(self) -> None:
        """Raise ``OSError`` if the root is not the folder that was opened. Every miss asks this, or would hide it."""
        proof = self._path(MARKER) if self._has_marker else self._root
        try:
            os.stat(proof)  # noqa: PTH116
        except OSError as error:
            if error.errno not in MISSING_ERRNOS:
                raise
            raise OSError(
                errno.ENODEV,
                f"the share is gone: {proof} does not exist; mount the share again (its folders are never made anew)",
                self._root,
            ) from error
