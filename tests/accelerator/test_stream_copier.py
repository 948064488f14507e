"""Copies by streams: right bytes in any order of the streams, and no call that waits for one."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from offload_core.memory.block_copier import BlockSlice, DetachedError
from offload_core.memory.canonical import CanonicalKVCaches, LayerPages
from offload_core.memory.copiers import block_copier
from offload_core.memory.device.block_id_buffer import BlockIdBuffer
from offload_core.memory.device.stream_copier import StreamBlockCopier
from offload_core.memory.payload_layout import PackLayout
from offload_core.planning.planner import GroupGeometry, HitPolicy, Pack
from tests.support.accelerator import DEVICE, StreamControl

NUM_BLOCKS = 12
PAGE_BYTES = 512
UNIT = 3
SECONDS = 20


class Case:
    """Two layers, with three blocks per payload."""

    def __init__(self, payloads_on_device: int = 4) -> None:
        generator = torch.Generator().manual_seed(1)
        shape = NUM_BLOCKS, PAGE_BYTES
        self.memories = [
            torch.randint(-128, 128, shape, dtype=torch.int8, generator=generator).to(DEVICE) for _ in range(2)
        ]
        caches = self.caches()
        policy = HitPolicy("full")
        pack = Pack(f"full-u{UNIT}", UNIT, policy, UNIT, (GroupGeometry(0, 1, policy),))
        self.layout = PackLayout.build(pack, caches, [0])
        self.copier = StreamBlockCopier(caches, payloads_on_device * -(-self.layout.payload_bytes // 256) * 256)
        torch.accelerator.synchronize()

    def caches(self) -> CanonicalKVCaches:
        layers = [
            LayerPages(str(index), memory, NUM_BLOCKS, PAGE_BYTES, PAGE_BYTES)
            for index, memory in enumerate(self.memories)
        ]
        return CanonicalKVCaches.build([layers])

    @property
    def streams(self) -> tuple[torch.Stream, torch.Stream, torch.Stream]:
        """The streams of the engine, of stores and of loads."""
        return torch.accelerator.current_stream(), self.copier._store_stream, self.copier._load_stream

    def payload(self, value: int = 0x33) -> torch.Tensor:
        return torch.full((self.layout.payload_bytes,), value, dtype=torch.int8, pin_memory=True)

    def blocks_of(self, ids: Sequence[int]) -> torch.Tensor:
        """Return the pages of blocks, as a payload has them."""
        torch.accelerator.synchronize()
        return torch.cat([memory.cpu()[list(ids), :PAGE_BYTES].flatten() for memory in self.memories])

    def gather(self, ids: Sequence[int], payload: torch.Tensor) -> bool:
        is_copied = self.copier.gather(self.layout, [BlockSlice(0, tuple(ids))], payload)
        self.copier.gathers_end()
        return is_copied

    def scatter(self, ids: Sequence[int], payload: torch.Tensor) -> None:
        self.copier.scatter(self.layout, [BlockSlice(0, tuple(ids))], payload)
        self.copier.scatters_end()

    def engine_writes(self, ids: Sequence[int], value: int) -> None:
        """Give the engine's stream work that fills blocks."""
        for memory in self.memories:
            for block in ids:
                memory[block].fill_(value)


def within(call: Callable[[], object]) -> None:
    """Make a call, and fail if it waits for a held stream."""
    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    thread.join(SECONDS)
    assert not thread.is_alive(), "the call waits for a stream"


def test_the_copier_of_a_device_has_streams(control: StreamControl) -> None:
    memory = torch.zeros(4, 8, dtype=torch.int8, device=DEVICE)
    caches = CanonicalKVCaches.build([[LayerPages("layer", memory, 4, 8, 8)]])
    assert isinstance(block_copier(caches, 8), StreamBlockCopier)


@pytest.mark.parametrize("ids", [(4, 5, 6), (6, 5, 4), (1, 7, 3), (0, 1, 11)])
def test_blocks_come_and_go(control: StreamControl, ids: tuple[int, ...]) -> None:
    case = Case()
    expected = case.blocks_of(ids)
    payload = case.payload()
    assert case.gather(ids, payload)
    case.copier.wait()
    assert torch.equal(payload, expected)
    case.engine_writes(range(NUM_BLOCKS), 0x11)
    case.scatter((2, 9, 8), payload)
    case.copier.wait()
    assert torch.equal(case.blocks_of((2, 9, 8)), expected)
    assert bool((case.blocks_of((0, 1, 3)) == 0x11).all())


