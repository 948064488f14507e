"""Copies between an accelerator and host memory, beside one large copy, and tokens per second with and without stores.

It runs on any accelerator that torch knows. Without one it says so and ends.

Each round copies the same objects in every way, one way after the other. An object has some pages, which lie anywhere
in the KV cache. Times end when the bytes are there.

* bus to host, bus to device: one large copy of as many bytes, to and from pinned memory. This is the limit.
* gather: the pages into the buffer on the device, on the engine's stream. The engine's work waits for this alone.
* gather to host: the same, and the move to pinned memory.
* scatter: pinned memory into the pages.
* store, load: the whole way of the connector's worker, with a ``cpu`` tier in an I/O process, checksums included. The
  tier lends its memory. As in an engine, it has reserved that of the stores before their step ends.
* vLLM store, vLLM load: vLLM's own handlers of CPU offloading with the same pages, where it has them for the device.

The ratio is the speed in relation to the large copy of the same round and direction. Then an engine computes new
prompts with a ``cpu`` tier and without one, as in ``benchmarks.overhead``. "To none" is the ratio to the speed without
a connector in the same turn. One model has the layers of Gemma 3 1B, so its steps wait for the processor. The other has
those of Gemma 3 12B and dummy weights, so its steps wait for the accelerator. Its two engines need 70 GiB.

    python -m benchmarks.device_copies [--page-kib 4,16,64,256,1024,4096] [--pages 1,16,128] [--round-mib 128]
                                       [--rounds 20] [--turns 6] [--models 0.7B,12B] [--json FILE]
"""

from __future__ import annotations

import argparse
import gc
import random
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.device_copies_stock import StockCopies
from benchmarks.overhead import Contender, Speeds
from benchmarks.reporting.document import Run, add_json_option
from benchmarks.reporting.rows import DeviceCopies, DeviceCopy, TokensPerSecond, percentile
from offload_core.api.memory.pinned_memory import HostPinning, pinning_in_use
from offload_core.memory.block_copier import BlockSlice
from offload_core.memory.copiers import block_copier
from offload_core.memory.device.batched_copy import BatchedCopy
from offload_core.memory.device.pinned_pieces import PinnedPieces
from offload_core.memory.staging_size import lease_bytes
from offload_core.objects.format import object_bytes
from offload_core.runtime.io_loop import IoLoop
from offload_core.transfer.batches import TransferObject
from offload_core.vllm.worker.batched_copy import installed_batched_copy
from tests.support import tiny_models
from tests.support.engine.lab import count
from tests.support.engine.spec import RunResult, disk_transfer_config
from tests.support.lending_rig import LendingRig
from tests.support.memory_backend import key

