"""``offload-core bench``: how fast is each tier, through the calls that the engine makes?"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Annotated

import numpy as np
import typer

from offload_core.api.backend import LoadOutcome, StoreOutcome
from offload_core.api.errors import ObjectFormatError
from offload_core.api.keys import ObjectKey
from offload_core.cli.application import app
from offload_core.cli.arguments import AsJson, ConfigFile, TierNames, size
from offload_core.cli.output import human_bytes, human_milliseconds, note, print_json, print_table
from offload_core.cli.parallel import in_parallel
from offload_core.cli.probes import probe_key, removed_on_failure, sealed
from offload_core.cli.session import EXIT_USAGE, TierReport, finish, open_session
from offload_core.cli.watched_tier import OperationError, WatchedTier
from offload_core.objects import format as object_format

_LOOKUP_KEYS = 64
_DELETE_KEYS = 256
_SLACK_BYTES = 64 * 1024
"""Objects are cut from one random block this much longer than they are, each at an offset of its own."""
_PERCENTILES = (50, 90, 99)


@dataclass
class _Measured:
    """One operation."""

    seconds: float = 0.0
    nbytes: int = 0
    latencies_seconds: list[float] = field(default_factory=list)

    def percentile(self, percent: int) -> float | None:
        """Return the nearest-rank percentile of the latencies."""
        ranked = sorted(self.latencies_seconds)
        return ranked[math.ceil(percent / 100 * len(ranked)) - 1] if ranked else None

    @property
    def bytes_per_second(self) -> float | None:
        return self.nbytes / self.seconds if self.nbytes and self.seconds else None

    @property
    def calls_per_second(self) -> float | None:
        return len(self.latencies_seconds) / self.seconds if self.seconds else None


@dataclass
class _Benched:
    operations: dict[str, _Measured] = field(default_factory=dict)
    evicted: int = 0
    concurrency: int = 0

    @property
    def hint(self) -> str:
        """Why objects may be missing, for the end of an error."""
        return (
            f"; the tier evicted {self.evicted} objects to make room: use fewer or smaller ones" if self.evicted else ""
        )


@app.command()
def bench(
    config: ConfigFile,
    tier: TierNames = None,
    object_size: Annotated[
        int, typer.Option(metavar="SIZE", parser=size, help="bytes of each object's payload", show_default="2MiB")
    ] = 2 * 1024 * 1024,
    objects: Annotated[int, typer.Option(min=1, help="how many objects to store and load")] = 64,
    concurrency: Annotated[
        int | None, typer.Option(min=1, help="calls at the same time; by default the tier's io_threads")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Measure storing, looking up and loading on every tier, one tier after the other: throughput and latencies.

    One call moves one object; one lookup asks for up to 64 keys. The objects hold random bytes (random bf16 numbers
    where the tier compresses, which is measured too; bytes are counted before it), stand under a fingerprint of zeros,
    which no engine has, and are deleted afterwards, also on an error or Ctrl-C. What was just stored may be loaded from
    the operating system's cache: store more than the memory holds to measure the medium itself. A tier with a limit on
    its bytes may evict other objects to make room. At most `staging_bytes` of memory are used.

    Exits with 1 when a tier failed or returned wrong bytes, with 2 when the calls do not fit in `staging_bytes`.

    Example: `offload-core bench offload.yaml --object-size 2MiB --objects 256 --concurrency 8`
    """
    with open_session(config, tier, as_json=as_json) as session:

        def calls(watched: WatchedTier) -> int:
            return min(concurrency or watched.io_threads, objects)

        async def work(watched: WatchedTier, result: _Benched) -> None:
            result.concurrency = calls(watched)
            sizes = f"{objects} objects of {human_bytes(object_size)}"
            note(f"tier {watched.name!r}: {sizes}, {result.concurrency} at a time")
            keys = [probe_key("bench") for _ in range(objects)]
            async with removed_on_failure(watched, keys, session.cleanup_seconds):
                await _measure(watched, result, keys, object_size)

        most = max(min(concurrency or configured.common.io_threads, objects) for configured in session.configs)
        twice = any(configured.common.compression != "none" for configured in session.configs)
        needed = (most + 1) * (1 + twice) * (object_format.object_bytes(object_size) + _SLACK_BYTES)
        if needed > session.settings.staging_bytes:
            note(
                f"{most} calls at a time with objects of {human_bytes(object_size)} need {human_bytes(needed)} of "
                f"memory, more than staging_bytes = {human_bytes(session.settings.staging_bytes)}; "
                "lower --concurrency or --object-size"
            )
            raise typer.Exit(EXIT_USAGE)
        reports = session.each(work, _Benched, one_by_one=True)
    if as_json:
        print_json({"object_bytes": object_format.object_bytes(object_size), "tiers": list(map(_document, reports))})
    else:
        columns = ["tier", "operation", "calls|", "calls/s|", "throughput|", *(f"p{p} ms|" for p in _PERCENTILES)]
        print_table(columns, (row for report in reports for row in _rows(report)))
    finish(reports)


