"""Costs of a backend's calls as its objects grow in number, and its peak memory."""

from __future__ import annotations

import asyncio
import hashlib
import multiprocessing
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console
from vllm.fs_io_C import batch_load_block, batch_lookup, batch_store_block

from benchmarks.backends_rig import CHUNK_BYTES, MIB, NAMESPACE, Contender, Memory, OurTier, VllmHelpers
from benchmarks.reporting.rows import Calls, Peak, percentile
from offload_core.api.backend import (
    Backend,
    BackendContext,
    LoadOutcome,
    LoadReservation,
    StoreOutcome,
    StoreReservation,
)
from offload_core.api.capabilities import Capabilities
from offload_core.api.keys import ObjectKey
from offload_core.api.options import BackendOptions
from offload_core.config.loading import load_config
from offload_core.runtime.threads import DaemonExecutor

OBJECT_BYTES = 5 * 1024
SAMPLES = 100
FILL_AT_ONCE = 256
AT_ONCE = 8
LOOKUP_AT_ONCE = 64


class VllmFolder(Backend[BackendOptions]):
    """vLLM's helpers with the calls of a backend; each call is one hop to a thread, as in vLLM."""

    def __init__(self, folder: Path, context: BackendContext) -> None:
        super().__init__(BackendOptions(), context)
        self._folder = folder

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(medium="disk", persistent=True, shared=True)

    def _paths(self, keys: Sequence[ObjectKey]) -> list[str]:
        names = [key.chunk_hash.hex() for key in keys]
        return [f"{self._folder}/{name[:2]}/{name}.bin" for name in names]

    async def contains(self, keys: Sequence[ObjectKey]) -> Sequence[bool]:
        found: list[bool] = await self.run_blocking(batch_lookup, self._paths(keys))
        return found

    async def prepare_load(self, keys: Sequence[ObjectKey]) -> LoadReservation:
        return LoadReservation([True] * len(keys))

    async def load_into(self, keys: Sequence[ObjectKey], buffers: Sequence[memoryview]) -> Sequence[LoadOutcome]:
        await self.run_blocking(batch_load_block, self._paths(keys), list(buffers), False)
        return [LoadOutcome.HIT] * len(keys)

    async def prepare_store(
        self, keys: Sequence[ObjectKey], nbytes: Sequence[int], spare: Sequence[bool] = ()
    ) -> StoreReservation:
        return StoreReservation([None] * len(keys))

    async def store(self, keys: Sequence[ObjectKey], buffers: Sequence[memoryview]) -> Sequence[StoreOutcome]:
        paths = self._paths(keys)
        await self.run_blocking(batch_store_block, [f"{path}.tmp" for path in paths], paths, list(buffers), False)
        return [StoreOutcome.STORED] * len(keys)

    async def delete(self, keys: Sequence[ObjectKey]) -> None:
        def unlink() -> None:
            for path in self._paths(keys):
                Path(path).unlink()

        await self.run_blocking(unlink)


@dataclass
class Growth:
    """Durations of calls, in seconds, on a backend with ``objects`` objects."""

    name: str
    objects: int
    fill_seconds: float
    contains: list[float] = field(default_factory=list)
    prepare_store: list[float] = field(default_factory=list)
    store: list[float] = field(default_factory=list)
    load: list[float] = field(default_factory=list)

    def calls(self) -> Calls:
        """Return the percentiles of the calls' durations."""
        contains, prepare_store, store, load = (
            [percentile(seconds, percent) * 1e6 for percent in (50, 90)]
            for seconds in (self.contains, self.prepare_store, self.store, self.load)
        )
        return Calls(
            name=self.name,
            objects=self.objects,
            samples=len(self.contains),
            fill_us_per_object=self.fill_seconds / self.objects * 1e6,
            contains_p50_us=contains[0],
            contains_p90_us=contains[1],
            prepare_store_p50_us=prepare_store[0],
            prepare_store_p90_us=prepare_store[1],
            store_p50_us=store[0],
            store_p90_us=store[1],
            load_p50_us=load[0],
            load_p90_us=load[1],
        )


def peaks_of(tiers: Mapping[str, dict[str, Any]], folder: Path, chunks: int) -> list[Peak]:
    """Store and load everything once for each tier and with vLLM's helpers, each in a process of its own."""
    peaks: list[Peak] = []
    for name, keys in tiers.items():

        def tier(memory: Memory, options: dict[str, Any] = {**keys, "io_threads": 4}) -> Contender:  # noqa: B006
            return OurTier("", memory, chunks, CHUNK_BYTES, options)

        peaks.append(_peak(name, chunks, tier))

    def peer(memory: Memory) -> Contender:
        return VllmHelpers("", memory, chunks, 4, folder / "vllm", CHUNK_BYTES, direct=False)

    return [*peaks, _peak("vLLM's helpers, page cache", chunks, peer)]


