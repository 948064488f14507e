"""Retries of operations that failed with a transient error."""

from __future__ import annotations

import errno
import random
import re
import threading
import time
from collections.abc import Callable
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")

_FIRST_WAIT_SECONDS = 0.05
_LONGEST_WAIT_SECONDS = 2.0
_TRANSIENT_ERRNOS = frozenset(
    [
        *(errno.EAGAIN, errno.EBUSY, errno.EINTR, errno.EIO, errno.EREMOTEIO, errno.ESTALE, errno.ETIMEDOUT),
        *(errno.ECONNABORTED, errno.ECONNREFUSED, errno.ECONNRESET, errno.EPIPE, errno.ENETDOWN, errno.ENETRESET),
        *(errno.ENETUNREACH, errno.EHOSTDOWN, errno.EHOSTUNREACH),
    ]
)
"""s3fs raises EBUSY for SlowDown and 503, and EREMOTEIO for 500."""
# If a connection fails, client libraries raise errors that are no OSError, or an OSError without a number:
# botocore.exceptions.EndpointConnectionError, aiohttp.ClientPayloadError and the like. Their packages may be missing,
# so the errors are recognised by name.
_TRANSIENT_NAMES = re.compile(r"Connect|Timeout|TimedOut|Disconnect|Incomplete|Streaming|Payload|HTTPClientError")


def is_transient(error: BaseException) -> bool:
    """Return whether the operation may succeed on a retry after ``error``."""
    if isinstance(error, ConnectionError | TimeoutError):
        return True
    if isinstance(error, OSError) and error.errno is not None:
        return error.errno in _TRANSIENT_ERRNOS
    return any(_TRANSIENT_NAMES.search(kind.__name__) for kind in type(error).__mro__)


class Retrier:
    """Retries operations for a limited time, with random waits that grow.

    A wait is any time up to its limit ("full jitter"). So engines that failed together do not retry together. A wait
    occupies its thread.

    Args:
        seconds: no retry begins later than this after the first try.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._stopped = threading.Event()

    def stop(self) -> None:
        """End all waits. The waiting operations fail with their last error."""
        self._stopped.set()

    @property
    def stopped(self) -> bool:
        """``True`` once :meth:`stop` was called."""
        return self._stopped.is_set()

    def call(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Call ``function`` until it succeeds, fails permanently, or the time is over.

        Raises:
            OSError: the error of the last try. Any other error of a client library is wrapped in an ``OSError``.
        """
        deadline = time.monotonic() + self._seconds
        longest_wait = _FIRST_WAIT_SECONDS
        while True:
            try:
                return function(*args, **kwargs)
            except Exception as error:
                wait = random.uniform(0, longest_wait)
                if not is_transient(error) or time.monotonic() + wait > deadline or self._stopped.wait(wait):
                    if isinstance(error, OSError) and error.errno is not None:
                        raise
                    raise OSError(errno.EIO, f"{type(error).__name__}: {error}") from error
            longest_wait = min(2 * longest_wait, _LONGEST_WAIT_SECONDS)
