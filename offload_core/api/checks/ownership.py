"""A check of the folders of file backends: no other user may change their content."""

from __future__ import annotations

import errno
import os
import pwd
import stat
import tempfile
from pathlib import Path

OTHERS_MAY_WRITE = stat.S_IWGRP | stat.S_IWOTH
_ROOT_USER = 0


def check_ownership(folder: Path) -> None:
    """Refuse a folder that another user could change. Blocks; call it when the backend opens.

    Objects carry a checksum and no signature. So any user with write permission can replace the content of a KV cache,
    or plant a link to a private file.

    The folder's owner must be this process's user or root. NFS with root squash gives new files of this process to
    another user. That user is a good owner there too. Group and others must have no write permission.
    A link to a folder is as good as that folder.

    Args:
        folder: the folder, which exists.

    Raises:
        PermissionError: with the folder, its owner and mode, the good values and the cure.
        OSError: the folder cannot be examined.
    """
    status = folder.stat()
    user = os.geteuid()
    if status.st_uid not in (user, _ROOT_USER, _owner_of_new_files(folder, status.st_uid)):
        raise PermissionError(
            errno.EPERM,
            f"the folder belongs to {_name(status.st_uid)}. That user can change its content, and this process runs as "
            f"{_name(user)}. Its owner must be {_name(user)}{'' if user == _ROOT_USER else ' or root'}. Choose another "
            "folder. If you trust everything in this one, change its owner (chown -R)",
            str(folder),
        )
    if status.st_mode & OTHERS_MAY_WRITE:
        raise PermissionError(
            errno.EPERM,
            f"the folder has mode {stat.S_IMODE(status.st_mode):04o} (owner {_name(status.st_uid)}), so other users "
            "can change its content; good modes have no write permission for group and others, such as 0700. Choose "
            "another folder, such as a new one inside it. If you trust everything in this one, run chmod go-w",
            str(folder),
        )


def _owner_of_new_files(folder: Path, expected: int) -> int | None:
    """Return the owner of a new file in ``folder``, ``None`` if none can be created.

    Args:
        expected: the folder's owner. If that is this process's user, no file is created.
    """
    if expected in (os.geteuid(), _ROOT_USER):
        return None
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            return os.fstat(file.fileno()).st_uid
    except OSError:
        return None


def _name(user: int) -> str:
    try:
        return f"{pwd.getpwuid(user).pw_name} (uid {user})"
    except KeyError:
        return f"uid {user}"
