"""``offload-core stats``: the number and size of the objects by fingerprint and pack."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass

from offload_core.api.backend import StoredObject
from offload_core.cli.application import app
from offload_core.cli.arguments import AsJson, ConfigFile, TierNames
from offload_core.cli.output import human_age, human_bytes, print_json, print_table
from offload_core.cli.session import TierReport, finish, open_session
from offload_core.cli.tier_client import TierClient


@dataclass
class _Sum:
    """The totals of the objects of one fingerprint and pack."""

    objects: int = 0
    nbytes: int = 0
    oldest_at_seconds: float | None = None
    newest_at_seconds: float | None = None

    def add(self, objects: int, nbytes: int, oldest: float | None, newest: float | None) -> None:
        self.objects += objects
        self.nbytes += nbytes
        if oldest is not None and (self.oldest_at_seconds is None or oldest < self.oldest_at_seconds):
            self.oldest_at_seconds = oldest
        if newest is not None and (self.newest_at_seconds is None or newest > self.newest_at_seconds):
            self.newest_at_seconds = newest

    def document(self) -> dict[str, object]:
        return {
            "objects": self.objects,
            "bytes": self.nbytes,
            "oldest_at_seconds": self.oldest_at_seconds,
            "newest_at_seconds": self.newest_at_seconds,
        }

    def cells(self, now: float) -> list[object]:
        ages = ["-" if at is None else human_age(now - at) for at in (self.oldest_at_seconds, self.newest_at_seconds)]
        return [self.objects, human_bytes(self.nbytes), *ages]


_Kinds = dict[tuple[str, str], _Sum]


@app.command()
def stats(config: ConfigFile, tier: TierNames = None, as_json: AsJson = False) -> None:
    """Count objects and bytes per tier, fingerprint and pack, with the age of the oldest and the newest object.

    A fingerprint belongs to one rank of one engine configuration. Find the objects of retired engines here, and delete
    them with prune.

    Exits with 1 if a tier failed, or if no tier can list its objects.

    Example: `offload-core stats offload.yaml`
    """
    with open_session(config, tier, as_json=as_json) as session:
        reports = session.run_on_each_tier(_count, dict[tuple[str, str], _Sum], lists=True)
    now = time.time()
    if as_json:
        every = _total(kind for report in reports for kind in report.result.values())
        print_json({"tiers": [_document(report) for report in reports], "total": every.document()})
    else:
        rows: list[list[object]] = []
        for report in reports:
            for (namespace, pack), kind in sorted(report.result.items()):
                rows.append([report.tier, namespace[:16], pack, *kind.cells(now)])
            if not report.skipped:
                rows.append([report.tier, "all", "all", *_total(report.result.values()).cells(now)])
        print_table(["tier", "fingerprint", "pack", "objects|", "bytes|", "oldest|", "newest|"], rows)
    finish(reports)


async def _count(tier: TierClient, result: _Kinds) -> None:
    async for batch in tier.objects():
        for stored in batch:
            _add(result, stored)


def _add(kinds: _Kinds, stored: StoredObject) -> None:
    kind = kinds.setdefault((stored.key.namespace, stored.key.pack), _Sum())
    kind.add(1, stored.nbytes, stored.stored_at_seconds, stored.stored_at_seconds)


def _total(kinds: Iterable[_Sum]) -> _Sum:
    total = _Sum()
    for kind in kinds:
        total.add(kind.objects, kind.nbytes, kind.oldest_at_seconds, kind.newest_at_seconds)
    return total


def _document(report: TierReport[_Kinds]) -> dict[str, object]:
    kinds = [
        {"fingerprint": namespace, "pack": pack, **kind.document()}
        for (namespace, pack), kind in sorted(report.result.items())
    ]
    return report.document(kinds=kinds, total=_total(report.result.values()).document())
