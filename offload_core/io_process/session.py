"""One I/O process during its life, seen from the engine's process: its start, its calls, and its end.

A call ends with its answer, or once the process is gone with all of its threads. So nobody uses a call's memory again
while a thread of the process could still write into it (invariant I3). A process in an uninterruptible call stays after
SIGKILL, and its calls stay with it. A replacement need not wait for that.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from itertools import count
from typing import Any, Final

from offload_core.api.cancellation import to_the_end
from offload_core.config.model import OffloadConfig
from offload_core.io_process import protocol
from offload_core.io_process.control import ControlSocket, Record
from offload_core.io_process.direct_calls import DirectCalls
from offload_core.io_process.log_relay import relay
from offload_core.io_process.messages import Lane, MessageChannel, RingPair, make_rings
from offload_core.io_process.protocol import Kind, Message
from offload_core.runtime.companion_process import CompanionProcess
from offload_core.runtime.doorbell import Doorbell
from offload_core.tiers.storage import StorageAwayError

logger = logging.getLogger(__name__)

MODULE: Final = "offload_core.io_process"
BELLS: Final = ("to_process", "to_engine", "direct_to_process", "direct_to_engine")
"""The names of the doorbells: per lane one for each side."""
_PING_SECONDS = 1.0
_BUSY_LOOK_SECONDS, _IDLE_LOOK_SECONDS = 0.05, 0.25
_KILL_SECONDS = 0.2
"""Time in which a killed process is mostly gone."""


class Session:
    """One I/O process. All methods run on the I/O loop.

    Args:
        threads: for the start of the process.
        on_message: gets each message that is no answer.
        on_end: called once, when the process is gone, with a description.
        on_killed: called when the process is killed because it is damaged or silent.
        silence_seconds: a process that has not answered for so long is killed.
    """

    def __init__(
        self,
        config: OffloadConfig,
        threads: Executor,
        on_message: Callable[[Message], None],
        on_end: Callable[[Session, str], None],
        on_killed: Callable[[Session], None],
        silence_seconds: float,
    ) -> None:
        self._config = config
        self._threads = threads
        self._on_message = on_message
        self._on_end = on_end
        self._on_killed = on_killed
        self._silence_seconds = silence_seconds
        self._loop = asyncio.get_running_loop()
        self._control, their_control = ControlSocket.pair()
        self._log, their_log = ControlSocket.pair()
        self._rings = make_rings()
        self._bells = {name: Doorbell() for name in BELLS}
        self._channel = MessageChannel(
            RingPair(self._rings, Lane.LOOP, to_process=True),
            own_bell=self._bells["to_engine"],
            other_bell=self._bells["to_process"],
            on_message=self._received,
            on_error=self._damaged,
        )
        self.direct = DirectCalls(
            RingPair(self._rings, Lane.DIRECT, to_process=True),
            own_bell=self._bells["direct_to_engine"],
            other_bell=self._bells["direct_to_process"],
            on_damage=self._damaged_on_any_thread,
        )
        """Calls that need no event loop."""
        self._theirs = (their_control, their_log)
        self._companion = CompanionProcess(
            MODULE,
            descriptors={
                "control": their_control.fileno(),
                "log": their_log.fileno(),
                "rings": self._rings.descriptor,
                **{name: bell.fileno() for name, bell in self._bells.items()},
            },
            payload=json.dumps(
                {
                    "protocol": protocol.VERSION,
                    "config": dict(config.keys),
                    "log_level": logging.getLogger("offload_core").getEffectiveLevel(),
                },
                default=str,  # a script may pass paths
            ).encode(),
            limits=config.settings.io_process_limits,
            on_end=self._companion_ended,
        )
        self._calls = count(1)
        self._pending: dict[int, asyncio.Future[Message]] = {}
        self._ready: asyncio.Future[Record] = self._loop.create_future()
        self._control_answers: deque[asyncio.Future[Record]] = deque()
        self._ping: asyncio.TimerHandle | None = None
        self._look: asyncio.TimerHandle | None = None
        self._unanswered_pings = 0
        self._is_over = self._is_closing = self._is_killed = False
        self._over = asyncio.Event()

    @property
    def pid(self) -> int | None:
        """The process id, for log lines; ``None`` if there is no process."""
        return self._companion.pid

    @property
    def is_killed(self) -> bool:
        """``True`` once the process was killed or has ended: it takes no more calls."""
        return self._is_killed or self._is_over

    async def start(self, seconds: float) -> None:
        """Start the process and wait until it serves.

        Raises:
            OSError: it did not start.
        """
        for end, reader in ((self._control, self._on_control), (self._log, self._on_log)):
            end.set_blocking(False)
            self._loop.add_reader(end.fileno(), reader)
        try:
            await to_the_end(self._loop.run_in_executor(self._threads, self._companion.start))
            for end in self._theirs:
                end.close()
            async with asyncio.timeout(seconds):
                await self._ready
        except BaseException:
            if self._companion.pid is None:
                self._ended("did not start")
            await self.abandon()
            raise
        self._ping = self._loop.call_later(_PING_SECONDS, self._send_ping)
        self._take_direct_answers()

    def call(self, kind: Kind, tier: int, body: bytes = b"") -> asyncio.Future[Message]:
        """Send a request. The future ends with the answer, or with :class:`StorageAwayError`.

        A call whose future is cancelled goes on.

        Raises:
            StorageAwayError: the process takes no more calls.
        """
        if self.is_killed:
            raise StorageAwayError("the I/O process has ended and is being replaced")
        number = next(self._calls)
        self._pending[number] = answer = self._loop.create_future()
        self._channel.send(protocol.message(kind, tier, number, body))
        return answer

    def tell(self, kind: Kind, tier: int, body: bytes) -> None:
        """Send a message without an answer; it is lost if the process has ended."""
        if not self.is_killed:
            self._channel.send(protocol.message(kind, tier, 0, body))

    async def ask(self, record: Record, descriptors: Sequence[int] = ()) -> Record:
        """Send a control message, and return its answer.

        Raises:
            OSError: the process is gone, or reports this error.
        """
        if self._is_over:
            raise StorageAwayError("the I/O process has ended and is being replaced")
        answer: asyncio.Future[Record] = self._loop.create_future()
        self._control.send(record, descriptors)
        self._control_answers.append(answer)
        answered = await answer
        if "error" in answered:
            raise protocol.Reader(memoryview(bytes.fromhex(answered["error"]))).error()
        return answered

    def kill(self) -> None:
        """Kill the process. :attr:`on_end` follows once it is gone."""
        self._is_killed = True
        self.direct.refuse()
        self._companion.kill()

    async def end(self, seconds: float) -> None:
        """Ask the process to end; kill it after ``seconds``, and do not wait for a call that even outlives that."""
        self._is_closing = True
        with contextlib.suppress(OSError, TimeoutError):
            async with asyncio.timeout(seconds):
                await self.call(Kind.PING, 0)  # after it, the process has all earlier messages
                await self.ask({"end": True})
                await self._over.wait()
        if not self._over.is_set():
            await self.abandon()

    async def abandon(self) -> None:
        """Kill the process, and wait a moment for its end."""
        self.kill()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_KILL_SECONDS):
                await self._over.wait()

    def _received(self, message: Message) -> None:
        if message.kind not in (Kind.DONE, Kind.FAILED):
            self._on_message(message)
        elif (answer := self._pending.pop(message.call, None)) is not None and not answer.done():
            if message.kind is Kind.DONE:
                answer.set_result(message)
            else:
                answer.set_exception(protocol.Reader(message.body).error())

    def _on_control(self) -> None:
        if not self._control.receive_all(self._take_record):
            self._loop.remove_reader(self._control.fileno())

    def _on_log(self) -> None:
        if not self._log.receive_all(lambda record, _: relay(record)):
            self._loop.remove_reader(self._log.fileno())

    def _take_record(self, record: Record, _: list[int]) -> None:
        if "ready" in record and not self._ready.done():
            self._ready.set_result(record)
        elif "failed" in record:
            self._fail_start(str(record["failed"]))
        elif self._control_answers and not (answer := self._control_answers.popleft()).done():
            answer.set_result(record)

    def _fail_start(self, reason: str) -> None:
        if not self._ready.done():
            self._ready.set_exception(OSError(f"the I/O process cannot serve: {reason}"))
        else:
            logger.error("the I/O process has failed: %s", reason)

    def _damaged(self, error: Exception) -> None:
        logger.error("the I/O process (pid %s) has sent damaged messages and is killed: %s", self.pid, error)
        self.kill()
        self._on_killed(self)

    def _damaged_on_any_thread(self, error: Exception) -> None:
        self._loop.call_soon_threadsafe(self._damaged, error)

    def _take_direct_answers(self) -> None:
        """Take the answers of direct calls while the engine's thread is busy or idle."""
        if not self._is_over:
            self.direct.receive()
            seconds = _BUSY_LOOK_SECONDS if self.direct.has_calls else _IDLE_LOOK_SECONDS
            self._look = self._loop.call_later(seconds, self._take_direct_answers)

    def _send_ping(self) -> None:
        """Ask the process for a sign of life. A process that a debugger or a signal stopped gives none.

        Ticks are counted, and not seconds: after a stop of this process too, the other one has time to answer.
        """
        if self.is_killed or self._is_closing:
            return
        if self._unanswered_pings * _PING_SECONDS >= self._silence_seconds:
            logger.warning(
                "the I/O process (pid %s) has not answered for %g s and is killed", self.pid, self._silence_seconds
            )
            self.kill()
            self._on_killed(self)
            return
        self._unanswered_pings += 1
        self.call(Kind.PING, 0).add_done_callback(self._pinged)
        self._ping = self._loop.call_later(_PING_SECONDS, self._send_ping)

    def _pinged(self, answer: asyncio.Future[Message]) -> None:
        if not answer.cancelled() and answer.exception() is None:
            self._unanswered_pings = 0

    def _companion_ended(self, description: str) -> None:
        """Note the end, on the companion's thread."""
        with contextlib.suppress(RuntimeError):  # the loop has been closed
            self._loop.call_soon_threadsafe(self._ended, description)

    def _ended(self, description: str) -> None:
        """Fail the calls without an answer. The process is gone with all of its threads."""
        if self._is_over:
            return
        self._channel.receive()  # answers from before its end
        self._is_over = True
        self._on_control()
        self._on_log()
        for timer in (self._ping, self._look):
            if timer is not None:
                timer.cancel()
        self._channel.close()
        for end in (self._control, self._log):
            self._loop.remove_reader(end.fileno())
            end.close()
        for end in self._theirs:
            end.close()
        error = StorageAwayError(f"the I/O process {description}")
        self.direct.close(error)
        for bell in self._bells.values():
            bell.close()
        self._rings.close()
        unanswered: list[asyncio.Future[Any]] = [*self._pending.values(), *self._control_answers, self._ready]
        for answer in unanswered:
            if not answer.done():
                answer.set_exception(error)
        self._pending.clear()
        self._control_answers.clear()
        with contextlib.suppress(asyncio.CancelledError, asyncio.InvalidStateError):
            self._ready.exception()  # retrieved, if nobody waits for it
        self._over.set()
        self._on_end(self, description)
