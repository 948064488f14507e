"""The I/O process: it owns the tiers' storages and serves the calls of the engine's process.

It imports neither torch nor vLLM. One event loop receives the calls; each tier's threads do the blocking work, as they
would in the engine's process. The staging memory is mapped, so that objects are read and written in place.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import time
from collections.abc import Coroutine, Iterator, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any, cast

from offload_core.api.backend import LoadOutcome
from offload_core.api.keys import ObjectKey
from offload_core.config.loading import load_config
from offload_core.config.model import OffloadConfig
from offload_core.io_process import protocol
from offload_core.io_process.control import ControlSocket, Record
from offload_core.io_process.log_relay import LogSender
from offload_core.io_process.messages import Lane, MessageChannel, RingPair
from offload_core.io_process.protocol import NO_PIECE, Kind, Message, ProtocolError
from offload_core.memory.staging_size import in_batches
from offload_core.plugins.observers import EventDelivery
from offload_core.runtime.companion_child import StartMessage
from offload_core.runtime.doorbell import Doorbell
from offload_core.runtime.io_loop import run_all
from offload_core.runtime.metrics import Counters
from offload_core.runtime.shared_memory import SharedMemory
from offload_core.runtime.threads import DaemonExecutor
from offload_core.tiers.call_slots import CallSlots
from offload_core.tiers.object_io import answer
from offload_core.tiers.staged_object import StagedObject, seal_all
from offload_core.tiers.storage import LocalStorage, StorageEvents, StoreEnd

if TYPE_CHECKING:
    from offload_core.memory.staging_pool import Lease  # which imports torch
    from offload_core.memory.staging_shares import TierShare

logger = logging.getLogger(__name__)

_SEALING_THREADS = 2


def serve(start: StartMessage) -> None:
    """Serve the engine's process until it asks for the end, or ends itself. Does not return."""
    settings = json.loads(start.payload)
    control = ControlSocket.from_descriptor(start.descriptors["control"])
    handler = LogSender(ControlSocket.from_descriptor(start.descriptors["log"]))
    logging.basicConfig(level=settings["log_level"], handlers=[handler])
    status = 0
    try:
        if settings["protocol"] != protocol.VERSION:
            raise ProtocolError(f"the engine speaks version {settings['protocol']}, this process {protocol.VERSION}")
        config = load_config(settings["config"])
        asyncio.run(_Server(config, control, start.descriptors).run())
    except BaseException as error:
        status = 1
        control.set_blocking(True)
        with contextlib.suppress(OSError):  # the engine's process is gone
            control.send({"failed": f"{type(error).__name__}: {error}"})
    os._exit(status)  # a hung thread must not delay the end


class _MappedPiece:
    """A piece of mapped memory in the place of a lease. The engine's process releases the lease itself."""

    def __init__(self, view: memoryview) -> None:
        self.view = view
        self.nbytes = len(view)

    def release(self) -> None:
        """Do nothing."""


class _Scratch:
    """Memory for compressed objects of one call: the pieces that came with it, and for loads private memory."""

    def __init__(self, pieces: Sequence[memoryview]) -> None:
        self._unused = list(pieces)

    def try_scratch_for_store(self, nbytes: int) -> _MappedPiece | None:
        """Return the first unused piece of at least ``nbytes`` bytes."""
        for index, view in enumerate(self._unused):
            if len(view) >= nbytes:
                del self._unused[index]
                return _MappedPiece(view[:nbytes])
        return None

    def try_scratch_for_load(self, nbytes: int) -> _MappedPiece:
        """Return new memory of this process."""
        return _MappedPiece(memoryview(bytearray(nbytes)))


class _ServedTier:
    """A storage, and the slots for its concurrent batches, as many as on threads of the engine's process."""

    def __init__(self, storage: LocalStorage, io_threads: int, longest_call_seconds: float) -> None:
        self.storage = storage
        self.io_threads = io_threads
        self.longest_call_seconds = longest_call_seconds
        self.load_slots = CallSlots(2 * io_threads, spare_slots=io_threads)
        self.store_slots = CallSlots(io_threads + 1, spare_slots=io_threads)


