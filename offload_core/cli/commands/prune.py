"""``offload-core prune``: make room."""

from __future__ import annotations

import sys
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Annotated

import typer

from offload_core.api.backend import StoredObject
from offload_core.cli.application import app
from offload_core.cli.arguments import AsJson, ConfigFile, TierNames, duration_seconds, fingerprint_prefix, size
from offload_core.cli.output import human_bytes, note, print_json, print_table
from offload_core.cli.parallel import in_parallel
from offload_core.cli.session import EXIT_TROUBLE, EXIT_USAGE, Session, TierReport, finish, open_session
from offload_core.cli.watched_tier import WatchedTier

_BATCH_OBJECTS = 256


@dataclass(frozen=True)
class Criteria:
    """Which objects go: those that fulfil every criterion that is given."""

    stored_before_seconds: float | None
    max_bytes: int | None
    fingerprint: str
    keep_fingerprints: tuple[str, ...]

    def match(self, stored: StoredObject) -> bool:
        """Return whether the object may go, the limit on bytes aside."""
        if self.stored_before_seconds is not None and stored.stored_at_seconds >= self.stored_before_seconds:
            return False
        namespace = stored.key.namespace
        return namespace.startswith(self.fingerprint) and not namespace.startswith(self.keep_fingerprints)

    def select(self, matching: list[StoredObject], total_bytes: int) -> list[StoredObject]:
        """Return those of ``matching`` that go, oldest first, on a tier with ``total_bytes`` in all its objects."""
        matching.sort(key=lambda stored: stored.stored_at_seconds)
        if self.max_bytes is None:
            return matching
        for index, stored in enumerate(matching):
            if total_bytes <= self.max_bytes:
                return matching[:index]
            total_bytes -= stored.nbytes
        return matching


@dataclass
class _Pruned:
    objects: int = 0
    nbytes: int = 0
    doomed: list[StoredObject] = field(default_factory=list)
    removed_objects: int = 0
    removed_bytes: int = 0

    @property
    def doomed_bytes(self) -> int:
        return sum(stored.nbytes for stored in self.doomed)


