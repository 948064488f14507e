"""Sends and receives the messages of one process through a pair of rings, on an event loop."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

from offload_core.io_process.protocol import Message, parse
from offload_core.runtime.doorbell import Doorbell
from offload_core.runtime.message_ring import RingReader, RingWriter, format_ring
from offload_core.runtime.shared_memory import SharedMemory

RING_BYTES = 4 * 1024 * 1024
"""Bytes of one ring. Few calls run at once, so that a ring is full only if the other side has stopped."""
_RETRY_SECONDS = 0.002
_LOOK_SECONDS = 0.25


def make_rings() -> SharedMemory:
    """Return shared memory with two empty rings: one to the I/O process, then one back."""
    memory = SharedMemory.create("offload-rings", 2 * RING_BYTES)
    format_ring(memory.view[:RING_BYTES])
    format_ring(memory.view[RING_BYTES:])
    return memory


class MessageChannel:
    """One side of the rings. All methods are for the event loop.

    Args:
        memory: from :func:`make_rings`.
        to_process: whether this is the engine's side, which writes the first ring.
        own_bell: rings when the other side has written.
        other_bell: wakes the other side.
        on_message: gets each message.
        on_error: gets the error of damaged rings or messages; nothing is received after it.
    """

    def __init__(
        self,
        memory: SharedMemory,
        *,
        to_process: bool,
        own_bell: Doorbell,
        other_bell: Doorbell,
        on_message: Callable[[Message], None],
        on_error: Callable[[Exception], None],
    ) -> None:
        first, second = memory.view[:RING_BYTES], memory.view[RING_BYTES:]
        self._writer = RingWriter(first if to_process else second)
        self._reader = RingReader(second if to_process else first)
        self._own_bell = own_bell
        self._other_bell = other_bell
        self._on_message = on_message
        self._on_error = on_error
        self._unsent: deque[bytes] = deque()
        self._retry: asyncio.TimerHandle | None = None
        self._look: asyncio.TimerHandle | None = None
        self._loop = asyncio.get_running_loop()
        self._closed = False
        self._loop.add_reader(own_bell.fileno(), self.receive)
        self._look_again()

    def send(self, message: bytes) -> None:
        """Send a message. If the ring is full, it is sent as soon as there is room.

        Raises:
            ValueError: the message is larger than the ring.
        """
        if len(message) > self._writer.max_payload_bytes:
            raise ValueError(f"a message of {len(message)} bytes does not fit into a ring of {RING_BYTES} bytes")
        self._unsent.append(message)
        if self._retry is None:
            self._flush()

    def close(self) -> None:
        """Send and receive nothing more. Harmless when repeated. The caller closes the memory and the bells."""
        if not self._closed:
            self._closed = True
            self._loop.remove_reader(self._own_bell.fileno())
            for timer in (self._retry, self._look):
                if timer is not None:
                    timer.cancel()
            self._unsent.clear()

    def _flush(self) -> None:
        self._retry = None
        if self._closed:
            return
        sent = False
        try:
            while self._unsent and self._writer.try_write(self._unsent[0]):
                self._unsent.popleft()
                sent = True
        except Exception as error:  # a damaged ring
            self._fail(error)
            return
        if sent:
            self._other_bell.ring()
        if self._unsent:
            self._retry = self._loop.call_later(_RETRY_SECONDS, self._flush)

    def receive(self) -> None:
        """Receive the messages that are there."""
        if self._closed:
            return
        self._own_bell.clear()
        try:
            while not self._closed and (frame := self._reader.read()) is not None:
                self._on_message(parse(frame))
        except Exception as error:  # a damaged ring or message
            self._fail(error)

    def _look_again(self) -> None:
        """Look for a frame that was not complete when the bell rang, as processors with weak memory order allow."""
        self.receive()
        if not self._closed:
            self._look = self._loop.call_later(_LOOK_SECONDS, self._look_again)

    def _fail(self, error: Exception) -> None:
        self.close()
        self._on_error(error)
