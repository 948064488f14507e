"""The queues of stores: drops of the oldest objects, deadlines, and the memory held until then (I3, I4)."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator, Sequence

import pytest

from offload_core.api.backend import StoreOutcome
from offload_core.api.keys import ObjectKey
from offload_core.objects import format as object_format
from offload_core.runtime.io_loop import IoLoop
from offload_core.transfer.stores import tier_writer
from offload_core.transfer.stores.pending_store import StoreResult
from offload_core.transfer.stores.store_queue import BatchState
from tests.support.memory_backend import MemoryBackend, key
from tests.support.transfer_rig import PACK, SECONDS, Rig, WholeCopier, item

LEASE = 2 * 4096
"""Bytes of staging that an object of the rig takes."""
LATE = 0.6
"""A deadline in seconds before which calls begin, on a busy machine too."""


@pytest.fixture
def rig(io: IoLoop) -> Iterator[Rig]:
    rig = Rig(io)
    yield rig
    rig.finish()


def kept(backend: MemoryBackend) -> set[int]:
    return {int.from_bytes(name.chunk_hash, "big") for name in backend.objects}


def submit(rig: Rig, *numbers: int) -> None:
    """Submit objects one by one, and wait until each is in its queue or in its tier's call."""
    for number in numbers:
        rig.engine.submit_stores([item(number, block=number)])
        sealed(rig)


def sealed(rig: Rig) -> None:
    batches = [batch for writer in rig.engine._stores._writers for batch in tuple(writer._job_of)]
    rig.step_until(lambda: not any(batch.state is BatchState.PREPARING for batch in batches))
    rig.io.submit(asyncio.sleep(0)).result(SECONDS)


def results(rig: Rig, count: int) -> dict[int, bool]:
    """Step the engine until ``count`` stores have their results."""
    found: dict[int, bool] = {}
    rig.step_until(lambda: bool(found.update(rig.store_results()) or len(found) >= count))
    return found


# Full shares and a full pool


def test_one_store_more_than_there_are_threads_is_handed_to_the_backend(rig: Rig) -> None:
    backend = rig.add_memory_tier(io_threads=2)
    rig.start()
    backend.gates["store"].shut()
    submit(rig, *range(5))
    assert backend.reserved == 3, "two threads are busy and one store waits for them; loads must not wait for more"
    backend.gates["store"].open()
    assert rig.engine.drain_stores(SECONDS)
    assert rig.store_results() == dict.fromkeys(range(5), True)


def test_the_oldest_waiting_object_is_dropped_for_the_newest(rig: Rig) -> None:
    backend = rig.add_memory_tier(io_threads=1)
    rig.start(staging_bytes=2 * 5 * LEASE)
    backend.gates["store"].shut()
    submit(rig, *range(5))
    assert rig.store_results() == {}, "two run, three wait"
    submit(rig, 5, 6)
    assert rig.store_results() == {2: False, 3: False}
    assert rig.counted("store_dropped") == 2
    assert rig.counted("pending_stores", keep=True) == 5
    assert rig.staging.used_bytes == 5 * LEASE
    backend.gates["store"].open()
    assert rig.engine.drain_stores(SECONDS)
    assert rig.counted("pending_stores") == 0
    assert kept(backend) == {0, 1, 4, 5, 6}
    assert rig.store_results() == dict.fromkeys((0, 1, 4, 5, 6), True)
    assert rig.staging.used_bytes == 0


def test_a_running_store_is_never_dropped(rig: Rig) -> None:
    backend = rig.add_memory_tier(io_threads=4)
    rig.start(staging_bytes=2 * 4 * LEASE)
    backend.gates["store"].shut()
    submit(rig, *range(4))
    submit(rig, 4)
    assert rig.store_results() == {4: False}
    backend.gates["store"].open()
    assert rig.engine.drain_stores(SECONDS)
    assert kept(backend) == set(range(4))


def test_objects_of_one_step_do_not_drop_each_other(rig: Rig) -> None:
    """They are of one age, and a prompt's later objects are useless without its earlier ones."""
    backend = rig.add_memory_tier(io_threads=1)
    rig.start(staging_bytes=2 * 5 * LEASE)
    backend.gates["store"].shut()
    rig.engine.submit_stores([item(number, block=number) for number in range(7)])
    assert rig.store_results() == {5: False, 6: False}


