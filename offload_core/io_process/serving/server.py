"""The I/O process: it owns the tiers' backends and serves the calls of an engine's processes.

It imports neither torch nor vLLM. One event loop receives the calls; each tier's threads do the blocking work, as they
would in the engine's process. Staging memory is mapped, so that objects are read and written in place.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import socket
from collections.abc import Mapping

from offload_core.api.errors import text_of
from offload_core.api.events import Event
from offload_core.config.loading import load_config
from offload_core.config.model import OffloadConfig
from offload_core.io_process import protocol
from offload_core.io_process.control import JOIN_DESCRIPTORS, ControlSocket
from offload_core.io_process.life.meeting_point import is_own_user
from offload_core.io_process.log_relay import LogSender
from offload_core.io_process.protocol import ProtocolError
from offload_core.io_process.serving.client import SEALING_THREADS, ServedClient
from offload_core.io_process.serving.tier import ServedTier
from offload_core.plugins.observers import EventDelivery
from offload_core.runtime.companion_child import StartMessage, outlive_parent
from offload_core.runtime.metrics import Counters
from offload_core.runtime.threads import DaemonExecutor

logger = logging.getLogger(__name__)

_ACCEPT_PAUSE_SECONDS = 1.0
_MAX_ERROR_CHARACTERS = 8192
"""A message has room for so many characters of any kind."""


def serve(start: StartMessage) -> None:
    """Serve the engine's processes until the last one leaves, or the first one ends. Does not return."""
    settings = json.loads(start.payload)
    control = ControlSocket.from_descriptor(start.descriptors["control"])
    log = LogSender()
    log.add(own_log := ControlSocket.from_descriptor(start.descriptors["log"]))
    logging.basicConfig(level=settings["log_level"], handlers=[log])
    status = 0
    try:
        if settings["protocol"] != protocol.VERSION:
            raise ProtocolError(f"the engine speaks version {settings['protocol']}, this process {protocol.VERSION}")
        config = load_config(settings["config"])
        asyncio.run(_Server(config, log).run(control, own_log, start.descriptors))
    except BaseException as error:
        status = 1
        control.set_blocking(True)
        with contextlib.suppress(OSError):  # the engine's process is gone
            control.send({"failed": f"{type(error).__name__}: {text_of(error)[:_MAX_ERROR_CHARACTERS]}"})
    os._exit(status)  # a hung thread must not delay the end


class _Server:
    """The processes of the engine, and the tiers that they share. All methods run on the event loop."""

    def __init__(self, config: OffloadConfig, log: LogSender) -> None:
        self._config = config
        self._limits = config.settings.limits
        self._log = log
        self._shared_tiers: dict[str, ServedTier] = {}
        self._clients: dict[ServedClient, ControlSocket] = {}
        self._parent: ServedClient | None = None
        self._closing: set[asyncio.Task[None]] = set()
        self.sealers = DaemonExecutor(SEALING_THREADS, "offload-seal")
        self._counters = Counters()
        observers = config.plugins.observers
        self._events = EventDelivery(observers, self._counters) if observers else None
        self._end = asyncio.Event()

    async def run(self, control: ControlSocket, log: ControlSocket, descriptors: Mapping[str, int]) -> None:
        """Serve until the end.

        Args:
            control: the socket to the process that has started this one.
            log: the socket for log records to it.
            descriptors: those of the start. ``listener`` is the socket for further processes of the engine.
        """
        self._loop = asyncio.get_running_loop()
        self._parent = self._serve(control, log, descriptors)
        self._parent.greet()
        listener: socket.socket | None = None
        if "listener" in descriptors:
            listener = socket.socket(fileno=descriptors["listener"])
            listener.setblocking(False)
            os.register_at_fork(after_in_child=listener.close)  # else the engine's processes would wait for a fork
            self._loop.add_reader(listener, self._accept, listener)
        await self._end.wait()
        if listener is not None:  # a process that comes now starts another I/O process
            self._loop.remove_reader(listener)
            listener.close()
        if self._closing:
            await asyncio.wait(self._closing, timeout=self._limits.close_timeout_seconds)
        if self._events is not None:
            await self._loop.run_in_executor(None, self._events.close, self._limits.close_timeout_seconds)
        os._exit(0)  # the end of the loop would wait for calls that hang

    # Processes of the engine

    def _accept(self, listener: socket.socket) -> None:
        try:
            connection, _ = listener.accept()
        except OSError as error:  # gone already; or no descriptor is left
            if not isinstance(error, BlockingIOError | ConnectionAbortedError):
                logger.warning("no further process of the engine can join now: %s", error)
                self._loop.remove_reader(listener)
                self._loop.call_later(_ACCEPT_PAUSE_SECONDS, self._loop.add_reader, listener, self._accept, listener)
            return
        if is_own_user(connection):
            control = ControlSocket(connection)
            control.set_blocking(False)
            self._loop.add_reader(control.fileno(), self._join, control)
        else:
            connection.close()

    def _join(self, control: ControlSocket) -> None:
        """Take the first message of a process that joins."""
        self._loop.remove_reader(control.fileno())
        try:
            if (received := control.receive()) is None:
                raise EOFError("the connection was closed")
            _, numbers = received
            if len(numbers) != len(JOIN_DESCRIPTORS):
                for number in numbers:
                    os.close(number)
                raise ProtocolError(f"{len(numbers)} descriptors came in place of {len(JOIN_DESCRIPTORS)}")
            descriptors = dict(zip(JOIN_DESCRIPTORS, numbers, strict=True))
            log = ControlSocket.from_descriptor(descriptors["log"])
            client = self._serve(control, log, descriptors)
        except (OSError, ValueError, EOFError) as error:
            logger.warning("a process of the engine could not join: %s", error)
            control.close()
            return
        self._log.add(log)
        try:
            descriptor = os.pidfd_open(os.getpid())
            try:
                client.greet([descriptor])
            finally:
                os.close(descriptor)
        except OSError as error:
            logger.warning("a process of the engine has gone while it joined: %s", error)
            client.end()

    def _serve(self, control: ControlSocket, log: ControlSocket, descriptors: Mapping[str, int]) -> ServedClient:
        client = ServedClient(self, control, descriptors)
        self._clients[client] = log
        return client

    def leave(self, client: ServedClient) -> bool:
        """Prepare for the leave of a process of the engine, and return whether others stay."""
        others = bool(self._clients.keys() - {client})
        if others and client is self._parent:
            outlive_parent()
        return others

    def client_ended(self, client: ServedClient, closing: set[asyncio.Task[None]]) -> None:
        """Note that a process of the engine has left, or is gone.

        Args:
            closing: the ends of its tiers.
        """
        self._log.remove(self._clients.pop(client))
        self._closing |= closing
        for task in closing:
            task.add_done_callback(self._closing.discard)
        if not self._clients:
            self._end.set()

    # What the calls need

    def tier(self, name: str) -> ServedTier:
        """Return the tier of that name. If its objects are in this process, all processes of the engine share it."""
        shared = self._shared_tiers.get(name)
        if shared is not None and not shared.is_closed:
            return shared
        (config,) = (tier for tier in self._config.tiers if tier.common.name == name)
        tier = ServedTier(config, self._config)
        if tier.can_be_shared:
            self._shared_tiers[name] = tier
        return tier

    def emit(self, event: Event) -> int:
        """Give an event to the observers, and return the number of events that were dropped since the last call."""
        if self._events is None:
            return 0
        self._events.emit(event)
        return int(sum(self._counters.take().values()))
