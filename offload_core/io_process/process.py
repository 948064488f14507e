"""The I/O process of an engine, seen from one of its processes: the start, replacements, and the end."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import threading
from collections.abc import Callable, Sequence
from functools import partial
from itertools import count
from typing import ClassVar, Final

from offload_core.api.cancellation import to_the_end
from offload_core.api.capabilities import Capabilities
from offload_core.api.errors import ConfigError
from offload_core.api.events import Event
from offload_core.api.memory.shared_memory import SharedMemory
from offload_core.config.limits import Limits
from offload_core.config.model import OffloadConfig, TierConfig
from offload_core.io_process.direct_calls import DirectCalls
from offload_core.io_process.lent_mapping import LentMapping
from offload_core.io_process.life.companion import make_companion
from offload_core.io_process.life.meeting_point import MeetingPoint
from offload_core.io_process.life.reopening import reopen
from offload_core.io_process.protocol import Kind, Message, Reader, pack_event
from offload_core.io_process.remote_storage import RemoteStorage, pack_objects
from offload_core.io_process.session import Session
from offload_core.plugins.registry import PluginRegistry
from offload_core.runtime.companion_process import WorkingFolder
from offload_core.runtime.io_loop import IoLoop, log_unexpected, result_within
from offload_core.runtime.metrics import Counters
from offload_core.runtime.restart_pause import RestartPause
from offload_core.runtime.threads import DaemonExecutor
from offload_core.tiers.staged_object import StagedObject
from offload_core.tiers.storage import StorageAwayError, StorageEvents

logger = logging.getLogger(__name__)

START_SECONDS: Final = 30.0
"""Limit on the start of a process, for an interpreter on a slow file system."""
_GONE_SECONDS: Final = 2.0
"""A killed process that is not gone by then is replaced all the same."""


class IoProcess:
    """The I/O process that the halves of a connector in one process share.

    Its calls run on the I/O loop. A process that ends is replaced: at once, then after growing pauses. The calls under
    way fail, and the tiers answer as absent until the next process has opened them.

    The process serves the other processes of the engine on this host too. The first of them starts it. Relative paths
    start in the working folder that the engine's process had when it made this object.

    Args:
        name: unique for an engine, and the same in all of its processes.
        io: the I/O loop.
        config: the process reads this configuration again, without its files.
    """

    _shared: ClassVar[dict[str, IoProcess]] = {}
    _class_lock = threading.Lock()

    def __init__(self, name: str, io: IoLoop, config: OffloadConfig) -> None:
        self._io = io
        self._meeting_point = MeetingPoint(name, config.keys)
        self._generation = 0
        self._config = config
        # A script may change the working folder before the process is replaced.
        self._make_process = partial(make_companion, config, WorkingFolder())
        self._threads = DaemonExecutor(2, "offload-io-process")
        self._users = 0
        self._session: Session | None = None
        self._storages: dict[int, RemoteStorage] = {}
        self._numbers = count()
        self._observed_by: dict[int, Counters] = {}
        self._staging: SharedMemory | None = None
        self.replace_memory: Callable[[], None] | None = None
        """Called on the I/O loop if the process, or a fork with its memory, outlives its SIGKILL."""
        self._pause = RestartPause()
        self._replacing: asyncio.Task[None] | None = None
        self._is_closed = False
        self._starting = io.submit(self._start())

    @classmethod
    def acquire(cls, name: str, io: IoLoop, config: OffloadConfig) -> IoProcess:
        """Return the process of that name, and begin its start for the first user; it is not waited for.

        Call :meth:`release` once for each call. Connectors of one engine with different configurations have different
        processes.

        Args:
            name: unique for an engine, and the same in all of its processes.
        """
        with cls._class_lock:
            place = MeetingPoint(name, config.keys).name
            process = cls._shared.get(place)
            if process is None:
                process = cls._shared[place] = cls(name, io, config)
            process._users += 1
            return process

    @classmethod
    def forget_all(cls) -> None:
        """Forget the I/O processes of the process that this one is a fork of."""
        cls._shared, cls._class_lock = {}, threading.Lock()

    def release(self, seconds: float) -> None:
        """Give up one use. The last one ends the process tidily, or kills it after ``seconds``.

        Does nothing in a fork of the process that has acquired it.
        """
        with self._class_lock:
            places = [place for place, process in self._shared.items() if process is self]
            if not places:
                return
            self._users -= 1
            if self._users > 0:
                return
            for place in places:
                del self._shared[place]
        with contextlib.suppress(TimeoutError):  # a callback that hangs the loop
            self._io.submit(self._close(seconds)).result(seconds + START_SECONDS)
        self._threads.shutdown()

    @property
    def pid(self) -> int | None:
        """The process id; ``None`` while there is no process."""
        return None if self._session is None else self._session.pid

    def share_staging(self, memory: SharedMemory) -> None:
        """Let the process map the staging memory. Call it before the first load or store.

        Raises:
            ConfigError: the process did not start.
            OSError: the process cannot map it, or not in time.
        """
        self._wait_for_start()
        words = f"the I/O process has not mapped the staging memory within {START_SECONDS:g} s"
        result_within(self._io.submit(self._share_staging(memory)), START_SECONDS, words)

    def forget_staging(self) -> None:
        """Give later processes no staging memory. Call it after the last load and store."""
        self._staging = self.replace_memory = None

    def make_storage(
        self, config: TierConfig, limits: Limits, plugins: PluginRegistry | None, changes: StorageEvents, half: str
    ) -> RemoteStorage:
        """Make a tier's storage in the process; a :class:`~offload_core.tiers.storage.StorageFactory`.

        Raises:
            ConfigError: the process did not start.
            OSError: the process has ended, or does not answer in time.
        """
        self._wait_for_start()
        words = f"the I/O process has not made it within {START_SECONDS:g} s; it may hang on the medium"
        return result_within(self._io.submit(self._make_storage(config, changes, half)), START_SECONDS, words)

    def observe(self, event: Event, counters: Counters) -> None:
        """Send an event to the observers in the process. Thread-safe; never waits.

        Args:
            counters: the place to count dropped events.
        """
        self._io.loop.call_soon_threadsafe(self._observe, event, counters)

    @property
    def direct(self) -> DirectCalls | None:
        """The loads and stores under way; ``None`` while there is no process. May be called on any thread."""
        return None if (session := self._session) is None else session.direct

    async def seal(self, objects: Sequence[StagedObject]) -> None:
        """Write the headers and checksums of objects in staging memory.

        Raises:
            StorageAwayError: the process has ended. Nobody writes to the objects any more.
        """
        await to_the_end(self._call(Kind.SEAL, 0, pack_objects(objects, [None] * len(objects))))

    def _wait_for_start(self) -> None:
        try:
            result_within(self._starting, 2 * START_SECONDS, "the I/O loop hangs")
        except (OSError, RuntimeError) as error:  # RuntimeError: no thread can be started
            raise ConfigError(
                [f"io_process: the I/O process did not start: {error}; set io_process to off to run without it"]
            ) from error

    async def _start(self) -> None:
        """Start a process, with the staging memory and the tiers of the one before."""
        session = Session(
            self._make_process,
            self._meeting_point,
            self._generation,
            self._threads,
            self._received,
            self._ended,
            self._killed,
            self._config.settings.io_process_timeout_seconds,
        )
        try:
            await session.start(START_SECONDS)
        except TimeoutError as error:
            raise TimeoutError(str(error) or f"it did not serve within {START_SECONDS:g} s") from None
        try:
            await self._prepare(session)
        except BaseException as error:  # a plugin may raise anything, and the engine may end meanwhile
            await session.abandon()
            if isinstance(error, TimeoutError):
                raise TimeoutError(str(error) or f"it did not make a tier within {START_SECONDS:g} s") from None
            raise
        self._session = session
        self._pause.started()
        logger.info("the I/O process has the id %s", session.pid)
        for storage in self._storages.values():
            if storage.wants_open:
                self._io.submit(self._reopen(storage, session)).add_done_callback(log_unexpected)
            else:
                storage.reopened()
        if session.is_killed:  # before it was this object's session, and so nobody was told
            if session.pid is not None:  # it still has the meeting point
                self._generation += 1
            self._ended(session, "has ended")

    async def _prepare(self, session: Session) -> None:
        """Give a new process the tiers and the staging memory, also those that come meanwhile.

        Raises:
            TimeoutError: the process stands still.
        """
        made: set[int] = set()
        has_staging = False
        while True:
            left = [storage for storage in self._storages.values() if storage.number not in made]
            if not left and (has_staging or self._staging is None):
                return
            for storage in left:
                async with asyncio.timeout(START_SECONDS):
                    await session.ask({"tier": storage.number, "name": storage.name, "half": storage.half})
                made.add(storage.number)
            if self._staging is not None and not has_staging:
                has_staging = True
                async with asyncio.timeout(START_SECONDS):
                    await session.share_staging(self._staging)

    async def _reopen(self, storage: RemoteStorage, session: Session) -> None:
        if await reopen(storage, session) and session is self._session:
            storage.reopened()

    async def _share_staging(self, memory: SharedMemory) -> None:
        self._staging = memory  # a process that starts now gets it too
        if (session := self._session) is not None:
            try:
                await session.share_staging(memory)
            except OSError:
                if session is self._session:  # it lives
                    raise

    async def _make_storage(self, config: TierConfig, changes: StorageEvents, half: str) -> RemoteStorage:
        number = next(self._numbers)
        question = {"tier": number, "name": config.common.name, "half": half}
        try:
            answer = await (await self._session_for_start()).ask(question)
        except StorageAwayError:  # the process has ended; a plugin may be the cause each time, so it is asked once more
            answer = await (await self._session_for_start()).ask(question)
        storage = self._storages[number] = RemoteStorage(
            number,
            config.common.name,
            Capabilities(**answer["capabilities"]),
            changes,
            self._call,
            self._direct,
            self._tell,
            self._lent_memory,
            half=half,
            encodes=config.common.encodes,
            lends=answer["lends"],
        )
        return storage

    async def _session_for_start(self) -> Session:
        """Return the process that serves, waited for if it is being replaced.

        Raises:
            OSError: it is not replaced in time.
        """
        if self._session is None and self._replacing is not None:
            await asyncio.wait([self._replacing], timeout=START_SECONDS / 2)  # the caller waits longer
        if self._session is None:
            raise OSError("the I/O process has ended during the start of the engine")
        return self._session

    async def _call(self, kind: Kind, tier: int, body: bytes) -> Message:
        if self._session is None:
            raise StorageAwayError("the I/O process has ended and is being replaced")
        return await self._session.call(kind, tier, body)

    def _direct(self) -> DirectCalls:
        if (direct := self.direct) is None:
            raise StorageAwayError("the I/O process has ended and is being replaced")
        return direct

    def _tell(self, kind: Kind, tier: int, body: bytes) -> None:
        if (direct := self.direct) is not None:
            direct.tell(kind, tier, body)

    async def _lent_memory(self, tier: int) -> LentMapping | None:
        if (session := self._session) is None:
            raise StorageAwayError("the I/O process has ended and is being replaced")
        memory = await session.lent_memory(tier, self._storages[tier].label)
        if memory is not None and session is not self._session:  # its last answer may come with the news of its end
            memory.close()
            raise StorageAwayError("the I/O process has ended and is being replaced")
        return memory

    def _observe(self, event: Event, counters: Counters) -> None:
        if self._session is None:
            counters.add("events_dropped", event.tier)
            return
        number = next((one.number for one in self._storages.values() if one.name == event.tier), 0)
        self._observed_by[number] = counters
        try:
            self._session.tell(Kind.EVENT, number, pack_event(event))
        except ValueError:  # it names more objects than a message has room for
            counters.add("events_dropped", event.tier)

    def _received(self, message: Message) -> None:
        if message.kind is Kind.EVENTS_DROPPED:
            storage, counters = self._storages.get(message.tier), self._observed_by.get(message.tier)
            if storage is not None and counters is not None:
                counters.add("events_dropped", storage.name, Reader(message.body).change())
            return
        if (storage := self._storages.get(message.tier)) is not None:
            storage.received(message)

    def _ended(self, session: Session, description: str) -> None:
        """Replace a process that has ended unasked."""
        if self._is_closed or session is not self._session:
            return
        self._session = None
        pause = self._pause.ended()
        logger.log(
            logging.WARNING if session.is_parent else logging.INFO,  # one warning in all processes of the engine
            "the I/O process%s %s. Its calls have failed, and their requests are computed; it is replaced in "
            "%.3g s.", self._of_tiers(), description, pause,
        )  # fmt: skip
        for storage in self._storages.values():
            storage.process_ended()
        self._replacing = self._io.loop.create_task(self._replace(pause))

    def _killed(self, session: Session) -> None:
        """Do not wait long for the end of a killed process: a call on a dead medium, or a fork, can outlive it.

        The memory of its calls stays in use until it is gone, and its forks too. Other calls get other memory.
        """
        self._io.loop.call_later(_GONE_SECONDS, self._not_gone, session)

    def _not_gone(self, session: Session) -> None:
        if not self._is_closed and session is self._session:
            self._generation += 1  # it still has the meeting point
            self._ended(session, session.remains)
            if self.replace_memory is not None:
                self.replace_memory()

    def _of_tiers(self) -> str:
        """Return the tiers of the process for a log line: nothing before the first one is made."""
        names = sorted({repr(storage.name) for storage in self._storages.values()})
        return f" of tier{'s' if len(names) > 1 else ''} {', '.join(names)}" if names else ""

    async def _replace(self, pause: float) -> None:
        while not self._is_closed:
            await asyncio.sleep(pause)
            try:
                await self._start()
            except Exception as error:
                if isinstance(error, TimeoutError):  # a process that not even SIGKILL ends has the meeting point
                    self._generation += 1
                pause = self._pause.ended()
                logger.warning("the I/O process cannot be replaced: %s; it is tried again in %.3g s", error, pause)
            else:
                return

    async def _close(self, seconds: float) -> None:
        self._is_closed = True
        for storage in self._storages.values():
            storage.abandon_open()
        self._starting.cancel()
        if self._replacing is not None:
            self._replacing.cancel()
            await asyncio.wait([self._replacing])
        if self._session is not None:
            await self._session.end(seconds)


os.register_at_fork(after_in_child=IoProcess.forget_all)
