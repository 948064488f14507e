"""Shared storage that is mounted: NFS and anything else with the calls of a file system.

What it goes by, on NFS and so everywhere: a file's bytes are on the server when it has been closed, and a reader who
opens it afterwards sees them (close-to-open consistency), so nothing has its final name before it is closed. What was
replaced or deleted by another host may answer ESTALE, which is a miss after one more look. There are no locks, no
mmap, no O_DIRECT and no inotify here. Bytes are forced to the server before the rename: on NFS closing does that
anyway and tells of errors; on other mounts a name could otherwise outlive a server's crash without its bytes.
"""

from __future__ import annotations

import errno
import logging
import os
import stat
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from offload_backend_nfs.storage import temporaries as owners
from offload_backend_nfs.storage.base import TEMPORARY_FOLDER, TEMPORARY_LIFE_SECONDS, Entry, Medium
from offload_core.api import LoadOutcome

logger = logging.getLogger(__name__)

FOLDER_MODE = 0o700
FILE_MODE = 0o600
MARKER = ".offload-core-share"
"""A file in the root, by which an empty mount point is told from the share."""
_MARKER_TEXT = b"offload-core keeps KV caches here. Without this file it takes the share for unmounted.\n"
_ROOT_CHECK_SECONDS = 1.0
_GONE = (errno.ENOENT, errno.ENOTDIR, errno.ESTALE)
_NO_LINKS = (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK)


