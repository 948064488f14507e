"""The selections of a plan bring the bytes that copies of single pages bring, wherever the slots are."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from offload_core.memory.block_copier import BlockSlice
from offload_core.memory.device.device_buffer import DeviceBuffer, slot_bytes
from offload_core.memory.device.gather_plan import Gather, GatherPlan
from offload_core.memory.payload_layout import PackLayout, PageRun
from tests.core.memory.test_batched_pieces import Case, cases


@given(case=cases(), slots_in_use=st.integers(0, 3), spare_bytes=st.integers(0, 3000), seed=st.integers(0, 2**31))
def test_selections_bring_the_bytes_of_single_pages(case: Case, slots_in_use: int, spare_bytes: int, seed: int) -> None:
    _, tensors, objects = case
    generator = torch.Generator().manual_seed(seed)
    for tensor in tensors:
        tensor.random_(-128, 128, generator=generator)
    buffer_bytes = sum(slot_bytes(layout.payload_bytes) for layout, _ in objects) + 3 * 256 + spare_bytes
    buffer = DeviceBuffer(buffer_bytes)
    taken = [buffer.try_take(256 + spare_bytes // 2) for _ in range(slots_in_use)]
    for start in taken[:-1]:  # the next slots begin behind the one that stays, and go on at the beginning
        if start is not None:
            buffer.free_oldest()
    gathers: list[Gather] = []
    for layout, blocks in objects:
        if (start := buffer.try_take(layout.payload_bytes)) is not None:
            gathers.append(Gather(layout, blocks, torch.zeros(layout.payload_bytes, dtype=torch.int8), start))

    plan = GatherPlan.of(gathers)
    memory = torch.zeros(slot_bytes(buffer_bytes), dtype=torch.int8)
    ids = torch.tensor(plan.block_ids, dtype=torch.int64)
    for run, first_id, count, pages, start, stride in plan.selections:
        chosen = tensors[run.tensor_index][ids[first_id : first_id + count * pages], : run.page_bytes]
        shape = count, pages, run.page_bytes
        memory.as_strided(shape, (stride, run.page_bytes, 1), start).copy_(chosen.view(shape))

    moved = {payload.data_ptr(): memory[start : start + len(payload)] for start, payload in plan.slots}
    assert len(moved) == len(gathers)
    for gather in gathers:
        expected = torch.zeros(gather.layout.payload_bytes, dtype=torch.int8)
        for run in gather.layout.runs:
            part = gather.blocks[run.group]
            for slot, block in enumerate(part.block_ids, part.first_slot):
                first = run.offset_bytes + slot * run.page_bytes
                expected[first : first + run.page_bytes] = tensors[run.tensor_index][block, : run.page_bytes]
        written = torch.zeros(gather.layout.payload_bytes, dtype=torch.bool)
        for run in gather.layout.runs:
            part = gather.blocks[run.group]
            first = run.offset_bytes + part.first_slot * run.page_bytes
            written[first : first + len(part.block_ids) * run.page_bytes] = True
        assert torch.equal(moved[gather.payload.data_ptr()][written], expected[written])


def test_objects_that_are_alike_take_one_selection_per_reference_in_whatever_order_they_come() -> None:
    layouts = [PackLayout(name, (PageRun(0, 0, 64, 2, 0), PageRun(0, 1, 64, 2, 128)), 256) for name in "ab"]
    gathers = []
    for number in range(6):
        blocks = [BlockSlice(0, (number, number + 1))]
        gathers.append(Gather(layouts[number % 2], blocks, torch.zeros(256, dtype=torch.int8), 256 * number))
    plan = GatherPlan.of(gathers)
    assert [(one.objects, one.pages) for one in plan.selections] == [(3, 2)] * 4
    assert sorted(start for start, _ in plan.slots) == [256 * number for number in range(6)]
