"""The storage of a tier in the I/O process, seen from the engine's process."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from itertools import count
from typing import TYPE_CHECKING, TypeVar

from offload_core.api.backend import LoadOutcome, StoreOutcome
from offload_core.api.capabilities import Capabilities
from offload_core.api.context import tier_label
from offload_core.api.keys import ObjectKey
from offload_core.api.memory.pinned_memory import HostPinning
from offload_core.io_process import protocol
from offload_core.io_process.direct_calls import DirectCalls
from offload_core.io_process.lent_mapping import LentMapping
from offload_core.io_process.protocol import NO_PIECE, Kind, Message, Piece
from offload_core.tiers.calls.lent_objects import LendingEnd, LendingEnded, LentObject, OutcomeT, WantedObject, lend
from offload_core.tiers.staged_object import StagedObject
from offload_core.tiers.storage import LoadEnded, StorageAwayError, StorageEvents, StoreEnd, StoreEnded

if TYPE_CHECKING:
    from offload_core.memory.staging_pool import Lease  # which imports torch
    from offload_core.memory.staging_shares import TierShare

logger = logging.getLogger(__name__)

T = TypeVar("T")

Call = Callable[[Kind, int, bytes], Awaitable[Message]]
Tell = Callable[[Kind, int, bytes], None]


class RemoteStorage:
    """A :class:`~offload_core.tiers.storage.TierStorage` whose calls are messages to the I/O process.

    Between the end of a process and the opening of the tier in the next one, every call raises
    :class:`StorageAwayError`.

    Args:
        number: the tier's number in the I/O process.
        name: the tier's name in the configuration.
        half: the half of the engine that uses it, for log lines; may be empty.
        encodes: whether stores need a second lease for each object.
        call: sends a request to the process, and returns its answer.
        direct: returns the calls of the process that serves now, which any thread may make.
        tell: sends a message without an answer from any thread, on the way of the direct calls.
        lent_memory: maps the memory that the tier of a number lends.
        lends: whether the tier may lend memory.
    """

    def __init__(
        self,
        number: int,
        name: str,
        capabilities: Capabilities,
        changes: StorageEvents,
        call: Call,
        direct: Callable[[], DirectCalls],
        tell: Tell,
        lent_memory: Callable[[int], Awaitable[LentMapping | None]],
        *,
        half: str,
        encodes: bool,
        lends: bool,
    ) -> None:
        self.is_elsewhere = True
        self.seals_stores = True
        self.number = number
        self.name = name
        self.half = half
        self.label = tier_label(name, half)
        """The words for the tier in log lines."""
        self._capabilities = capabilities
        self._changes = changes
        self._send = call
        self._direct = direct
        self._tell = tell
        self._fetch_lent_memory = lent_memory
        self._encodes = encodes
        self._may_lend = lends
        self._lent_memory: LentMapping | None = None
        self._needs_pinned = False
        self._pinning: HostPinning | None = None
        self._lendings = count(1)
        self._stuck_threads = 0
        self._is_here = True
        self._reopening: asyncio.Future[None] | None = None
        self.wants_open = False
        """True after ``open`` until ``close``: the next process opens the tier too."""

    @property
    def capabilities(self) -> Capabilities:
        """The backend's capabilities."""
        return self._capabilities

    @property
    def stuck_threads(self) -> int:
        """Number of the tier's threads that are stuck now."""
        return self._stuck_threads

    @property
    def lends(self) -> bool:
        """True if the tier lends memory that this process has mapped, and pinned if it must be."""
        memory = self._lent_memory
        return memory is not None and self._is_here and (memory.is_pinned or not self._needs_pinned)

    def lend_pinned_only(self, pinning: HostPinning | None) -> None:
        """Lend memory only while it is pinned; see :class:`TierStorage`."""
        self._needs_pinned, self._pinning = True, pinning
        self._pin(self._lent_memory)

    async def open(self) -> None:
        """Open the backend. If its process ends meanwhile, this waits until the next one has opened it."""
        self.wants_open = True
        try:
            await self._call(Kind.OPEN)
        except StorageAwayError:
            if not self.wants_open:  # nobody opens it in the next process
                raise
            self._reopening = asyncio.get_running_loop().create_future()
            await self._reopening
        else:
            await self.map_lent_memory()

    async def close(self) -> None:
        """Close the backend. If its process is away, there is nothing to close."""
        self.abandon_open()
        self._forget_lent_memory()
        if self._is_here:
            await self._call(Kind.CLOSE)

    async def contains(self, keys: Sequence[ObjectKey]) -> list[bool]:
        """Return, per key, whether the object is there."""
        flags: list[bool] = []
        for part in protocol.parts_of(keys):
            flags += (await self._call(Kind.CONTAINS, protocol.pack_keys(part))).flags(len(part))
        return flags

    def start_load(self, objects: Sequence[StagedObject], staging: TierShare | None, on_end: LoadEnded) -> None:
        """Load and verify objects; see :class:`TierStorage`."""

        body = pack_objects(objects, [staged.scratch for staged in objects])
        self._send_direct(Kind.LOAD, body, lambda answer: answer.loaded(len(objects)), on_end)

    def start_store(self, objects: Sequence[StagedObject], staging: TierShare | None, on_end: StoreEnded) -> None:
        """Store objects; see :class:`TierStorage`."""
        scratch: list[Lease | None] = [None] * len(objects)
        if self._encodes and staging is not None:
            scratch = [staging.try_scratch_for_store(staged.nbytes) for staged in objects]

        def ended(ends: list[StoreEnd] | Exception) -> None:
            _release(scratch)
            on_end(ends)

        try:
            body = pack_objects(objects, scratch)
            self._send_direct(Kind.STORE, body, lambda answer: answer.stored(len(objects)), ended)
        except BaseException:
            _release(scratch)
            raise

    def start_borrow(self, wanted: Sequence[WantedObject], on_end: LendingEnded[LoadOutcome], *, verify: bool) -> None:
        """Let the backend lend stored objects; see :class:`TierStorage`."""
        body = protocol.pack_flags([verify]) + protocol.pack_wanted(wanted)
        self._start_lending(Kind.BORROW, wanted, body, lambda answer: answer.borrowed(len(wanted)), on_end)

    def start_reserve(self, wanted: Sequence[WantedObject], on_end: LendingEnded[StoreOutcome]) -> None:
        """Let the backend lend memory for objects that will be stored; see :class:`TierStorage`."""
        body = protocol.pack_wanted(wanted)
        self._start_lending(Kind.RESERVE, wanted, body, lambda answer: answer.reserved(len(wanted)), on_end)

    def _start_lending(
        self,
        kind: Kind,
        wanted: Sequence[WantedObject],
        body: bytes,
        read: Callable[[protocol.Reader], tuple[list[OutcomeT | None], list[int]]],
        on_end: LendingEnded[OutcomeT],
    ) -> None:
        """Send a request that lends.

        Args:
            body: the request, without its number.
            read: reads the outcomes, and the positions in the lent memory, from the answer.
        """
        direct = self._direct()  # before the memory: a process never gets a call for the memory of the one before it
        memory = self._lent_memory
        if memory is None or not self.lends:
            raise StorageAwayError(f"tier {self.name!r} lends no memory now")
        view, number = memory.view, next(self._lendings)
        number_bytes = protocol.pack_lending(number)

        def read_end(answer: protocol.Reader) -> LendingEnd[OutcomeT]:
            outcomes, offsets = read(answer)
            views: list[memoryview | None] = []
            for one, offset in zip(wanted, offsets, strict=True):
                views.append(None if offset == NO_PIECE else view[offset : offset + one.nbytes])
                if offset != NO_PIECE and offset + one.nbytes > len(view):
                    raise protocol.ProtocolError(f"an object ends behind the {len(view)} bytes of the lent memory")
            give_back = memory.use(partial(self._tell, Kind.GIVE_BACK, self.number, number_bytes))
            return LendingEnd(outcomes, lend(views, give_back, number, offsets))

        self._send_direct(kind, number_bytes + body, read_end, on_end, direct)

    async def delete(self, keys: Sequence[ObjectKey]) -> None:
        """Remove objects."""
        for part in protocol.parts_of(keys):
            await self._call(Kind.DELETE, protocol.pack_keys(part))

    async def touch(self, keys: Sequence[ObjectKey], spare: Sequence[bool]) -> None:
        """Set the order of eviction; see :meth:`Backend.touch`."""
        for start in range(0, len(keys), protocol.MAX_KEYS):
            part = slice(start, start + protocol.MAX_KEYS)
            await self._call(Kind.TOUCH, protocol.pack_keys(keys[part]) + protocol.pack_flags(spare[part]))

    # For the process's owner

    def received(self, message: Message) -> None:
        """Take a change that no call returns."""
        body = protocol.Reader(message.body)
        if message.kind is Kind.EVICTED:
            self._changes.evicted(body.keys())
        elif message.kind is Kind.EVICTED_BY_OTHERS:
            self._changes.evicted_by_others(body.keys())
        elif message.kind is Kind.STUCK_THREADS:
            self._stuck(body.change())

    async def map_lent_memory(self) -> None:
        """Map the memory that the tier lends, once it is open. Without it, loads and stores use staging memory."""
        if not self._may_lend:
            return
        try:
            memory = await self._fetch_lent_memory(self.number)
            self._forget_lent_memory()  # of an earlier attempt to open the tier
            self._lent_memory = memory
            self._pin(memory)
            if not self.wants_open:  # closed meanwhile
                self._forget_lent_memory()
        except StorageAwayError:
            pass  # the next process lends again
        except (OSError, ValueError) as error:
            logger.warning(
                "%s: its memory cannot be mapped, so objects are copied through staging memory: %s", self.label, error
            )

    def _pin(self, memory: LentMapping | None) -> None:
        """Begin to pin lent memory if it must be. Called by both threads that may be the later one."""
        if memory is not None and self._pinning is not None:
            memory.pin(self._pinning)

    def _forget_lent_memory(self) -> None:
        memory, self._lent_memory = self._lent_memory, None
        if memory is not None:
            memory.close()  # it stays mapped for copies that still use it

    def process_ended(self) -> None:
        """Note that the process has ended: its threads are gone, and so are objects that lived in its memory."""
        self._is_here = False
        self._forget_lent_memory()
        self._stuck(-self._stuck_threads)
        self._changes.ended(not (self._capabilities.persistent or self._capabilities.shared))

    def reopened(self) -> None:
        """Note that the tier can be called in the next process."""
        self._is_here = True
        if self._reopening is not None and not self._reopening.done():
            self._reopening.set_result(None)

    def abandon_open(self) -> None:
        """Open the tier in no further process. An ``open`` that waits for one fails."""
        self.wants_open = False
        if self._reopening is not None and not self._reopening.done():
            self._reopening.set_exception(StorageAwayError(f"tier {self.name!r} is closed"))

    def _stuck(self, change: int) -> None:
        if change:
            self._stuck_threads += change
            self._changes.stuck_threads_changed(change)

    def _check_is_here(self) -> None:
        if not self._is_here:
            raise StorageAwayError(f"the I/O process of tier {self.name!r} has ended and is being replaced")

    def _send_direct(
        self,
        kind: Kind,
        body: bytes,
        read: Callable[[protocol.Reader], T],
        on_end: Callable[[T | Exception], None],
        direct: DirectCalls | None = None,
    ) -> None:
        """Send a request from any thread.

        Args:
            read: reads the answer.
            on_end: gets the result of ``read``, or an error.
            direct: the calls of the process that must get it; by default of the process that serves now.
        """
        self._check_is_here()

        def answered(answer: Message | Exception) -> None:
            end: T | Exception
            try:
                end = answer if isinstance(answer, Exception) else read(protocol.Reader(answer.body))
            except (protocol.ProtocolError, StorageAwayError) as error:
                end = error
            on_end(end)

        (direct or self._direct()).send(kind, self.number, body, answered)

    async def _call(self, kind: Kind, body: bytes = b"") -> protocol.Reader:
        self._check_is_here()
        return protocol.Reader((await self._send(kind, self.number, body)).body)


def _release(leases: Sequence[Lease | None]) -> None:
    for lease in leases:
        if lease is not None:
            lease.release()


def pack_objects(objects: Sequence[StagedObject], scratch: Sequence[Lease | None]) -> bytes:
    """Return the bytes of objects in a request.

    Args:
        scratch: per object, the second lease for its stored bytes.
    """
    pieces = [
        Piece(
            staged.lease.offset,
            staged.nbytes,
            NO_PIECE if second is None else second.offset,
            staged.spare,
            staged.unsealed,
            staged.lease.lending if isinstance(staged.lease, LentObject) else 0,
        )
        for staged, second in zip(objects, scratch, strict=True)
    ]
    return protocol.pack_keys([staged.key for staged in objects]) + protocol.pack_pieces(pieces)