class _Server:
    """The storages and their calls. All methods run on the event loop."""

    def __init__(self, config: OffloadConfig, control: ControlSocket, descriptors: Mapping[str, int]) -> None:
        self._config = config
        self._limits = config.settings.limits
        self._control = control
        self._descriptors = descriptors
        self._tiers: dict[int, _ServedTier] = {}
        self._staging: SharedMemory | None = None
        self._sealers = DaemonExecutor(_SEALING_THREADS, "offload-seal")
        self._counters = Counters()
        observers = config.plugins.observers
        self._events = EventDelivery(observers, self._counters) if observers else None
        self._running: set[asyncio.Task[None]] = set()
        self._end = asyncio.Event()

    async def run(self) -> None:
        """Serve until the end."""
        loop = asyncio.get_running_loop()
        self._loop = loop
        self._control.set_blocking(False)
        loop.add_reader(self._control.fileno(), self._on_control)
        rings = SharedMemory.from_descriptor(self._descriptors["rings"])
        self._channel = self._channel_of(rings, Lane.LOOP, "to_process", "to_engine")
        self._direct = self._channel_of(rings, Lane.DIRECT, "direct_to_process", "direct_to_engine")
        self._control.send({"ready": os.getpid()})
        await self._end.wait()
        if self._events is not None:
            await self._loop.run_in_executor(None, self._events.close, self._limits.close_timeout_seconds)

    def _channel_of(self, rings: SharedMemory, lane: Lane, own_bell: str, other_bell: str) -> MessageChannel:
        return MessageChannel(
            RingPair(rings, lane, to_process=False),
            own_bell=Doorbell.from_descriptor(self._descriptors[own_bell]),
            other_bell=Doorbell.from_descriptor(self._descriptors[other_bell]),
            on_message=partial(self._on_message, lane),
            on_error=self._on_error,
        )

    # Control messages

    def _on_control(self) -> None:
        if not self._control.receive_all(self._answer):
            self._end.set()

    def _answer(self, record: Record, descriptors: list[int]) -> None:
        self._control.send(self._handle(record, descriptors))

    def _handle(self, record: Record, descriptors: list[int]) -> Record:
        """Carry out a control message, and return the answer."""
        try:
            if "staging" in record:
                self._staging = SharedMemory.from_descriptor(descriptors[0])
                return {"staging": self._staging.nbytes}
            if "tier" in record:
                return {"tier": record["tier"], "capabilities": self._make_tier(record["tier"], record["name"])}
            if "end" in record:
                self._end.set()
                return {"end": True}
            raise ProtocolError(f"there is no control message {sorted(record)}")
        except Exception as error:
            return {**record, "error": protocol.pack_error(error).hex()}

    def _make_tier(self, number: int, name: str) -> dict[str, Any]:
        (tier,) = (tier for tier in self._config.tiers if tier.common.name == name)
        changes = StorageEvents(
            evicted=partial(self._evicted, number),
            stuck_threads_changed=partial(self._stuck_on_any_thread, number),
        )
        limits = self._limits.overridden_by(tier.common)
        storage = LocalStorage(tier, limits, self._config.plugins, changes)
        self._tiers[number] = _ServedTier(storage, tier.common.io_threads, limits.longest_call_seconds)
        return asdict(storage.capabilities)

    # Calls

    def _on_message(self, lane: Lane, message: Message) -> None:
        if message.kind is Kind.PING:
            self._channel.send(protocol.message(Kind.DONE, message.tier, message.call))
            return
        if message.kind is Kind.EVENT:
            self._observe(message)
            return
        task = self._loop.create_task(self._serve(lane, message))
        self._running.add(task)
        task.add_done_callback(self._running.discard)

    async def _serve(self, lane: Lane, message: Message) -> None:
        """Make a call and send its answer on the lane of the request."""
        try:
            kind, body = Kind.DONE, await answer(self._call(message))
        except Exception as error:
            kind, body = Kind.FAILED, protocol.pack_error(error)
        channel = self._direct if lane is Lane.DIRECT else self._channel
        channel.send(protocol.message(kind, message.tier, message.call, body))

    def _call(self, message: Message) -> Coroutine[Any, Any, bytes]:
        body = protocol.Reader(message.body)
        if message.kind is Kind.SEAL:
            return self._seal(body)
        tier = self._tiers.get(message.tier)
        if tier is None:
            raise ProtocolError(f"there is no tier {message.tier}")
        call = _CALLS.get(message.kind)
        if call is None:
            raise ProtocolError(f"{message.kind.name} is no call")
        return call(self, tier, body)

    async def _open(self, tier: _ServedTier, _: protocol.Reader) -> bytes:
        await tier.storage.open()
        return b""

    async def _close(self, tier: _ServedTier, _: protocol.Reader) -> bytes:
        await tier.storage.close()
        return b""

    async def _contains(self, tier: _ServedTier, body: protocol.Reader) -> bytes:
        return protocol.pack_flags(await tier.storage.contains(body.keys()))

    async def _load(self, tier: _ServedTier, body: protocol.Reader) -> bytes:
        staged, scratch = self._staged(body)

        async def load(batch: Sequence[StagedObject]) -> tuple[list[LoadOutcome], int]:
            async with tier.load_slots.held(time.monotonic() + tier.longest_call_seconds):
                return await tier.storage.load(batch, cast("TierShare", scratch))

        parts = await run_all(load(part) for part in _in_parts(staged, tier.load_slots.free - tier.io_threads))
        return protocol.pack_loaded([one for part, _ in parts for one in part], sum(nbytes for _, nbytes in parts))

    async def _store(self, tier: _ServedTier, body: protocol.Reader) -> bytes:
        staged, scratch = self._staged(body)

        async def store(batch: Sequence[StagedObject]) -> list[StoreEnd]:
            if unsealed := [one for one in batch if one.unsealed]:
                await self._loop.run_in_executor(self._sealers, seal_all, unsealed)
            async with tier.store_slots.held(time.monotonic() + tier.longest_call_seconds):
                return await tier.storage.store(batch, cast("TierShare", scratch))

        parts = await run_all(store(part) for part in _in_parts(staged, tier.store_slots.free - 1))
        return protocol.pack_stored(chain.from_iterable(parts))

    async def _seal(self, body: protocol.Reader) -> bytes:
        staged, _scratch = self._staged(body)
        parts = _in_parts(staged, _SEALING_THREADS)
        await run_all(self._loop.run_in_executor(self._sealers, seal_all, part) for part in parts)
        return b""

    async def _delete(self, tier: _ServedTier, body: protocol.Reader) -> bytes:
        await tier.storage.delete(body.keys())
        return b""

    async def _touch(self, tier: _ServedTier, body: protocol.Reader) -> bytes:
        keys = body.keys()
        await tier.storage.touch(keys, body.flags(len(keys)))
        return b""

    def _staged(self, body: protocol.Reader) -> tuple[list[StagedObject], _Scratch]:
        """Return the objects of a call, with their memory, and the memory for their compressed bytes."""
        keys = body.keys()
        pieces = body.pieces(len(keys))
        staged = []
        for key, piece in zip(keys, pieces, strict=True):
            lease = cast("Lease", _MappedPiece(self._view(piece.offset, piece.nbytes)))
            second = None
            if piece.scratch != NO_PIECE:
                second = cast("Lease", _MappedPiece(self._view(piece.scratch, piece.nbytes)))
            staged.append(StagedObject(key, lease, second, piece.spare, piece.unsealed))
        scratch = [self._view(piece.scratch, piece.nbytes) for piece in pieces if piece.scratch != NO_PIECE]
        return staged, _Scratch(scratch)

    def _view(self, offset: int, nbytes: int) -> memoryview:
        if self._staging is None or offset + nbytes > self._staging.nbytes:
            raise ProtocolError(f"there is no staging memory from {offset} to {offset + nbytes}")
        return self._staging.view[offset : offset + nbytes]

    def _observe(self, message: Message) -> None:
        if self._events is not None:
            self._events.emit(protocol.Reader(message.body).event())
            dropped = sum(self._counters.take().values())
            if dropped:
                body = protocol.pack_change(int(dropped))
                self._channel.send(protocol.message(Kind.EVENTS_DROPPED, message.tier, body=body))

    # Changes that no call returns

    def _evicted(self, number: int, keys: Sequence[ObjectKey]) -> None:
        if keys:
            self._channel.send(protocol.message(Kind.EVICTED, number, body=protocol.pack_keys(keys)))

    def _stuck_on_any_thread(self, number: int, change: int) -> None:
        self._loop.call_soon_threadsafe(self._stuck, number, change)

    def _stuck(self, number: int, change: int) -> None:
        self._channel.send(protocol.message(Kind.STUCK_THREADS, number, body=protocol.pack_change(change)))

    def _on_error(self, error: Exception) -> None:
        logger.error("the I/O process ends, since a message of the engine is damaged: %s", error)
        self._end.set()


def _in_parts(staged: Sequence[StagedObject], most: int) -> Iterator[list[StagedObject]]:
    """Divide the objects of a call into parts of whole batches, each of them the work of one thread.

    Args:
        most: number of free threads. If there is none, the objects stay together, since that costs less time.
    """
    batches = list(in_batches(staged, lambda one: one.lease.nbytes))
    size = -(-len(batches) // max(1, most))
    return (list(chain.from_iterable(batches[start : start + size])) for start in range(0, len(batches), size))


_CALLS = {
    Kind.OPEN: _Server._open,
    Kind.CLOSE: _Server._close,
    Kind.CONTAINS: _Server._contains,
    Kind.LOAD: _Server._load,
    Kind.STORE: _Server._store,
    Kind.DELETE: _Server._delete,
    Kind.TOUCH: _Server._touch,
}
