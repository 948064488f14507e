"""Under every fault of a medium a tier answers with a miss or a failure, never with wrong bytes."""

from __future__ import annotations

import asyncio
import errno
import random
import re
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from offload_backend_disk import DiskBackend, DiskOptions
from offload_backend_disk.plugin import DISK

from offload_core.api.backend import (
    Backend,
    BackendContext,
    BackendType,
    LoadOutcome,
    StoreOutcome,
    StoreReservation,
)
from offload_core.api.keys import ObjectKey
from offload_core.api.wrapper import BackendWrapper
from offload_core.config.model import BackendConfig, TierConfig
from offload_core.memory.staging_pool import StagingPool
from offload_core.objects import format as object_format
from offload_core.objects.format import HEADER_BYTES
from offload_core.runtime.io_loop import IoLoop
from offload_core.runtime.metrics import Counters
from offload_core.testing import (
    Call,
    Fail,
    Fault,
    FaultPlan,
    FaultyBackend,
    FlipBit,
    Full,
    GoOn,
    Hang,
    Inject,
    Late,
    Lie,
    Lose,
    Reorder,
    Slow,
    Stall,
    Truncate,
    open_backend,
)
from offload_core.testing.faults.plan import OPERATIONS
from offload_core.tiers.opening import close_tiers
from offload_core.tiers.staged_object import StagedObject
from offload_core.tiers.tier import Tier
from tests.support.memory_backend import LIMITS, key

SECONDS = 30
BATCH = (1, 2, 3)
HIT, MISS, CORRUPT = LoadOutcome.HIT, LoadOutcome.MISS, LoadOutcome.CORRUPT
STORED, PRESENT = StoreOutcome.STORED, StoreOutcome.ALREADY_PRESENT


