"""The report of ``pytest --offload-throughput``: stores and loads of a backend, one object after the other."""

from __future__ import annotations

import hashlib
import math
import os
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from offload_core.api.backend import Backend, LoadOutcome, StoreOutcome
from offload_core.api.keys import ObjectKey

MIB = 1024 * 1024
OBJECTS = ((64 * 1024, 128), (2 * MIB, 32))
"""Sizes in bytes, each with the number of objects to store and then load."""


@dataclass(frozen=True)
class Throughput:
    """Times of one operation on objects of one size; a call reserves and moves one object."""

    operation: str
    object_bytes: int
    latencies_seconds: tuple[float, ...]

    @property
    def mib_per_second(self) -> float:
        """All bytes divided by the time of all calls, one after the other."""
        return self.object_bytes * len(self.latencies_seconds) / sum(self.latencies_seconds) / MIB

    def percentile_seconds(self, percent: int) -> float:
        """Return the nearest-rank percentile of the calls' times."""
        ranked = sorted(self.latencies_seconds)
        return ranked[math.ceil(percent / 100 * len(ranked)) - 1]


async def measure(backend: Backend[Any], object_bytes: int, count: int) -> list[Throughput]:
    """Store, load and delete ``count`` objects of random bytes; cancellation may leave some on the medium.

    Loads may come from a cache of the operating system.

    Raises:
        RuntimeError: an object was not stored, or was not loaded with its stored bytes.
    """
    data = memoryview(os.urandom(object_bytes + count))  # each object begins a byte later
    keys = [_key(object_bytes, number) for number in range(count)]
    stores: list[float] = []
    loads: list[float] = []
    for number, key in enumerate(keys):
        start = time.perf_counter()
        reservation = await backend.prepare_store([key], [object_bytes])
        try:
            outcomes: Sequence[StoreOutcome | None] = reservation.outcomes
            if outcomes[0] is None:
                outcomes = await backend.store([key], [data[number : number + object_bytes]])
        finally:
            await reservation.release()
        stores.append(time.perf_counter() - start)
        if outcomes[0] is not StoreOutcome.STORED:
            raise RuntimeError(f"storing object {number + 1} of {count}, {object_bytes} bytes each: {outcomes[0]}")
    buffer = memoryview(bytearray(object_bytes))
    for number, key in enumerate(keys):
        start = time.perf_counter()
        pinned = await backend.prepare_load([key])
        try:
            (found,) = await backend.load_into([key], [buffer])
        finally:
            await pinned.release()
        loads.append(time.perf_counter() - start)
        if found is not LoadOutcome.HIT or buffer != data[number : number + object_bytes]:
            raise RuntimeError(f"loading object {number + 1} of {count}, {object_bytes} bytes each: {found}")
    await backend.delete(keys)
    return [Throughput("store", object_bytes, tuple(stores)), Throughput("load", object_bytes, tuple(loads))]


def report(measured: Iterable[tuple[str, Throughput]]) -> list[str]:
    """Return the lines of a table; ``measured`` are pairs of a backend's name and a measurement."""
    rows = [("backend", "operation", "object", "MiB/s", "p50 ms", "p99 ms")]
    for name, one in measured:
        p50, p99 = (f"{one.percentile_seconds(percent) * 1000:.2f}" for percent in (50, 99))
        rows.append((name, one.operation, f"{one.object_bytes // 1024} KiB", f"{one.mib_per_second:.0f}", p50, p99))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def _key(object_bytes: int, number: int) -> ObjectKey:
    return ObjectKey("0" * 64, "throughput", hashlib.sha256(b"%d/%d" % (object_bytes, number)).digest())
