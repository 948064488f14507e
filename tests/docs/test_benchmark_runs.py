"""Benchmarks stop, with a reason, where their figures would be wrong."""

from __future__ import annotations

import asyncio
import errno
import multiprocessing
from pathlib import Path
from typing import cast

import pytest
from offload_backend_disk import DiskOptions
from offload_backend_disk.folder import files

from benchmarks import crossover, disk_capacity, lmcache_connector
from benchmarks.backends import Cell, contenders_of
from benchmarks.backends_distributed import DISTRIBUTED, running_stores
from benchmarks.backends_rig import CHUNK_BYTES, Medium, Memory, PlainThreads
from benchmarks.live_engines import Answer, LiveEngine, Order
from benchmarks.reporting.rows import FirstToken
from tests.support.engine.spec import PromptResult, PromptSpec


class InstantEngine:
    """An engine that answers at once. Tiers serve some tokens of each prompt."""

    def __init__(self, served_tokens: int) -> None:
        self._served_tokens = served_tokens

    def tell(self, order: Order) -> Answer:
        return Answer(prompts=[self._answer(prompt) for prompt in order.prompts])

    def _answer(self, prompt: PromptSpec) -> PromptResult:
        return PromptResult(
            name=prompt.name,
            token_ids=[1],
            logprobs=[0.0],
            prompt_tokens=len(prompt.token_ids),
            local_cached_tokens=0,
            external_cached_tokens=self._served_tokens,
            ttft_seconds=0.001,
            total_seconds=0.001,
        )


RIGHT = {"compute": 0, "compute again": 0, "load": 256, "ours": 0}


def measured(served_tokens: dict[str, int]) -> int:
    live = {name: cast(LiveEngine, InstantEngine(tokens)) for name, tokens in served_tokens.items()}
    return len(crossover.measure(live, latency_ms=1, mb_per_second=1000, rounds=1))


def test_loads_and_computed_prompts_are_compared_if_they_are_such() -> None:
    assert measured(RIGHT) == len(crossover.LENGTHS)


@pytest.mark.parametrize(("name", "tokens"), [("load", 0), ("compute", 256), ("compute again", 256)])
def test_a_failed_load_does_not_count_as_a_fast_one(name: str, tokens: int) -> None:
    with pytest.raises(SystemExit, match=f"^{name}: tiers served {tokens} tokens of a prompt of 300 tokens"):
        measured(RIGHT | {name: tokens})


def first_token(p50_ms: float, p90_ms: float) -> FirstToken:
    return FirstToken(name="", served_tokens=0, samples=9, p50_ms=p50_ms, p90_ms=p90_ms, p99_ms=p90_ms, ratio=1.0)


@pytest.mark.parametrize(("ours_ms", "speed"), [(90.0, None), (100.0, None), (110.0, None), (125.0, 2.0)])
def test_a_load_within_the_spread_of_no_load_is_not_compared(ours_ms: float, speed: float | None) -> None:
    ours, theirs, local = first_token(ours_ms, ours_ms), first_token(150.0, 160.0), first_token(100.0, 110.0)
    assert lmcache_connector.speed(ours, theirs, local) == speed


def test_objects_that_the_disk_has_rejected_do_not_count_as_stored(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    room = iter([True] * 5)

    def preallocate(descriptor: int, nbytes: int) -> None:
        if not next(room, False):
            raise OSError(errno.ENOSPC, "no space left on device")

    monkeypatch.setattr(files, "preallocate", preallocate)
    options = DiskOptions.model_validate({"path": str(tmp_path)})
    _, stored = asyncio.run(disk_capacity.store(options, 16, 4096, multiprocessing.Barrier(1)))
    assert stored == 5


def test_a_run_without_a_capacity_stores_all_objects_or_stops(tmp_path: Path) -> None:
    assert disk_capacity.run(tmp_path, 1, 8, 4096)[1] == 1
    assert disk_capacity.run(tmp_path, 1, 8, 4096, capacity="1KiB")[1] == 0
    with pytest.raises(SystemExit, match=r"^only 0 of 8 objects were stored; is the disk of .* full\?"):
        disk_capacity.run(tmp_path, 1, 8, 4096, keep_free="1000TiB")


@pytest.mark.parametrize(
    ("backend", "medium"), [("disk", "page cache"), ("nfs", "page cache"), ("cpu", "memory"), ("nixl", "page cache")]
)
def test_a_contender_says_on_how_many_threads_it_runs_if_not_on_those_of_its_cell(
    backend: str, medium: Medium, tmp_path: Path
) -> None:
    if backend in DISTRIBUTED and (reason := DISTRIBUTED[backend]()):
        pytest.skip(reason)
    chunks = 16
    memory = Memory(chunks)
    cell = Cell(backend, medium, CHUNK_BYTES, threads=4)
    with running_stores([(backend, medium)], tmp_path, chunks * CHUNK_BYTES) as stores:
        for make in contenders_of(cell, tmp_path, memory, chunks, stores, encryption=False):
            contender = make()
            if isinstance(contender, PlainThreads):
                assert contender.threads == cell.threads or contender.name.endswith(f", {contender.threads} threads")
                assert contender.threads > 1, "ours runs on several"
                contender.store(1)
                contender.load(1)
                contender.clean(1)
            contender.close()
