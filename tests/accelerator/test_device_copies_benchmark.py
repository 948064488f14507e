"""The benchmark of device copies runs; its figures on a simulated device say nothing."""

from __future__ import annotations

import sys
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.v1.kv_offload.cpu import gpu_worker

from benchmarks import device_copies
from benchmarks.device_copies_stock import StockCopies
from benchmarks.reporting.document import read
from benchmarks.reporting.rows import DeviceCopies
from offload_core.vllm.worker.batched_copy import SwapBlocksBatch
from tests.support.accelerator import DEVICE, StreamControl, only_simulated

pytestmark = only_simulated

WAYS = {"bus to host", "bus to device", "gather", "gather to host", "scatter", "store", "load"}


@pytest.mark.parametrize("batched", [False, True])
def test_it_writes_a_row_for_every_way(
    control: StreamControl, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, batched: bool
) -> None:
    copy = SwapBlocksBatch(control.swap_blocks_batch, torch.int64) if batched else None
    monkeypatch.setattr(device_copies, "pinning_in_use", lambda: control)
    monkeypatch.setattr(device_copies, "installed_batched_copy", lambda: copy)
    path = tmp_path / "copies.json"
    options = ["--page-kib", "4,64", "--pages", "1,3,128", "--round-mib", "1", "--rounds", "2", "--turns", "0"]
    monkeypatch.setattr(sys, "argv", ["device_copies", *options, "--json", str(path)])
    device_copies.main()
    results = read(path, DeviceCopies).results
    assert (results.device, results.batched, results.tokens) == (DEVICE, batched, [])
    shapes = {(row.page_kib, row.pages, row.objects) for row in results.copies}
    assert shapes == {(4, 1, 64), (4, 3, 64), (4, 128, 2), (64, 1, 16), (64, 3, 5)}
    for shape in shapes:
        rows = [row for row in results.copies if (row.page_kib, row.pages, row.objects) == shape]
        assert {row.way for row in rows} == WAYS
        assert all(row.gb_per_second_p50 > 0 and row.rounds == 2 for row in rows)
        assert all(row.ratio == 1 for row in rows if row.way.startswith("bus"))


class OfTheGpu(torch.Tensor):
    """A tensor that vLLM's handlers take for one of a GPU."""

    is_cuda = True


def vllm_on_device(control: StreamControl, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let vLLM's handlers use the simulated device's streams and its batched copy."""

    def stream(entered: Any) -> Any:
        return entered or nullcontext()

    no = lambda: False  # noqa: E731
    platform = SimpleNamespace(
        Stream=lambda: torch.Stream(device=DEVICE), stream=stream, current_stream=torch.accelerator.current_stream,
        is_xpu=no, is_rocm=no,
    )  # fmt: skip
    monkeypatch.setattr(gpu_worker, "current_platform", platform)
    monkeypatch.setattr(gpu_worker.ops, "swap_blocks_batch", control.swap_blocks_batch)


def test_the_handlers_of_vllm_copy_the_same_blocks(control: StreamControl, monkeypatch: pytest.MonkeyPatch) -> None:
    vllm_on_device(control, monkeypatch)
    memory = torch.arange(40, dtype=torch.int8).view(5, 8).to(DEVICE)
    assert StockCopies.of(memory, torch.zeros(5, 8, dtype=torch.int8).pin_memory()) is None
    host = torch.zeros(5, 8, dtype=torch.int8).pin_memory()
    stock = StockCopies(memory.as_subclass(OfTheGpu), host)
    stock.store([3, 1])
    assert host[[1, 3]].tolist() == memory.cpu()[[1, 3]].tolist()
    assert not host[[0, 2, 4]].any()
    host.fill_(7)
    stock.load([0])
    assert memory.cpu()[0].tolist() == [7] * 8


def test_without_an_accelerator_it_says_so_and_ends(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    monkeypatch.setattr(sys, "argv", ["device_copies"])
    device_copies.main()
    assert capsys.readouterr().out == "no accelerator here\n"
