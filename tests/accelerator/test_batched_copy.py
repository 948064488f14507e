"""Batched copies on the device: a trial of their bytes at the start, and blocks whose pages lie apart."""

from __future__ import annotations

import pytest
import torch

from offload_core.api.errors import ConfigError
from offload_core.memory.block_copier import BlockSlice
from offload_core.memory.canonical import CanonicalKVCaches, LayerPages
from offload_core.memory.copiers import block_copier
from offload_core.memory.device.batched_copy import BatchedCopy, CopyPieces, copies_right
from offload_core.memory.device.stream_copier import StreamBlockCopier, lowest_priority
from offload_core.memory.payload_layout import PackLayout
from offload_core.planning.planner import GroupGeometry, HitPolicy, Pack
from offload_core.vllm.worker.batched_copy import SwapBlocksBatch
from tests.support.accelerator import DEVICE, StreamControl, only_simulated
from tests.support.simulated_accelerator import Control

ROW_BYTES, PAGE_BYTES, NUM_BLOCKS = 768, 512, 9


@pytest.fixture
def batched(control: StreamControl) -> BatchedCopy:
    return SwapBlocksBatch(control.swap_blocks_batch, torch.int64, 3)


def padded_caches() -> tuple[torch.Tensor, CanonicalKVCaches]:
    """Return pages with bytes behind them that belong to nobody."""
    generator = torch.Generator().manual_seed(3)
    memory = torch.randint(-128, 128, (NUM_BLOCKS, ROW_BYTES), dtype=torch.int8, generator=generator).to(DEVICE)
    layer = LayerPages("layer", memory[:, :PAGE_BYTES], NUM_BLOCKS, PAGE_BYTES, PAGE_BYTES)
    return memory, CanonicalKVCaches.build([[layer]])


def layout_of(caches: CanonicalKVCaches, blocks: int) -> PackLayout:
    policy = HitPolicy("full")
    return PackLayout.build(Pack("full", blocks, policy, blocks, (GroupGeometry(0, 1, policy),)), caches, [0])


@pytest.mark.parametrize("ids", [(4, 5, 6), (6, 5, 4), (0, 8, 3)])
def test_padded_pages_come_and_go_and_their_padding_stays(batched: BatchedCopy, ids: tuple[int, ...]) -> None:
    memory, caches = padded_caches()
    copier = block_copier(caches, 3 * PAGE_BYTES, batched_copy=batched)
    assert isinstance(copier, StreamBlockCopier)
    before = memory.cpu()
    layout = layout_of(caches, 3)
    payload = torch.zeros(layout.payload_bytes, dtype=torch.int8, pin_memory=True)
    assert copier.gather(layout, [BlockSlice(0, ids)], payload)
    copier.wait()
    assert torch.equal(payload.view(3, PAGE_BYTES), before[list(ids), :PAGE_BYTES])
    copier.scatter(layout, [BlockSlice(0, (1, 2, 7))], payload)
    copier.wait()
    before[[1, 2, 7], :PAGE_BYTES] = before[list(ids), :PAGE_BYTES]
    assert torch.equal(memory.cpu(), before)


@only_simulated
def test_the_moves_and_the_scatters_of_a_step_are_one_call_each_and_its_descriptors_live_until_their_end(
    control: Control, batched: BatchedCopy
) -> None:
    _, caches = padded_caches()
    calls: list[int] = []

    def counted(pieces: CopyPieces, *, from_host: bool) -> object:
        calls.append(len(pieces.sizes))
        return batched(pieces, from_host=from_host)

    copier = StreamBlockCopier(caches, 8 * PAGE_BYTES, counted)
    layout = layout_of(caches, 1)
    lost = control.lost_descriptors
    payloads = [torch.zeros(PAGE_BYTES, dtype=torch.int8, pin_memory=True) for _ in range(4)]
    with control.held(copier._store_stream, copier._load_stream):
        for block, payload in enumerate(payloads):
            assert copier.gather(layout, [BlockSlice(0, (block,))], payload)
        end = copier.gathers_end()
        for block in (8, 5):
            copier.scatter(layout, [BlockSlice(0, (block,))], payloads[0])
        copier.scatters_end()
        copier.scatter(layout, [BlockSlice(0, (7,))], payloads[0])
        assert end is not None
        assert not end.has_passed()
    copier.wait()
    assert calls == [4, 2, 1]
    assert control.lost_descriptors == lost


def test_a_trial_finds_a_copy_that_brings_the_right_bytes(batched: BatchedCopy) -> None:
    assert copies_right(batched, torch.device(DEVICE))


def test_a_copy_that_brings_wrong_bytes_or_fails_is_not_used(
    batched: BatchedCopy, caplog: pytest.LogCaptureFixture
) -> None:
    def wrong(pieces: CopyPieces, *, from_host: bool) -> object:
        return batched(pieces._replace(sources=pieces.sources[::-1].copy()), from_host=from_host)

    def failing(pieces: CopyPieces, *, from_host: bool) -> object:
        raise RuntimeError("no such call")

    _, caches = padded_caches()
    for copy, message in ((wrong, f"brings wrong bytes on {DEVICE}"), (failing, "torch copies page by page: no such")):
        copier = block_copier(caches, PAGE_BYTES, batched_copy=copy)
        assert isinstance(copier, StreamBlockCopier)
        assert copier._batched_copy is None
        assert message in caplog.text


def test_the_buffer_on_the_device_has_the_configured_size_or_is_refused(control: StreamControl) -> None:
    _, caches = padded_caches()
    copier = block_copier(caches, 1000, device_buffer_bytes=1000)
    assert isinstance(copier, StreamBlockCopier)
    assert len(copier._memory) == 1024, "a whole number of slots"
    with pytest.raises(ConfigError, match=r"device_buffer_bytes: 999 is too small .* set it to 1000 or more"):
        block_copier(caches, 1000, device_buffer_bytes=999)


@only_simulated
def test_the_store_stream_has_the_lowest_priority(control: Control, monkeypatch: pytest.MonkeyPatch) -> None:
    assert [lowest_priority(torch.device(kind)) for kind in ("cuda", "xpu", DEVICE)] == [0, 1, 0]
    monkeypatch.setattr("offload_core.memory.device.stream_copier.lowest_priority", lambda device: 1)
    _, caches = padded_caches()
    copier = StreamBlockCopier(caches, PAGE_BYTES)
    assert [control.priority(stream) for stream in (copier._store_stream, copier._load_stream)] == [1, 0]
