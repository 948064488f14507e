"""The rings between the engine's process and the I/O process, and their use on an event loop."""

from __future__ import annotations

import asyncio
import enum
from collections import deque
from collections.abc import Callable

from offload_core.api.memory.shared_memory import SharedMemory
from offload_core.io_process.protocol import Message, parse
from offload_core.runtime.doorbell import Doorbell
from offload_core.runtime.message_ring import RingReader, RingWriter, format_ring

_RETRY_SECONDS = 0.002
_LOOK_SECONDS = 0.25


class Lane(enum.Enum):
    """The two ways from the engine's process to the I/O process and back. The value is the size of a ring, in bytes."""

    LOOP = 4 * 1024 * 1024
    """For the I/O loop: lookups and everything rare. A ring is full only if the other side has stopped."""
    DIRECT = 1024 * 1024
    """For loads and stores."""


class RingPair:
    """The rings of a lane, seen from one side. A lane has one such object on each side in its life.

    Args:
        memory: from :func:`make_rings`.
        to_process: whether this is the engine's side.
    """

    def __init__(self, memory: SharedMemory, lane: Lane, *, to_process: bool) -> None:
        first, second = _regions(memory, lane)
        self.writer = RingWriter(first if to_process else second)
        self.reader = RingReader(second if to_process else first)

    def close(self) -> None:
        """Give the memory up. Nothing may use the rings afterwards."""
        self.writer.close()
        self.reader.close()

    def write_all(self, messages: deque[bytes]) -> bool:
        """Write messages while there is room, and remove them; return whether there was one.

        Raises:
            RingError: the ring is damaged.
        """
        written = False
        while messages and self.writer.try_write(messages[0]):
            messages.popleft()
            written = True
        return written

    def check_size(self, message: bytes) -> None:
        """Check that a message fits into a ring.

        Raises:
            ValueError: it does not.
        """
        if len(message) > self.writer.max_payload_bytes:
            raise ValueError(
                f"a message of {len(message)} bytes does not fit; a ring takes {self.writer.max_payload_bytes} bytes"
            )


def make_rings() -> SharedMemory:
    """Return shared memory with two empty rings for each lane: one to the I/O process, then one back."""
    memory = SharedMemory.create("offload-rings", 2 * sum(lane.value for lane in Lane))
    for lane in Lane:
        for region in _regions(memory, lane):
            format_ring(region)
    return memory


def _regions(memory: SharedMemory, lane: Lane) -> tuple[memoryview, memoryview]:
    """Return the memory of a lane's rings."""
    start = 0 if lane is Lane.LOOP else 2 * Lane.LOOP.value
    return memory.view[start : start + lane.value], memory.view[start + lane.value : start + 2 * lane.value]


class MessageChannel:
    """One side of the rings. All methods are for the event loop.

    Args:
        own_bell: rings when the other side has written.
        other_bell: wakes the other side.
        on_message: gets each message.
        on_error: gets the error of damaged rings or messages; nothing is received after it.
    """

    def __init__(
        self,
        rings: RingPair,
        *,
        own_bell: Doorbell,
        other_bell: Doorbell,
        on_message: Callable[[Message], None],
        on_error: Callable[[Exception], None],
    ) -> None:
        self._rings = rings
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
        self._rings.check_size(message)
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
            self._rings.close()

    def _flush(self) -> None:
        self._retry = None
        if self._closed:
            return
        try:
            sent = self._rings.write_all(self._unsent)
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
            while not self._closed and (frame := self._rings.reader.read()) is not None:
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
