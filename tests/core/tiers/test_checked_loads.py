"""Loads in one call: objects are checked while they arrive, and careless backends are caught."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Iterator, Sequence
from typing import Any

import pytest

from offload_core.api.backend import Backend, BackendContext, BackendType, LoadOutcome, LoadReservation
from offload_core.api.keys import ObjectKey
from offload_core.api.one_pass import LoadCheck
from offload_core.api.wrapper import BackendWrapper
from offload_core.config.model import BackendConfig, TierConfig
from offload_core.objects import format as object_format
from offload_core.objects.format import HEADER_BYTES
from offload_core.runtime.io_loop import IoLoop
from offload_core.runtime.metrics import Counters
from offload_core.testing import FaultPlan, FaultyBackend, FlipBit, Inject
from offload_core.tiers.opening import close_tiers
from offload_core.tiers.tier import Tier
from tests.support.memory_backend import LIMITS, MemoryBackend, MemoryOptions, key
from tests.support.staged_objects import OBJECT_BYTES, StagedObjects

SECONDS = 30
HIT, MISS, CORRUPT = LoadOutcome.HIT, LoadOutcome.MISS, LoadOutcome.CORRUPT

Fill = Callable[[bytes, memoryview, LoadCheck], None]


def in_parts(content: bytes, buffer: memoryview, check: LoadCheck) -> None:
    """Fill a buffer in three parts, as an honest backend does."""
    for start, end in ((0, 1000), (1000, HEADER_BYTES + 10), (HEADER_BYTES + 10, len(buffer))):
        buffer[start:end] = content[start:end]
        check.filled(end - start)


def in_one_part(content: bytes, buffer: memoryview, check: LoadCheck) -> None:
    buffer[:] = content
    check.filled(len(buffer))


def told_nothing(content: bytes, buffer: memoryview, check: LoadCheck) -> None:
    buffer[:] = content


def told_too_little(content: bytes, buffer: memoryview, check: LoadCheck) -> None:
    buffer[:] = content
    check.filled(len(buffer) - 1)


def told_too_much(content: bytes, buffer: memoryview, check: LoadCheck) -> None:
    in_one_part(content, buffer, check)
    check.filled(1)


def told_early(content: bytes, buffer: memoryview, check: LoadCheck) -> None:
    check.filled(HEADER_BYTES)
    check.filled(len(buffer) - HEADER_BYTES)
    buffer[:] = content


def told_of_a_read_that_began_again(content: bytes, buffer: memoryview, check: LoadCheck) -> None:
    buffer[:1000] = bytes(1000)
    check.filled(1000)
    in_parts(content, buffer, check)


HONEST = (in_parts, in_one_part)
CARELESS = (told_nothing, told_too_little, told_too_much, told_early, told_of_a_read_that_began_again)


class OneCallBackend(MemoryBackend):
    """Loads in one call, and fills buffers by ``fill``."""

    fill: Fill = staticmethod(in_parts)

    async def load_and_check(
        self, keys: Sequence[ObjectKey], buffers: Sequence[memoryview], checks: Sequence[LoadCheck]
    ) -> Sequence[LoadOutcome]:
        outcomes = await self.run_blocking(lambda: list(map(self._load_checked, keys, buffers, checks)))
        return self._result("load_and_check", outcomes)

    def _load_checked(self, wanted: ObjectKey, buffer: memoryview, check: LoadCheck) -> LoadOutcome:
        found = self.objects.get(wanted)
        if found is None:
            return MISS
        if len(found) != len(buffer):
            return CORRUPT
        self.fill(found, buffer, check)
        return HIT


class Rig(StagedObjects):
    """A tier over a backend of a class, perhaps wrapped, and staging for its objects."""

    def __init__(self, io: IoLoop) -> None:
        super().__init__()
        self.io, self.counters = io, Counters()
        self.tiers: list[Tier] = []

    def tier(
        self,
        backend_class: type[MemoryBackend] = OneCallBackend,
        wrap: Callable[[Backend[Any]], Backend[Any]] | None = None,
    ) -> tuple[Tier, MemoryBackend]:
        made: list[MemoryBackend] = []

        def construct(options: MemoryOptions, context: BackendContext) -> Backend[Any]:
            made.append(backend_class(options, context))
            return made[-1] if wrap is None else wrap(made[-1])

        config = BackendConfig.model_validate({"name": "memory", "type": "memory", "io_threads": 2})
        backend_type = BackendType("memory", construct, MemoryOptions)  # type: ignore[arg-type]
        self.tiers.append(Tier(TierConfig(config, backend_type, MemoryOptions()), LIMITS, self.counters))
        self.run(self.tiers[-1].open())
        made[0].calls.clear()
        made[0].objects.update((key(number), bytes(self.sealed(number).lease.view)) for number in range(3))
        return self.tiers[-1], made[0]

    def run(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        return self.io.submit(coroutine).result(SECONDS)

    def load(self, tier: Tier, *numbers: int) -> list[LoadOutcome | None]:
        """Load objects, and check that the leases of the hits hold them."""
        staged = [self.staged(number) for number in numbers]
        outcomes: list[LoadOutcome | None] = self.run(tier.load(staged))
        for one, outcome in zip(staged, outcomes, strict=True):
            if outcome is HIT:
                object_format.verify(one.lease.view, one.key)
            one.lease.release()
        return outcomes


@pytest.fixture
def rig(io: IoLoop) -> Iterator[Rig]:
    rig = Rig(io)
    yield rig
    close_tiers(rig.tiers, io, SECONDS)


@pytest.fixture
def verified_later(monkeypatch: pytest.MonkeyPatch) -> list[ObjectKey]:
    """The objects that the core verified as a whole after their loads."""
    verified: list[ObjectKey] = []
    verify_all = object_format.verify

    def watched(view: memoryview, name: ObjectKey, *payload_checksum: bytes | None) -> Any:
        if not payload_checksum:
            verified.append(name)
        return verify_all(view, name, *payload_checksum)

    monkeypatch.setattr(object_format, "verify", watched)
    return verified


@pytest.mark.parametrize("fill", HONEST)
def test_an_object_that_was_checked_on_its_way_is_not_verified_again(
    rig: Rig, verified_later: list[ObjectKey], fill: Fill
) -> None:
    tier, backend = rig.tier()
    backend.fill = fill  # type: ignore[attr-defined]
    staged = [rig.staged(number) for number in (1, 7, 0)]
    assert rig.run(tier.load(staged)) == [HIT, MISS, HIT]
    assert verified_later == []
    assert backend.calls == ["load_and_check"]
    assert set(staged[1].lease.tensor.tolist()) == {0x5A}, "a miss leaves its buffer alone"


@pytest.mark.parametrize("fill", CARELESS)
def test_an_object_whose_check_was_not_told_of_every_byte_once_is_verified_afterwards(
    rig: Rig, verified_later: list[ObjectKey], fill: Fill
) -> None:
    tier, backend = rig.tier()
    backend.fill = fill  # type: ignore[attr-defined]
    assert rig.load(tier, 1)[0] is HIT
    assert verified_later[0] == key(1)


@pytest.mark.parametrize("at", [0, 50, 4090, HEADER_BYTES, OBJECT_BYTES - 1])
@pytest.mark.parametrize("fill", [*HONEST, *CARELESS])
def test_a_damaged_object_is_deleted_and_never_a_hit(rig: Rig, fill: Fill, at: int) -> None:
    tier, backend = rig.tier()
    backend.fill = fill  # type: ignore[attr-defined]
    whole = bytearray(backend.objects[key(1)])
    whole[at] ^= 1
    backend.objects[key(1)] = bytes(whole)
    assert rig.load(tier, 0, 1, 2) == [HIT, CORRUPT, HIT]
    assert set(backend.objects) == {key(0), key(2)}


def test_a_damaged_object_is_counted_and_logged_once(rig: Rig, caplog: pytest.LogCaptureFixture) -> None:
    tier, backend = rig.tier()
    backend.objects[key(1)] = backend.objects[key(2)]
    assert rig.load(tier, 1, 2) == [CORRUPT, HIT]
    counted = {name: count for (name, _), count in rig.counters.take().items()}
    assert (counted["load_hits"], counted["load_corrupt"], counted["load_bytes"]) == (1, 1, OBJECT_BYTES)
    assert len([one for one in caplog.records if "damaged object, deleting it" in one.getMessage()]) == 1
    assert "load_into" not in backend.calls


def test_a_backend_that_tells_the_check_of_another_object_is_caught(rig: Rig) -> None:
    class Confused(OneCallBackend):
        async def load_and_check(
            self, keys: Sequence[ObjectKey], buffers: Sequence[memoryview], checks: Sequence[LoadCheck]
        ) -> Sequence[LoadOutcome]:
            return await super().load_and_check(keys, buffers, checks[::-1])

    tier, backend = rig.tier(Confused)
    backend.objects[key(1)] = backend.objects[key(2)]
    assert rig.load(tier, 0, 1, 2) == [HIT, CORRUPT, HIT]


def test_an_object_of_another_size_is_loaded_again_in_steps(rig: Rig) -> None:
    tier, backend = rig.tier()
    backend.objects[key(1)] += b"\0"
    assert rig.load(tier, 0, 1, 2) == [HIT, CORRUPT, HIT]
    assert backend.calls == [*["load_and_check", "prepare_load", "load_into"] * 2, "delete"]
    assert backend.reserved == 0
    assert backend.call_objects["load_into"] == [1, 1], "the others were loaded"


@pytest.mark.parametrize("fault", [[HIT], [HIT, HIT, HIT, HIT], OSError(5, "the medium is gone"), RuntimeError("bug")])
def test_a_call_that_fails_or_breaks_the_contract_loads_nothing(rig: Rig, fault: object) -> None:
    tier, backend = rig.tier()
    backend.faults = {"load_and_check": fault}
    assert rig.load(tier, 0, 1, 2) == [None, None, None]


class FlipsABit(BackendWrapper):
    """Changes the bytes behind the inner backend's back, which the check of the inner backend could not see."""

    async def load_into(self, keys: Sequence[ObjectKey], buffers: Sequence[memoryview]) -> Sequence[LoadOutcome]:
        outcomes = await self.inner.load_into(keys, buffers)
        for buffer in buffers:
            buffer[-1] ^= 1
        return outcomes


