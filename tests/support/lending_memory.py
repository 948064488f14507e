"""A memory backend whose objects are slots of one pinned arena, which it lends. A free slot is overwritten at once."""

from __future__ import annotations

import mmap
import threading
from collections.abc import Awaitable, Callable, Iterator, MutableMapping, Sequence
from contextlib import contextmanager
from typing import Any

from offload_core.api.backend import BackendContext, BackendType, LoadReservation, StoreOutcome, StoreReservation
from offload_core.api.capabilities import Capabilities
from offload_core.api.keys import ObjectKey
from offload_core.api.memory.addresses import address_of
from offload_core.api.memory.pinned_memory import HostPinning
from offload_core.config.model import BackendConfig, TierConfig
from tests.support.memory_backend import MemoryBackend, MemoryOptions

POISON = 0x5C
PAGE_BYTES = 4096


class Slots(MutableMapping[ObjectKey, bytes]):
    """Objects of one size in the slots of an arena. Thread-safe.

    Args:
        count: number of slots.
        nbytes: size of an object in bytes.
    """

    def __init__(self, count: int, nbytes: int) -> None:
        self.nbytes = nbytes
        self.slot_bytes = -(-nbytes // PAGE_BYTES) * PAGE_BYTES
        self.memory = memoryview(mmap.mmap(-1, count * self.slot_bytes))
        self._lock = threading.RLock()
        self._slots: dict[ObjectKey, int] = {}
        self._free = list(range(count))
        self._uses = [0] * count
        """Per slot, one for its object and one for each borrower."""

    def __getitem__(self, key: ObjectKey) -> bytes:
        with self._lock:
            return bytes(self.view(self._slots[key]))

    def __setitem__(self, key: ObjectKey, content: bytes | memoryview) -> None:
        slot = self.reserve()
        if slot is None:
            raise MemoryError("no slot is free")
        self.view(slot)[:] = content
        self.publish(key, slot)
        self.release(slot)

    def __delitem__(self, key: ObjectKey) -> None:
        with self._lock:
            self.release(self._slots.pop(key))

    def __iter__(self) -> Iterator[ObjectKey]:
        return iter(list(self._slots))

    def __len__(self) -> int:
        return len(self._slots)

    @property
    def borrowed(self) -> int:
        """The number of uses of slots beside their objects."""
        return sum(self._uses) - len(self._slots)

    def view(self, slot: int) -> memoryview:
        start = slot * self.slot_bytes
        return self.memory[start : start + self.nbytes]

    def reserve(self) -> int | None:
        """Return a free slot, or that of the oldest object that nobody has borrowed."""
        with self._lock:
            if not self._free:
                oldest = next((key for key, slot in self._slots.items() if self._uses[slot] == 1), None)
                if oldest is None:
                    return None
                del self[oldest]
            slot = self._free.pop()
            self._uses[slot] = 1
            return slot

    def publish(self, key: ObjectKey, slot: int) -> None:
        with self._lock:
            if key in self._slots:
                del self[key]
            self._slots[key] = slot
            self._uses[slot] += 1

    def borrow(self, key: ObjectKey) -> int | None:
        with self._lock:
            slot = self._slots.get(key)
            if slot is not None:
                self._uses[slot] += 1
            return slot

    def release(self, slot: int) -> None:
        with self._lock:
            self._uses[slot] -= 1
            if not self._uses[slot]:
                self.view(slot)[:] = bytes([POISON]) * self.nbytes
                self._free.append(slot)

    def slot_of(self, buffer: memoryview) -> int | None:
        """Return the slot in which a buffer lies."""
        place, beyond = divmod(address_of(buffer) - address_of(self.memory), self.slot_bytes)
        return place if not beyond and 0 <= place < len(self._uses) else None


class LendingMemory(MemoryBackend):
    """Lends all of its objects.

    Args:
        slots: its objects.
    """

    def __init__(self, options: MemoryOptions, context: BackendContext, slots: Slots) -> None:
        super().__init__(options, context)
        self.slots = slots
        self.objects: Any = slots

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(medium="host", persistent=False, shared=False, lends=True)

    async def prepare_load(self, keys: Sequence[ObjectKey]) -> LoadReservation:
        slots = [self.slots.borrow(key) for key in keys]
        views = [None if slot is None else self.slots.view(slot).toreadonly() for slot in slots]
        sizes = [None if view is None else len(view) for view in views]
        return LoadReservation([slot is not None for slot in slots], self._giving_back(slots), sizes, lambda: views)

    async def prepare_store(
        self, keys: Sequence[ObjectKey], nbytes: Sequence[int], spare: Sequence[bool] = ()
    ) -> StoreReservation:
        outcomes: list[StoreOutcome | None] = []
        slots: list[int | None] = []
        for key in keys:
            slots.append(None if key in self.slots else self.slots.reserve())
            present = StoreOutcome.ALREADY_PRESENT if key in self.slots else StoreOutcome.REJECTED
            outcomes.append(present if slots[-1] is None else None)
        views = [None if slot is None else self.slots.view(slot) for slot in slots]
        return StoreReservation(outcomes, on_release=self._giving_back(slots), lend=lambda: views)

    async def store(self, keys: Sequence[ObjectKey], buffers: Sequence[memoryview]) -> Sequence[StoreOutcome]:
        await self.run_blocking(self.gates["store"].pass_through)
        return [self._store(key, buffer) for key, buffer in zip(keys, buffers, strict=True)]

    def _store(self, key: ObjectKey, buffer: memoryview) -> StoreOutcome:
        slot = self.slots.slot_of(buffer)
        if slot is not None:
            self.slots.publish(key, slot)
            return StoreOutcome.STORED
        try:
            self.slots[key] = bytes(buffer)
        except MemoryError:
            return StoreOutcome.REJECTED
        return StoreOutcome.STORED

    def _giving_back(self, slots: Sequence[int | None]) -> Callable[[], Awaitable[None]]:
        async def release() -> None:
            for slot in slots:
                if slot is not None:
                    self.slots.release(slot)

        return release


def lending_tier(slots: Slots, **common: object) -> tuple[TierConfig, list[LendingMemory]]:
    """Return a tier's configuration and a list; the tier's backend is appended to the list on construction."""
    made: list[LendingMemory] = []

    def construct(options: MemoryOptions, context: BackendContext) -> LendingMemory:
        made.append(LendingMemory(options, context, slots))
        return made[-1]

    config = BackendConfig.model_validate({"name": "memory", "type": "memory", **common})
    return TierConfig(config, BackendType("memory", construct, MemoryOptions), MemoryOptions()), made  # type: ignore[arg-type]


@contextmanager
def pinned_in_pieces(slots: Slots, pinning: HostPinning, piece_bytes: int = 3 * PAGE_BYTES) -> Iterator[None]:
    """Pin the arena piece by piece, with borders within slots."""
    start = address_of(slots.memory)
    pieces = range(start, start + len(slots.memory), piece_bytes)
    for piece in pieces:
        pinning.register(piece, min(piece_bytes, start + len(slots.memory) - piece))
    try:
        yield
    finally:
        for piece in pieces:
            pinning.unregister(piece)