def _peak(name: str, chunks: int, make: Callable[[Memory], Contender]) -> Peak:
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)

    def child() -> None:
        contender = make(Memory(chunks))
        Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here
        before = _status_bytes("VmRSS")
        contender.store(0)
        contender.load(0)
        sender.send(_status_bytes("VmHWM") - before)
        contender.clean(0)
        contender.close()

    process = context.Process(target=child)
    process.start()
    sender.close()
    try:
        return Peak(name=name, stored_mib=chunks * CHUNK_BYTES / MIB, peak_mib=receiver.recv() / MIB)
    except EOFError:
        raise SystemExit(f"{name}: the process that measures the memory ended without a result") from None
    finally:
        process.join()


def _status_bytes(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:"))


def growth_of(backends: Sequence[str], folder: Path, counts: Sequence[int], console: Console) -> list[Calls]:
    """Fill each backend up to each of ``counts`` and measure small calls there."""
    path = folder / "growth"
    limit = 4 * counts[-1] * OBJECT_BYTES
    variants: dict[str, dict[str, Any]] = {}
    for name in backends:
        if name == "disk":
            variants["disk"] = {"type": "disk", "path": str(path)}
            variants["disk with a capacity"] = {"type": "disk", "path": str(path), "capacity": limit}
        elif name == "cpu":
            variants["cpu"] = {"type": "cpu", "capacity": limit}
        else:
            variants[name] = {"type": name, "url": path.as_uri()}
    makers: dict[str, Callable[[BackendContext], Backend[Any]]] = {
        name: partial(_made, keys) for name, keys in variants.items()
    }
    if "disk" in backends:
        makers["vLLM's helpers"] = partial(VllmFolder, path)
    growths: list[Calls] = []
    for name, make in makers.items():
        path.mkdir()
        growths += [growth.calls() for growth in asyncio.run(_grow(name, make, counts, console))]
        shutil.rmtree(path)
    return growths


def _made(keys: dict[str, Any], context: BackendContext) -> Backend[Any]:
    config = load_config({"backends": [{"name": "bench", **keys}]}).tiers[0]
    return config.backend_type.backend(config.options, context)


async def _grow(
    name: str, make: Callable[[BackendContext], Backend[Any]], counts: Sequence[int], console: Console
) -> list[Growth]:
    executor = DaemonExecutor(4, "bench-growth")
    backend = make(BackendContext("bench", executor))
    await backend.open()
    growths: list[Growth] = []
    data = memoryview(bytes(OBJECT_BYTES))
    there = 0
    for count in counts:
        console.print(f"{name}, {count:,} objects …")
        started = time.perf_counter()
        added = count - there
        while there < count:
            batch = [_key(number) for number in range(there, min(count, there + FILL_AT_ONCE))]
            await _store(backend, batch, data)
            there += len(batch)
        growth = Growth(name, count, (time.perf_counter() - started) * count / added)
        for sample in range(SAMPLES):
            await _sample(backend, growth, count, sample, data)
        growths.append(growth)
    await backend.close()
    executor.shutdown()
    return growths


async def _sample(backend: Backend[Any], growth: Growth, count: int, sample: int, data: memoryview) -> None:
    step = 7919 * (sample + 1)  # a prime, so that the calls spread over all objects
    asked = [_key((step + 31 * index) % count) for index in range(LOOKUP_AT_ONCE)]
    start = time.perf_counter()
    if not all(await backend.contains(asked)):
        raise SystemExit(f"{growth.name}: contains does not find an object that was stored")
    growth.contains.append(time.perf_counter() - start)
    buffers = [memoryview(bytearray(OBJECT_BYTES)) for _ in range(AT_ONCE)]
    start = time.perf_counter()
    reservation = await backend.prepare_load(asked[:AT_ONCE])
    await backend.load_into(asked[:AT_ONCE], buffers)
    await reservation.release()
    growth.load.append(time.perf_counter() - start)
    fresh = [_key(-1 - index) for index in range(AT_ONCE)]
    prepared, stored = await _store(backend, fresh, data)
    growth.prepare_store.append(prepared)
    growth.store.append(stored)
    await backend.delete(fresh)


async def _store(backend: Backend[Any], keys: list[ObjectKey], data: memoryview) -> tuple[float, float]:
    """Store objects and return the seconds of the reservation and those of the rest."""
    start = time.perf_counter()
    reservation = await backend.prepare_store(keys, [len(data)] * len(keys))
    prepared = time.perf_counter()
    if any(outcome is not None for outcome in reservation.outcomes):
        raise SystemExit(f"{type(backend).__name__}: prepare_store did not accept an object: {reservation.outcomes}")
    await backend.store(keys, [data] * len(keys))
    await reservation.release()
    return prepared - start, time.perf_counter() - prepared


def _key(number: int) -> ObjectKey:
    return ObjectKey(NAMESPACE, "growth", hashlib.sha256(b"%d" % number).digest())
