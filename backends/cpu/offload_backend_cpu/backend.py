"""The ``cpu`` backend: host memory of this process.

Everything but the copies happens on the event loop, so nothing here needs a lock. :meth:`CpuBackend.prepare_store`
*reserves* an object's pages. The object becomes visible when its pages are filled. After its eviction or deletion they
are released as soon as no load uses them. An object is not in the order of eviction while loads use it. When the last
load ends, the object returns there as just used, and is spare no longer.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence

from offload_backend_cpu.arena import Arena
from offload_backend_cpu.free_pages import Run
from offload_backend_cpu.memory_setup import MemorySetup
from offload_backend_cpu.options import CpuOptions
from offload_core.api import (
    Backend,
    BackendContext,
    BackendError,
    Capabilities,
    EvictionOrder,
    HostPinning,
    LoadOutcome,
    LoadReservation,
    ObjectKey,
    SharedMemory,
    StoredObject,
    StoreOutcome,
    StoreReservation,
)

_LIST_BATCH = 1000
# One batch of the transfer engine: 2 MiB and headers, copied in some 0.15 ms. Use of a thread was measured to add
# 0.1 ms, on busy cores 2 ms, and nearly to double the processor time (benchmarks/cpu_memory.py).
_INLINE_COPY_BYTES = 2112 * 1024


class _Object:
    """An object's memory. There may be a million objects, so every attribute here is indispensable.

    Attributes:
        pins: the loads that use or await it.
        removed: it was evicted or deleted; its pages are released with the last pin.
    """

    __slots__ = ("nbytes", "num_pages", "pins", "removed", "runs", "stored_at_seconds")

    def __init__(self, runs: tuple[Run, ...], nbytes: int, num_pages: int) -> None:
        self.runs = runs
        self.nbytes = nbytes
        self.num_pages = num_pages
        self.pins = 0
        self.removed = False
        self.stored_at_seconds = time.time()


class CpuBackend(Backend[CpuOptions]):
    """Objects in host memory; the option ``eviction`` sets the order of eviction.

    Args:
        pinning: the means of pinning; by default CUDA, as the option ``pin`` says.
    """

    def __init__(self, options: CpuOptions, context: BackendContext, pinning: HostPinning | None = None) -> None:
        super().__init__(options, context)
        self._memory_setup = MemorySetup(options, context.logger(__name__), self.run_blocking, pinning)
        self._arena: Arena | None = None
        self._objects: dict[ObjectKey, _Object] = {}
        self._eviction_order: EvictionOrder[ObjectKey] = EvictionOrder("lru", 0)
        self._reserved: dict[ObjectKey, dict[_Object, bool]] = {}  # and whether the reservation is for a spare object
        self._lent: set[_Object] = set()  # reservations whose memory is lent

    @property
    def capabilities(self) -> Capabilities:
        """Memory of this process."""
        return Capabilities(
            medium="host", persistent=False, shared=False, bounded=True, lists=True, sizes=True, spares=True, lends=True
        )

    @property
    def lent_memory(self) -> SharedMemory | None:
        """See :attr:`Backend.lent_memory`."""
        return None if self._arena is None else self._arena.shared_memory

    @property
    def pins_lent_memory(self) -> bool:
        """See :attr:`Backend.pins_lent_memory`."""
        return self.options.pin != "off"

    async def open(self) -> None:
        """Map the memory. The system gives it as it is filled, unless the options make it pinned or prefaulted.

        A call that is cancelled while it pins ends after the current piece.

        Raises:
            OSError: the system has not so much memory, or it cannot be pinned and ``pin`` is ``on``.
        """
        arena = await self.run_blocking(Arena, self.options.capacity, is_shared=self.context.lends_to_processes)
        await self._memory_setup.start(arena)
        self._eviction_order = EvictionOrder(self.options.eviction, arena.pages.num_pages)
        self._arena = arena

    async def close(self) -> None:
        """Wait for running copies and release the memory."""
        self._memory_setup.stop()
        await super().close()
        await self._memory_setup.undo()
        self._objects.clear()
        self._reserved.clear()  # their pages must not return to the memory of a later open
        self._lent.clear()
        self._eviction_order = EvictionOrder("lru", 0)
        if self._arena is not None:
            self._arena.close()
        self._arena = None

    async def contains(self, keys: Sequence[ObjectKey]) -> Sequence[bool]:
        """See :meth:`Backend.contains`."""
        return [key in self._objects for key in keys]

    async def prepare_load(self, keys: Sequence[ObjectKey]) -> LoadReservation:
        """Pin the objects that are present. Those in one piece can be lent."""
        found = [self._objects.get(key) for key in keys]
        pinned = [(key, held) for key, held in zip(keys, found, strict=True) if held is not None]
        for key, held in pinned:
            self._pin(key, held)

        async def release() -> None:
            self._unpin_all(pinned)

        sizes = [None if held is None else held.nbytes for held in found]

        def lend() -> list[memoryview | None]:
            views = [None if held is None else self._memory.lent(held.runs, held.nbytes) for held in found]
            return [None if view is None else view.toreadonly() for view in views]

        return LoadReservation([held is not None for held in found], release, sizes, lend)

    async def load_into(self, keys: Sequence[ObjectKey], buffers: Sequence[memoryview]) -> Sequence[LoadOutcome]:
        """See :meth:`Backend.load_into`. A cancelled call ends with its copies."""
        outcomes: list[LoadOutcome] = []
        copies: list[tuple[tuple[Run, ...], memoryview]] = []
        pinned: list[tuple[ObjectKey, _Object]] = []
        for key, buffer in zip(keys, buffers, strict=True):
            held = self._objects.get(key)
            if held is None:
                outcomes.append(LoadOutcome.MISS)
            elif held.nbytes != len(buffer):
                outcomes.append(LoadOutcome.CORRUPT)
            else:
                outcomes.append(LoadOutcome.HIT)
                copies.append((held.runs, buffer))
                pinned.append((key, held))
                self._pin(key, held)
        try:
            await self._copy(self.run_load, self._memory.read, copies, are_resident=True)
        finally:
            self._unpin_all(pinned)
        return outcomes

    async def prepare_store(
        self, keys: Sequence[ObjectKey], nbytes: Sequence[int], spare: Sequence[bool] = ()
    ) -> StoreReservation:
        """Reserve pages; objects are evicted for them in the order of ``eviction``. If too few can be, reject.

        A spare object gets free pages only. If it is present already, nothing changes. Pages in one piece can be lent.
        If another process may use them, the system gives them now. A call that is cancelled meanwhile ends after that.

        Raises:
            OSError: the system has not so much memory.
        """
        outcomes: list[StoreOutcome | None] = []
        evicted: list[ObjectKey] = []
        taken: list[tuple[ObjectKey, _Object]] = []
        granted: list[_Object | None] = []
        for key, size, is_spare in zip(keys, nbytes, spare or [False] * len(keys), strict=True):
            present = self._objects.get(key)
            if present is not None:
                if not present.pins and not is_spare:
                    self._eviction_order.record_use(key)
                outcomes.append(StoreOutcome.ALREADY_PRESENT)
                granted.append(None)
                continue
            reserved = self._reserve_free(size) if is_spare else self._reserve(size, evicted)
            if reserved is not None:
                self._reserved.setdefault(key, {})[reserved] = is_spare
                taken.append((key, reserved))
            outcomes.append(None if reserved is not None else StoreOutcome.REJECTED)
            granted.append(reserved)

        if evicted:  # perhaps some of this batch, for others of it (C5)
            gone = set(evicted)
            outcomes = [
                StoreOutcome.REJECTED if outcome is StoreOutcome.ALREADY_PRESENT and key in gone else outcome
                for key, outcome in zip(keys, outcomes, strict=True)
            ]

        async def release() -> None:
            for key, reserved in taken:
                self._lent.discard(reserved)
                if reserved in self._reserved.get(key, ()):
                    self._take_reserved(key, reserved)
                    self._free(reserved)

        if self.context.lends_to_processes:
            new = [reserved.runs for _, reserved in taken if not self._memory.is_resident(reserved.runs)]
            try:
                if new:
                    await self.run_blocking(self._memory.make_resident, new)
            except BaseException:
                await release()
                raise

        def lend() -> list[memoryview | None]:
            self._lent.update(reserved for _, reserved in taken)
            return [None if one is None else self._memory.lent(one.runs, one.nbytes) for one in granted]

        return StoreReservation(outcomes, evicted, release, lend)

    async def store(self, keys: Sequence[ObjectKey], buffers: Sequence[memoryview]) -> Sequence[StoreOutcome]:
        """See :meth:`Backend.store`. A cancelled call ends with its copies, and stores nothing.

        A buffer that was lent for its key becomes the object's memory as it is.
        """
        outcomes: list[StoreOutcome] = []
        filling: list[tuple[ObjectKey, _Object, bool]] = []
        copies: list[tuple[tuple[Run, ...], memoryview]] = []
        for key, buffer in zip(keys, buffers, strict=True):
            if key in self._objects:
                outcomes.append(StoreOutcome.ALREADY_PRESENT)
                continue
            fitting = [r for r in self._reserved.get(key, ()) if r.nbytes == len(buffer)]
            lent = next((r for r in fitting if r in self._lent and self._memory.is_lent(r.runs, buffer)), None)
            # Nobody but the borrower may use memory that is lent.
            held = lent or next((r for r in fitting if r not in self._lent), None)
            is_spare = False
            if held is not None:
                is_spare = self._take_reserved(key, held)
            else:
                held = self._reserve_free(len(buffer))  # prepare_store evicts
            if held is None:
                outcomes.append(StoreOutcome.REJECTED)
                continue
            outcomes.append(StoreOutcome.STORED)
            filling.append((key, held, is_spare))
            if held is lent:
                self._memory.mark_resident(sum(max(held.runs)))
            else:
                copies.append((held.runs, buffer))
        try:
            are_resident = all(self._memory.is_resident(runs) for runs, _ in copies)
            await self._copy(self.run_blocking, self._memory.write, copies, are_resident=are_resident)
        except BaseException:
            for _, held, _ in filling:
                self._free(held)
            raise
        for key, held, is_spare in filling:
            if key in self._objects:  # the same key twice, or another call was faster
                self._free(held)
                if not is_spare:
                    await self.touch([key], [False])
            else:
                self._objects[key] = held
                others = self._reserved.get(key, {}).values()  # of calls that will find the object present
                self._eviction_order.add(key, held.num_pages, spare=is_spare and all(others))
        return outcomes

    async def touch(self, keys: Sequence[ObjectKey], spare: Sequence[bool]) -> None:
        """See :meth:`Backend.touch`. An object in use is left alone: when its last load ends, it is just used."""
        for key, is_spare in zip(keys, spare, strict=True):
            if key in self._eviction_order:
                self._eviction_order.touch(key, spare=is_spare)

    async def delete(self, keys: Sequence[ObjectKey]) -> None:
        """See :meth:`Backend.delete`."""
        for key in keys:
            if key in self._objects:
                self._remove(key)

    async def list_objects(self) -> AsyncIterator[Sequence[StoredObject]]:
        """See :meth:`Backend.list_objects`."""
        listed = [StoredObject(key, held.nbytes, held.stored_at_seconds) for key, held in self._objects.items()]
        for start in range(0, len(listed), _LIST_BATCH):
            yield listed[start : start + _LIST_BATCH]

    @property
    def _memory(self) -> Arena:
        if self._arena is None:
            raise BackendError(f"tier {self.context.name!r} is not open")
        return self._arena

    async def _copy(
        self,
        run: Callable[..., Awaitable[None]],
        copy: Callable[[tuple[Run, ...], memoryview], None],
        batch: Sequence[tuple[tuple[Run, ...], memoryview]],
        *,
        are_resident: bool,
    ) -> None:
        """Run a batch's copies on one of the tier's threads; a small batch is copied here, which is faster.

        Args:
            run: runs a function on a thread.
            are_resident: the system has given the memory of all copies.
        """
        if are_resident and sum([len(buffer) for _, buffer in batch]) <= _INLINE_COPY_BYTES:
            _copy_all(copy, batch)
        else:
            await run(_copy_all, copy, batch)

    def _reserve(self, nbytes: int, evicted: list[ObjectKey]) -> _Object | None:
        """Take pages for an object, or ``None`` if too few can be evicted. Evicted keys are added to ``evicted``."""
        pages = self._memory.pages
        needed = self._memory.pages_for(nbytes)
        if needed > pages.num_free + self._eviction_order.size:
            return None
        while pages.num_free < needed:
            victim = self._eviction_order.next_victim()
            self._remove(victim)
            evicted.append(victim)
        return _Object(pages.take(needed), nbytes, needed)

    def _reserve_free(self, nbytes: int) -> _Object | None:
        """Take pages for an object, or ``None`` if too few are free."""
        is_free = self._memory.pages_for(nbytes) <= self._memory.pages.num_free
        return self._reserve(nbytes, []) if is_free else None

    def _take_reserved(self, key: ObjectKey, reserved: _Object) -> bool:
        """End a reservation; its pages are the caller's now. Return whether it is for a spare object."""
        is_spare = self._reserved[key].pop(reserved)
        if not self._reserved[key]:
            del self._reserved[key]
        return is_spare

    def _remove(self, key: ObjectKey) -> None:
        """Make an object invisible. Its pages are released at once, or after the last load that uses them."""
        held = self._objects.pop(key)
        held.removed = True
        if not held.pins:
            self._eviction_order.remove(key)
            self._free(held)

    def _free(self, held: _Object) -> None:
        if self._arena is not None:  # else close() has released everything
            self._arena.pages.release(held.runs)

    def _pin(self, key: ObjectKey, held: _Object) -> None:
        if not held.pins:
            self._eviction_order.remove(key)
        held.pins += 1

    def _unpin_all(self, pinned: Sequence[tuple[ObjectKey, _Object]]) -> None:
        for key, held in pinned:
            held.pins -= 1
            if held.pins or self._arena is None:
                continue
            if held.removed:
                self._free(held)
            else:
                self._eviction_order.add(key, held.num_pages, used_again=True)


def _copy_all(
    copy: Callable[[tuple[Run, ...], memoryview], None], batch: Sequence[tuple[tuple[Run, ...], memoryview]]
) -> None:
    for runs, buffer in batch:
        copy(runs, buffer)
