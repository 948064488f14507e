"""``offload-core bench``: the speed of each tier, measured through the calls that the engine makes."""

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
from offload_core.cli.probes import PROBE_PAYLOAD_BYTES, deleted_on_failure, probe_key, sealed, store_probe
from offload_core.cli.session import EXIT_USAGE, TierReport, finish, open_session
from offload_core.cli.tier_client import OperationError, TierClient
from offload_core.objects import format as object_format

_LOOKUP_KEYS = 64
_DELETE_KEYS = 256
_SLACK_BYTES = 64 * 1024
"""Extra length of the random block from which all objects are cut, each at its own offset."""
_PERCENTILES = (50, 90, 99)


@dataclass
class _Measured:
    """The measurements of one operation."""

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
        """A possible reason for missing objects, to append to an error."""
        return (
            f"; the tier evicted {self.evicted} objects to free capacity: use fewer or smaller ones"
            if self.evicted
            else ""
        )


@app.command()
def bench(
    config: ConfigFile,
    tier: TierNames = None,
    object_size: Annotated[
        int, typer.Option(metavar="SIZE", parser=size, help="size of each object's payload", show_default="2MiB")
    ] = 2 * 1024 * 1024,
    objects: Annotated[int, typer.Option(min=1, help="number of objects to store and load")] = 64,
    concurrency: Annotated[
        int | None, typer.Option(min=1, help="number of calls at the same time; by default the tier's io_threads")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Measure throughput and latencies of stores, lookups and loads on every tier, one tier after the other.

    One call moves one object, and one lookup asks for up to 64 keys. The objects hold random bytes. On a tier with
    compression they hold random bf16 numbers; compression is part of the time, and bytes are counted before it.

    A tier with a capacity counts as full until it has scanned its folder. The command first waits for that, up to the
    deadline of a load.

    All objects have a fingerprint of zeros, which no engine has. The command deletes them at the end, also after an
    error or Ctrl-C. A tier with a capacity may evict other objects to store them. The command uses at most
    `staging_bytes` of memory.

    The operating system may load recent objects from its cache. To measure the medium itself, store more bytes than the
    memory holds.

    Exits with 1 if a tier failed or returned wrong bytes, and with 2 if the calls do not fit into `staging_bytes`.

    Example: `offload-core bench offload.yaml --object-size 2MiB --objects 256 --concurrency 8`
    """
    with open_session(config, tier, as_json=as_json) as session:

        def calls(client: TierClient) -> int:
            return min(concurrency or client.io_threads, objects)

        async def work(client: TierClient, result: _Benched) -> None:
            result.concurrency = calls(client)
            sizes = f"{objects} objects of {human_bytes(object_size)}"
            note(f"tier {client.name!r}: {sizes}, {result.concurrency} at a time")
            if client.capacity_bytes is not None:
                result.evicted += await _wait_for_room(client, session.cleanup_seconds)
            keys = [client.stored_name(probe_key("bench")) for _ in range(objects)]
            async with deleted_on_failure(client, keys, session.cleanup_seconds):
                await _measure(client, result, keys, object_size)

        most = max(min(concurrency or configured.common.io_threads, objects) for configured in session.configs)
        twice = any(configured.common.encodes for configured in session.configs)
        needed = (most + 1) * (1 + twice) * (object_format.object_bytes(object_size) + _SLACK_BYTES)
        if needed > session.settings.staging_bytes:
            note(
                f"{most} calls at a time with objects of {human_bytes(object_size)} need {human_bytes(needed)} of "
                f"memory, more than staging_bytes = {human_bytes(session.settings.staging_bytes)}; "
                "lower --concurrency or --object-size"
            )
            raise typer.Exit(EXIT_USAGE)
        reports = session.run_on_each_tier(work, _Benched, one_by_one=True)
    if as_json:
        print_json({"object_bytes": object_format.object_bytes(object_size), "tiers": list(map(_document, reports))})
    else:
        columns = ["tier", "operation", "calls|", "calls/s|", "throughput|", *(f"p{p} ms|" for p in _PERCENTILES)]
        print_table(columns, (row for report in reports for row in _rows(report)))
    finish(reports)


async def _wait_for_room(tier: TierClient, cleanup_seconds: float) -> int:
    """Wait until a tier with a capacity stores a small object, and delete it. Return the number of evicted objects."""
    key = tier.stored_name(probe_key("bench"))
    async with deleted_on_failure(tier, [key], cleanup_seconds):
        stored = await store_probe(tier, key, sealed(key, bytes(PROBE_PAYLOAD_BYTES)))
        await tier.delete([key])
    return stored.evicted


async def _measure(tier: TierClient, result: _Benched, keys: Sequence[ObjectKey], payload_bytes: int) -> None:
    random = np.random.default_rng()
    block = memoryview(random.bytes(payload_bytes + _SLACK_BYTES))
    if tier.tier.config.compression != "none":  # noise does not compress; bf16 numbers do, as in a KV cache
        values = random.standard_normal(len(block) // 2 + 1, dtype=np.float32)
        block = memoryview((values.view(np.uint32) >> 16).astype("<u2").tobytes())
    numbers = {key: index for index, key in enumerate(keys)}

    def made(key: ObjectKey) -> memoryview:
        # The step is even, for whole bf16 numbers. It is no multiple of a block, so no two objects share a block.
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
            raise OperationError(f"store: {stored.outcomes[0].value}; is there capacity for {len(keys)} objects?")

    async def lookup(start_key: ObjectKey, measured: _Measured) -> None:
        first = numbers[start_key]
        asked = [keys[(first + offset) % len(keys)] for offset in range(min(_LOOKUP_KEYS, len(keys)))]
        start = time.perf_counter()
        found = await tier.contains(asked)
        measured.latencies_seconds.append(time.perf_counter() - start)
        if not all(found):
            raise OperationError(
                f"lookup: {found.count(False)} of {len(found)} objects that were stored are missing{result.hint}"
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
            raise OperationError(f"load: the tier returned wrong bytes: {error}") from error

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
