"""Calls to the I/O process without an event loop: any thread makes them, and any thread takes their answers.

The engine's thread sends loads and stores here, and takes the answers when it polls. So the end of a call wakes no
other thread of the engine's process, which would take the interpreter lock away from a step.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable
from itertools import count

from offload_core.io_process import protocol
from offload_core.io_process.messages import RingPair
from offload_core.io_process.protocol import Kind, Message
from offload_core.runtime.doorbell import Doorbell
from offload_core.tiers.storage import StorageAwayError

logger = logging.getLogger(__name__)

OnAnswer = Callable[[Message | Exception], None]
"""Gets the answer of a call, or the error that it has ended in, on any thread."""


class DirectCalls:
    """The direct calls to one process. Thread-safe; no method waits.

    Args:
        own_bell: rings when the process has answered.
        other_bell: wakes the process.
        on_message: gets messages that are no answers, on any thread, before any answer that follows them is delivered.
            They are taken while a call has no answer yet. It must not use this object.
        on_damage: called once, on any thread, if the rings or messages are damaged. No more answers are taken then.
    """

    def __init__(
        self,
        rings: RingPair,
        own_bell: Doorbell,
        other_bell: Doorbell,
        on_message: Callable[[Message], None],
        on_damage: Callable[[Exception], object],
    ) -> None:
        self._rings = rings
        self._own_bell = own_bell
        self._other_bell = other_bell
        self._on_message = on_message
        self._on_damage = on_damage
        self._lock = threading.Lock()
        self._numbers = count(1)
        self._calls: dict[int, OnAnswer] = {}
        self._unsent: deque[bytes] = deque()
        self._refuses = self._is_closed = False

    @property
    def has_calls(self) -> bool:
        """True if a call has no answer yet."""
        return bool(self._calls)

    @property
    def bell(self) -> Doorbell:
        """Rings when there may be an answer. Do not clear it; call :meth:`clear_bell`."""
        return self._own_bell

    def clear_bell(self) -> None:
        """Clear the bell, before :meth:`receive`."""
        with self._lock:
            if not self._is_closed:
                self._own_bell.clear()

    def send(self, kind: Kind, tier: int, body: bytes, on_answer: OnAnswer) -> None:
        """Send a request. This call itself does not call ``on_answer``.

        Raises:
            StorageAwayError: the process takes no more calls.
            ValueError: the message is larger than a ring.
        """
        with self._lock:
            if self._refuses:
                raise StorageAwayError("the I/O process has ended and is being replaced")
            number = next(self._numbers)
            message = protocol.message(kind, tier, number, body)
            self._rings.check_size(message)
            self._calls[number] = on_answer
            self._unsent.append(message)
            damage = self._try_flush()
        if damage is not None:
            self._on_damage(damage)

    def tell(self, kind: Kind, tier: int, body: bytes) -> None:
        """Send a message without an answer; it is lost if the process takes no more calls."""
        damage = None
        with self._lock:
            if not self._refuses:
                self._unsent.append(protocol.message(kind, tier, 0, body))
                damage = self._try_flush()
        if damage is not None:
            self._on_damage(damage)

    def receive(self) -> bool:
        """Take the answers that are there. If another thread does so at this moment, nothing happens.

        Returns:
            Whether there were answers.
        """
        if not (self._calls or self._unsent) or not self._lock.acquire(blocking=False):
            return False
        try:
            answers, damage = self._read()
        finally:
            self._lock.release()
        self._deliver(answers)
        if damage is not None:
            self._on_damage(damage)
        return bool(answers)

    def receive_for_another_thread(self) -> None:
        """Take the answers that are there, and wake the thread that may wait for their bell, which it has cleared."""
        if self.receive():
            with self._lock:
                if not self._is_closed:
                    self._own_bell.ring()

    def refuse(self) -> None:
        """Take no more calls, since the process will end."""
        with self._lock:
            self._refuses = True

    def close(self, error: Exception) -> None:
        """End all calls without an answer in ``error``. Call it when the process is gone with all of its threads.

        Afterwards nothing uses the rings and the bells.
        """
        with self._lock:
            answers, _ = self._read()  # from before its end
            self._refuses = self._is_closed = True
            unanswered = list(self._calls.values())
            self._calls.clear()
            self._unsent.clear()
            self._rings.close()
        self._deliver(ends := [*answers, *((on_answer, error) for on_answer in unanswered)])
        if ends:  # another thread may wait for them
            self._own_bell.ring()

    def _read(self) -> tuple[list[tuple[OnAnswer, Message | Exception]], Exception | None]:
        """Return the answers that are there with their receivers, and the error of damaged ones. Needs the lock."""
        answers: list[tuple[OnAnswer, Message | Exception]] = []
        if self._is_closed:
            return answers, None
        try:
            while (frame := self._rings.reader.read()) is not None:
                message = protocol.parse(frame)
                if message.kind not in (Kind.DONE, Kind.FAILED):
                    self._take_message(message)  # at once: another thread may deliver the answers behind it first
                elif (on_answer := self._calls.pop(message.call, None)) is not None:
                    failed = message.kind is not Kind.DONE
                    answers.append((on_answer, protocol.Reader(message.body).error() if failed else message))
        except Exception as error:
            self._refuses = self._is_closed = True
            return answers, error
        return answers, self._try_flush()

    def _try_flush(self) -> Exception | None:
        """Send messages while the ring has room, and return the error of a damaged ring. Needs the lock."""
        try:
            if self._rings.write_all(self._unsent):
                self._other_bell.ring()
        except Exception as error:
            self._refuses = self._is_closed = True
            return error
        return None

    def _take_message(self, message: Message) -> None:
        try:
            self._on_message(message)
        except Exception:
            logger.exception("a message could not be handled; this is a defect, please report it")

    @staticmethod
    def _deliver(answers: list[tuple[OnAnswer, Message | Exception]]) -> None:
        for on_answer, answer in answers:
            try:
                on_answer(answer)
            except Exception:
                logger.exception("the end of a call could not be handled; this is a defect, please report it")