def test_an_object_dropped_for_one_tier_goes_on_to_the_others(rig: Rig) -> None:
    hung = rig.add_memory_tier("hung", io_threads=1, staging_share=0.5)
    well = rig.add_memory_tier("well", io_threads=8, staging_share=1.0)
    rig.start(staging_bytes=2 * 8 * LEASE)
    for backend in (hung, well):
        backend.gates["store"].shut()
    submit(rig, *range(6))
    assert rig.counted("store_dropped", "hung") == 2
    assert rig.counted("store_dropped", "well") == 0
    assert rig.store_results() == {}, "the other tier still decides"
    assert rig.staging.used_bytes == 6 * LEASE
    well.gates["store"].open()
    assert results(rig, 6) == dict.fromkeys(range(6), True)
    rig.step_until(lambda: rig.staging.used_bytes == 4 * LEASE)
    hung.gates["store"].open()
    assert rig.engine.drain_stores(SECONDS)
    assert (kept(hung), kept(well)) == ({0, 1, 4, 5}, set(range(6)))
    assert rig.store_results() == {}, "one result each"


def test_if_the_pool_is_full_the_oldest_object_that_only_waits_is_dropped(rig: Rig) -> None:
    one = rig.add_memory_tier("one", io_threads=1, staging_share=1.0)
    second = rig.add_memory_tier("second", io_threads=1, staging_share=1.0, write_policy="second-touch")
    third = rig.add_memory_tier("third", io_threads=1, staging_share=0.5, write_policy="second-touch")
    rig.start(staging_bytes=2 * 6 * LEASE)
    backends = (one, second, third)
    for backend in backends:
        backend.gates["store"].shut()
    submit(rig, 0, 1, 2, 3)
    assert backend.reserved == 0, "the first one has all: two run and two wait"
    submit(rig, 2, 3)
    assert (one.reserved, second.reserved, third.reserved) == (2, 2, 2), "again: they wait there, and run elsewhere"
    assert rig.counted("store_dropped", "one") == rig.counted("store_dropped", "second") == 0
    rig.engine._shares["one"].stores._limit_bytes *= 2  # so that it is the pool that is full
    submit(rig, 4)
    assert rig.store_results() == {2: False}, "the oldest, which waits for one tier only"
    assert rig.counted("store_dropped", "one") == 1
    submit(rig, 5, 6, 7)
    assert rig.store_results() == {3: False, 4: False, 5: False}, "not those that run elsewhere"
    for backend in backends:
        backend.gates["store"].open()
    assert rig.engine.drain_stores(SECONDS)
    assert rig.store_results() == {0: True, 1: True, 2: True, 3: True, 6: True, 7: True}
    assert kept(second) == kept(third) == {2, 3}


def test_nothing_is_dropped_if_that_would_not_free_enough(io: IoLoop) -> None:
    rig = Rig(io)
    backend = rig.add_memory_tier("small", io_threads=1, staging_share=0.4)
    rig.add_memory_tier("large", staging_share=1.0)
    rig.start(staging_bytes=2 * 5 * LEASE)  # the small one may hold two objects
    backend.gates["store"].shut()
    submit(rig, 0, 1, 2)
    assert rig.counted("store_dropped", "small") == 1
    assert results(rig, 3) == dict.fromkeys(range(3), True)
    rig.finish()
    assert kept(backend) == {0, 1}


def test_a_promotion_drops_nothing_and_may_be_dropped(rig: Rig) -> None:
    fast = rig.add_memory_tier("fast", io_threads=1, staging_share=0.5)
    slow = rig.add_memory_tier("slow", staging_share=1.0)
    rig.start(staging_bytes=2 * 8 * LEASE)
    for number in range(3):
        rig.store_all(item(number, block=number))
    fast.objects.clear()
    fast.gates["store"].shut()
    for number in range(3):
        rig.load(item(number, block=15), tier="slow")
        assert rig.result().status == "loaded"
    submit(rig, 3)
    rig.step_until(lambda: 3 in kept(slow))
    rig.load(item(3, block=15), tier="slow")
    assert rig.result().status == "loaded"
    assert rig.counted("promotions_dropped", "fast") == 1, "the share is full: two run, a promotion and a store wait"
    submit(rig, 4)
    assert rig.counted("promotions_dropped", "fast") == 1, "the oldest is a promotion"
    assert rig.counted("store_dropped", "fast") == 0
    fast.gates["store"].open()
    assert rig.engine.drain_stores(SECONDS)
    assert kept(fast) == {0, 1, 3, 4}
    assert rig.counted("promotions", "fast") == 2