async def _measure(tier: WatchedTier, result: _Benched, keys: Sequence[ObjectKey], payload_bytes: int) -> None:
    random = np.random.default_rng()
    block = memoryview(random.bytes(payload_bytes + _SLACK_BYTES))
    if tier.tier.compresses:  # noise would be stored as it is: numbers as bf16 instead, as a KV cache has them
        values = random.standard_normal(len(block) // 2 + 1, dtype=np.float32)
        block = memoryview((values.view(np.uint32) >> 16).astype("<u2").tobytes())
    numbers = {key: index for index, key in enumerate(keys)}

    def made(key: ObjectKey) -> memoryview:
        # A step of whole numbers and no whole blocks, so that no two objects have a block of the file system in common.
        start = numbers[key] * 4098 % _SLACK_BYTES
        return sealed(key, block[start : start + payload_bytes])

    async def store(key: ObjectKey, measured: _Measured) -> None:
        view = await asyncio.to_thread(made, key)
        start = time.perf_counter()
        stored = await tier.store([key], [view])
        measured.latencies_seconds.append(time.perf_counter() - start)
        measured.nbytes += len(view)
        result.evicted += stored.evicted
        if stored.outcomes != [StoreOutcome.STORED]:
            raise OperationError(f"store: {stored.outcomes[0].value}; is there room for {len(keys)} objects?")

    async def lookup(start_key: ObjectKey, measured: _Measured) -> None:
        first = numbers[start_key]
        asked = [keys[(first + offset) % len(keys)] for offset in range(min(_LOOKUP_KEYS, len(keys)))]
        start = time.perf_counter()
        found = await tier.contains(asked)
        measured.latencies_seconds.append(time.perf_counter() - start)
        if not all(found):
            raise OperationError(
                f"lookup: {found.count(False)} of {len(found)} objects that were stored are not there{result.hint}"
            )

    async def load(key: ObjectKey, measured: _Measured) -> None:
        view = memoryview(bytearray(object_format.object_bytes(payload_bytes)))
        start = time.perf_counter()
        (outcome,) = await tier.load([key], [view])
        measured.latencies_seconds.append(time.perf_counter() - start)
        measured.nbytes += len(view)
        if outcome is not LoadOutcome.HIT:
            raise OperationError(f"load: {outcome.value} for an object that was stored{result.hint}")
        try:
            await asyncio.to_thread(object_format.verify, view, key)
        except ObjectFormatError as error:
            raise OperationError(f"load: wrong bytes came back: {error}") from error

    for name, operation in (("store", store), ("lookup", lookup), ("load", load)):
        await _timed(operation, keys, result.operations.setdefault(name, _Measured()), result.concurrency)
    for start in range(0, len(keys), _DELETE_KEYS):
        await tier.delete(keys[start : start + _DELETE_KEYS])


async def _timed(
    operation: Callable[[ObjectKey, _Measured], Awaitable[None]],
    keys: Sequence[ObjectKey],
    measured: _Measured,
    concurrency: int,
) -> None:
    start = time.perf_counter()
    try:
        await in_parallel(_each(keys), lambda key: operation(key, measured), concurrency)
    finally:
        measured.seconds = time.perf_counter() - start


async def _each(keys: Sequence[ObjectKey]) -> AsyncIterator[ObjectKey]:
    for key in keys:
        yield key


def _document(report: TierReport[_Benched]) -> dict[str, object]:
    operations = {
        name: {
            "calls": len(measured.latencies_seconds),
            "calls_per_second": measured.calls_per_second,
            "bytes": measured.nbytes,
            "bytes_per_second": measured.bytes_per_second,
            "seconds": measured.seconds,
            **{f"p{percent}_seconds": measured.percentile(percent) for percent in _PERCENTILES},
        }
        for name, measured in report.result.operations.items()
    }
    return report.document(
        concurrency=report.result.concurrency, evicted_objects=report.result.evicted, operations=operations
    )


def _rows(report: TierReport[_Benched]) -> list[list[object]]:
    return [
        [
            report.tier,
            name,
            len(measured.latencies_seconds),
            f"{measured.calls_per_second or 0:.0f}",
            "-" if measured.bytes_per_second is None else f"{human_bytes(measured.bytes_per_second)}/s",
            *(human_milliseconds(measured.percentile(percent)) for percent in _PERCENTILES),
        ]
        for name, measured in report.result.operations.items()
    ]
