"""No call of the connector waits while the copy streams are held. Only budgets of memory say no, which drops stores."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from offload_core.memory.canonical import CanonicalKVCaches
from offload_core.memory.device.stream_copier import StreamBlockCopier
from offload_core.memory.staging_pool import StagingPool
from offload_core.memory.staging_size import STORE_SHARE
from offload_core.runtime.io_loop import IoLoop
from offload_core.vllm.worker import half
from tests.standin.rig import Rig
from tests.support import transfer_rig
from tests.support.accelerator import DEVICE, StreamControl
from tests.support.standin.geometries import MODELS
from tests.support.standin.workload import reference
from tests.support.transfer_rig import item, number_of

SECONDS = 20
PAGE_BYTES = 4096
LEASE_BYTES = 2 * PAGE_BYTES
"""Bytes of staging for an object: a page and a header, in whole pages."""


@contextmanager
def held(control: StreamControl, *streams: Any) -> Iterator[None]:
    """Hold streams; a call that waits for one of them ends after a time, and the test fails."""
    waited = threading.Event()

    def let_go() -> None:
        waited.set()
        for stream in streams:
            control.release(stream)

    timer = threading.Timer(SECONDS, let_go)
    timer.start()
    try:
        with control.held(*streams):
            yield
            assert not waited.is_set(), "a call waits for a held stream"
    finally:
        timer.cancel()


@pytest.fixture
def engine_of(control: StreamControl) -> Iterator[Callable[..., transfer_rig.Rig]]:
    io = IoLoop.acquire()
    rigs: list[transfer_rig.Rig] = []

    def make(*, buffer_objects: int, staging_objects: int) -> transfer_rig.Rig:
        def copier(caches: CanonicalKVCaches) -> StreamBlockCopier:
            return StreamBlockCopier(caches, buffer_objects * PAGE_BYTES)

        rigs.append(transfer_rig.Rig(io, page_bytes=PAGE_BYTES, num_blocks=32, make_copier=copier, device=DEVICE))
        rigs[0].add_memory_tier(staging_share=1.0)
        rigs[0].start_with(StagingPool(staging_objects * LEASE_BYTES, STORE_SHARE, control))
        return rigs[0]

    yield make
    for rig in rigs:
        rig.finish()
        rig.staging.close()
    io.release()


@pytest.mark.parametrize(
    ("buffer_objects", "staging_objects", "kept"), [(3, 64, 3), (32, 16, 8)], ids=["device buffer", "staging"]
)
def test_stores_are_dropped_where_a_budget_is_used_up_and_only_there(
    engine_of: Callable[..., transfer_rig.Rig],
    control: StreamControl,
    buffer_objects: int,
    staging_objects: int,
    kept: int,
) -> None:
    assert STORE_SHARE == 0.5
    rig = engine_of(buffer_objects=buffer_objects, staging_objects=staging_objects)
    before = rig.kv_cache.cpu()
    copier = rig.copier
    with held(control, torch.accelerator.current_stream(), copier._store_stream, copier._load_stream):
        for number in range(12):
            rig.engine.submit_stores([item(number, block=number)])
            rig.engine.poll()
            rig.kv_cache[number].fill_(0x11)
        dropped = [number_of(result) for result in rig.engine.take_store_results()]
    assert dropped == list(range(kept, 12))
    assert rig.counted("store_dropped") == len(dropped)
    assert rig.engine.drain_stores(SECONDS)
    assert rig.store_results() == dict.fromkeys(range(kept), True)
    rig.load(*(item(number, block=20 + number) for number in range(kept)))
    assert rig.result().status == "loaded"
    assert torch.equal(rig.kv_cache.cpu()[20 : 20 + kept], before[:kept])
    assert rig.store_all(*(item(number, block=number) for number in range(12, 12 + kept))) == dict.fromkeys(
        range(12, 12 + kept), True
    ), "the budgets are free again"


def test_an_engine_goes_on_while_all_copies_stand_still(
    rig: Rig, control: StreamControl, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One request waits for its load, others compute and finish, and stores without room wait."""
    monkeypatch.setattr(half, "pinning_in_use", lambda: control)
    model = MODELS["gemma3"]()
    old = [3 + i % 997 for i in range(2 * model.chunk_tokens + 5)]
    first = rig.engine(model, device=DEVICE)
    rig.run(first, old)
    rig.end(first)

    engine = rig.engine(model, device=DEVICE, device_buffer_bytes="100KiB")
    assert engine.workers[0].connector is not None
    copier = engine.workers[0].connector._worker_half._engine._copier
    with held(control, copier._store_stream, copier._load_stream):
        loading = engine.add(old, 4)
        others = {}
        for number in range(4):
            prompt = [5 + (7 * number + 3 * i) % 991 for i in range(2 * model.chunk_tokens + 9)]
            others[engine.add(prompt, 4)] = reference(tuple(prompt), 4)
        rig.step_until(engine, lambda: engine.finished.keys() == others.keys())
        assert engine.outputs[loading] == []
        assert engine.connector is not None
        assert len(engine.connector._scheduler._store_plan._waiting) > 0, "there is room for all"
    assert {request: engine.outputs[request] for request in others} == others
    rig.drain(engine)
    assert engine.outputs[loading] == reference(tuple(old), 4)
    assert engine.served[loading].external_tokens == 2 * model.chunk_tokens
