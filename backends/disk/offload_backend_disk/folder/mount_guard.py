"""A guard against writing below a mount point whose file system was unmounted.

A missing folder may have been deleted, or its file system may have been unmounted. A deleted folder is created again.
After an unmount, a new folder would fill the disk below the mount point, usually the root disk, which is not ours to
fill. So nothing is written until the file system is back.
"""

from __future__ import annotations

import errno
import os
from pathlib import Path

from offload_backend_disk.folder import files
from offload_core.api import check_ownership


class MountGuard:
    """A tier's folder, which must stay on the file system where it was first opened.

    Args:
        root: the folder.
        own_file: a file in it that only this process creates. If it is present, the folder is the same one. Some mounts
            need this proof, such as those of FUSE: they do not tell the identity of their file system.
    """

    def __init__(self, root: Path, own_file: Path | None = None) -> None:
        self.root = root
        self._own_file = own_file
        self._device: int | None = None
        self._file_system = 0

    def open(self) -> None:
        """Create the folder if it is missing, and check its owner. The first call remembers its file system.

        Raises:
            PermissionError: another user could change its content.
            OSError: the folder cannot be created, or would be on another file system than before.
        """
        self.check()
        files.make_private_folder(self.root)
        check_ownership(self.root)
        if self._device is None:
            self._device = self.root.stat().st_dev
            self._file_system = os.statvfs(self.root).f_fsid

    def check(self) -> None:
        """Check that the folder is on its file system; for a missing folder, check the parent that would get it.

        Raises:
            OSError: it is on another one.
        """
        if self._device is None:
            return
        place = self.root
        while True:
            try:
                device = place.stat().st_dev
                break
            except (FileNotFoundError, NotADirectoryError):
                place = place.parent
        if device == self._device:
            return
        if self._file_system and os.statvfs(place).f_fsid == self._file_system:  # mounted again, as another device
            return
        if self._own_file is not None and self._own_file.exists():
            return
        raise OSError(
            errno.ENODEV,
            f"{self.root} is on another file system than when this process opened it, and stores fail until the first "
            "one is back: mount it again, or restart the engine to use the present one",
        )

    def free_bytes(self) -> int:
        """Return the bytes that this process may still write to the file system."""
        status = os.statvfs(self.root)
        return status.f_bavail * status.f_frsize
