"""One process of the engine, seen from the I/O process: its rings, its staging memory, and its calls."""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import asdict, replace
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any, Final, Protocol, cast

from offload_core.api.backend import LoadOutcome
from offload_core.api.events import Event
from offload_core.api.keys import ObjectKey
from offload_core.api.memory.shared_memory import SharedMemory
from offload_core.io_process import protocol
from offload_core.io_process.control import BELLS, ControlSocket, Record
from offload_core.io_process.messages import Lane, MessageChannel, RingPair
from offload_core.io_process.protocol import NO_PIECE, Kind, Message, ProtocolError
from offload_core.io_process.serving.lendings import Lendings
from offload_core.io_process.serving.scratch import CallScratch, MappedPiece
from offload_core.io_process.serving.tier import ServedTier, in_parts
from offload_core.runtime.doorbell import Doorbell
from offload_core.runtime.io_loop import run_all
from offload_core.tiers.calls.answer import answer
from offload_core.tiers.calls.lent_objects import Lent, LentObject, WantedObject
from offload_core.tiers.object_io import LoadEnd
from offload_core.tiers.staged_object import StagedObject, seal_all
from offload_core.tiers.storage import LocalStorage, StoreEnd

if TYPE_CHECKING:
    from offload_core.memory.staging_pool import Lease  # which imports torch
    from offload_core.memory.staging_shares import TierShare

logger = logging.getLogger(__name__)

SEALING_THREADS: Final = 2


class Server(Protocol):
    """The I/O process, as the calls of a process of the engine need it."""

    @property
    def sealers(self) -> Executor:
        """Threads that compute checksums."""
        ...

    def tier(self, name: str) -> ServedTier:
        """Return the tier of that name. If its objects are in this process, all processes of the engine share it."""
        ...

    def emit(self, event: Event) -> int:
        """Give an event to the observers, and return the number of events that were dropped since the last call."""
        ...

    def leave(self, client: ServedClient) -> bool:
        """Prepare for the leave of a process of the engine, and return whether others stay."""
        ...

    def client_ended(self, client: ServedClient, closing: set[asyncio.Task[None]]) -> None:
        """Note that a process of the engine has left, or is gone.

        Args:
            closing: the ends of its tiers.
        """
        ...


class _UsedTier:
    """A tier as one process of the engine uses it.

    Args:
        number: the tier's number in messages.
        half: the half of the engine, for log lines; may be empty.
        tell: sends a message to that process; those on one lane arrive in order.
    """

    def __init__(self, number: int, tier: ServedTier, half: str, tell: Callable[[Lane, Kind, bytes], None]) -> None:
        self.number = number
        self.tier = tier
        self._tell = tell
        self.storage = tier.make_storage(self, half)

    def evicted(self, keys: Sequence[ObjectKey]) -> None:
        """See :class:`TierUser`. A store of that process has evicted them, whose answer follows on the same lane."""
        for part in protocol.parts_of(keys):
            self._tell(Lane.DIRECT, Kind.EVICTED, protocol.pack_keys(part))

    def evicted_by_others(self, keys: Sequence[ObjectKey]) -> None:
        """See :class:`TierUser`."""
        for part in protocol.parts_of(keys):
            self._tell(Lane.LOOP, Kind.EVICTED_BY_OTHERS, protocol.pack_keys(part))

    def stuck_threads_changed(self, change: int) -> None:
        """See :class:`TierUser`."""
        self._tell(Lane.LOOP, Kind.STUCK_THREADS, protocol.pack_change(change))


