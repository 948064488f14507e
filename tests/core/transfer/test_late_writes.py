"""Blocks whose load has ended belong to other requests: late arrivals change no block (I2, I3)."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from offload_core.runtime.io_loop import IoLoop
from offload_core.transfer.jobs import JobState
from tests.support.memory_backend import Gate
from tests.support.transfer_rig import SECONDS, Rig, item


@pytest.fixture
def rig(io: IoLoop) -> Iterator[Rig]:
    """Two tiers with the same four objects: the gate can delay loads from ``slow``."""
    rig = Rig(io)
    rig.add_memory_tier("fast")
    rig.add_memory_tier("slow")
    rig.start()
    rig.store_all(*(item(number, block=number) for number in range(1, 5)))
    yield rig
    rig.finish()


@pytest.fixture
def gate(rig: Rig) -> Gate:
    gate = rig.backends["slow"].gates["load_into"]
    gate.shut()
    return gate


@pytest.mark.parametrize("end", ["timed out", "cancelled"])
def test_i2_blocks_that_were_given_to_another_request_keep_its_bytes(rig: Rig, gate: Gate, end: str) -> None:
    slow = rig.tiers[1]
    if end == "timed out":
        slow.limits = slow.limits.model_copy(update={"load_timeout_seconds": 0.02})
    late = rig.load(item(1, block=10), item(2, block=11), tier="slow")
    gate.wait_for_a_call()
    if end == "cancelled":
        rig.engine.cancel_load(late)
    assert rig.result().status == end

    rig.load(item(3, block=10), item(4, block=11), tier="fast")
    assert rig.result().status == "loaded"
    expected = rig.kv_cache.clone()
    assert torch.equal(expected[10:12], expected[3:5])
    gate.open()
    rig.all_leases_are_back()
    assert torch.equal(rig.kv_cache, expected)
    assert rig.counted("load_late", "slow") == 2


def test_i2_objects_of_an_earlier_load_are_not_taken_for_those_of_a_later_one(rig: Rig, gate: Gate) -> None:
    late = rig.load(item(1, block=10), tier="slow")
    gate.wait_for_a_call()
    rig.engine.cancel_load(late)
    assert rig.result().status == "cancelled"
    rig.load(item(1, block=12), tier="slow")
    expected = rig.kv_cache.clone()
    expected[12] = expected[1]
    gate.open()
    assert rig.result().status == "loaded"
    rig.all_leases_are_back()
    assert torch.equal(rig.kv_cache, expected)


def test_i2_an_arrival_is_dropped_if_its_load_ended_before_the_copy(rig: Rig) -> None:
    late = rig.load(item(1, block=10), tier="slow")
    rig.engine.wait_for_arrival(SECONDS)  # verified and handed over; the engine has not polled yet
    rig.engine.cancel_load(late)
    rig.load(item(1, block=12), tier="fast")
    expected = rig.kv_cache.clone()
    expected[12] = expected[1]
    assert {result.status for result in rig.results(2).values()} == {"cancelled", "loaded"}
    rig.all_leases_are_back()
    assert torch.equal(rig.kv_cache, expected)


def test_i3_a_job_drains_until_its_call_has_ended(rig: Rig, gate: Gate) -> None:
    rig.counters.take()
    late = rig.load(item(1, block=10), item(2, block=11), tier="slow")
    gate.wait_for_a_call()
    (job,) = rig.engine.jobs.live
    assert (job.state, job.leases) == (JobState.RUNNING, 2)
    rig.engine.cancel_load(late)
    assert (job.state, job.verdict) == (JobState.DRAINING, JobState.CANCELLED)
    assert rig.counted("draining_leases", "slow") == 2
    assert rig.result().job_id == late
    gate.open()
    rig.all_leases_are_back()
    rig.step_until(lambda: not rig.engine.jobs.live)
    assert job.state is JobState.RETIRED
    counts = rig.counters.take()
    assert counts["draining_leases", "slow"] == -2, "as many as were added"
    assert counts["jobs", "slow"] == counts["jobs_cancelled", "slow"] == counts["jobs_retired", "slow"] == 1
