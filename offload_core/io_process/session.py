"""One I/O process during its life, seen from a process of the engine: its start, its calls, and its end.

A call ends with its answer, or once the process is gone with all of its threads. If the process has given the staging
memory to others, such as forks, these must be gone too. So nobody uses a call's memory again while it could still be
written to (invariant I3). The one exception is :meth:`Session.end`. A process in an uninterruptible call stays after
SIGKILL, and its calls stay with it. A replacement need not wait.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor

from offload_core.api.cancellation import to_the_end
from offload_core.api.memory.shared_memory import SharedMemory
from offload_core.io_process.control import BELLS, JOIN_DESCRIPTORS, ControlSocket, Record
from offload_core.io_process.control_channel import ControlChannel
from offload_core.io_process.direct_calls import DirectCalls
from offload_core.io_process.lent_mapping import LentMapping
from offload_core.io_process.life.joined_process import JoinedProcess
from offload_core.io_process.life.meeting_point import MeetingPoint
from offload_core.io_process.life.memory_use import MemoryUse
from offload_core.io_process.life.signs_of_life import SignsOfLife
from offload_core.io_process.log_relay import relay
from offload_core.io_process.loop_calls import LoopCalls
from offload_core.io_process.messages import Lane, RingPair, make_rings
from offload_core.io_process.protocol import Kind, Message
from offload_core.runtime.companion_process import CompanionProcess
from offload_core.runtime.doorbell import Doorbell
from offload_core.tiers.storage import StorageAwayError

logger = logging.getLogger(__name__)

_BUSY_LOOK_SECONDS, _IDLE_LOOK_SECONDS = 0.05, 0.25
_KILL_SECONDS = 0.2
"""Time in which a killed process is mostly gone."""
_DROPPED_SECONDS = 1.0
"""Time in which a process that has closed its socket is mostly gone."""
_UNMAPPED_SECONDS = 0.05
"""Pause between two looks for other processes that have the memory of a process that is gone."""
_LATER_GENERATIONS = 2
_RETRY_SECONDS = 0.02
"""Pause before the next attempt to meet, while the I/O process begins or ends."""


class Session:
    """One I/O process. All methods run on the I/O loop.

    Args:
        make_process: makes a process that is not started yet, from its descriptors and the function for its end.
        meeting_point: where the engine's processes on this host meet.
        generation: number of I/O processes before it that have ended only in part, and have their sockets still.
        threads: for the start of the process.
        on_message: gets each message that is no answer.
        on_end: called once, when the process is gone, with a description.
        on_killed: called when the process was killed because it is damaged or silent, or when others have its memory
            after its end. ``on_end`` may then follow late.
        silence_seconds: a process that has not answered for so long is killed.

    Raises:
        OSError: the system has no descriptor or no memory left.
    """

    def __init__(
        self,
        make_process: Callable[[Mapping[str, int], Callable[[str], None]], CompanionProcess],
        meeting_point: MeetingPoint,
        generation: int,
        threads: Executor,
        on_message: Callable[[Message], None],
        on_end: Callable[[Session, str], None],
        on_killed: Callable[[Session], None],
        silence_seconds: float,
    ) -> None:
        self._make_process = make_process
        self._meeting_point = meeting_point
        self._generation = generation
        self._threads = threads
        self._on_end = on_end
        self._on_killed = on_killed
        self._loop = asyncio.get_running_loop()
        with contextlib.ExitStack() as made:
            self._log, self._their_log = (made.enter_context(contextlib.closing(end)) for end in ControlSocket.pair())
            self._rings = made.enter_context(contextlib.closing(make_rings()))
            self._bells = {name: made.enter_context(contextlib.closing(Doorbell())) for name in BELLS}
            made.pop_all()
        self._control: ControlChannel | None = None
        self._theirs: list[ControlSocket | socket.socket] = [self._their_log]
        self._calls = LoopCalls(
            RingPair(self._rings, Lane.LOOP, to_process=True),
            own_bell=self._bells["to_engine"],
            other_bell=self._bells["to_process"],
            on_message=on_message,
            on_damage=self._damaged,
        )
        self.direct = DirectCalls(
            RingPair(self._rings, Lane.DIRECT, to_process=True),
            own_bell=self._bells["direct_to_engine"],
            other_bell=self._bells["direct_to_process"],
            on_message=on_message,
            on_damage=lambda error: self._loop.call_soon_threadsafe(self._damaged, error),
        )
        """Calls that need no event loop."""
        self._process: CompanionProcess | JoinedProcess | None = None
        self._look: asyncio.TimerHandle | None = None
        self._dropped: asyncio.TimerHandle | None = None
        self._staging_use: MemoryUse | None = None
        self._signs_of_life = SignsOfLife(lambda: self.call(Kind.PING, 0), self._silent, silence_seconds)
        self._is_over = self._is_closing = self._is_killed = False
        self._over = asyncio.Event()

    @property
    def pid(self) -> int | None:
        """The process id, for log lines; ``None`` if there is no process."""
        return None if self._process is None else self._process.pid

    @property
    def is_parent(self) -> bool:
        """True if this process of the engine has started the I/O process."""
        return isinstance(self._process, CompanionProcess)

    @property
    def is_killed(self) -> bool:
        """``True`` once the process was killed or has ended: it takes no more calls."""
        return self._is_killed or self._is_over

    @property
    def remains(self) -> str:
        """The words for the state in which the process was killed, but its memory may still be written to."""
        if self.pid is not None:
            return "was killed and is not gone yet"
        return "has ended, and a process that has its memory from it has not"

    async def start(self, seconds: float) -> None:
        """Meet the I/O process of the engine, or start it, and wait until it serves.

        Raises:
            OSError: it did not start.
        """
        self._log.set_blocking(False)
        self._loop.add_reader(self._log.fileno(), self._on_log)
        try:
            async with asyncio.timeout(seconds):
                await self._meet()
        except BaseException:
            if self.pid is None:
                self._ended("did not start")
            await self.abandon()
            raise
        if not self.is_killed:
            self._signs_of_life.watch()
        self._take_direct_answers()

    async def _meet(self) -> None:
        while True:
            listener = connection = None
            try:
                for later in range(_LATER_GENERATIONS, 0, -1):  # of another process, which knew of a held socket
                    connection = connection or self._meeting_point.connect(self._generation + later)
                if connection is None and (listener := self._meeting_point.try_listen(self._generation)) is None:
                    connection = self._meeting_point.connect(self._generation)
            except OSError as error:
                logger.warning("this process of the engine gets an I/O process of its own: %s", error)
                await self._start_process()
                return
            if listener is not None:
                self._theirs.append(listener)
                await self._start_process(listener)
                return
            if connection is not None:
                with contextlib.suppress(ConnectionError):  # it ends at this moment
                    await self._join(connection)
                    return
            await asyncio.sleep(_RETRY_SECONDS)

    async def _start_process(self, listener: socket.socket | None = None) -> None:
        end, their_control = ControlSocket.pair()
        self._control = control = ControlChannel(end, self._on_end_of_file)
        descriptors = {"control": their_control.fileno(), **self._descriptors()}
        self._theirs.append(their_control)
        if listener is not None:
            descriptors["listener"] = listener.fileno()
        self._process = process = self._make_process(descriptors, self._gone_on_any_thread)
        await to_the_end(self._loop.run_in_executor(self._threads, process.start))
        self._close_theirs()
        await control.ready

    async def _join(self, connection: socket.socket) -> None:
        """Join the process that another process of the engine has started.

        Raises:
            ConnectionError: it has ended meanwhile.
        """
        self._control = control = ControlChannel(ControlSocket(connection), self._on_end_of_file)
        try:
            descriptors = self._descriptors()
            control.tell({"join": os.getpid()}, [descriptors[name] for name in JOIN_DESCRIPTORS])
            record, descriptor = await control.ready_with_descriptor()
        except ConnectionError as error:
            control.close(error)
            raise
        self._process = JoinedProcess(record["ready"], descriptor, self._gone)
        self._close_theirs()

    def _descriptors(self) -> dict[str, int]:
        """Return the descriptors of :data:`JOIN_DESCRIPTORS`, which the I/O process gets."""
        bells = {name: bell.fileno() for name, bell in self._bells.items()}
        return {"log": self._their_log.fileno(), "rings": self._rings.descriptor, **bells}

    def _close_theirs(self) -> None:
        for end in self._theirs:
            end.close()
        self._theirs.clear()

    def call(self, kind: Kind, tier: int, body: bytes = b"") -> asyncio.Future[Message]:
        """Send a request. The future ends with the answer, or with :class:`StorageAwayError`.

        A call whose future is cancelled goes on.

        Raises:
            StorageAwayError: the process takes no more calls.
        """
        if self.is_killed:
            raise StorageAwayError("the I/O process has ended and is being replaced")
        return self._calls.call(kind, tier, body)

    def tell(self, kind: Kind, tier: int, body: bytes) -> None:
        """Send a message without an answer; it is lost if the process has ended."""
        if not self.is_killed:
            self._calls.tell(kind, tier, body)

    async def ask(self, record: Record, descriptors: Sequence[int] = ()) -> Record:
        """Send a control message, and return its answer.

        Raises:
            OSError: the process is gone, or reports this error.
        """
        if self._is_over or self._control is None:
            raise StorageAwayError("the I/O process has ended and is being replaced")
        return await self._control.ask(record, descriptors)

    async def share_staging(self, memory: SharedMemory) -> None:
        """Let the process map the staging memory. Call it once.

        Raises:
            OSError: the process is gone, or cannot map it.
        """
        use = MemoryUse(memory)
        try:
            await self.ask({"staging": memory.nbytes}, [use.descriptor])
        finally:
            use.sent()
            self._staging_use = use

    async def lent_memory(self, tier: int, label: str) -> LentMapping | None:
        """Map the memory that a tier lends; ``None`` if it lends none to other processes.

        Args:
            label: the words for the tier in log lines.

        Raises:
            OSError: the process is gone, or the memory cannot be mapped.
        """
        if self._is_over or self._control is None:
            raise StorageAwayError("the I/O process has ended and is being replaced")
        answer, descriptors = await self._control.ask_for_descriptors({"lent": tier})
        if not descriptors:
            return None
        try:
            memory = SharedMemory.from_descriptor(descriptors[0])
        except BaseException:
            os.close(descriptors[0])
            raise
        return LentMapping(memory, may_be_pinned=answer["pin"], label=label)

    def kill(self) -> None:
        """Kill the process. :attr:`on_end` follows once it is gone."""
        self._is_killed = True
        self._signs_of_life.stop()
        self.direct.refuse()
        if self._process is not None:
            self._process.kill()

    async def end(self, seconds: float) -> None:
        """Leave the process, which ends with the last one that leaves.

        If it has not answered or ended after ``seconds``, its parent kills it; the others only leave it. A call that
        even outlives that is not waited for.

        The calls of this process may go on if the I/O process stays. So their memory must not be used again, also after
        they have ended here: call this when the engine has ended.
        """
        self._is_closing = True
        self._signs_of_life.stop()
        with contextlib.suppress(OSError, TimeoutError):
            async with asyncio.timeout(seconds):
                await self.call(Kind.PING, 0)  # after it, the process has all earlier messages
                if (await self.ask({"end": True}))["stays"]:
                    self._ended("serves other processes of the engine")
                await self._over.wait()
        if not self._over.is_set():
            await self.abandon()

    async def abandon(self) -> None:
        """Kill the process, and wait a moment for its end. A process that others may use is only left."""
        if isinstance(self._process, JoinedProcess):
            self._ended("serves other processes of the engine")
            return
        self.kill()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_KILL_SECONDS):
                await self._over.wait()

    def _on_end_of_file(self) -> None:
        if self._process is None and self._control is not None:
            self._control.fail(ConnectionResetError("the I/O process has ended before it served"))
        elif not self._is_closing:
            self._dropped = self._loop.call_later(_DROPPED_SECONDS, self._kill_dropped)

    def _kill_dropped(self) -> None:
        """Kill a process that lives, but has closed its socket."""
        if not self.is_killed:
            logger.error("the I/O process (pid %s) serves this process no more and is killed", self.pid)
            self._kill_unasked()

    def _on_log(self) -> None:
        if not self._log.receive_all(lambda record, _: relay(record)):
            self._loop.remove_reader(self._log.fileno())

    def _damaged(self, error: Exception) -> None:
        logger.error("the I/O process (pid %s) has sent damaged messages and is killed: %s", self.pid, error)
        self._kill_unasked()

    def _take_direct_answers(self) -> None:
        """Take the answers of direct calls while the engine's thread is busy or idle."""
        if not self._is_over:
            self.direct.receive_for_another_thread()
            seconds = _BUSY_LOOK_SECONDS if self.direct.has_calls else _IDLE_LOOK_SECONDS
            self._look = self._loop.call_later(seconds, self._take_direct_answers)

    def _silent(self, seconds: float) -> None:
        if not self.is_killed:
            logger.warning("the I/O process (pid %s) has not answered for %g s and is killed", self.pid, seconds)
            self._kill_unasked()

    def _kill_unasked(self) -> None:
        self.kill()
        self._on_killed(self)

    def _gone_on_any_thread(self, description: str) -> None:
        """Note that the process is gone, on the companion's thread."""
        with contextlib.suppress(RuntimeError):  # the loop has been closed
            self._loop.call_soon_threadsafe(self._gone, description)

    def _gone(self, description: str) -> None:
        """Note that the process is gone with all of its threads. Others that have its memory are waited for."""
        if self._is_over:
            return
        if self._staging_use is None or self._staging_use.has_ended():
            self._ended(description)
            return
        if not self.is_killed:  # nobody has killed it, but it takes no more calls, and its end may be late
            self._kill_unasked()
        self._loop.call_later(_UNMAPPED_SECONDS, self._gone, description)

    def _ended(self, description: str) -> None:
        """Fail the calls without an answer. Nobody writes to their memory any more, or the process was left."""
        if self._is_over:
            return
        self._calls.receive()  # answers from before its end
        self._is_over = True
        if self._control is not None:
            self._control.receive()
        self._on_log()
        self._signs_of_life.stop()
        for timer in (self._look, self._dropped):
            if timer is not None:
                timer.cancel()
        self._calls.close()
        self._loop.remove_reader(self._log.fileno())
        self._log.close()
        self._close_theirs()
        if isinstance(self._process, JoinedProcess):
            self._process.close()
        error = StorageAwayError(f"the I/O process {description}")
        self.direct.close(error)
        for bell in self._bells.values():
            bell.close()
        self._rings.close()
        if self._control is not None:
            self._control.close(error)
        self._calls.fail_all(error)
        self._over.set()
        self._on_end(self, description)
