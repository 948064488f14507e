"""Every behaviour of a backend becomes outcomes and counts of its tier."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

import pytest

from offload_core.api.backend import LoadOutcome, StoreOutcome
from offload_core.api.errors import BackendError
from offload_core.api.keys import ObjectKey
from offload_core.config.limits import Limits
from offload_core.objects import format as object_format
from offload_core.objects.format import HEADER_BYTES
from offload_core.runtime.io_loop import IoLoop
from offload_core.runtime.metrics import Counters
from offload_core.tiers import compression
from offload_core.tiers.health import MAX_QUIET_SECONDS
from offload_core.tiers.opening import close_tiers
from offload_core.tiers.tier import Tier
from tests.support.memory_backend import LIMITS, MemoryBackend, key, memory_tier
from tests.support.staged_objects import OBJECT_BYTES, PAYLOAD_BYTES, StagedObjects

SECONDS = 30
HIT, MISS, CORRUPT = LoadOutcome.HIT, LoadOutcome.MISS, LoadOutcome.CORRUPT


class Rig(StagedObjects):
    """A tier over a memory backend, and staging for its objects."""

    def __init__(self, io: IoLoop, counters: Counters) -> None:
        super().__init__()
        config, made = memory_tier(io_threads=2)
        self.io, self.counters = io, counters
        self.now = 0.0
        self.tier = Tier(config, LIMITS, counters, clock=lambda: self.now)
        self.backend: MemoryBackend = made[0]

    def put(self, *numbers: int) -> None:
        """Put whole objects onto the medium, past the tier."""
        self.backend.objects.update((key(number), bytes(self.sealed(number).lease.view)) for number in numbers)

    def run(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        return self.io.submit(coroutine).result(SECONDS)

    def lookup(self, *numbers: int) -> list[bool]:
        return list(self.run(self.tier.lookup([key(number) for number in numbers])))

    def load(self, *numbers: int) -> list[LoadOutcome | None]:
        return list(self.run(self.tier.load([self.staged(number) for number in numbers])))

    def store(self, *numbers: int) -> list[bool]:
        return list(self.run(self.tier.store([self.sealed(number) for number in numbers])))

    def counted(self) -> dict[str, float]:
        return {name: count for (name, tier), count in self.counters.take().items() if tier == "memory"}


@pytest.fixture
def rig(io: IoLoop, counters: Counters) -> Iterator[Rig]:
    rig = Rig(io, counters)
    yield rig
    rig.backend.faults = {}
    close_tiers([rig.tier], io, SECONDS)


def test_a_round_trip_is_counted(rig: Rig) -> None:
    size = OBJECT_BYTES
    assert rig.store(1, 2) == [True, True]
    assert rig.counted() == {"stores": 2, "store_bytes": 2 * size}
    assert rig.lookup(0, 1, 2) == [False, True, True]
    assert rig.counted() == {"lookup_hits": 2, "lookup_misses": 1}
    staged = [rig.staged(number) for number in (2, 3, 1)]
    assert rig.run(rig.tier.load(staged)) == [HIT, MISS, HIT]
    assert rig.counted() == {"load_hits": 2, "load_missing": 1, "load_bytes": 2 * size}
    assert staged[0].lease.tensor[HEADER_BYTES:].tolist() == [2] * PAYLOAD_BYTES
    assert staged[2].lease.tensor[HEADER_BYTES:].tolist() == [1] * PAYLOAD_BYTES
    assert set(staged[1].lease.tensor.tolist()) == {0x5A}


def test_empty_batches(rig: Rig) -> None:
    assert (rig.store(), rig.lookup(), rig.load()) == ([], [], [])
    assert rig.counted() == {}


def _flip_a_payload_bit(objects: dict[Any, bytes]) -> None:
    whole = bytearray(objects[key(1)])
    whole[-1] ^= 1
    objects[key(1)] = bytes(whole)


def _truncate(objects: dict[Any, bytes]) -> None:
    objects[key(1)] = objects[key(1)][:-1]


def _replace_by_another(objects: dict[Any, bytes]) -> None:
    objects[key(1)] = objects[key(2)]


@pytest.mark.parametrize("damage", [_flip_a_payload_bit, _truncate, _replace_by_another])
def test_a_damaged_object_is_deleted_and_counted_and_the_others_are_loaded(
    rig: Rig, damage: Callable[[dict[Any, bytes]], None]
) -> None:
    rig.put(0, 1, 2)
    damage(rig.backend.objects)
    assert rig.load(0, 1, 2) == [HIT, CORRUPT, HIT]
    assert set(rig.backend.objects) == {key(0), key(2)}
    counted = rig.counted()
    assert (counted["load_corrupt"], counted["load_hits"]) == (1, 2)
    assert rig.load(1) == [MISS]


def test_between_two_parts_of_a_large_batch_the_event_loop_serves_others(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compression, "_INLINE_CHECK_BYTES", 2 * OBJECT_BYTES)
    turns: list[int | str] = []
    verify = object_format.verify

    def watched(view: memoryview, name: ObjectKey) -> None:
        turns.append(int.from_bytes(name.chunk_hash, "big"))
        asyncio.get_running_loop().call_soon(turns.append, "others")
        verify(view, name)

    monkeypatch.setattr(object_format, "verify", watched)
    rig.put(*range(5))
    _flip_a_payload_bit(rig.backend.objects)
    assert rig.load(*range(5)) == [HIT, CORRUPT, HIT, HIT, HIT]
    assert turns[:9] == [0, 1, "others", "others", 2, 3, "others", "others", 4]


def test_a_hit_that_brought_nothing_is_a_miss(rig: Rig) -> None:
    rig.backend.faults = {"prepare_load": [True], "load_into": [HIT]}
    assert rig.load(1) == [MISS]
    assert rig.counted() == {"load_missing": 1, "load_read_twice": 1}


def test_an_object_gone_between_the_preparation_and_the_load_is_a_miss(rig: Rig) -> None:
    rig.backend.faults = {"prepare_load": [True, True]}
    rig.put(1)
    assert rig.load(0, 1) == [MISS, HIT]
    assert rig.counted()["load_missing"] == 1


def test_a_damaged_object_that_cannot_be_deleted_is_counted(rig: Rig) -> None:
    rig.put(1)
    _flip_a_payload_bit(rig.backend.objects)
    rig.backend.faults = {"delete": OSError("read-only")}
    assert rig.load(1) == [CORRUPT]
    assert rig.counted() == {"load_corrupt": 1, "load_read_twice": 1, "delete_failures": 1}


class Panic(BaseException):
    """An error as of a Rust extension."""


class UnreadableError(OSError):
    def __str__(self) -> str:
        raise AttributeError("message")


FAULTS = {
    "an OSError": OSError("the medium is gone"),
    "a defect": ZeroDivisionError("plugin"),
    "a cancellation of its own making": asyncio.CancelledError(),
    "an exit": SystemExit(3),
    "a panic": Panic("rust"),
    "an error without a text": UnreadableError(),
    "too few results": [],
    "too many results": [True, True, True],
    "no sequence": 7,
}


@pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS)
def test_a_lookup_that_fails_finds_nothing_and_is_counted(rig: Rig, fault: object) -> None:
    rig.put(1, 2)
    rig.backend.faults = {"contains": fault}
    assert rig.lookup(1, 2) == [False, False]
    assert rig.counted() == {"lookup_failures": 1}
    rig.backend.faults = {}
    assert rig.lookup(1, 2) == [True, True]


PLAIN_METHODS: dict[str, Callable[[Rig], object]] = {
    "contains": lambda rig: rig.lookup(1),
    "prepare_load": lambda rig: rig.load(1),
    "load_into": lambda rig: rig.load(1),
    "prepare_store": lambda rig: rig.store(2),
    "store": lambda rig: rig.store(2),
    "delete": lambda rig: rig.run(rig.tier.delete([key(1)])),
}


@pytest.mark.parametrize("method", PLAIN_METHODS)
def test_a_plain_method_is_named_with_the_cure_if_nobody_can_await_its_result(
    rig: Rig, method: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    rig.put(1)
    monkeypatch.setattr(rig.backend, method, lambda *arguments: [])
    PLAIN_METHODS[method](rig)
    assert f"{method} returned an object of type list, which cannot be awaited; write async def {method}" in caplog.text


def test_a_plain_open_is_named_with_the_cure(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rig.backend, "open", lambda: None)
    with pytest.raises(BackendError, match=r"open returned an object of type NoneType.*; write async def open"):
        rig.run(rig.tier.open())


def test_a_plain_method_that_returns_a_coroutine_works(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    rig.put(1)
    contains = rig.backend.contains
    monkeypatch.setattr(rig.backend, "contains", lambda keys: contains(keys))
    assert rig.lookup(0, 1) == [False, True]


@pytest.mark.parametrize("call", ["prepare_load", "load_into"])
@pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS)
def test_a_load_that_fails_is_a_failure_of_each_key_and_releases_its_reservation(
    rig: Rig, call: str, fault: object
) -> None:
    rig.put(1, 2)
    rig.backend.faults = {call: fault}
    assert rig.load(1, 2) == [None, None]
    assert rig.counted() == {"load_failures": 2}
    assert rig.backend.reserved == 0
    assert len(rig.backend.objects) == 2, "a failure is no reason to delete"


@pytest.mark.parametrize("call", ["prepare_store", "store"])
@pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS)
def test_a_store_that_fails_is_a_failure_of_each_key_and_releases_its_reservation(
    rig: Rig, call: str, fault: object
) -> None:
    rig.backend.faults = {call: fault}
    assert rig.store(1, 2) == [False, False]
    assert rig.counted() == {"store_failures": 2}
    assert rig.backend.reserved == 0


@pytest.mark.parametrize(
    ("call", "wrong", "words"),
    [
        ("load_into", True, "load_into returned True; clause C2 requires a LoadOutcome per key: HIT, MISS, CORRUPT"),
        ("load_into", None, "load_into returned None; clause C2 requires a LoadOutcome per key: HIT, "),
        ("load_into", StoreOutcome.STORED, "load_into returned <StoreOutcome.STORED: 'stored'>; clause C2 requires a "),
        ("store", True, "store returned True; clause C2 requires a StoreOutcome per key: STORED, "),
        ("store", "stored", "store returned 'stored'; clause C2 requires a StoreOutcome per key: STORED, "),
        ("store", None, "store returned None; clause C2 requires a StoreOutcome per key: STORED, "),
        ("prepare_store", True, "a StoreOutcome per key: STORED, ALREADY_PRESENT, REJECTED or None"),
    ],
)
def test_a_result_that_is_no_outcome_is_a_failure_that_names_it(
    rig: Rig, caplog: pytest.LogCaptureFixture, call: str, wrong: object, words: str
) -> None:
    rig.put(1)
    rig.backend.faults = {call: [wrong]}
    if call == "load_into":
        assert rig.load(1) == [None]
        assert rig.counted() == {"load_failures": 1}
    else:
        assert rig.store(2) == [False]
        assert rig.counted() == {"store_failures": 1}
    assert words in caplog.text
    assert rig.backend.reserved == 0


def test_a_reservation_is_released_if_its_evicted_objects_are_no_keys(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepare_store = rig.backend.prepare_store

    async def prepare(*arguments: Any) -> Any:
        reservation: Any = await prepare_store(*arguments)
        reservation.evicted = [["no key"]]
        return reservation

    monkeypatch.setattr(rig.backend, "prepare_store", prepare)
    assert rig.store(1) == [False]
    assert rig.counted() == {"store_failures": 1, "evictions": 1}
    assert rig.backend.reserved == 0


def test_a_store_writes_only_what_the_preparation_asked_for(rig: Rig) -> None:
    rig.backend.faults = {"prepare_store": [StoreOutcome.ALREADY_PRESENT, None, StoreOutcome.REJECTED]}
    assert rig.store(1, 2, 3) == [True, True, False]
    assert set(rig.backend.objects) == {key(2)}
    counted = rig.counted()
    assert (counted["stores"], counted["store_already_present"], counted["store_rejected"]) == (1, 1, 1)


@pytest.mark.parametrize(
    ("call", "run"),
    [
        ("contains", lambda rig: rig.lookup(1)),
        ("load_into", lambda rig: rig.load(1)),
        ("store", lambda rig: (rig.backend.objects.pop(key(2), None), rig.store(2))),
        ("delete", lambda rig: (rig.put(3), rig.backend.objects.update({key(3): b"damaged"}), rig.load(3))),
    ],
    ids=["lookup", "load", "store", "delete"],
)
def test_each_change_of_state_is_logged_once(
    rig: Rig, call: str, run: Callable[[Rig], object], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "offload_core")
    rig.put(1)

    def logged(faults: dict[str, object]) -> list[str]:
        caplog.clear()
        rig.backend.faults = faults
        for _ in range(3):
            run(rig)
        return [message for message in caplog.messages if "failed" in message or "works again" in message]

    broken: dict[str, object] = {call: OSError("the medium is gone")}
    assert logged({}) == []
    for _ in range(2):
        (message,) = logged(broken)
        assert message.startswith("tier 'memory': ")
        assert "OSError: the medium is gone" in message
        rig.now += MAX_QUIET_SECONDS
        (message,) = logged({})
        assert message.endswith("works again")


def test_a_backend_is_not_called_with_empty_batches(rig: Rig) -> None:
    rig.put(1)
    rig.backend.calls.clear()
    rig.store(1)
    rig.load(2)
    assert rig.backend.calls == ["prepare_store", "prepare_load"]


def test_lookups_beyond_the_limit_are_shed_at_once(rig: Rig) -> None:
    rig.put(1)
    gate = rig.backend.gates["contains"]
    gate.shut()
    pending = [rig.io.submit(rig.tier.lookup([key(1)])) for _ in range(16)]
    gate.wait_for_a_call()
    assert rig.lookup(1, 1) == [False, False], "the seventeenth is answered although the backend hangs"
    assert rig.counted() == {"lookup_failures": 1}
    assert not any(answer.done() for answer in pending)
    gate.open()
    assert [answer.result(SECONDS) for answer in pending] == [[True]] * 16
    assert rig.lookup(1) == [True]


def test_a_tiers_own_load_deadline_wins_over_the_global_one(counters: Counters) -> None:
    everywhere = Limits(load_timeout_seconds=12.0, load_timeout_seconds_per_mib=0.5)
    assert Tier(memory_tier()[0], everywhere, counters).limits.load_seconds(2 << 20) == 13.0
    assert Tier(memory_tier(load_timeout_seconds=3)[0], everywhere, counters).limits.load_seconds(2 << 20) == 4.0
    own = memory_tier(load_timeout_seconds=3, load_timeout_seconds_per_mib=0)[0]
    assert Tier(own, everywhere, counters).limits.load_seconds(2 << 20) == 3.0


@pytest.mark.parametrize(
    ("fault", "expected"),
    [(None, type(None)), (OSError("gone"), OSError), (SystemExit(3), BackendError)],
    ids=["closed", "close failed", "close exited"],
)
def test_closing_ends_the_threads(rig: Rig, fault: BaseException | None, expected: type) -> None:
    assert rig.lookup(1) == [False]
    mine = [thread for thread in threading.enumerate() if thread.name.startswith("offload-memory-")]
    assert mine
    rig.backend.faults = {"close": fault}
    future = rig.io.submit(rig.tier.close())
    assert type(future.exception(SECONDS)) is expected
    for thread in mine:
        thread.join(SECONDS)
    assert not any(thread.is_alive() for thread in mine)
