"""Calls to the I/O process on the event loop, each with a future for its answer."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from itertools import count

from offload_core.io_process import protocol
from offload_core.io_process.messages import MessageChannel, RingPair
from offload_core.io_process.protocol import Kind, Message
from offload_core.runtime.doorbell import Doorbell


class LoopCalls:
    """The calls to one process. All methods run on the event loop.

    Args:
        own_bell: rings when the process has answered.
        other_bell: wakes the process.
        on_message: gets each message that is no answer.
        on_damage: called if the rings or messages are damaged.
    """

    def __init__(
        self,
        rings: RingPair,
        own_bell: Doorbell,
        other_bell: Doorbell,
        on_message: Callable[[Message], None],
        on_damage: Callable[[Exception], None],
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._channel = MessageChannel(
            rings, own_bell=own_bell, other_bell=other_bell, on_message=self._received, on_error=on_damage
        )
        self._on_message = on_message
        self._numbers = count(1)
        self._pending: dict[int, asyncio.Future[Message]] = {}

    def __len__(self) -> int:
        """Return the number of calls without an answer."""
        return len(self._pending)

    def call(self, kind: Kind, tier: int, body: bytes) -> asyncio.Future[Message]:
        """Send a request. A call whose future is cancelled goes on."""
        number = next(self._numbers)
        self._pending[number] = answer = self._loop.create_future()
        self._channel.send(protocol.message(kind, tier, number, body))
        return answer

    def tell(self, kind: Kind, tier: int, body: bytes) -> None:
        """Send a message without an answer."""
        self._channel.send(protocol.message(kind, tier, 0, body))

    def receive(self) -> None:
        """Take the messages that are there."""
        self._channel.receive()

    def close(self) -> None:
        """Take no more messages. Call it before the doorbells are closed."""
        self._channel.close()

    def fail_all(self, error: Exception) -> None:
        """End the calls without an answer in ``error``."""
        for answer in self._pending.values():
            if not answer.done():
                answer.set_exception(error)
        self._pending.clear()

    def _received(self, message: Message) -> None:
        if message.kind not in (Kind.DONE, Kind.FAILED):
            self._on_message(message)
        elif (answer := self._pending.pop(message.call, None)) is not None and not answer.done():
            if message.kind is Kind.DONE:
                answer.set_result(message)
            else:
                answer.set_exception(protocol.Reader(message.body).error())