KIB, MIB = 1024, 1024 * 1024
MAX_OBJECTS = 64
NONE = "none"
ENGINE_ARGS = {
    "enforce_eager": False,
    "compilation_config": {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"},
    "max_num_batched_tokens": 8192,
    "gpu_memory_utilization": 0.45,
}
"""Decoding is by graphs, as on a server; no minutes of compilation. Two engines share the accelerator."""
TO_HOST = ("bus to host", "gather", "gather to host", "store", "vLLM store")


class Model(NamedTuple):
    """A model whose tokens are counted.

    Args:
        write: writes its folder.
        cpu_capacity: of the ``cpu`` tier.
        engine_args: of vLLM, beside :data:`ENGINE_ARGS`.
    """

    write: Callable[[Path], Path]
    cpu_capacity: str
    engine_args: dict[str, Any]


MODELS = {
    "0.7B": Model(tiny_models.write_gemma3_700m, "3GiB", {}),
    "12B": Model(tiny_models.write_gemma3_12b, "16GiB", {"load_format": "dummy", "kv_cache_memory_bytes": 8 << 30}),
}


class Shape(NamedTuple):
    """The objects of a round."""

    page_bytes: int
    pages: int
    objects: int

    @property
    def object_bytes(self) -> int:
        """Bytes of an object's pages."""
        return self.page_bytes * self.pages


class Seconds(NamedTuple):
    """Time until the bytes are there, and the time of the engine's thread; ``None`` if it makes no call."""

    elapsed: float
    engine: float | None


def shapes(page_bytes: Sequence[int], pages: Sequence[int], round_bytes: int) -> Iterator[Shape]:
    """Yield the shapes whose objects fit into a round."""
    for size in page_bytes:
        for pages_each in pages:
            if size * pages_each <= round_bytes:
                yield Shape(size, pages_each, min(MAX_OBJECTS, round_bytes // (size * pages_each)))


class Bench:
    """A worker's engine with a ``cpu`` tier, and the memory of one shape.

    Args:
        folder: gives the I/O process its name.
        pinning: pins the tier's memory and the staging memory.
        batched_copy: the engine's; ``None`` for torch's copies.
    """

    def __init__(
        self,
        io: IoLoop,
        folder: Path,
        device: torch.device,
        shape: Shape,
        pinning: HostPinning | None,
        batched_copy: BatchedCopy | None,
    ) -> None:
        pinned = None if pinning is None else PinnedPieces(pinning)
        self._shape = shape
        self._draw = random.Random(3)
        self._round_bytes = shape.objects * shape.object_bytes
        blocks = 2 * shape.objects * shape.pages
        lease = lease_bytes(object_bytes(shape.object_bytes))
        self._rig = LendingRig(
            io, folder, "engine", capacity_objects=4 * shape.objects, num_blocks=blocks, page_bytes=shape.page_bytes,
            blocks_per_object=shape.pages, device=device, pinning=pinned, prefault=True, io_threads=2,
            staging_bytes=4 * shape.objects * lease + 4 * MIB,
            make_copier=lambda caches: block_copier(
                caches, shape.object_bytes, device_buffer_bytes=2 * self._round_bytes, batched_copy=batched_copy,
                pinned=pinned,
            ),
        )  # fmt: skip
        ((self._pack, self._layout),) = self._rig.layouts.items()
        self._copier = self._rig.copier
        if self._copier.takes_pinned_pieces:
            self._rig.step_until(lambda: self._rig.tiers[0].lending.is_possible)
        self._large = torch.empty(self._round_bytes, dtype=torch.int8, device=device)
        self._host = torch.ones(self._round_bytes, dtype=torch.int8).pin_memory()
        pages = torch.ones((blocks, shape.page_bytes), dtype=torch.int8).pin_memory()
        self._stock = StockCopies.of(self._rig.kv_cache, pages)
        self._stream: Any = torch.Stream(device=device)
        self._next = 0

    def round(self) -> dict[str, Seconds]:
        """Copy new objects in every way."""
        shape = self._shape
        ids = self._draw.sample(range(self._rig.kv_cache.shape[0]), shape.objects * shape.pages)
        parts = [(BlockSlice(0, tuple(ids[first : first + shape.pages])),) for first in range(0, len(ids), shape.pages)]
        payloads = torch.split(self._host, shape.object_bytes)
        self._next += shape.objects
        names = [key(number, self._pack) for number in range(self._next - shape.objects, self._next)]
        objects = [TransferObject(name, blocks) for name, blocks in zip(names, parts, strict=True)]
        seconds = {
            "bus to host": self._large_copy(self._large, self._host),
            "bus to device": self._large_copy(self._host, self._large),
            "gather": self._timed(lambda: self._gather(parts, payloads), self._compute_stream.synchronize),
        }
        self._copier.wait()
        seconds["gather to host"] = self._timed(lambda: self._gather(parts, payloads), self._copier.wait)
        seconds["scatter"] = self._timed(lambda: self._scatter(parts, payloads), self._copier.wait)
        self._rig.announce(*objects)
        seconds["store"] = self._timed(lambda: self._rig.engine.submit_stores(objects), self._stored)
        seconds["load"] = self._timed(lambda: self._load(objects), self._loaded)
        if self._stock is not None:
            for name, copy in (("vLLM store", self._stock.store), ("vLLM load", self._stock.load)):
                started = time.perf_counter()
                copy(ids)
                seconds[name] = Seconds(time.perf_counter() - started, None)
        return seconds

    def close(self) -> None:
        """Close the engine and its tier."""
        self._rig.close()

    @property
    def _compute_stream(self) -> Any:
        return torch.accelerator.current_stream(self._large.device)

    def _timed(self, call: Callable[[], object], wait: Callable[[], object]) -> Seconds:
        torch.accelerator.synchronize(self._large.device)
        started = time.perf_counter()
        call()
        called = time.perf_counter()
        wait()
        return Seconds(time.perf_counter() - started, called - started)

    def _large_copy(self, source: torch.Tensor, target: torch.Tensor) -> Seconds:
        def copy() -> None:
            with self._stream:
                target.copy_(source, non_blocking=True)

        return Seconds(self._timed(copy, self._stream.synchronize).elapsed, None)

    def _gather(self, parts: Sequence[tuple[BlockSlice, ...]], payloads: Sequence[torch.Tensor]) -> None:
        for blocks, payload in zip(parts, payloads, strict=True):
            assert self._copier.gather(self._layout, blocks, payload), "the device buffer is full"
        self._copier.gathers_end()

    def _scatter(self, parts: Sequence[tuple[BlockSlice, ...]], payloads: Sequence[torch.Tensor]) -> None:
        for blocks, payload in zip(parts, payloads, strict=True):
            self._copier.scatter(self._layout, blocks, payload)
        self._copier.scatters_end()

    def _stored(self) -> None:
        assert self._rig.engine.drain_stores(60)
        results = self._rig.engine.take_store_results()
        assert len(results) == self._shape.objects
        assert all(result.stored for result in results), "a store was dropped"

    def _load(self, objects: Sequence[TransferObject]) -> None:
        self._rig.load(*objects, tier="cpu")

    def _loaded(self) -> None:
        assert self._rig.result().status == "loaded"


def rows_of(shape: Shape, rounds: Sequence[dict[str, Seconds]]) -> list[DeviceCopy]:
    """Return a row for each way."""
    nbytes = shape.objects * shape.object_bytes
    ways: dict[str, list[Seconds]] = defaultdict(list)
    for one in rounds:
        for way, seconds in one.items():
            ways[way].append(seconds)
    rows = []
    for way, times in ways.items():
        limit = ways["bus to host" if way in TO_HOST else "bus to device"]
        speeds = [nbytes / seconds.elapsed / 1e9 for seconds in times]
        engine = [seconds.engine for seconds in times if seconds.engine is not None]
        rows.append(
            DeviceCopy(
                page_kib=shape.page_bytes / KIB,
                pages=shape.pages,
                objects=shape.objects,
                way=way,
                rounds=len(times),
                gb_per_second_p50=percentile(speeds, 50),
                gb_per_second_p10=percentile(speeds, 10),
                gb_per_second_p90=percentile(speeds, 90),
                engine_us_per_object=percentile(engine, 50) / shape.objects * 1e6 if engine else None,
                ratio=percentile(
                    [bus.elapsed / seconds.elapsed for bus, seconds in zip(limit, times, strict=True)], 50
                ),
            )
        )
    return rows


def copies(
    device: torch.device,
    pinning: HostPinning | None,
    batched_copy: BatchedCopy | None,
    some: Sequence[Shape],
    rounds: int,
) -> Iterator[DeviceCopy]:
    """Yield a row for each shape and way; the first round of each shape warms up."""
    io = IoLoop.acquire()
    try:
        with tempfile.TemporaryDirectory(prefix="offload-core-bench-") as name:
            for shape in some:
                bench = Bench(io, Path(name), device, shape, pinning, batched_copy)
                try:
                    yield from rows_of(shape, [bench.round() for _ in range(1 + rounds)][1:])
                finally:
                    bench.close()
    finally:
        io.release()


def tokens_per_second(model_name: str, turns: int) -> Iterator[TokensPerSecond]:
    """Yield a row for an engine without a connector and for one with a ``cpu`` tier, which take turns."""
    chosen = MODELS[model_name]
    arguments = argparse.Namespace(turns=turns, prompts=8, prompt_tokens=1500, output_tokens=64, dtype="bfloat16")
    ram = {"name": "ram", "type": "cpu", "capacity": chosen.cpu_capacity, "prefault": True}
    with tempfile.TemporaryDirectory(prefix="offload-core-bench-") as name:
        folder = Path(name)
        model = chosen.write(folder / "model")
        transfers = {NONE: None, "cpu": disk_transfer_config(folder, backends=[ram])}
        engine_args = ENGINE_ARGS | chosen.engine_args
        engines = {
            name: Contender(model, transfer, folder / f"files of {name}", arguments, engine_args=engine_args)
            for name, transfer in transfers.items()
        }
        draw = random.Random(turns)
        for batch in range(2 * (1 + turns)):
            for engine in draw.sample(list(engines.values()), len(engines)):
                engine.compute(batch)
        for name, engine in engines.items():
            result = engine.end()
            yield tokens_row(model_name, name, engine.speeds, engines[NONE].speeds, result)


def tokens_row(model: str, name: str, speeds: Speeds, none: Speeds, result: RunResult) -> TokensPerSecond:
    """Return the row of an engine, beside the speeds of the one without a connector."""
    without = [(one + other) / 2 for one, other in zip(none.stored, none.opted_out, strict=True)]
    to_none = [stored / other for stored, other in zip(speeds.stored, without, strict=True)]
    return TokensPerSecond(
        model=model,
        name=name,
        turns=len(speeds.stored),
        stored_p50=percentile(speeds.stored, 50),
        opted_out_p50=percentile(speeds.opted_out, 50),
        to_opted_out_p50=percentile(speeds.ratios, 50),
        to_none_p10=percentile(to_none, 10),
        to_none_p50=percentile(to_none, 50),
        to_none_p90=percentile(to_none, 90),
        stored_objects=count(result, "stores", "ram"),
        dropped_objects=count(result, "store_dropped", "ram"),
    )


def show(rows: Sequence[DeviceCopy], console: Console) -> None:
    """Print the table of the copies."""
    table = Table(title="GB/s (p50, and p10 to p90), and the engine's time per object")
    for column in ("page KiB", "pages", "objects", "way", "GB/s", "p10 to p90", "to one large copy", "engine µs"):
        table.add_column(column, justify="left" if column == "way" else "right")
    for row in rows:
        table.add_row(
            f"{row.page_kib:g}", str(row.pages), str(row.objects), row.way, f"{row.gb_per_second_p50:.2f}",
            f"{row.gb_per_second_p10:.2f} to {row.gb_per_second_p90:.2f}", f"{row.ratio:.3f}",
            "" if row.engine_us_per_object is None else f"{row.engine_us_per_object:.1f}",
        )  # fmt: skip
    console.print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--page-kib", default="4,16,64,256,1024,4096", help="KiB of a page, with commas between them")
    parser.add_argument("--pages", default="1,16,128", help="pages of an object, with commas between them")
    parser.add_argument("--round-mib", type=int, default=128, help="MiB that a round copies in each way, at most")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--turns", type=int, default=6, help="measured turns of each engine; 0 for no engine")
    parser.add_argument("--models", default=",".join(MODELS), help="models of the engines, with commas between them")
    add_json_option(parser)
    arguments = parser.parse_args()
    if not torch.accelerator.is_available():
        print("no accelerator here")
        return
    run = Run(arguments)
    console = Console(width=120)
    kind = torch.accelerator.current_accelerator()
    assert kind is not None
    device = torch.device(kind.type, torch.accelerator.current_device_index())
    torch.zeros(1, device=device)  # CUDA starts with its first use
    batched_copy = installed_batched_copy()
    sizes = [int(float(size) * KIB) for size in arguments.page_kib.split(",")]
    some = list(shapes(sizes, [int(pages) for pages in arguments.pages.split(",")], arguments.round_mib * MIB))
    found = list(copies(device, pinning_in_use(), batched_copy, some, arguments.rounds))
    show(found, console)
    name = str(getattr(torch.get_device_module(device), "get_device_name", lambda: device.type)())
    results = DeviceCopies(device=name, batched=batched_copy is not None, copies=found, tokens=[])
    run.write(results)  # the engines may fail
    gc.collect()
    torch.accelerator.empty_cache()  # for the engines, which want most of the memory
    for model in arguments.models.split(",") if arguments.turns else ():
        results.tokens.extend(tokens_per_second(model, arguments.turns))
        run.write(results)
    for row in results.tokens:
        console.print(
            f"{row.model}, {row.name}: {row.stored_p50:.0f} tokens per second stored, "
            f"{row.opted_out_p50:.0f} opted out, ratio {row.to_opted_out_p50:.3f}; to none {row.to_none_p50:.3f} "
            f"({row.to_none_p10:.3f} to {row.to_none_p90:.3f}); "
            f"{row.stored_objects} objects stored, {row.dropped_objects} dropped"
        )


if __name__ == "__main__":
    main()
