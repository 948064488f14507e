"""A small in-memory backend; tests can hold, break and watch its calls."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Literal, TypeVar, cast

from offload_core.api.backend import (
    Backend,
    BackendContext,
    BackendType,
    LoadOutcome,
    LoadReservation,
    StoreOutcome,
    StoreReservation,
)
from offload_core.api.capabilities import Capabilities
from offload_core.api.keys import ObjectKey
from offload_core.api.options import BackendOptions
from offload_core.config.limits import Limits
from offload_core.config.model import BackendConfig, OffloadConfig, OffloadSettings, TierConfig

WAIT_SECONDS = 60
LIMITS = Limits(lookup_timeout_seconds=30.0, load_timeout_seconds_per_mib=0.0, breaker_failures=1_000_000)
"""Limits that no test reaches by accident."""

T = TypeVar("T")


def key(number: int, pack: str = "full-u16") -> ObjectKey:
    return ObjectKey("ab" * 32, pack, number.to_bytes(32, "big"))


class MemoryOptions(BackendOptions):
    """The test backend has no options."""


class Gate:
    """A gate for one kind of call: ``shut`` it, wait until a call has ``arrived``, and ``open`` it."""

    def __init__(self) -> None:
        self.arrived = threading.Event()
        self._open = threading.Event()
        self._open.set()

    def shut(self) -> None:
        self.arrived.clear()
        self._open.clear()

    def open(self) -> None:
        self._open.set()

    def wait_for_a_call(self) -> None:
        assert self.arrived.wait(WAIT_SECONDS), "no call came"

    def pass_through(self) -> None:
        """Wait at the gate, on a thread of the tier."""
        self.arrived.set()
        assert self._open.wait(WAIT_SECONDS), "the test never opened the gate"


class CountedLoad(LoadReservation):
    def __init__(self, present: Sequence[bool], released: Callable[[], None]) -> None:
        super().__init__(present)
        self._released = released

    async def release(self) -> None:
        self._released()


class CountedStore(StoreReservation):
    def __init__(self, outcomes: Sequence[StoreOutcome | None], released: Callable[[], None]) -> None:
        super().__init__(outcomes)
        self._released = released

    async def release(self) -> None:
        self._released()


class MemoryBackend(Backend[MemoryOptions]):
    """A dictionary of objects. ``faults`` has, by call name, an exception to raise or a result to return instead."""

    shared = True
    """True if the scheduler half asks the backend; if false, it relies on the workers' reports."""
    medium: Literal["host", "disk", "remote"] = "host"
    bounded = spares = evicts = False
    room_for_spares = True

    def __init__(self, options: MemoryOptions, context: BackendContext) -> None:
        super().__init__(options, context)
        self.objects: dict[ObjectKey, bytes] = {}
        self.faults: dict[str, object] = {}
        self.calls: list[str] = []
        self.call_objects: dict[str, list[int]] = {"load_into": [], "store": []}
        """Per kind of call, the number of objects in each call."""
        self.reserved = 0
        self.spare_keys: set[ObjectKey] = set()
        """Every key that was offered as a spare object."""
        self.touches: list[tuple[ObjectKey, bool]] = []
        self.gates = {name: Gate() for name in ("open", "close", "contains", "load_into", "store")}

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(
            medium=self.medium,
            persistent=False,
            shared=self.shared,
            bounded=self.bounded,
            evicts=self.evicts,
            spares=self.spares,
        )

    async def open(self) -> None:
        await self.run_blocking(self.gates["open"].pass_through)
        self._result("open", None)

    async def close(self) -> None:
        await self.run_blocking(self.gates["close"].pass_through)
        self._result("close", None)

    async def contains(self, keys: Sequence[ObjectKey]) -> Sequence[bool]:
        await self.run_blocking(self.gates["contains"].pass_through)
        return self._result("contains", [key in self.objects for key in keys])

    async def load_into(self, keys: Sequence[ObjectKey], buffers: Sequence[memoryview]) -> Sequence[LoadOutcome]:
        self.call_objects["load_into"].append(len(keys))
        await self.run_blocking(self.gates["load_into"].pass_through)
        outcomes = await self.run_blocking(lambda: list(map(self._load, keys, buffers)))
        return self._result("load_into", outcomes)

    async def store(self, keys: Sequence[ObjectKey], buffers: Sequence[memoryview]) -> Sequence[StoreOutcome]:
        self.call_objects["store"].append(len(keys))
        await self.run_blocking(self.gates["store"].pass_through)
        assert all(buffer.readonly for buffer in buffers)
        self.objects.update((key, bytes(buffer)) for key, buffer in zip(keys, buffers, strict=True))
        return self._result("store", [StoreOutcome.STORED] * len(keys))

    async def delete(self, keys: Sequence[ObjectKey]) -> None:
        self._result("delete", None)
        for gone in keys:
            self.objects.pop(gone, None)

    async def prepare_load(self, keys: Sequence[ObjectKey]) -> LoadReservation:
        present = self._result("prepare_load", [key in self.objects for key in keys])
        reservation = CountedLoad(present, self._released)
        self.reserved += 1
        return reservation

    async def prepare_store(
        self, keys: Sequence[ObjectKey], nbytes: Sequence[int], spare: Sequence[bool] = ()
    ) -> StoreReservation:
        present = [StoreOutcome.ALREADY_PRESENT if key in self.objects else None for key in keys]
        if spare:
            assert self.spares, "only a backend that declares spares gets the flags"
            self.spare_keys.update(key for key, is_spare in zip(keys, spare, strict=True) if is_spare)
            if not self.room_for_spares:
                rejected = StoreOutcome.REJECTED
                present = [rejected if flag else outcome for flag, outcome in zip(spare, present, strict=True)]
        outcomes = self._result("prepare_store", present)
        reservation = CountedStore(outcomes, self._released)
        self.reserved += 1
        return reservation

    async def touch(self, keys: Sequence[ObjectKey], spare: Sequence[bool]) -> None:
        self._result("touch", None)
        self.touches += zip(keys, spare, strict=True)

    def _released(self) -> None:
        self.reserved -= 1

    def _load(self, wanted: ObjectKey, buffer: memoryview) -> LoadOutcome:
        found = self.objects.get(wanted)
        if found is None:
            return LoadOutcome.MISS
        if len(found) != len(buffer):
            return LoadOutcome.CORRUPT
        buffer[:] = found
        return LoadOutcome.HIT

    def _result(self, call: str, result: T) -> T:
        self.calls.append(call)
        fault = self.faults.get(call)
        if isinstance(fault, BaseException):
            raise fault
        return result if fault is None else cast("T", fault)


