"""Trying again: which errors pass by themselves, and for how long an operation goes on."""

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
_PASSING_ERRNOS = frozenset(
    [
        *(errno.EAGAIN, errno.EBUSY, errno.EINTR, errno.EIO, errno.EREMOTEIO, errno.ESTALE, errno.ETIMEDOUT),
        *(errno.ECONNABORTED, errno.ECONNREFUSED, errno.ECONNRESET, errno.EPIPE, errno.ENETDOWN, errno.ENETRESET),
        *(errno.ENETUNREACH, errno.EHOSTDOWN, errno.EHOSTUNREACH),
    ]
)
"""s3fs says EBUSY for SlowDown and 503, EREMOTEIO for 500."""
# For a connection that fails, client libraries raise what is no OSError, or one without a number:
# botocore.exceptions.EndpointConnectionError, aiohttp.ClientPayloadError and the like. Their packages need not be
# installed, so they are known by name.
_PASSING_NAMES = re.compile(r"Connect|Timeout|TimedOut|Disconnect|Incomplete|Streaming|Payload|HTTPClientError")


def is_passing(error: BaseException) -> bool:
    """Return whether ``error`` may be gone when the operation is tried again."""
    if isinstance(error, ConnectionError | TimeoutError):
        return True
    if isinstance(error, OSError) and error.errno is not None:
        return error.errno in _PASSING_ERRNOS
    return any(_PASSING_NAMES.search(kind.__name__) for kind in type(error).__mro__)


class Retrier:
    """Tries operations again, with growing random waits, for a limited time.

    A wait is anything up to its limit ("full jitter"), so that engines that failed together do not come back together.
    It holds the thread that waits.

    Args:
        seconds: no try begins later than this after the first one.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._stopped = threading.Event()

    def stop(self) -> None:
        """End all waits; operations then fail with the error they have."""
        self._stopped.set()

    @property
    def stopped(self) -> bool:
        """Whether :meth:`stop` was called."""
        return self._stopped.is_set()

    def call(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Call ``function`` until it succeeds, fails for good, or the time is over.

        Raises:
            OSError: the last try's; what a client library raises of its own becomes one too.
        """
        deadline = time.monotonic() + self._seconds
        longest = _FIRST_WAIT_SECONDS
        while True:
            try:
                return function(*args, **kwargs)
            except Exception as error:
                wait = random.uniform(0, longest)
                if not is_passing(error) or time.monotonic() + wait > deadline or self._stopped.wait(wait):
                    if isinstance(error, OSError) and error.errno is not None:
                        raise
                    raise OSError(errno.EIO, f"{type(error).__name__}: {error}") from error
            longest = min(2 * longest, _LONGEST_WAIT_SECONDS)
