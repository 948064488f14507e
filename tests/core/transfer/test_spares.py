"""Spare objects on their way to tiers: into free capacity only, and never at the cost of others."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest

from offload_core.runtime.io_loop import IoLoop
from offload_core.transfer.batches import TransferObject
from offload_core.transfer.stores import tier_writer
from tests.support.memory_backend import MemoryBackend, key
from tests.support.transfer_rig import PACK, SECONDS, Rig, item


def _make_bounded(backend: MemoryBackend) -> None:
    backend.bounded = True


def _know_spares(backend: MemoryBackend) -> None:
    backend.bounded = backend.spares = True


def _evict(backend: MemoryBackend) -> None:
    backend.evicts = True


@pytest.fixture
def rig(io: IoLoop) -> Iterator[Rig]:
    made = Rig(io)
    yield made
    made.finish()


def spare(number: int, block: int) -> TransferObject:
    return replace(item(number, block), spare=True)


def test_a_tier_without_a_limit_stores_spare_objects_as_all_others(rig: Rig) -> None:
    backend = rig.add_memory_tier()
    rig.start()
    assert rig.store_all(item(1, 1), spare(2, 2)) == {1: True, 2: True}
    assert set(backend.objects) == {key(1, PACK), key(2, PACK)}


@pytest.mark.parametrize("prepare", [_make_bounded, _evict])
def test_a_tier_that_cannot_tell_spare_objects_from_others_gets_none(
    rig: Rig, prepare: Callable[[MemoryBackend], None]
) -> None:
    backend = rig.add_memory_tier(prepare=prepare)
    rig.start()
    assert rig.store_all(item(1, 1), spare(2, 2)) == {1: True, 2: False}
    assert set(backend.objects) == {key(1, PACK)}
    assert rig.counted("spares_declined") == 1


def test_a_bounded_tier_is_told_which_objects_are_spare(rig: Rig) -> None:
    backend = rig.add_memory_tier(prepare=_know_spares)
    rig.start()
    assert rig.store_all(item(1, 1), spare(2, 2)) == {1: True, 2: True}
    assert backend.spare_keys == {key(2, PACK)}


def test_without_free_capacity_no_spare_object_is_copied_for_a_while(rig: Rig) -> None:
    backend = rig.add_memory_tier(prepare=_know_spares)
    rig.start()
    backend.room_for_spares = False
    assert rig.store_all(item(1, 1), spare(2, 2)) == {1: True, 2: False}
    offered = backend.calls.count("prepare_store")
    assert rig.store_all(spare(3, 3)) == {3: False}
    assert backend.calls.count("prepare_store") == offered, "it was not even offered"
    assert rig.store_all(item(4, 4)) == {4: True}
    assert rig.counted("spares_declined") == 2
    assert rig.counted("store_rejected") == 0


def test_after_the_pause_spare_objects_are_offered_again(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tier_writer, "_PAUSE_OF_SPARES_SECONDS", 0.0)
    backend = rig.add_memory_tier(prepare=_know_spares)
    rig.start()
    backend.room_for_spares = False
    assert rig.store_all(spare(1, 1)) == {1: False}
    backend.room_for_spares = True
    assert rig.store_all(spare(1, 1)) == {1: True}


def test_a_spare_object_is_not_stored_while_a_request_waits_for_a_load(rig: Rig) -> None:
    backend = rig.add_memory_tier(prepare=_know_spares)
    rig.start()
    assert rig.store_all(item(1, 1)) == {1: True}
    backend.gates["load_into"].shut()
    rig.load(item(1, 2))
    assert rig.store_all(spare(2, 2), item(3, 3)) == {2: False, 3: True}
    backend.gates["load_into"].open()
    assert rig.result().status == "loaded"
    assert rig.store_all(spare(2, 2)) == {2: True}


def test_a_spare_object_is_not_stored_while_others_wait_for_their_stores(rig: Rig) -> None:
    backend = rig.add_memory_tier(prepare=_know_spares, io_threads=1)
    rig.start(staging_bytes=1 << 20)
    backend.gates["store"].shut()
    for number in range(1, 5):  # two calls at once, two that wait
        rig.engine.submit_stores([item(number, number)])
    queue = rig.engine._stores._writer_of["memory"]._queue
    rig.step_until(lambda: queue.waiting_bytes > 0)
    rig.engine.submit_stores([spare(5, 5)])
    backend.gates["store"].open()
    assert rig.engine.drain_stores(SECONDS)
    assert rig.store_results() == {1: True, 2: True, 3: True, 4: True, 5: False}


def test_a_spare_object_drops_no_other_from_full_staging_memory(rig: Rig) -> None:
    slow, fast = (
        rig.add_memory_tier(name, prepare=_know_spares, staging_share=1.0, io_threads=1) for name in ("slow", "fast")
    )
    rig.start(staging_bytes=8 * 2 * 4096)  # eight objects, of which stores may hold four
    slow.gates["store"].shut()
    for number in range(4):
        rig.engine.submit_stores([item(number, number)])
    rig.step_until(lambda: rig.engine._stores._writer_of["slow"]._queue.waiting_bytes > 0 and len(fast.objects) == 4)
    rig.engine.submit_stores([spare(5, 5)])
    slow.gates["store"].open()
    assert rig.engine.drain_stores(SECONDS)
    assert rig.store_results() == {0: True, 1: True, 2: True, 3: True, 5: False}
    assert len(slow.objects) == 4


def test_tiers_that_know_spare_objects_are_touched(rig: Rig) -> None:
    knowing, other = rig.add_memory_tier("knowing", prepare=_know_spares), rig.add_memory_tier("other")
    rig.start().touch([key(2, PACK), key(1, PACK)], [True, False])
    rig.step_until(lambda: len(knowing.touches) == 2)
    assert knowing.touches == [(key(2, PACK), True), (key(1, PACK), False)]
    assert other.touches == []


def test_a_touch_that_fails_is_logged_once_and_harms_nothing(rig: Rig, caplog: pytest.LogCaptureFixture) -> None:
    backend = rig.add_memory_tier(prepare=_know_spares)
    rig.start()
    backend.faults["touch"] = OSError("gone")
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            rig.io.submit(rig.tiers[0].touch([key(1, PACK)], [False])).result(SECONDS)
    assert [record.getMessage() for record in caplog.records] == [
        "tier 'memory': touch failed; only the order of eviction suffers"
    ]
    assert rig.tiers[0].health.available
