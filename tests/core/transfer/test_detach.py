"""A transfer engine whose KV cache loses its memory: all that is under way ends, and no byte enters or leaves."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from offload_core.memory.block_copier import DetachedError
from offload_core.memory.canonical import CanonicalKVCaches, LayerPages
from offload_core.objects.format import HEADER_BYTES
from offload_core.runtime.io_loop import IoLoop
from tests.support.held_copier import HeldCopier, copier
from tests.support.memory_backend import MemoryBackend, key
from tests.support.transfer_rig import PACK, SECONDS, Rig, item

LOST = 0x5A


@pytest.fixture
def rig(io: IoLoop) -> Iterator[Rig]:
    """A tier with the blocks 1 to 3 under their own numbers."""
    rig = Rig(io, make_copier=HeldCopier)
    copier(rig).let_go()
    rig.add_memory_tier()
    rig.start()
    assert all(rig.store_all(*(item(number, block=number) for number in (1, 2, 3))).values())
    yield rig
    copier(rig).let_go()
    rig.finish()


@pytest.fixture
def backend(rig: Rig) -> MemoryBackend:
    return rig.backends["memory"]


def lose_memory(rig: Rig) -> None:
    """Detach, and fill the memory with a pattern."""
    rig.copier.detach()
    rig.engine.detach()
    rig.kv_cache.fill_(LOST)


def get_memory(rig: Rig) -> None:
    """Give the KV cache other memory; nobody may have touched the memory that was gone."""
    assert (rig.kv_cache == LOST).all(), "a copy into memory that is gone"
    num_blocks, page_bytes = rig.kv_cache.shape
    rig.kv_cache = torch.zeros_like(rig.kv_cache)
    rig.copier.attach(
        CanonicalKVCaches.build([[LayerPages("layer", rig.kv_cache, num_blocks, page_bytes, page_bytes)]])
    )
    rig.engine.attach()


def test_a_load_under_way_is_cancelled_and_its_bytes_come_too_late(rig: Rig, backend: MemoryBackend) -> None:
    backend.gates["load_into"].shut()
    rig.load(item(1, block=5), item(2, block=6))
    backend.gates["load_into"].wait_for_a_call()
    lose_memory(rig)
    result = rig.result()
    assert (result.status, result.failed_keys) == ("cancelled", ()), "the objects are not at fault"
    assert rig.staging.used_bytes > 0, "I3: the call still writes into its buffers"

    backend.gates["load_into"].open()
    rig.all_leases_are_back()
    get_memory(rig)
    rig.load(item(1, block=5))
    assert rig.result().status == "loaded"
    assert not rig.kv_cache[6].any()


def test_an_object_that_has_arrived_does_not_enter(rig: Rig) -> None:
    rig.load(item(1, block=5))
    while not rig.engine._loads.has_arrivals:
        rig.engine.wait_for_arrival(0.01)
    lose_memory(rig)
    assert rig.staging.used_bytes == 0
    get_memory(rig)
    assert rig.result().status == "cancelled"
    assert not rig.kv_cache[5].any()


def test_copies_on_a_device_end_before_the_memory_goes(rig: Rig, backend: MemoryBackend) -> None:
    backend.objects.pop(key(3, PACK))
    stored = rig.kv_cache[3].clone()
    copier(rig).is_held = True
    rig.engine.submit_stores([item(3, block=3)])
    rig.load(item(1, block=5))
    rig.step_until(lambda: copier(rig).loads.length == 1)

    lose_memory(rig)
    assert copier(rig).stores.length == copier(rig).loads.length == 0
    assert rig.engine.drain_stores(SECONDS)
    assert rig.store_results()[3]
    assert bytes(backend.objects[key(3, PACK)][HEADER_BYTES:]) == stored.numpy().tobytes(), "what was copied goes on"
    get_memory(rig)
    assert rig.result().status == "cancelled", "the copy was complete, but its bytes are gone"
    rig.all_leases_are_back()


def test_loads_and_stores_without_memory_end_at_once(rig: Rig, backend: MemoryBackend) -> None:
    lose_memory(rig)
    rig.counted("store_dropped")
    rig.engine.announce_stores([item(7, block=7)])
    rig.engine.submit_stores([item(7, block=7)])
    assert rig.store_results() == {7: False}
    assert rig.counted("store_dropped") == 1
    rig.load(item(1, block=5))
    assert rig.result().status == "cancelled"
    get_memory(rig)
    assert key(7, PACK) not in backend.objects
    rig.all_leases_are_back()
    assert rig.engine._stores.budget.held_bytes == 0


def test_detach_may_come_twice_and_a_copy_into_nothing_is_an_error(rig: Rig) -> None:
    lose_memory(rig)
    lose_memory(rig)
    payload = torch.zeros(rig.largest_payload_bytes, dtype=torch.int8)
    with pytest.raises(DetachedError, match="all loads must end before"):
        rig.copier.scatter(rig.layouts[PACK], item(1, block=1).blocks, payload)