def test_no_call_waits_while_all_streams_are_held(control: StreamControl) -> None:
    case = Case()
    payloads = [case.payload(), case.payload()]
    with control.held(*case.streams):
        within(lambda: case.gather((0, 1, 2), payloads[0]))
        within(lambda: case.gather((8, 0, 11), payloads[0]))
        within(lambda: case.scatter((3, 4, 5), payloads[1]))
        stored, loaded = case.copier.gathers_end(), case.copier.scatters_end()
        within(case.copier.let_engine_follow_scatters)
        assert stored is not None
        assert not stored.has_passed()
        assert not loaded.has_passed()
    case.copier.wait()
    assert stored.has_passed()
    assert loaded.has_passed()


def test_the_engine_may_reuse_blocks_while_their_bytes_are_still_on_the_device(control: StreamControl) -> None:
    case = Case()
    expected = case.blocks_of((0, 1, 2))
    payload = case.payload()
    with control.held(case.copier._store_stream):
        assert case.gather((0, 1, 2), payload)
        case.engine_writes((0, 1, 2), 0x11)
        torch.accelerator.current_stream().synchronize()
        assert bool((payload == 0x33).all())
    case.copier.wait()
    assert torch.equal(payload, expected)


def test_a_gather_follows_the_work_that_fills_its_blocks(control: StreamControl) -> None:
    case = Case()
    payload = case.payload()
    with control.held(torch.accelerator.current_stream()):
        case.engine_writes((0, 1, 2), 0x11)
        assert case.gather((0, 1, 2), payload)
    case.copier.wait()
    assert bool((payload == 0x11).all())


def test_a_scatter_follows_the_work_that_still_uses_its_blocks(control: StreamControl) -> None:
    case = Case()
    payload = case.payload(0x22)
    with control.held(torch.accelerator.current_stream()):
        case.engine_writes((0, 1, 2), 0x11)
        case.scatter((0, 1, 2), payload)
    case.copier.wait()
    assert bool((case.blocks_of((0, 1, 2)) == 0x22).all())


def test_work_after_a_verdict_follows_the_scatters(control: StreamControl) -> None:
    case = Case()
    with control.held(case.copier._load_stream):
        case.scatter((0, 1, 2), case.payload(0x22))
        case.copier.let_engine_follow_scatters()
        case.engine_writes((0, 1, 2), 0x11)
    assert bool((case.blocks_of((0, 1, 2)) == 0x11).all())


def test_a_full_device_buffer_refuses_a_gather_and_is_free_again(control: StreamControl) -> None:
    case = Case(payloads_on_device=2)
    payloads = [case.payload() for _ in range(4)]
    with control.held(case.copier._store_stream):
        assert [case.gather((0, 1, 2), payload) for payload in payloads[:3]] == [True, True, False]
    case.copier.wait()
    assert case.gather((3, 4, 5), payloads[3])
    case.copier.wait()
    assert bool((payloads[2] == 0x33).all()), "a refused gather has copied"
    assert torch.equal(payloads[3], case.blocks_of((3, 4, 5)))


def test_a_gather_of_too_many_blocks_is_refused_and_takes_no_room(control: StreamControl) -> None:
    case = Case(payloads_on_device=1)
    for _ in range(2):
        with pytest.raises(ValueError, match="slots are 0 to 2"):
            case.gather((0, 1, 2, 3), case.payload())
    payload = case.payload()
    assert case.gather((0, 1, 2), payload)
    case.copier.wait()
    assert torch.equal(payload, case.blocks_of((0, 1, 2)))


