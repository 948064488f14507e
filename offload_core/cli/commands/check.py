"""``offload-core check``: a test of every tier of a configuration."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from offload_core.api.backend import LoadOutcome
from offload_core.api.errors import ObjectFormatError
from offload_core.cli.application import app
from offload_core.cli.arguments import AsJson, ConfigFile, TierNames
from offload_core.cli.output import human_milliseconds, print_json, print_table
from offload_core.cli.probes import PROBE_PAYLOAD_BYTES, deleted_on_failure, probe_key, sealed, store_probe
from offload_core.cli.session import TierReport, finish, open_session
from offload_core.cli.tier_client import OperationError, TierClient
from offload_core.objects import format as object_format

_STEPS = ("store", "load", "delete")


@dataclass
class _Checked:
    seconds: dict[str, float] = field(default_factory=dict)
    evicted: int = 0

    @contextmanager
    def step(self, name: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self.seconds[name] = time.perf_counter() - start


@app.command()
def check(config: ConfigFile, tier: TierNames = None, as_json: AsJson = False) -> None:
    """Test every tier: open it, write a probe, read it back, verify it and delete it. Show the time of each step.

    The probe is an object of 68 KiB with a random name and a fingerprint of zeros, which no engine has. The command
    always deletes it. A tier with a capacity may evict an older object to store it. Each step has its configured
    deadline; stores and deletions have the deadline of loads. A tier with a capacity counts as full until it has
    scanned its folder. The command waits for that, up to the deadline.

    Exits with 1 if a tier failed. Exits with 2 if the configuration is wrong, after printing all its problems.

    Example: `offload-core check offload.yaml`
    """
    with open_session(config, tier, as_json=as_json) as session:
        reports = session.run_on_each_tier(
            lambda client, result: _probe(client, result, session.cleanup_seconds), new_result=_Checked
        )
    if as_json:
        print_json({"tiers": [_document(report) for report in reports]})
    else:
        columns = ["tier", "type", "status", *(f"{step} ms|" for step in ("open", *_STEPS))]
        print_table(columns, map(_row, reports))
    finish(reports)


async def _probe(tier: TierClient, result: _Checked, cleanup_seconds: float) -> None:
    key = tier.stored_name(probe_key("check"))
    written = sealed(key, os.urandom(PROBE_PAYLOAD_BYTES))
    read = memoryview(bytearray(len(written)))
    async with deleted_on_failure(tier, [key], cleanup_seconds):
        with result.step("store"):
            result.evicted = (await store_probe(tier, key, written)).evicted
        with result.step("load"):
            (outcome,) = await tier.load([key], [read])
            if outcome is not LoadOutcome.HIT:
                raise OperationError(f"load: {outcome.value} right after the probe was stored")
            try:
                object_format.verify(read, key)
            except ObjectFormatError as error:
                raise OperationError(f"load: the tier returned wrong bytes: {error}") from error
        with result.step("delete"):
            await tier.delete([key])
        if await tier.contains([key]) != [False]:
            raise OperationError("delete: the probe is still there afterwards")


def _document(report: TierReport[_Checked]) -> dict[str, object]:
    latencies = {f"{step}_seconds": report.result.seconds.get(step) for step in _STEPS}
    return report.document(
        type=report.type,
        ok=report.error is None,
        open_seconds=report.open_seconds,
        **latencies,
        evicted_objects=report.result.evicted,
    )


def _row(report: TierReport[_Checked]) -> list[object]:
    latencies = [report.open_seconds, *(report.result.seconds.get(step) for step in _STEPS)]
    return [report.tier, report.type, "failed" if report.error else "ok", *map(human_milliseconds, latencies)]
