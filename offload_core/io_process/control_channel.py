"""The control socket on the event loop of a process of the engine: questions, answers, and the end of file."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import os
from collections import deque
from collections.abc import Callable, Sequence

from offload_core.io_process import protocol
from offload_core.io_process.control import ControlSocket, Record
from offload_core.tiers.storage import StorageAwayError

logger = logging.getLogger(__name__)


class ControlChannel:
    """One connection to an I/O process. All methods run on the event loop.

    Args:
        socket: belongs to this object.
        on_end_of_file: called once if the other side closes the socket.
    """

    def __init__(self, socket: ControlSocket, on_end_of_file: Callable[[], None]) -> None:
        self._socket = socket
        self._on_end_of_file = on_end_of_file
        self._loop = asyncio.get_running_loop()
        self._answers: deque[asyncio.Future[tuple[Record, list[int]]]] = deque()
        self._is_closed = False
        self.ready: asyncio.Future[tuple[Record, list[int]]] = self._loop.create_future()
        """The first message of the process, with its descriptors; an error if it cannot serve."""
        socket.set_blocking(False)
        self._loop.add_reader(socket.fileno(), self.receive)

    async def ready_with_descriptor(self) -> tuple[Record, int]:
        """Return the first message of a process that another one has started, with the descriptor that belongs to it.

        Raises:
            OSError: the process cannot serve, or this process has no room for the descriptor.
        """
        record, descriptors = await self.ready
        if len(descriptors) != 1:  # the kernel drops those that do not fit
            _close_all(descriptors)
            raise OSError(errno.EMFILE, "the descriptor of the I/O process did not come; too many files may be open")
        return record, descriptors[0]

    def tell(self, record: Record, descriptors: Sequence[int] = ()) -> None:
        """Send a message without an answer.

        Raises:
            OSError: the process is gone.
        """
        self._socket.send(record, descriptors)

    async def ask(self, record: Record, descriptors: Sequence[int] = ()) -> Record:
        """Send a message, and return its answer; see :meth:`ask_for_descriptors`."""
        answered, _ = await self.ask_for_descriptors(record, descriptors)
        return answered

    async def ask_for_descriptors(self, record: Record, descriptors: Sequence[int] = ()) -> tuple[Record, list[int]]:
        """Send a message, and return its answer with the descriptors that came with it.

        Raises:
            OSError: the process is gone, or reports this error.
        """
        if self._is_closed:
            raise StorageAwayError("the I/O process has ended and is being replaced")
        answer: asyncio.Future[tuple[Record, list[int]]] = self._loop.create_future()
        with contextlib.suppress(ConnectionError):  # the process has ended; the end of file, read next, tells of it
            self._socket.send(record, descriptors)
        self._answers.append(answer)
        answered, received = await answer
        if "error" in answered:
            raise protocol.Reader(memoryview(bytes.fromhex(answered["error"]))).error()
        return answered, received

    def receive(self) -> None:
        """Take the messages that are there."""
        if not self._is_closed and not self._socket.receive_all(self._take):
            self._loop.remove_reader(self._socket.fileno())
            self._on_end_of_file()

    def close(self, error: Exception) -> None:
        """Close the socket; the questions without an answer end in ``error``. Harmless when repeated."""
        if self._is_closed:
            return
        self._is_closed = True
        self._loop.remove_reader(self._socket.fileno())
        self._socket.close()
        for answer in self._answers:
            if not answer.done():
                answer.set_exception(error)
        self._answers.clear()
        self.fail(error)
        with contextlib.suppress(asyncio.CancelledError):
            self.ready.exception()  # retrieved, if nobody waits for it

    def fail(self, error: Exception) -> None:
        """End the wait for the first message, if it has not come."""
        if not self.ready.done():
            self.ready.set_exception(error)

    def _take(self, record: Record, descriptors: list[int]) -> None:
        if "ready" in record and not self.ready.done():
            self.ready.set_result((record, descriptors))
        elif "failed" in record:
            if self.ready.done():
                logger.error("the I/O process has failed: %s", record["failed"])
            self.fail(OSError(f"the I/O process cannot serve: {record['failed']}"))
        elif self._answers and not (answer := self._answers.popleft()).done():
            answer.set_result((record, descriptors))
        else:  # the question was cancelled
            _close_all(descriptors)


def _close_all(descriptors: Sequence[int]) -> None:
    for descriptor in descriptors:
        os.close(descriptor)
