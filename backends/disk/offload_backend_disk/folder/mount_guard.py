"""Where a tier's folder is: on which file system.

A folder that is gone may have been deleted, or the file system that it was on may have been unmounted. A deleted one is
made again. After an unmount, making it again would fill the disk below the mount point, usually the root disk, which
nobody gave us; so nothing is written until the file system is back.
"""

from __future__ import annotations

import errno
import os
from pathlib import Path

from offload_backend_disk.folder import files


class Home:
    """A tier's folder, which stays on the file system that it was on when it was opened.

    Args:
        root: the folder.
        witness: a file in it that only this process makes. Where it is there, the folder is the same one, even on a
            mount that does not tell its file system's identity, as those of FUSE do not.
    """

    def __init__(self, root: Path, witness: Path | None = None) -> None:
        self.root = root
        self._witness = witness
        self._device: int | None = None
        self._file_system = 0

    def open(self) -> None:
        """Create the folder if it is missing; the first time, remember its file system.

        Raises:
            OSError: it cannot be made, or would be on another file system than it was.
        """
        self.check()
        files.make_private_folder(self.root)
        if self._device is None:
            self._device = self.root.stat().st_dev
            self._file_system = os.statvfs(self.root).f_fsid

    def check(self) -> None:
        """Check that the folder, or where it would be made again, is on the file system that it was on.

        Raises:
            OSError: it is not.
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
        if self._witness is not None and self._witness.exists():
            return
        raise OSError(
            errno.ENODEV,
            f"{self.root} is not on the file system that it was on when this process opened it; nothing is stored "
            "elsewhere: mount it again, or restart the engine to use what is there now",
        )

    def free_bytes(self) -> int:
        """Return how much this process may still write to the file system."""
        status = os.statvfs(self.root)
        return status.f_bavail * status.f_frsize