class PosixShare(Medium):
    """A folder on a mounted share.

    Args:
        root: the folder, absolute; created by :meth:`open` when its parent exists, and never again.
    """

    def __init__(self, root: Path) -> None:
        self._root = str(root)
        self._marked = False
        self._root_seen_seconds = float("-inf")

    def open(self) -> None:
        """See :meth:`Medium.open`. A read-only share is no error: it can still be loaded from."""
        if not os.path.isdir(self._root):  # noqa: PTH112 - Path.is_dir is slower, and strings are used throughout
            if not os.path.isdir(os.path.dirname(self._root)):  # noqa: PTH112, PTH120
                raise OSError(errno.ENOENT, "the folder above the share's is gone; mount the share", self._root)
            _make_private(self._root)
        marker = self._path(MARKER)
        try:
            descriptor = os.open(marker, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, FILE_MODE)
        except FileExistsError:
            self._marked = True
        except OSError as error:
            if error.errno not in (errno.EROFS, errno.EACCES, errno.EPERM):
                raise
            self._marked = _size(marker) is not None
        else:
            try:
                os.write(descriptor, _MARKER_TEXT)
            finally:
                os.close(descriptor)
            self._marked = True

    def close(self) -> None:
        """See :meth:`Medium.close`."""

    def sizes(self, names: Sequence[str]) -> list[int | None]:
        """See :meth:`Medium.sizes`."""
        found = [_size(self._path(name)) for name in names]
        if None in found:
            self._after_a_miss()
        return found

    def load(self, name: str, buffer: memoryview) -> LoadOutcome:
        """See :meth:`Medium.load`; reads straight into ``buffer``.

        What vanishes while it is read (ESTALE: another host deleted it) is looked for once more and then a miss, which
        is the one case in which a miss has written to its buffer.
        """
        path = self._path(name)
        for _ in range(2):
            try:
                return _read(path, buffer)
            except OSError as error:
                if error.errno not in _GONE:
                    raise
                if error.errno != errno.ESTALE:
                    break
        self._after_a_miss()
        return LoadOutcome.MISS

    def store(self, name: str, buffer: memoryview) -> None:
        """See :meth:`Medium.store`."""
        self._write(name, buffer, sync=True)

    def create(self, name: str, data: bytes) -> bool:
        """See :meth:`Medium.create`; by a hard link, which exists whole or not at all."""
        temporary = self._write_temporary(memoryview(data), sync=False)
        try:
            linked = self._link(temporary, self._path(name))
        finally:
            _unlink_quietly(temporary)
        return self._create_without_links(self._path(name), data) if linked is None else linked

    def store_new(self, name: str, buffer: memoryview) -> bool:
        """See :meth:`Medium.store_new`; on a share without hard links, of several at once each may be told ``True``."""
        path = self._path(name)
        if _size(path) is not None:
            return False
        temporary = self._write_temporary(buffer)
        try:
            linked = self._link(temporary, path)
            if linked is None:
                self._give_name(temporary, path, len(buffer))
                return True
        except BaseException:
            _unlink_quietly(temporary)
            raise
        _unlink_quietly(temporary)
        return linked

    def write_small(self, name: str, data: bytes) -> None:
        """See :meth:`Medium.write_small`."""
        self._write(name, memoryview(data), sync=False)

    def _write(self, name: str, buffer: memoryview, *, sync: bool) -> None:
        temporary = self._write_temporary(buffer, sync=sync)
        try:
            self._give_name(temporary, self._path(name), len(buffer))
        except BaseException:
            _unlink_quietly(temporary)
            raise

    def delete(self, names: Sequence[str]) -> None:
        """See :meth:`Medium.delete`."""
        for name in names:
            _unlink(self._path(name))

    def entries(self, folder: str) -> list[Entry]:
        """See :meth:`Medium.entries`. Names with a dot in front are passed over: ``.nfs…`` is what NFS keeps of a file
        that was deleted while somebody had it open.
        """
        return [entry for entry in _scan(self._path(folder)) if not entry.name.startswith(".")]

    def names(self, folder: str) -> list[str]:
        """See :meth:`Medium.names`; nothing is asked about the files."""
        try:
            return [name for name in os.listdir(self._path(folder)) if not name.startswith(".")]  # noqa: PTH208
        except OSError as error:
            if error.errno not in _GONE:
                raise
            return []

    def read_small(self, name: str) -> bytes | None:
        """See :meth:`Medium.read_small`."""
        for _ in range(2):
            try:
                return Path(self._path(name)).read_bytes()
            except OSError as error:
                if error.errno not in _GONE:
                    raise
        return None

    def sweep(self, stopped: Callable[[], bool]) -> int:
        """See :meth:`Medium.sweep`: temporaries of this host's dead processes, and all that are older than a day."""
        count = 0
        oldest = time.time() - TEMPORARY_LIFE_SECONDS
        for entry in _scan(self._path(TEMPORARY_FOLDER)):
            if stopped():
                break
            if owners.is_temporary(entry.name) and (entry.modified_seconds < oldest or owners.is_dead(entry.name)):
                _unlink_quietly(self._path(f"{TEMPORARY_FOLDER}/{entry.name}"))
                count += 1
        return count

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}" if name else self._root

    def _write_temporary(self, buffer: memoryview, *, sync: bool = True) -> str:
        """Write a file that nobody sees. Small ones need no ``sync``: they are checked when they are read."""
        temporary = self._path(f"{TEMPORARY_FOLDER}/{owners.temporary_name()}")
        descriptor = self._create_in_folder(temporary)
        try:
            try:
                done = 0
                while done < len(buffer):
                    done += os.write(descriptor, buffer[done:])
                if sync:
                    os.fsync(descriptor)
            finally:
                os.close(descriptor)  # on NFS it may tell that a write has failed
        except BaseException:
            _unlink_quietly(temporary)
            raise
        return temporary

    def _create_in_folder(self, path: str) -> int:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        try:
            return os.open(path, flags, FILE_MODE)
        except OSError as error:
            if error.errno not in _GONE:
                raise
        self._make_folders_above(path)
        return os.open(path, flags, FILE_MODE)

    def _give_name(self, temporary: str, path: str, nbytes: int) -> None:
        try:
            os.replace(temporary, path)  # noqa: PTH105
            return
        except OSError as error:
            if error.errno not in _GONE:
                raise
        if _size(temporary) is None and _size(path) == nbytes:
            return  # an answer was lost on the network, and the client asked again after it had been done
        self._make_folders_above(path)
        os.replace(temporary, path)  # noqa: PTH105

    def _link(self, temporary: str, path: str) -> bool | None:
        """Give a file a second name, if that is free; return whether it was, ``None`` where there are no hard links."""
        for made_folders in (False, True):
            try:
                os.link(temporary, path)
                return True
            except FileExistsError:
                return os.stat(temporary).st_nlink == 2  # noqa: PTH116 - a lost answer, asked for again
            except OSError as error:
                if error.errno in _NO_LINKS:
                    return None
                if error.errno not in _GONE or made_folders:
                    raise
            self._make_folders_above(path)
        raise AssertionError("the loop returns or raises")

    def _create_without_links(self, path: str, data: bytes) -> bool:
        try:
            descriptor = self._create_in_folder(path)
        except FileExistsError:
            return False
        try:
            os.write(descriptor, data)
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        return True

    def _make_folders_above(self, path: str) -> None:
        """Make the folders between the root and ``path``; a root that has vanished is not made again."""
        self._check_root()
        folder = self._root
        for part in path.removeprefix(f"{self._root}/").split("/")[:-1]:
            folder = f"{folder}/{part}"
            _make_private(folder)

    def _after_a_miss(self) -> None:
        """Tell a miss from a share that is gone, with a look now and then."""
        if time.monotonic() - self._root_seen_seconds > _ROOT_CHECK_SECONDS:
            self._check_root()

    def _check_root(self) -> None:
        """Raise ``OSError`` where the root is not the folder that was opened."""
        sign = self._path(MARKER) if self._marked else self._root
        try:
            os.stat(sign)  # noqa: PTH116
        except OSError as error:
            if error.errno not in _GONE:
                raise
            self._root_seen_seconds = float("-inf")  # until it is back, every miss is looked into
            raise OSError(
                errno.ENODEV,
                f"the share is gone: there is no {sign}; mount it again (nothing is made anew)",
                self._root,
            ) from error
        self._root_seen_seconds = time.monotonic()