# Deadlines


def test_i3_at_its_deadline_a_store_has_its_result_and_keeps_its_memory_until_its_call_has_ended(rig: Rig) -> None:
    backend = rig.add_memory_tier(store_timeout_seconds=LATE)
    rig.start()
    backend.gates["store"].shut()
    rig.engine.submit_stores([item(1, block=1), item(2, block=2)])
    backend.gates["store"].wait_for_a_call()
    assert results(rig, 2) == {1: False, 2: False}
    assert (rig.counted("store_timeouts"), rig.counted("store_late")) == (2, 0)
    assert (rig.counted("jobs_timed_out"), rig.counted("draining_leases"), rig.counted("jobs_retired")) == (1, 2, 0)
    assert rig.staging.used_bytes == rig.engine._shares["memory"].stores.held_bytes == 2 * LEASE
    assert not rig.engine.drain_stores(0.01)
    backend.gates["store"].open()
    assert rig.engine.drain_stores(SECONDS)
    assert rig.staging.used_bytes == rig.engine._shares["memory"].stores.held_bytes == 0
    assert rig.store_results() == {}, "one result each"
    assert kept(backend) == {1, 2}, "stored after all"
    assert rig.counted("store_late") == 2
    assert (rig.counted("draining_leases"), rig.counted("jobs"), rig.counted("jobs_retired")) == (-2, 1, 1)


def test_a_waiting_store_is_dropped_at_its_deadline_and_its_memory_released(rig: Rig) -> None:
    backend = rig.add_memory_tier(io_threads=1, store_timeout_seconds=LATE)
    rig.start()
    backend.gates["store"].shut()
    rig.engine.submit_stores([item(number % 16, block=number % 16) for number in range(24)])  # two batches of eight run
    ended: list[StoreResult] = []

    def all_have_ended() -> bool:
        ended.extend(rig.engine.take_store_results())
        return len(ended) == 24

    rig.step_until(all_have_ended)
    assert not any(result.stored for result in ended)
    assert rig.counted("store_timeouts") == 24
    rig.step_until(lambda: rig.staging.used_bytes == 16 * LEASE)
    assert backend.reserved == 2, "what has waited too long does not begin"
    backend.gates["store"].open()
    assert rig.engine.drain_stores(SECONDS)
    assert rig.counted("store_late") == 16
    assert (rig.counted("jobs"), rig.counted("jobs_timed_out"), rig.counted("jobs_retired")) == (3, 3, 3)