class HidesAll(BackendWrapper):
    async def prepare_load(self, keys: Sequence[ObjectKey]) -> LoadReservation:
        return LoadReservation([False] * len(keys))


@pytest.mark.parametrize(
    ("wrap", "outcome"),
    [
        (FlipsABit, CORRUPT),
        (lambda inner: BackendWrapper(FlipsABit(inner)), CORRUPT),
        (lambda inner: FlipsABit(BackendWrapper(inner)), CORRUPT),
        # Another bit at each read: such damage is not on the medium, and deletes nothing.
        (lambda inner: FaultyBackend(inner, FaultPlan([Inject(FlipBit(), "load_into", chance=1.0)], seed=1)), MISS),
        (HidesAll, MISS),
    ],
)
def test_a_wrapper_that_changes_the_loads_is_loaded_in_steps(
    rig: Rig, wrap: Callable[[Backend[Any]], Backend[Any]], outcome: LoadOutcome
) -> None:
    tier, backend = rig.tier(wrap=wrap)
    assert rig.load(tier, 1) == [outcome]
    assert "load_and_check" not in backend.calls


class Flipped(OneCallBackend):
    """A backend whose author did not think of ``load_and_check``."""

    async def load_into(self, keys: Sequence[ObjectKey], buffers: Sequence[memoryview]) -> Sequence[LoadOutcome]:
        outcomes = await super().load_into(keys, buffers)
        for buffer in buffers:
            buffer[-1] ^= 1
        return outcomes