def memory_tier(
    name: str = "memory", prepare: Callable[[MemoryBackend], None] | None = None, **common: object
) -> tuple[TierConfig, list[MemoryBackend]]:
    """Return a tier's configuration and a list; the tier's backend is appended to the list on construction."""
    made: list[MemoryBackend] = []

    class Recorded(MemoryBackend):
        def __init__(self, options: MemoryOptions, context: BackendContext) -> None:
            super().__init__(options, context)
            made.append(self)
            if prepare is not None:
                prepare(self)

    config = BackendConfig.model_validate({"name": name, "type": "memory", **common})
    return TierConfig(config, BackendType("memory", Recorded, MemoryOptions), MemoryOptions()), made


def memory_config(**common: object) -> tuple[OffloadConfig, list[MemoryBackend]]:
    """Return a whole configuration with such a tier, for the doors to other systems, and the tier's backends."""
    tier, made = memory_tier(**common)  # type: ignore[arg-type]
    return config_of(tier), made


def config_of(tier: TierConfig) -> OffloadConfig:
    """Return a whole configuration with one tier, for the doors to other systems."""
    keys = {
        "staging_bytes": 32 << 20,
        "io_process": "off",
        "model_identity": "a-model",
        "backends": [tier.common.model_dump()],
        "shutdown_timeout_seconds": 0.1,
        "close_timeout_seconds": 0.1,
    }
    return OffloadConfig(OffloadSettings.model_validate(keys), (tier,))
