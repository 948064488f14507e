"""A connection whose every read and write has a deadline."""

from __future__ import annotations

import contextlib
import select
import socket
import struct
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import xxhash

MIN_BYTES_PER_SECOND = 1024**2
"""A transfer that is slower on average than this times out."""


class Stream:
    """A TCP connection for blocking transfers of known length.

    The kernel keeps the timeouts (``SO_RCVTIMEO`` and ``SO_SNDTIMEO``), so that a transfer needs no further system
    calls to wait.

    Args:
        connection: an open connection. The stream closes it.
        timeout_seconds: longest wait for the next bytes. A whole transfer may take this long in addition to the time
            at :data:`MIN_BYTES_PER_SECOND`.
        longest_seconds: the limit on a whole transfer of any length.
    """

    def __init__(
        self, connection: socket.socket, timeout_seconds: float, longest_seconds: float = float("inf")
    ) -> None:
        self._socket = connection
        self._longest_seconds = longest_seconds
        self._kernel_seconds: dict[int, float] = {}
        self.timeout_seconds = timeout_seconds
        connection.settimeout(None)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def receive(self, nbytes: int, timeout_seconds: float | None = None) -> bytes:
        """Receive exactly ``nbytes`` bytes. The caller has checked that the number is reasonable.

        Args:
            timeout_seconds: a wait other than that of the stream.

        Raises:
            TimeoutError: they did not come in time.
            ConnectionError: the peer closed the connection.
        """
        content = bytearray(nbytes)
        self.receive_into(memoryview(content), timeout_seconds)
        return bytes(content)

    def receive_into(self, buffer: memoryview, timeout_seconds: float | None = None) -> None:
        """Fill a buffer. See :meth:`receive`."""
        wait = self.timeout_seconds if timeout_seconds is None else timeout_seconds
        deadline = self._deadline(wait, len(buffer))
        while len(buffer):
            buffer = buffer[self._receive_some(buffer, wait, deadline) :]

    def receive_summed(self, buffer: memoryview, total: xxhash.xxh3_64) -> None:
        """Fill a buffer, and add its bytes to a checksum."""
        for part in self.receive_parts(buffer):
            total.update(part)

    def receive_parts(self, buffer: memoryview) -> Iterator[memoryview]:
        """Fill a buffer, and yield each part that has arrived while it is in the processor's cache."""
        deadline = self._deadline(self.timeout_seconds, len(buffer))
        received = yielded = 0
        while received < len(buffer):
            part = buffer[received : yielded + _PART_BYTES]
            received += self._receive_some(part, self.timeout_seconds, deadline)
            if received - yielded >= _PART_BYTES or received == len(buffer):
                yield buffer[yielded:received]
                yielded = received

    def send(self, *parts: bytes | memoryview) -> None:
        """Send all parts, without joining them.

        Raises:
            TimeoutError: the peer did not take them in time.
            ConnectionError: the peer closed the connection.
        """
        views = [memoryview(part) for part in parts if len(part)]
        self._send(views, self._deadline(self.timeout_seconds, sum(map(len, views))))

    def send_summed(
        self, before: bytes, buffer: memoryview, total: xxhash.xxh3_64, sent: Callable[[int], object]
    ) -> None:
        """Send ``before`` and a buffer, and add the buffer's bytes to a checksum. See :meth:`send`.

        Each part is summed right after the kernel has copied it, so it is still in the processor's cache.

        Args:
            sent: told of the bytes of each part of the buffer then.
        """
        deadline = self._deadline(self.timeout_seconds, len(before) + len(buffer))
        views = [memoryview(before)] if before else []
        for start in range(0, len(buffer), _PART_BYTES):
            part = buffer[start : start + _PART_BYTES]
            self._send([*views, part], deadline)
            total.update(part)
            sent(len(part))
            views = []
        self._send(views, deadline)  # if the buffer is empty

    def is_quiet(self) -> bool:
        """Return whether an idle connection is open and has nothing to read, as it must between two requests."""
        try:
            poll = select.poll()
            poll.register(self._socket, select.POLLIN)
            return not poll.poll(0)
        except (OSError, ValueError):
            return False

    def shut_down(self) -> None:
        """End the transfers of other threads on this connection. Harmless when repeated."""
        with contextlib.suppress(OSError):  # not connected any more
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the connection. Harmless when repeated."""
        self._socket.close()

    def _send(self, views: list[memoryview], deadline: float) -> None:
        while views:
            call = partial(self._socket.sendmsg, list(_first(views, _CALL_BYTES)))
            began = time.monotonic()
            sent = self._limited(call, socket.SO_SNDTIMEO, self.timeout_seconds, deadline)
            waited = time.monotonic() - began
            if waited >= self.timeout_seconds and sent < waited * MIN_BYTES_PER_SECOND:
                raise TimeoutError(_TOO_SLOW)  # the kernel had room for some bytes, and waited in vain for more
            views = _rest(views, sent)

    def _deadline(self, wait: float, nbytes: int) -> float:
        whole = max(wait, min(wait + nbytes / MIN_BYTES_PER_SECOND, self._longest_seconds))
        return time.monotonic() + whole

    def _receive_some(self, buffer: memoryview, wait: float, deadline: float) -> int:
        count = self._limited(partial(self._socket.recv_into, buffer), socket.SO_RCVTIMEO, wait, deadline)
        if not count:
            raise ConnectionResetError("the peer closed the connection")
        return count

    def _limited(self, call: Callable[[], int], option: int, wait: float, deadline: float) -> int:
        """Make a system call under the timeout of ``option``, and return its result."""
        seconds = min(wait, deadline - time.monotonic())
        if seconds <= 0:
            raise TimeoutError(_TOO_SLOW)
        if self._kernel_seconds.get(option) != seconds:
            microseconds = max(1, round(seconds * 1_000_000))  # 0 would mean no timeout
            timeval = struct.pack("@ll", *divmod(microseconds, 1_000_000))
            self._socket.setsockopt(socket.SOL_SOCKET, option, timeval)
            self._kernel_seconds[option] = seconds
        try:
            return call()
        except BlockingIOError as error:
            raise TimeoutError(_TOO_SLOW) from error


_MAX_PARTS = 512
_PART_BYTES = 1024**2
"""Each part is summed after its transfer. With smaller parts, a fast peer runs dry and sleeps more often."""
_CALL_BYTES = _PART_BYTES + 64 * 1024
"""One system call sends at most a part, with the header before it."""
_TOO_SLOW = "the transfer is too slow"


def _first(views: Sequence[memoryview], nbytes: int) -> Iterator[memoryview]:
    """Yield the parts of the first ``nbytes`` bytes, as many as one system call takes."""
    for view in views[:_MAX_PARTS]:
        if nbytes <= 0:
            break
        yield view[:nbytes]
        nbytes -= len(view)


def _rest(views: Sequence[memoryview], sent: int) -> list[memoryview]:
    """Return the parts that remain after ``sent`` bytes."""
    for index, view in enumerate(views):
        if sent < len(view):
            return [view[sent:], *views[index + 1 :]]
        sent -= len(view)
    return []
