"""Errors that concern one object or one file only, and are no failure of the medium."""

from __future__ import annotations

import errno
import threading
import time
from collections.abc import Callable, Collection

from offload_backend_nfs.recent_keys import drop_oldest, remember
from offload_core.api import ObjectKey, TierLogger

FULL_ERRNOS = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
"""A full medium, a full quota, or an object beyond the largest file. Loads still work."""
BAD_PATH_ERRNOS = frozenset(
    [
        *(errno.EACCES, errno.EPERM, errno.EISDIR, errno.ENOTDIR, errno.ELOOP, errno.EEXIST, errno.ENOTEMPTY),
        *(errno.ENXIO, errno.ENAMETOOLONG),
    ]
)
"""Errors of one path. The same numbers may come from the root, so the caller checks the root too."""
_ONE_FILE_ERRNOS = frozenset({errno.EBUSY, errno.EIO, errno.EUCLEAN})
"""Errors that a single file can cause, and a medium that has failed too."""
_MAX_LOGGED_PATHS = 16
_LOG_INTERVAL_SECONDS = 60.0
"""A medium that is nearly full has room for some objects and not for others."""
_REFUSAL_SECONDS = 600.0
_MAX_REFUSALS = 16_384


class BadPathError(OSError):
    """The path of one object cannot be used: it holds something else, or permission is missing. Others can be used."""


class UnreadableObjectError(OSError):
    """An object exists, and cannot be read.

    Args:
        cause: the error of the read.
        is_certain: no other object is concerned. Otherwise the storage may have failed.
    """

    def __init__(self, cause: OSError, *, is_certain: bool = False) -> None:
        super().__init__(cause.errno or errno.EACCES, cause.strerror or str(cause), cause.filename)
        self.is_certain = is_certain


class DeletionRefusedError(OSError):
    """The medium works, and refuses to delete some objects. All others of the call are deleted.

    Args:
        cause: the first error.
        names: the names of the refused objects.
    """

    def __init__(self, cause: OSError, names: Collection[str]) -> None:
        super().__init__(cause.errno or errno.EACCES, cause.strerror or str(cause), cause.filename)
        self.names = frozenset(names)


class ForeignFileError(OSError):
    """A control file is too large, or is no regular file."""


def means_full(error: BaseException) -> bool:
    """Return whether the error means that the medium is full."""
    return isinstance(error, OSError) and error.errno in FULL_ERRNOS


class StoreRejections:
    """Tells errors that reject one store from failures of the medium. Each cause is logged once. Thread-safe."""

    def __init__(self, log: TierLogger) -> None:
        self._log = log
        self._is_full = False
        self._logged_seconds = -float("inf")
        self._bad_paths: set[str] = set()

    def covers(self, error: OSError) -> bool:
        """Return whether the error rejects a single store, and log it if it is new."""
        if means_full(error):
            now = time.monotonic()
            if not self._is_full and now - self._logged_seconds >= _LOG_INTERVAL_SECONDS:
                self._logged_seconds = now
                self._log.warning(
                    "the storage is full (%s): stores are rejected until it has free space, and loads continue; "
                    "free some space, or lower the tier's capacity",
                    error,
                )
            self._is_full = True
            return True
        if isinstance(error, BadPathError):
            path = str(error.filename)
            if path not in self._bad_paths and len(self._bad_paths) < _MAX_LOGGED_PATHS:
                self._bad_paths.add(path)
                self._log.warning(
                    "an object's path cannot be used (%s): this object is not stored, and all others are; "
                    "remove the path, or give its permissions to the engine's user",
                    error,
                )
            return True
        return False

    def store_succeeded(self) -> None:
        """Note that the medium has free space, so that the next full medium is logged again."""
        self._is_full = False


class DeletionErrors:
    """The errors of one call that deletes several objects. An object that cannot be deleted does not end the call."""

    def __init__(self) -> None:
        self._errors: dict[str, OSError] = {}

    def add(self, name: str, error: OSError) -> None:
        """Add the error of one object.

        Raises:
            OSError: ``error`` concerns the medium.
        """
        if not (isinstance(error, PermissionError) or error.errno in BAD_PATH_ERRNOS | _ONE_FILE_ERRNOS):
            raise error
        self._errors[name] = error

    def raise_any(self, asked: int) -> None:
        """Raise the error of the whole call, if there is one. A medium that can delete none of several has failed.

        Args:
            asked: the number of objects of the call.

        Raises:
            DeletionRefusedError: some objects were refused, and all others are deleted.
            OSError: the medium failed.
        """
        errors = list(self._errors.values())
        failures = [error for error in errors if error.errno in _ONE_FILE_ERRNOS]
        if failures and 1 < asked == len(errors):
            raise failures[0]
        if errors:
            raise DeletionRefusedError(errors[0], self._errors) from errors[0]


class DeletionRefusals:
    """The objects that the medium has lately refused to delete. Thread-safe.

    Args:
        clock: returns seconds.
    """

    def __init__(self, clock: Callable[[], float], log: TierLogger) -> None:
        self._clock = clock
        self._log = log
        self._lock = threading.Lock()
        self._refused_seconds: dict[ObjectKey, float] = {}
        self._logged_seconds = -float("inf")

    @property
    def keys(self) -> frozenset[ObjectKey]:
        """The objects that were refused in the last ten minutes, at most 16,384."""
        oldest = self._clock() - _REFUSAL_SECONDS
        with self._lock:
            return frozenset(key for key, seconds in self._refused_seconds.items() if seconds > oldest)

    def add(self, keys: Collection[ObjectKey], error: OSError) -> None:
        """Remember objects that were refused just now. In ten minutes, at most one warning is logged."""
        now = self._clock()
        with self._lock:
            remember(self._refused_seconds, keys, now)
            drop_oldest(self._refused_seconds, _MAX_REFUSALS)
            if not keys or now - self._logged_seconds < _REFUSAL_SECONDS:
                return
            self._logged_seconds = now
        self._log.warning(
            "the storage refuses to delete %d objects (%s): they stay and count, and other objects are evicted in "
            "their place; give their permissions to the engine's user, or remove them",
            len(keys),
            error,
        )