class Rig:
    """A tier over a disk with faults, and staging for its objects: number ``n`` holds ``n`` in 100 bytes."""

    def __init__(self, folder: Path, plan: FaultPlan, io: IoLoop, counters: Counters) -> None:
        class FaultyDisk(FaultyBackend):
            def __init__(self, options: DiskOptions, context: BackendContext) -> None:
                super().__init__(DiskBackend(options, context), plan)

        config = BackendConfig.model_validate({"name": "faulty", "type": "faulty"})
        options = DiskOptions(path=folder)
        self.plan, self.io, self.counters = plan, io, counters
        self.tier = Tier(TierConfig(config, BackendType("faulty", FaultyDisk, DiskOptions), options), LIMITS, counters)
        self.pool = StagingPool(1 << 20, 1.0)

    def staged(self, number: int) -> StagedObject:
        lease = self.pool.try_acquire(HEADER_BYTES + 100, for_store=False)
        assert lease is not None
        lease.tensor.fill_(0x5A)
        return StagedObject(key(number), lease)

    def sealed(self, number: int) -> StagedObject:
        staged = self.staged(number)
        staged.lease.tensor[HEADER_BYTES:] = number
        object_format.seal(staged.lease.view, staged.key)
        return staged

    def start(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        return self.io.submit(coroutine)

    def store(self, *numbers: int) -> list[bool]:
        return list(self.start(self.tier.store([self.sealed(number) for number in numbers])).result(SECONDS))

    def lookup(self, *numbers: int) -> list[bool]:
        return list(self.start(self.tier.lookup([key(number) for number in numbers])).result(SECONDS))

    def load(self, *numbers: int) -> list[LoadOutcome | None]:
        """Load; every hit is checked to have the bytes that were stored."""
        staged = [self.staged(number) for number in numbers]
        outcomes = list(self.start(self.tier.load(staged)).result(SECONDS))
        for number, one, outcome in zip(numbers, staged, outcomes, strict=True):
            if outcome is HIT:
                assert one.lease.tensor[HEADER_BYTES:].tolist() == [number] * 100
            one.lease.release()
        return outcomes

    def happened(self) -> list[tuple[Fault, str, list[int]]]:
        return [
            (entry.fault, entry.operation, [int.from_bytes(k.chunk_hash, "big") for k in entry.keys])
            for entry in self.plan.injected
        ]


MakeRig = Callable[..., Rig]


@pytest.fixture
def make_rig(tmp_path: Path, io: IoLoop, counters: Counters) -> Iterator[MakeRig]:
    rigs: list[Rig] = []

    def make(*faults: Inject, seed: int = 0) -> Rig:
        rigs.append(Rig(tmp_path / "objects", FaultPlan(faults, seed), io, counters))
        rigs[-1].start(rigs[-1].tier.open()).result(SECONDS)
        return rigs[-1]

    yield make
    close_tiers([rig.tier for rig in rigs], io, SECONDS)


LOAD_FAULTS: dict[str, tuple[Inject, list[LoadOutcome | None], list[LoadOutcome | None]]] = {
    # fault, what the load says, what a load without faults says afterwards; damage of the way deletes nothing
    "slow": (Inject(Slow(0.01), "load_into"), [HIT] * 3, [HIT] * 3),
    "late": (Inject(Late(0.01), "load_into"), [HIT] * 3, [HIT] * 3),
    "stall": (Inject(Stall(0.01), "load_into"), [HIT] * 3, [HIT] * 3),
    "fail": (Inject(Fail(errno.EIO), "load_into"), [None] * 3, [HIT] * 3),
    "fail after": (Inject(Fail(errno.EIO, after=True), "load_into"), [None] * 3, [HIT] * 3),
    "fail to prepare": (Inject(Fail(errno.EIO, after=True), "prepare_load"), [None] * 3, [HIT] * 3),
    "lie": (Inject(Lie(), "load_into"), [MISS] * 3, [HIT] * 3),
    "lose": (Inject(Lose(), "prepare_load"), [MISS] * 3, [MISS] * 3),
    "truncate": (Inject(Truncate(), "load_into"), [MISS] * 3, [HIT] * 3),
    "one byte short": (Inject(Truncate(0.9999), "load_into"), [MISS] * 3, [HIT] * 3),
    "flip a bit": (Inject(FlipBit(), "load_into"), [MISS] * 3, [HIT] * 3),
    "reorder": (Inject(Reorder(), "load_into"), [HIT] * 3, [HIT] * 3),
    "swap buffers": (Inject(Reorder(buffers=True), "load_into"), [CORRUPT] * 3, [MISS] * 3),
}


@pytest.mark.parametrize(("fault", "outcomes", "afterwards"), LOAD_FAULTS.values(), ids=LOAD_FAULTS)
def test_no_fault_of_a_load_brings_wrong_bytes(
    make_rig: MakeRig, fault: Inject, outcomes: list[LoadOutcome | None], afterwards: list[LoadOutcome | None]
) -> None:
    rig = make_rig(fault)
    assert rig.store(*BATCH) == [True] * 3
    assert rig.load(*BATCH) == outcomes
    first, *again = rig.happened()
    assert first == (fault.fault, fault.operation, list(BATCH))
    assert again in ([], [first]), "damaged objects are read twice"
    rig.plan.active = False
    assert rig.load(*BATCH) == afterwards


def test_a_preparation_that_lies_ends_as_a_miss(make_rig: MakeRig) -> None:
    class Empty(Fault):
        """Says that nothing is there, so that there is something to lie about."""

        async def apply(self, call: Call, go_on: GoOn) -> list[bool]:
            return [False for _ in await go_on(call)]

    rig = make_rig(Inject(Lie(), "prepare_load"), Inject(Empty(), "prepare_load"))
    rig.store(1)
    assert rig.load(1, 2) == [HIT, MISS]
    assert rig.happened() == [(Lie(), "prepare_load", [1, 2])]


def test_reordered_outcomes_of_hits_and_misses_are_misses(make_rig: MakeRig) -> None:
    rig = make_rig(Inject(Lie(), "prepare_load"), Inject(Reorder(), "load_into"))  # else only hits are loaded
    rig.store(1, 3)
    outcomes = rig.load(1, 2, 3)
    assert outcomes[1] is MISS, "the miss was taken for a hit, and seen not to be one"
    assert MISS in (outcomes[0], outcomes[2]), "a hit was taken for a miss"


STORE_FAULTS: dict[str, tuple[Inject, list[bool], list[LoadOutcome | None]]] = {
    # fault, what the store says, what a load without faults says afterwards
    "slow": (Inject(Slow(0.01), "store"), [True] * 3, [HIT] * 3),
    "late": (Inject(Late(0.01), "store"), [True] * 3, [HIT] * 3),
    "fail": (Inject(Fail(errno.ENOSPC), "store"), [False] * 3, [MISS] * 3),
    "fail after": (Inject(Fail(errno.EIO, after=True), "store"), [False] * 3, [HIT] * 3),
    "fail to prepare": (Inject(Fail(errno.EIO), "prepare_store"), [False] * 3, [MISS] * 3),
    "stall": (Inject(Stall(0.01), "store"), [True] * 3, [HIT] * 3),
    "full": (Inject(Full(), "prepare_store"), [False] * 3, [MISS] * 3),
    "lie": (Inject(Lie(), "store"), [True] * 3, [MISS] * 3),
    "lie in preparation": (Inject(Lie(), "prepare_store"), [True] * 3, [MISS] * 3),
    "truncate": (Inject(Truncate(), "store"), [True] * 3, [CORRUPT] * 3),
    "flip a bit": (Inject(FlipBit(), "store"), [True] * 3, [CORRUPT] * 3),
    "swap buffers": (Inject(Reorder(buffers=True), "store"), [True] * 3, [CORRUPT] * 3),
}


@pytest.mark.parametrize(("fault", "answers", "loaded"), STORE_FAULTS.values(), ids=STORE_FAULTS)
def test_no_fault_of_a_store_brings_wrong_bytes(
    make_rig: MakeRig, fault: Inject, answers: list[bool], loaded: list[LoadOutcome | None]
) -> None:
    rig = make_rig(fault)
    assert rig.store(*BATCH) == answers
    assert rig.happened() == [(fault.fault, fault.operation, list(BATCH))]
    rig.plan.active = False
    assert rig.load(*BATCH) == loaded
    assert rig.store(*BATCH) == [True] * 3
    assert rig.load(*BATCH) == [HIT] * 3, "what was damaged has been deleted, so that it can be stored again"


LOOKUP_FAULTS: dict[str, tuple[Inject, list[bool], list[LoadOutcome | None]]] = {
    # fault, what a lookup of one object that is there and two that are not says, what loading them says
    "slow": (Inject(Slow(0.01), "contains"), [True, False, False], [HIT, MISS, MISS]),
    "fail": (Inject(Fail(errno.EIO), "contains"), [False] * 3, [HIT, MISS, MISS]),
    "lie": (Inject(Lie(), "contains"), [True] * 3, [HIT, MISS, MISS]),
    "lose": (Inject(Lose(), "contains"), [True, False, False], [MISS] * 3),
}


@pytest.mark.parametrize(("fault", "answers", "loaded"), LOOKUP_FAULTS.values(), ids=LOOKUP_FAULTS)
def test_a_wrong_lookup_ends_as_a_miss(
    make_rig: MakeRig, fault: Inject, answers: list[bool], loaded: list[LoadOutcome | None]
) -> None:
    rig = make_rig(fault)
    rig.store(1)
    rig.plan.injected.clear()
    assert rig.lookup(*BATCH) == answers
    assert rig.happened()
    assert rig.load(*BATCH) == loaded


def test_a_reordered_lookup_ends_as_a_miss(make_rig: MakeRig) -> None:
    rig = make_rig(Inject(Reorder(), "contains"))
    rig.store(1)
    answers = rig.lookup(*BATCH)
    assert answers[0] is False
    assert sorted(answers) == [False, False, True]
    assert rig.load(*BATCH) == [HIT, MISS, MISS]


def test_a_failing_delete_leaves_the_damaged_object_a_miss(make_rig: MakeRig) -> None:
    rig = make_rig(Inject(FlipBit(), "store"), Inject(Fail(errno.EROFS), "delete"))
    rig.store(1)
    assert rig.load(1) == [CORRUPT]
    assert rig.load(1) == [CORRUPT], "it is still there"
    assert rig.happened()[-1] == (Fail(errno.EROFS), "delete", [1])


@pytest.mark.parametrize(
    ("operation", "call", "answer"),
    [
        ("load_into", lambda rig: rig.tier.load([rig.staged(1)]), [HIT]),
        ("store", lambda rig: rig.tier.store([rig.sealed(2)]), [True]),
        ("contains", lambda rig: rig.tier.lookup([key(1)]), [True]),
    ],
    ids=["load", "store", "lookup"],
)
@pytest.mark.parametrize("end", ["release", "close"])
def test_a_hanging_call_goes_on_when_released_or_closed(
    make_rig: MakeRig, operation: str, call: Callable[[Rig], Coroutine[Any, Any, Any]], answer: list[object], end: str
) -> None:
    rig = make_rig(Inject(Hang(), operation, calls={2} if operation == "store" else None))
    rig.store(1)
    hanging = rig.start(call(rig))
    rig.start(_until_injected(rig.plan)).result(SECONDS)
    assert not hanging.done()
    if end == "release":
        rig.plan.release()
    else:
        rig.start(rig.tier.close()).result(SECONDS)
        assert hanging.done(), "C13: closing waits"
    assert hanging.result(SECONDS) == answer


@pytest.mark.parametrize("deaf", [False, True])
def test_a_hanging_call_is_cancelled_at_once_unless_it_is_deaf(make_rig: MakeRig, deaf: bool) -> None:
    rig = make_rig(Inject(Hang(deaf), "load_into"))
    rig.store(1)

    async def main() -> tuple[bool, bool]:
        task = asyncio.ensure_future(rig.tier.storage.load([rig.staged(1)], None))
        await _until_injected(rig.plan)
        task.cancel()
        await _turns(10)
        before = task.done()
        rig.plan.release()
        await asyncio.wait([task])
        return before, task.cancelled()

    assert rig.start(main()).result(SECONDS) == (not deaf, True)


def test_a_late_call_ends_after_its_cancellation_and_then_leaves_its_buffer(make_rig: MakeRig) -> None:
    rig = make_rig(Inject(Late(0.05), "load_into"))
    rig.store(1)
    staged = rig.staged(1)

    async def main() -> tuple[bool, bool]:
        task = asyncio.ensure_future(rig.tier.load([staged]))
        await _until_injected(rig.plan)
        task.cancel()
        await _turns(10)
        held = not task.done()
        await asyncio.wait([task])
        return held, task.cancelled()

    assert rig.start(main()).result(SECONDS) == (True, True)
    assert staged.lease.tensor[HEADER_BYTES:].tolist() == [1] * 100, "it was filled before the call ended"


async def _until_injected(plan: FaultPlan) -> None:
    limit = time.monotonic() + SECONDS
    while not plan.injected:
        assert time.monotonic() < limit, "no fault was injected"
        await asyncio.sleep(0)


async def _turns(count: int) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


def test_a_tier_that_cannot_be_opened(make_rig: MakeRig) -> None:
    with pytest.raises(OSError, match="injected into open") as caught:
        make_rig(Inject(Fail(errno.ENODEV), "open"))
    assert caught.value.errno == errno.ENODEV


def _story(seed: int, order: Sequence[int], tmp_path: Path) -> set[str]:
    """Store and load single objects in the given order, twice, with random faults; return the faults of each key."""
    plan = FaultPlan([Inject(FlipBit(), "load_into", chance=0.3), Inject(Fail(errno.EIO), "store", 0.2)], seed)

    async def main() -> None:
        disk = BackendType("disk", DiskBackend, DiskOptions)
        path = tmp_path / str(seed)
        async with open_backend(disk, {"path": path}, wrap=lambda inner: FaultyBackend(inner, plan)) as backend:
            for number in [*order, *order]:
                try:
                    await backend.store([key(number)], [memoryview(b"data")])
                except OSError:
                    continue
                await backend.load_into([key(number)], [memoryview(bytearray(4))])

    asyncio.run(main())
    return {f"{entry.fault} {entry.operation} {entry.keys[0]}" for entry in plan.injected}


def test_the_same_seed_does_the_same_to_each_key_in_any_order(tmp_path: Path) -> None:
    numbers = list(range(40))
    shuffled = random.Random(1).sample(numbers, len(numbers))
    story = _story(1, numbers, tmp_path)
    assert _story(1, shuffled, tmp_path) == story
    assert _story(2, numbers, tmp_path) != story
    kinds = {line.split("(")[0] for line in story}
    assert kinds == {"FlipBit", "Fail"}


def test_faults_compose_and_calls_are_counted(make_rig: MakeRig) -> None:
    rig = make_rig(
        Inject(Reorder(buffers=True), "load_into", calls={1}),
        Inject(FlipBit(), "load_into", calls={1, 2}),
        Inject(Fail(errno.EIO), "load_into", calls={3}),
    )
    rig.store(*BATCH)
    assert rig.load(*BATCH) == [MISS] * 3, "the second read is the second call, with other damage"
    assert rig.load(1) == [None]
    assert rig.load(*BATCH) == [HIT] * 3
    kinds = [(type(fault).__name__, sorted(numbers)) for fault, _, numbers in rig.happened()]
    assert kinds == [("Reorder", [1, 2, 3]), ("FlipBit", [1, 2, 3]), ("FlipBit", [1, 2, 3]), ("Fail", [1])]


def test_a_fault_that_an_operation_does_not_know_is_refused() -> None:
    with pytest.raises(
        ValueError, match=re.escape("FlipBit() cannot happen in 'contains'; it can happen in load_into, store")
    ):
        Inject(FlipBit(), "contains")
    with pytest.raises(ValueError, match="must be between 0 and 1"):
        Inject(FlipBit(), "store", chance=1.5)


@pytest.mark.parametrize("seed", range(20))
def test_a_tier_over_a_medium_full_of_faults_never_brings_wrong_bytes(make_rig: MakeRig, seed: int) -> None:
    everything: list[Fault] = [
        Slow(0.001),
        Late(0.001),
        Fail(errno.EIO),
        Fail(errno.EIO, after=True),
        Lie(),
        Lose(),
        Truncate(),
        FlipBit(),
        Reorder(),
        Reorder(buffers=True),
    ]
    rig = make_rig(
        *(Inject(f, op, 0.08) for f in everything for op in OPERATIONS if op in f.operations and op != "open"),
        seed=seed,
    )
    chance = random.Random(seed)
    for _ in range(15):
        numbers = chance.sample(range(6), 4)
        rig.store(*numbers)
        rig.lookup(*numbers)
        rig.load(*numbers)
    assert len({type(entry.fault) for entry in rig.plan.injected}) >= 6
    rig.plan.active = False
    for _ in range(2):  # the first finds what is damaged
        rig.store(*range(6))
        found = rig.load(*range(6))
    assert found == [HIT] * 6
    assert rig.load(*range(6)) == [HIT] * 6


class WritesDownFlags(BackendWrapper):
    def __init__(self, inner: Backend[Any]) -> None:
        super().__init__(inner)
        self.seen: list[tuple[Any, ...]] = []

    async def prepare_store(self, keys: Sequence[ObjectKey], nbytes: Sequence[int], *spare: Any) -> StoreReservation:
        self.seen.append(("prepare_store", *spare))
        return await super().prepare_store(keys, nbytes)

    async def touch(self, keys: Sequence[ObjectKey], spare: Sequence[bool]) -> None:
        self.seen.append(("touch", keys, spare))


def test_flags_and_touches_reach_the_inner_backend_but_no_flags_reach_an_older_one(tmp_path: Path) -> None:
    async def main() -> None:
        async with open_backend(
            DISK, {"path": tmp_path / "objects"}, wrap=lambda backend: WritesDownFlags(backend)
        ) as backend:
            assert isinstance(backend, WritesDownFlags)
            for outer in (FaultyBackend(backend, FaultPlan([])), BackendWrapper(backend)):
                await (await outer.prepare_store([key(1)], [3])).release()
                await (await outer.prepare_store([key(1)], [3], [True])).release()
                await outer.touch([key(1)], [True])
                assert backend.seen == [("prepare_store",), ("prepare_store", [True]), ("touch", [key(1)], [True])]
                backend.seen.clear()

    asyncio.run(main())