class Hidden(OneCallBackend):
    async def prepare_load(self, keys: Sequence[ObjectKey]) -> LoadReservation:
        return LoadReservation([False] * len(keys))


@pytest.mark.parametrize(("backend_class", "outcome"), [(Flipped, CORRUPT), (Hidden, MISS)])
def test_a_subclass_that_changes_one_step_alone_is_loaded_in_steps(
    rig: Rig, backend_class: type[MemoryBackend], outcome: LoadOutcome
) -> None:
    tier, backend = rig.tier(backend_class)
    assert rig.load(tier, 1) == [outcome]
    assert "load_and_check" not in backend.calls


def test_a_step_that_is_replaced_on_the_object_counts_too(rig: Rig) -> None:
    def replaced(backend: Backend[Any]) -> Backend[Any]:
        backend.load_into = Flipped.load_into.__get__(backend, Flipped)  # type: ignore[method-assign]
        return backend

    assert not rig.tier(OneCallBackend, replaced)[0].backend.loads_in_one_call


def test_a_wrapper_that_leaves_the_loads_alone_passes_the_call_on(rig: Rig, verified_later: list[ObjectKey]) -> None:
    tier, backend = rig.tier(wrap=lambda inner: BackendWrapper(BackendWrapper(inner)))
    assert rig.run(tier.load([rig.staged(1)])) == [HIT]
    assert (backend.calls, verified_later) == (["load_and_check"], [])


def test_a_wrapper_around_a_backend_without_loads_in_one_call_has_none(rig: Rig) -> None:
    tier, _ = rig.tier(MemoryBackend, BackendWrapper)
    assert not tier.backend.loads_in_one_call
    assert rig.load(tier, 1, 9) == [HIT, MISS]


def test_a_backend_without_loads_in_one_call_says_so(rig: Rig) -> None:
    _, backend = rig.tier(MemoryBackend)
    with pytest.raises(NotImplementedError, match=r"tier 'memory': MemoryBackend has no loads in one call"):
        rig.run(backend.load_and_check([], [], []))