@app.command()
def prune(
    config: ConfigFile,
    tier: TierNames = None,
    older_than: Annotated[
        float | None,
        typer.Option(
            metavar="DURATION", parser=duration_seconds, help="objects stored longer ago than this, such as 30d or 12h"
        ),
    ] = None,
    max_bytes: Annotated[
        int | None,
        typer.Option(metavar="SIZE", parser=size, help="the oldest, until the tier's objects fit, such as into 100GiB"),
    ] = None,
    fingerprint: Annotated[
        str | None,
        typer.Option(metavar="PREFIX", parser=fingerprint_prefix, help="objects under fingerprints that start so"),
    ] = None,
    keep_fingerprint: Annotated[
        list[str] | None,
        typer.Option(metavar="PREFIX", parser=fingerprint_prefix, help="all but these; may be given several times"),
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", "-n", help="show what would go, and delete nothing")] = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="do not ask; needed where there is no terminal")] = False,
    as_json: AsJson = False,
) -> None:
    """Delete objects by age, size or fingerprint. An object goes when it fulfils every criterion that is given.

    With `--max-bytes` only as many go, the oldest first, as bring the tier's total (all its objects, also those that
    the other criteria spare) down to the limit; every tier is taken by itself. An object's age is the time since it was
    stored. Engines may run meanwhile: to them a deleted object is a miss. Files that are no objects are never touched.

    Exits with 1 when a tier failed or is still over `--max-bytes`, when no tier can list its objects, and when the
    question was answered with no; with 2 without a criterion, and without both `--yes` and a terminal.

    Examples:

    - `offload-core prune offload.yaml --older-than 30d --dry-run`
    - `offload-core prune offload.yaml --max-bytes 100GiB --keep-fingerprint 3fa9 --yes`
    """
    if older_than is None and max_bytes is None and not fingerprint and not keep_fingerprint:
        note("what should go? give at least one of --older-than, --max-bytes, --fingerprint and --keep-fingerprint")
        raise typer.Exit(EXIT_USAGE)
    if not (dry_run or yes or sys.stdin.isatty()):
        note("nobody can be asked here (stdin is no terminal); give --yes to delete, or --dry-run to look")
        raise typer.Exit(EXIT_USAGE)
    before = None if older_than is None else time.time() - older_than
    criteria = Criteria(before, max_bytes, fingerprint or "", tuple(keep_fingerprint or ()))
    with open_session(config, tier, as_json=as_json) as session:
        reports = session.each(lambda watched, result: _select(watched, result, criteria), _Pruned, lists=True)
        doomed = sum(len(report.result.doomed) for report in reports)
        if doomed and not dry_run:
            if not yes:
                _ask(reports, doomed)
            _delete(session, reports)
    if as_json:
        print_json({"dry_run": dry_run, "tiers": [_document(report) for report in reports]})
    else:
        columns = ["tier", "objects|", "bytes|", "would go|" if dry_run else "to go|", "bytes|", "removed|", "bytes|"]
        print_table(columns, (_row(report) for report in reports if not report.skipped))
    over = [
        report
        for report in reports
        if _left_bytes(report.result) > (max_bytes if max_bytes is not None else sys.maxsize)
    ]
    for report in over:
        left = human_bytes(_left_bytes(report.result))
        note(f"tier {report.tier!r}: the objects that the criteria spare have {left}, more than --max-bytes")
    finish(reports, trouble=bool(over))


def _ask(reports: Sequence[TierReport[_Pruned]], objects: int) -> None:
    nbytes = sum(report.result.doomed_bytes for report in reports)
    names = ", ".join(repr(report.tier) for report in reports if report.result.doomed)
    if not typer.confirm(f"Delete {objects} objects with {human_bytes(nbytes)} from {names}?", err=True):
        note("nothing was deleted")
        raise typer.Exit(EXIT_TROUBLE)


async def _select(tier: WatchedTier, result: _Pruned, criteria: Criteria) -> None:
    matching: list[StoredObject] = []
    async for batch in tier.objects():
        result.objects += len(batch)
        result.nbytes += sum(stored.nbytes for stored in batch)
        matching += filter(criteria.match, batch)
    result.doomed = criteria.select(matching, result.nbytes)


def _delete(session: Session, reports: Sequence[TierReport[_Pruned]]) -> None:
    async def work(tier: WatchedTier, result: _Pruned) -> None:
        async def delete(batch: Sequence[StoredObject]) -> None:
            await tier.delete([stored.key for stored in batch])
            result.removed_objects += len(batch)
            result.removed_bytes += sum(stored.nbytes for stored in batch)

        await in_parallel(_batches(result.doomed), delete, tier.io_threads)

    session.go_on(work, reports)


async def _batches(objects: Sequence[StoredObject]) -> AsyncIterator[Sequence[StoredObject]]:
    for start in range(0, len(objects), _BATCH_OBJECTS):
        yield objects[start : start + _BATCH_OBJECTS]


def _left_bytes(result: _Pruned) -> int:
    return result.nbytes - result.doomed_bytes


def _document(report: TierReport[_Pruned]) -> dict[str, object]:
    result = report.result
    return report.document(
        objects=result.objects,
        bytes=result.nbytes,
        selected_objects=len(result.doomed),
        selected_bytes=result.doomed_bytes,
        removed_objects=result.removed_objects,
        removed_bytes=result.removed_bytes,
    )


def _row(report: TierReport[_Pruned]) -> list[object]:
    result = report.result
    return [
        report.tier,
        result.objects,
        human_bytes(result.nbytes),
        len(result.doomed),
        human_bytes(result.doomed_bytes),
        result.removed_objects,
        human_bytes(result.removed_bytes),
    ]