def test_an_object_being_sealed_at_its_deadline_keeps_its_memory_until_the_seal_is_done(
    io: IoLoop, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = Rig(io, make_copier=WholeCopier)
    backend = rig.add_memory_tier(store_timeout_seconds=LATE)
    rig.start()
    go_on = threading.Event()
    monkeypatch.setattr(object_format, "seal", lambda *_: go_on.wait(SECONDS))
    rig.engine.submit_stores([item(1, block=1)])
    assert results(rig, 1) == {1: False}
    assert rig.staging.used_bytes == LEASE
    go_on.set()
    assert rig.engine.drain_stores(SECONDS)
    assert "prepare_store" not in backend.calls, "nobody wants it any more"
    assert (rig.counted("store_timeouts"), rig.counted("jobs_timed_out"), rig.counted("jobs_retired")) == (1, 1, 1)
    rig.finish()


def test_one_tiers_deadline_is_not_the_others(rig: Rig) -> None:
    late = rig.add_memory_tier("late", store_timeout_seconds=LATE)
    slow = rig.add_memory_tier("slow")
    rig.start()
    for backend in (late, slow):
        backend.gates["store"].shut()
    rig.engine.submit_stores([item(1, block=1)])
    late.gates["store"].wait_for_a_call()
    rig.step_until(lambda: rig.counted("store_timeouts", "late") == 1)
    assert rig.store_results() == {}, "the slow one may store it yet"
    late.gates["store"].open()
    assert results(rig, 1) == {1: True}, "late, and before the last one had decided"
    assert rig.counted("store_late", "late") == 1
    slow.gates["store"].open()
    assert rig.engine.drain_stores(SECONDS)
    assert rig.store_results() == {}
    assert kept(slow) == {1}


def test_overdue_calls_give_up_as_many_slots_as_there_are_threads(rig: Rig) -> None:
    backend = rig.add_memory_tier(io_threads=2, store_timeout_seconds=LATE)
    rig.start(staging_bytes=2 * 16 * LEASE)
    backend.gates["store"].shut()
    for numbers, begun in ((range(3), 3), (range(3, 6), 5), (range(6, 7), 5)):
        submit(rig, *numbers)
        assert backend.reserved == begun, "three, and then two more in the place of those that hang"
        assert results(rig, len(numbers)) == dict.fromkeys(numbers, False)
    backend.gates["store"].open()
    assert rig.engine.drain_stores(SECONDS)
    assert kept(backend) == set(range(5))


def test_deadlines_and_waiting_stores_take_no_task_and_no_thread_each(rig: Rig) -> None:
    backend = rig.add_memory_tier(io_threads=2)
    rig.start(staging_bytes=2 * 200 * LEASE)
    backend.gates["store"].shut()
    submit(rig, *[0] * 10)
    threads, tasks = threading.active_count(), len(asyncio.all_tasks(rig.io.loop))
    submit(rig, *[0] * 150)
    assert len(asyncio.all_tasks(rig.io.loop)) == tasks
    assert threading.active_count() <= threads + 2, "a thread of the tier may have started late"
    assert timers(rig.io) == 1
    assert len(rig.engine._stores._running) <= 3


def timers(io: IoLoop) -> int:
    """Count the timers for deadlines of stores."""
    handles = io.loop._scheduled  # type: ignore[attr-defined]  # asyncio has no public way to count them
    ours = [handle for handle in handles if handle._callback and handle._callback.__module__ == tier_writer.__name__]
    return sum(not handle.cancelled() for handle in ours)


# Tiers that are not used


def test_a_store_that_the_breaker_refuses_is_not_copied_and_is_reported_at_once(rig: Rig) -> None:
    backend = rig.add_memory_tier(breaker_failures=1, breaker_pause_seconds=SECONDS)
    rig.start()
    backend.faults = {"store": OSError("the medium is gone")}
    assert rig.store_all(item(1, block=1)) == {1: False}
    assert rig.copier.threads != set()
    rig.copier.threads.clear()
    rig.engine.submit_stores([item(1, block=1), item(2, block=2)])
    assert rig.store_results() == {1: False, 2: False}
    assert rig.copier.threads == set(), "not gathered"
    assert (rig.counted("store_dropped"), rig.counted("breaker_refused")) == (2, 2)
    assert rig.counted("jobs") == 1


def test_other_tiers_take_a_store_that_one_tiers_breaker_refuses(rig: Rig) -> None:
    broken = rig.add_memory_tier("broken", breaker_failures=1, breaker_pause_seconds=SECONDS)
    well = rig.add_memory_tier("well")
    rig.start()
    broken.faults = {"store": OSError("the medium is gone")}
    for number in range(2):
        assert rig.store_all(item(number, block=number)) == {number: True}
    assert (rig.counted("store_failures", "broken"), rig.counted("store_dropped", "broken")) == (1, 1)
    assert (broken.calls.count("store"), kept(well)) == (1, {0, 1})


def test_a_promotion_that_the_breaker_refuses_is_counted(rig: Rig) -> None:
    fast = rig.add_memory_tier("fast", breaker_failures=1, breaker_pause_seconds=SECONDS)
    rig.add_memory_tier("slow")
    rig.start()
    fast.faults = {"store": OSError("the medium is gone")}
    rig.store_all(item(1, block=1))
    rig.load(item(1, block=15), tier="slow")
    assert rig.result().status == "loaded"
    assert rig.counted("promotions_dropped", "fast") == 1
    assert rig.staging.used_bytes == 0


def test_waiting_stores_are_dropped_when_the_breaker_opens(rig: Rig) -> None:
    backend = rig.add_memory_tier(io_threads=1, breaker_failures=1, breaker_pause_seconds=SECONDS)
    rig.start(staging_bytes=2 * 20 * LEASE)
    backend.gates["store"].shut()
    submit(rig, 0, 1)
    rig.engine.submit_stores([item(number, block=number) for number in range(2, 12)])
    sealed(rig)
    backend.faults = {"prepare_load": OSError("the medium is gone")}
    rig.load(item(0, block=15))
    assert rig.result().status == "failed"
    submit(rig, 12)
    assert rig.store_results() == dict.fromkeys(range(2, 13), False)
    assert rig.staging.used_bytes == 2 * LEASE
    assert (rig.counted("store_dropped"), rig.counted("jobs_cancelled")) == (11, 2)


def test_a_hung_tier_gets_no_calls_and_its_waiting_stores_are_dropped_at_once(
    rig: Rig, caplog: pytest.LogCaptureFixture
) -> None:
    backend = rig.add_memory_tier(
        io_threads=1, store_timeout_seconds=LATE, breaker_failures=2, breaker_pause_seconds=0.01
    )
    rig.start(staging_bytes=2 * 20 * LEASE)
    backend.gates["contains"].shut()  # the probe hangs as well
    backend.gates["store"].shut()
    rig.engine.submit_stores([item(number, block=number) for number in range(16)])  # two batches, one deadline
    rig.step_until(lambda: backend.reserved == 2)
    rig.engine.submit_stores([item(16, block=0), item(17, block=1)])
    assert results(rig, 18) == dict.fromkeys(range(18), False)
    assert rig.counted("breaker_opened") == 1
    rig.step_until(lambda: rig.staging.used_bytes == 16 * LEASE)
    for number in range(18, 21):
        rig.engine.submit_stores([item(number, block=0)])
    assert rig.store_results() == dict.fromkeys(range(18, 21), False)
    assert [record.levelname for record in caplog.records] == ["WARNING", "WARNING"]
    assert "store failed (first object: ababababab" in caplog.messages[0]
    assert "store_timeout_seconds" in caplog.messages[0]
    assert "is not used for now" in caplog.messages[1]
    for gate in backend.gates.values():
        gate.open()
    assert rig.engine.drain_stores(SECONDS)

    def is_stored() -> bool:
        return rig.store_all(item(21, block=0)) == {21: True}

    rig.step_until(is_stored)
    rig.step_until(lambda: rig.tiers[0].health.available)
    assert rig.engine.jobs.live == ()


def test_a_trial_that_hangs_keeps_the_tier_out_of_use(rig: Rig) -> None:
    """Also when a call from before has stored something after all."""
    backend = rig.add_memory_tier(
        io_threads=1, store_timeout_seconds=0.05, breaker_failures=1, breaker_pause_seconds=0.01
    )
    rig.start()
    backend.faults = {"store": OSError("the medium is gone")}
    rig.store_all(item(0, block=0))
    assert rig.counted("breaker_opened") == 1
    backend.faults = {}
    backend.gates["store"].shut()

    def is_tried() -> bool:
        rig.engine.submit_stores([item(1, block=1)])
        rig.store_results()
        return backend.gates["store"].arrived.is_set()

    rig.step_until(is_tried)
    rig.engine._stores._writers[0]._stored_at = float("inf")  # as if one from before had come back just now
    rig.step_until(lambda: rig.counted("breaker_opened") == 1)


def test_a_tier_that_stores_something_all_the_time_is_merely_slow(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    backend = rig.add_memory_tier(store_timeout_seconds=3, breaker_failures=1)
    rig.start()
    go_on = asyncio.Event()
    store = backend.store

    async def hangs_with_the_first(keys: Sequence[ObjectKey], buffers: Sequence[memoryview]) -> Sequence[StoreOutcome]:
        if keys[0] == key(1, PACK):
            await go_on.wait()
        return await store(keys, buffers)

    monkeypatch.setattr(backend, "store", hangs_with_the_first)
    submit(rig, 1)
    submit(rig, 2)
    assert results(rig, 2) == {1: False, 2: True}
    assert rig.counted("store_timeouts") == 1
    assert rig.tiers[0].health.available
    rig.io.loop.call_soon_threadsafe(go_on.set)
    assert rig.engine.drain_stores(SECONDS)
    assert rig.counted("store_late") == 1


# The end


def test_closing_drops_waiting_stores_and_leaves_running_ones_their_memory(rig: Rig) -> None:
    backend = rig.add_memory_tier(io_threads=1)
    rig.start()
    backend.gates["store"].shut()
    submit(rig, 0, 1, 2, 3)
    assert not rig.engine.drain_stores(0)
    rig.engine.close()
    assert rig.staging.used_bytes == 2 * LEASE
    assert (rig.counted("store_dropped"), rig.counted("jobs_cancelled"), rig.counted("jobs_retired")) == (2, 4, 2)
    backend.gates["store"].open()
    assert rig.engine.drain_stores(SECONDS)
    assert kept(backend) == {0, 1}
    assert rig.staging.used_bytes == 0
    rig.io.submit(asyncio.sleep(0)).result(SECONDS)
    assert timers(rig.io) == 0