class Calls(TorchDispatchMode):
    """The operators that torch is asked for."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


def test_a_gather_takes_one_call_for_a_layer_wherever_its_blocks_lie(control: StreamControl) -> None:
    case = Case()
    with Calls() as calls:
        assert case.gather((0, 2, 4), case.payload())
    assert calls.names.count("aten.index.Tensor_out") == len(case.memories)
    assert calls.names.count("aten.copy_.default") == 2, "the ids to the device, and the payload from it"
    case.copier.wait()


@pytest.mark.parametrize("page_bytes", [1, 6, 20, 64])
@pytest.mark.parametrize("padding", [0, 2, 8])
@pytest.mark.parametrize("before", [0, 3])
def test_pages_of_any_size_are_gathered(control: StreamControl, page_bytes: int, padding: int, before: int) -> None:
    """A device copies words; the pages may begin and end within them."""
    row_bytes = page_bytes + padding
    memory = torch.randint(-128, 128, (before + NUM_BLOCKS * row_bytes,), dtype=torch.int8)
    there = memory.to(DEVICE)[before:].view(NUM_BLOCKS, row_bytes)
    pages = LayerPages("layer", there[:, :page_bytes], NUM_BLOCKS, page_bytes, page_bytes)
    caches = CanonicalKVCaches.build([[pages]])
    policy = HitPolicy("full")
    layout = PackLayout.build(Pack("full", UNIT, policy, UNIT, (GroupGeometry(0, 1, policy),)), caches, [0])
    payload = torch.zeros(layout.payload_bytes, dtype=torch.int8, pin_memory=True)
    copier = StreamBlockCopier(caches, layout.payload_bytes)
    assert copier.gather(layout, [BlockSlice(0, (9, 0, 4))], payload)
    copier.wait()
    rows = memory[before:].view(NUM_BLOCKS, row_bytes)
    assert torch.equal(payload.view(UNIT, page_bytes), rows[[9, 0, 4], :page_bytes])


def test_blocks_are_gathered_without_room_for_their_ids(control: StreamControl) -> None:
    case = Case(payloads_on_device=8)
    case.copier._ids = BlockIdBuffer(torch.device(DEVICE), ids=32)
    payloads = [case.payload() for _ in range(6)]
    orders = [tuple(random.Random(seed).sample(range(NUM_BLOCKS), UNIT)) for seed in range(6)]
    for _ in range(2):
        with control.held(case.copier._store_stream), Calls() as calls:
            for ids, payload in zip(orders, payloads, strict=True):
                assert case.gather(ids, payload)
        assert calls.names.count("aten.index.Tensor_out") == len(case.memories)
        case.copier.wait()
        for ids, payload in zip(orders, payloads, strict=True):
            assert torch.equal(payload, case.blocks_of(ids))
            payload.zero_()


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_order_of_held_streams_moves_the_right_bytes(control: StreamControl, data: st.DataObject) -> None:
    """Random work of the engine, gathers and scatters, beside an oracle in the order of the calls."""
    case = Case(payloads_on_device=2)
    expected = [memory.cpu().clone() for memory in case.memories]
    gathered: list[tuple[torch.Tensor, torch.Tensor]] = []
    held: set[int] = set()
    try:
        for _ in range(data.draw(st.integers(1, 12))):
            step = data.draw(st.sampled_from(("engine", "gather", "scatter", "hold", "release")))
            ids = random.Random(data.draw(st.integers(0, 999))).sample(range(NUM_BLOCKS), UNIT)
            value = data.draw(st.integers(-128, 127))
            if step == "engine":
                case.engine_writes(ids, value)
                for memory in expected:
                    memory[ids] = value
            elif step == "gather":
                payload = case.payload()
                wanted = torch.cat([memory[ids, :PAGE_BYTES].flatten() for memory in expected])
                if case.gather(ids, payload):
                    gathered.append((payload, wanted))
            elif step == "scatter":
                case.scatter(ids, case.payload(value))
                case.copier.let_engine_follow_scatters()
                for memory in expected:
                    memory[ids, :PAGE_BYTES] = value
            elif step == "hold":
                index = data.draw(st.integers(0, 2))
                held.add(index)
                control.hold(case.streams[index])
            elif held:
                index = data.draw(st.sampled_from(sorted(held)))
                held.discard(index)
                control.release(case.streams[index])
    finally:
        for stream in case.streams:
            control.release(stream)
    case.copier.wait()
    torch.accelerator.synchronize()
    for payload, wanted in gathered:
        assert torch.equal(payload, wanted)
    for memory, right in zip(case.memories, expected, strict=True):
        assert torch.equal(memory.cpu(), right)


def test_a_copier_lets_go_of_its_memory_when_its_copies_have_ended_and_takes_other_memory() -> None:
    case = Case()
    payload, late = case.payload(), case.payload(0x11)
    expected = case.blocks_of((3, 1, 7))
    assert case.gather((3, 1, 7), payload)
    case.scatter((4, 5, 11), late)

    case.copier.detach()
    assert torch.equal(payload, expected)
    assert torch.equal(case.blocks_of((4, 5, 11)), late)
    kept = [memory.cpu() for memory in case.memories]
    assert not case.gather((3, 1, 7), payload)
    with pytest.raises(DetachedError):
        case.scatter((3, 1, 7), late)

    old, case.memories = case.memories, [torch.zeros_like(memory) for memory in case.memories]
    case.copier.attach(case.caches())
    case.scatter((8, 0, 2), payload)
    assert torch.equal(case.blocks_of((8, 0, 2)), expected)
    assert case.gather((8, 0, 2), late)
    case.copier.wait()
    assert torch.equal(late, expected)
    assert all(torch.equal(one.cpu(), other) for one, other in zip(old, kept, strict=True))
