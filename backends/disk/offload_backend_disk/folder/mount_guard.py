"""A guard that tells a folder without objects from a folder that is gone.

A tier's folder is gone if it was moved or deleted, or if its file system was unmounted. Every call then fails until the
folder is back: an answer "absent" would make a dead disk look healthy (C23). Nothing makes the folder again meanwhile.
After an unmount, a new folder would fill the disk below the mount point, usually the root disk, which is not ours to
fill.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path

from offload_backend_disk.folder import files
from offload_core.api import check_ownership


class MountGuard:
    """A tier's folder, which must stay on the file system where it was first opened.

    Args:
        root: the folder.
        is_recognised: returns whether the folder has a file by which this process knows it. Some mounts need this
            proof, such as those of FUSE: they do not tell the identity of their file system.
    """

    def __init__(self, root: Path, is_recognised: Callable[[], bool] | None = None) -> None:
        self.root = root
        self._root = os.fspath(root)
        self._is_recognised = is_recognised
        self._device: int | None = None
        self._file_system = 0

    def open(self) -> None:
        """Check the folder and its owner. The first call creates it if its parent exists, and notes its file system.

        Raises:
            PermissionError: another user could change its content.
            OSError: the folder is gone, cannot be created, or is on another file system than before.
        """
        if self._device is None:
            self._create()
        else:
            self.check()
        check_ownership(self.root)
        if self._device is None:
            self._device = self.root.stat().st_dev
            self._file_system = os.statvfs(self.root).f_fsid

    def check(self) -> None:
        """Check that the folder exists, on its file system. Costs about as much as one lookup.

        Raises:
            OSError: it is gone.
        """
        try:
            device = os.stat(self._root).st_dev  # noqa: PTH116 - pathlib is slow
        except (FileNotFoundError, NotADirectoryError) as error:
            raise OSError(
                errno.ENODEV,
                "the folder is gone; mount its file system again, or move the folder back. If it was deleted, make an "
                "empty one",
                self._root,
            ) from error
        if self._device is None or device == self._device:
            return
        # Mounted again, it may be another device.
        is_same = bool(self._file_system) and os.statvfs(self.root).f_fsid == self._file_system
        if is_same or (self._is_recognised is not None and self._is_recognised()):
            self._device = device
            return
        raise OSError(
            errno.ENODEV,
            "the folder is on another file system than when this process opened it; mount the first one again, or "
            "restart the engine to use the present one",
            self._root,
        )

    def _create(self) -> None:
        try:
            files.make_private_folder(self._root)
        except FileNotFoundError as error:
            raise OSError(
                errno.ENOENT,
                "its parent folder does not exist; create it, or mount the disk that should be there",
                self._root,
            ) from error

    def free_bytes(self) -> int:
        """Return the bytes that this process may still write to the file system."""
        status = os.statvfs(self.root)
        return status.f_bavail * status.f_frsize