def _read(path: str, buffer: memoryview) -> LoadOutcome:
    """Read a file into ``buffer``."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        if os.fstat(descriptor).st_size != len(buffer):
            return LoadOutcome.CORRUPT
        done = 0
        while done < len(buffer):
            count = os.preadv(descriptor, [buffer[done:]], done)
            if count == 0:  # truncated since the fstat
                return LoadOutcome.CORRUPT
            done += count
    finally:
        os.close(descriptor)
    return LoadOutcome.HIT


def _size(path: str) -> int | None:
    """Return the bytes of a regular file, or ``None``."""
    for _ in range(2):
        try:
            status = os.stat(path)  # noqa: PTH116
        except OSError as error:
            if error.errno not in _GONE:
                raise
            if error.errno != errno.ESTALE:
                break
        else:
            return status.st_size if stat.S_ISREG(status.st_mode) else None
    return None


def _scan(folder: str) -> list[Entry]:
    found: list[Entry] = []
    try:
        with os.scandir(folder) as entries:
            for entry in entries:
                with suppress(FileNotFoundError):  # deleted meanwhile
                    is_folder = entry.is_dir(follow_symlinks=False)
                    if is_folder or entry.is_file(follow_symlinks=False):
                        status = entry.stat(follow_symlinks=False)
                        found.append(Entry(entry.name, is_folder, status.st_size, status.st_mtime))
    except OSError as error:
        if error.errno not in _GONE:
            raise
    return found


def _make_private(folder: str) -> None:
    try:
        os.mkdir(folder, FOLDER_MODE)  # noqa: PTH102
    except FileExistsError:
        if not os.path.isdir(folder):  # noqa: PTH112 - another process may have been faster
            raise
    else:
        os.chmod(folder, FOLDER_MODE)  # noqa: PTH101 - whatever the umask says


def _unlink(path: str) -> None:
    try:
        os.unlink(path)  # noqa: PTH108
    except OSError as error:
        if error.errno not in _GONE:
            raise


def _unlink_quietly(path: str) -> None:
    with suppress(OSError):
        os.unlink(path)  # noqa: PTH108