class ServedClient:
    """The calls of one process of the engine. All methods run on the event loop.

    Args:
        control: the socket to it.
        descriptors: its rings and its doorbells, by name. They belong to this object.
    """

    def __init__(self, server: Server, control: ControlSocket, descriptors: Mapping[str, int]) -> None:
        self._server = server
        self._control = control
        self._loop = asyncio.get_running_loop()
        self._tiers: dict[int, _UsedTier] = {}
        self._staging: SharedMemory | None = None
        self._running: set[asyncio.Task[None]] = set()
        self._lendings = Lendings()
        self._rings = SharedMemory.from_descriptor(descriptors["rings"])
        self._bells = {name: Doorbell.from_descriptor(descriptors[name]) for name in BELLS}
        self._channel = self._channel_of(Lane.LOOP, "to_process", "to_engine")
        self._direct = self._channel_of(Lane.DIRECT, "direct_to_process", "direct_to_engine")
        self._has_ended = False
        control.set_blocking(False)
        self._loop.add_reader(control.fileno(), self._on_control)

    def greet(self, descriptors: Sequence[int] = ()) -> None:
        """Tell the process of the engine that its calls are served.

        Args:
            descriptors: a pidfd of this process, if that process is not the parent.

        Raises:
            OSError: the other process is gone.
        """
        self._control.send({"ready": os.getpid()}, descriptors)

    def _channel_of(self, lane: Lane, own_bell: str, other_bell: str) -> MessageChannel:
        return MessageChannel(
            RingPair(self._rings, lane, to_process=False),
            own_bell=self._bells[own_bell],
            other_bell=self._bells[other_bell],
            on_message=partial(self._on_message, lane),
            on_error=self._on_error,
        )

    # Control messages

    def _on_control(self) -> None:
        if not self._control.receive_all(self._answer):
            self.end()

    def _answer(self, record: Record, descriptors: list[int]) -> None:
        self._control.send(*self._handle(record, descriptors))
        if "end" in record:
            self.end()

    def _handle(self, record: Record, descriptors: list[int]) -> tuple[Record, Sequence[int]]:
        """Carry out a control message, and return the answer with its descriptors."""
        try:
            if "staging" in record:
                self._staging = SharedMemory.from_descriptor(descriptors[0])
                return {"staging": self._staging.nbytes}, ()
            if "tier" in record:
                storage = self._use_tier(record["tier"], record["name"], record["half"])
                kind = {"capabilities": asdict(storage.capabilities), "lends": storage.lends}
                return {"tier": record["tier"], **kind}, ()
            if "lent" in record:
                storage = self._tiers[record["lent"]].storage
                memory = Lendings.memory_of(storage)
                pin = storage.backend.pins_lent_memory
                return {**record, "pin": pin}, () if memory is None else (memory.descriptor,)
            if "end" in record:
                return {"end": True, "stays": self._server.leave(self)}, ()
            raise ProtocolError(f"there is no control message {sorted(record)}")
        except BaseException as error:  # the code of a plugin may raise anything, and the other process waits
            return {**record, "error": protocol.pack_error(error).hex()}, ()

    def _use_tier(self, number: int, name: str, half: str) -> LocalStorage:
        def tell(lane: Lane, kind: Kind, body: bytes) -> None:
            self._send(lane, protocol.message(kind, number, body=body))

        used = self._tiers[number] = _UsedTier(number, self._server.tier(name), half, tell)
        return used.storage

    def end(self) -> None:
        """Serve this process of the engine no more: it has asked for the end, or is gone."""
        if self._has_ended:
            return
        self._has_ended = True
        self._loop.remove_reader(self._control.fileno())
        self._control.close()
        for channel in (self._channel, self._direct):
            channel.close()
        for bell in self._bells.values():
            bell.close()
        self._rings.close()
        self._keep(self._loop.create_task(self._lendings.give_all_back(set(self._running))))
        closing = set()
        for used in self._tiers.values():
            used.tier.forget(used)
            closing.add(self._keep(self._loop.create_task(self._closed(used.storage))))
        self._tiers.clear()
        self._server.client_ended(self, closing)
        staging, self._staging = self._staging, None
        if staging is not None:  # to unmap it takes a while, and other processes are served meanwhile
            try:
                self._server.sealers.submit(staging.close)
            except RuntimeError:  # no thread can be started
                staging.close()

    async def _closed(self, storage: LocalStorage) -> None:
        try:
            await answer(storage.close())
        except Exception as error:  # the backend may raise anything
            logger.warning("%s could not be closed: %s", storage.label, error)

    # Calls

    def _on_message(self, lane: Lane, message: Message) -> None:
        if message.kind is Kind.PING:
            self._channel.send(protocol.message(Kind.DONE, message.tier, message.call))
            return
        if message.kind is Kind.EVENT:
            self._observe(message)
            return
        if message.kind is Kind.GIVE_BACK:
            number = protocol.Reader(message.body).lending()
            self._keep(self._loop.create_task(self._lendings.give_back(message.tier, number)))
            return
        self._keep(self._loop.create_task(self._serve(lane, message)))

    def _keep(self, task: asyncio.Task[None]) -> asyncio.Task[None]:
        self._running.add(task)
        task.add_done_callback(self._running.discard)
        return task

    async def _serve(self, lane: Lane, message: Message) -> None:
        """Make a call and send its answer on the lane of the request."""
        try:
            kind, body = Kind.DONE, await answer(self._call(message))
        except BaseException as error:  # without an answer the call would never end
            kind, body = Kind.FAILED, protocol.pack_error(error)
        self._send(lane, protocol.message(kind, message.tier, message.call, body))

    def _call(self, message: Message) -> Coroutine[Any, Any, bytes]:
        body = protocol.Reader(message.body)
        if message.kind is Kind.SEAL:
            return self._seal(body)
        used = self._tiers.get(message.tier)
        if used is None:
            raise ProtocolError(f"there is no tier {message.tier}")
        call = _CALLS.get(message.kind)
        if call is None:
            raise ProtocolError(f"{message.kind.name} is no call")
        return call(self, used, body)

    async def _open(self, used: _UsedTier, _: protocol.Reader) -> bytes:
        await used.storage.open()
        return b""

    async def _close(self, used: _UsedTier, _: protocol.Reader) -> bytes:
        await used.storage.close()
        return b""

    async def _contains(self, used: _UsedTier, body: protocol.Reader) -> bytes:
        return protocol.pack_flags(await used.storage.contains(body.keys()))

    async def _load(self, used: _UsedTier, body: protocol.Reader) -> bytes:
        staged, scratch = self._staged(body)
        tier = used.tier

        async def load(batch: Sequence[StagedObject]) -> LoadEnd:
            async with tier.load_slots.held(time.monotonic() + tier.longest_call_seconds):
                return await answer(used.storage.load(batch, cast("TierShare", scratch)))

        parts = await run_all(load(part) for part in in_parts(staged, tier.load_parts))
        return protocol.pack_loaded(
            LoadEnd(
                [outcome for part in parts for outcome in part.outcomes],
                sum(part.stored_bytes for part in parts),
                sum(part.read_twice for part in parts),
            )
        )

    async def _store(self, used: _UsedTier, body: protocol.Reader) -> bytes:
        staged, scratch = self._staged(body, used)
        tier, seals_stores = used.tier, used.storage.seals_stores

        async def store(batch: Sequence[StagedObject]) -> list[StoreEnd]:
            if not seals_stores and (unsealed := [one for one in batch if one.unsealed]):
                await self._loop.run_in_executor(self._server.sealers, seal_all, unsealed)
                batch = [replace(one, unsealed=False) for one in batch]
            async with tier.store_slots.held(time.monotonic() + tier.longest_call_seconds):
                return await answer(used.storage.store(batch, cast("TierShare", scratch)))

        parts = await run_all(store(part) for part in in_parts(staged, tier.store_parts))
        return protocol.pack_stored(chain.from_iterable(parts))

    async def _seal(self, body: protocol.Reader) -> bytes:
        staged, _scratch = self._staged(body)
        parts = in_parts(staged, SEALING_THREADS)
        await run_all(self._loop.run_in_executor(self._server.sealers, seal_all, part) for part in parts)
        return b""

    async def _borrow(self, used: _UsedTier, body: protocol.Reader) -> bytes:
        number, (verify,), wanted, tier = body.lending(), body.flags(1), body.wanted(), used.tier

        async def borrow(part: Sequence[WantedObject]) -> Lent[LoadOutcome]:
            async with tier.load_slots.held(time.monotonic() + tier.longest_call_seconds):
                return await used.storage.borrow(part, verify=verify)

        parts = in_parts(wanted, tier.load_parts)
        loans, offsets = await self._lendings.keep(used.number, number, used.storage, map(borrow, parts))
        return protocol.pack_borrowed([outcome for loan in loans for outcome in loan.outcomes], offsets)

    async def _reserve(self, used: _UsedTier, body: protocol.Reader) -> bytes:
        number, wanted = body.lending(), body.wanted()
        (grant,), offsets = await self._lendings.keep(used.number, number, used.storage, [used.storage.reserve(wanted)])
        return protocol.pack_reserved(grant.outcomes, offsets)

    async def _delete(self, used: _UsedTier, body: protocol.Reader) -> bytes:
        await used.storage.delete(body.keys())
        return b""

    async def _touch(self, used: _UsedTier, body: protocol.Reader) -> bytes:
        keys = body.keys()
        await used.storage.touch(keys, body.flags(len(keys)))
        return b""

    def _staged(self, body: protocol.Reader, used: _UsedTier | None = None) -> tuple[list[StagedObject], CallScratch]:
        """Return the objects of a call, with their memory, and the memory for their compressed bytes.

        Args:
            used: the tier, if it may have lent some of the memory.
        """
        keys = body.keys()
        pieces = body.pieces(len(keys))
        staged = []
        for key, piece in zip(keys, pieces, strict=True):
            if used is not None and piece.lending:
                view = self._lendings.view(used.number, piece.lending, piece.offset, piece.nbytes)
                staged.append(StagedObject(key, LentObject(view), None, piece.spare, piece.unsealed))
                continue
            lease = cast("Lease", MappedPiece(self._view(piece.offset, piece.nbytes)))
            second = None
            if piece.scratch != NO_PIECE:
                second = cast("Lease", MappedPiece(self._view(piece.scratch, piece.nbytes)))
            staged.append(StagedObject(key, lease, second, piece.spare, piece.unsealed))
        scratch = [self._view(piece.scratch, piece.nbytes) for piece in pieces if piece.scratch != NO_PIECE]
        return staged, CallScratch(scratch)

    def _view(self, offset: int, nbytes: int) -> memoryview:
        if self._staging is None or offset + nbytes > self._staging.nbytes:
            raise ProtocolError(f"there is no staging memory from {offset} to {offset + nbytes}")
        return self._staging.view[offset : offset + nbytes]

    def _observe(self, message: Message) -> None:
        if dropped := self._server.emit(protocol.Reader(message.body).event()):
            body = protocol.pack_change(dropped)
            self._send(Lane.LOOP, protocol.message(Kind.EVENTS_DROPPED, message.tier, body=body))

    def _send(self, lane: Lane, message: bytes) -> None:
        if not self._has_ended:
            (self._direct if lane is Lane.DIRECT else self._channel).send(message)

    def _on_error(self, error: Exception) -> None:
        logger.error("a process of the engine is served no more, since its message is damaged: %s", error)
        self.end()


_CALLS = {
    Kind.OPEN: ServedClient._open,
    Kind.CLOSE: ServedClient._close,
    Kind.CONTAINS: ServedClient._contains,
    Kind.LOAD: ServedClient._load,
    Kind.STORE: ServedClient._store,
    Kind.DELETE: ServedClient._delete,
    Kind.TOUCH: ServedClient._touch,
    Kind.BORROW: ServedClient._borrow,
    Kind.RESERVE: ServedClient._reserve,
}
