"""``offload-core prune``: deletion of objects by age, size or fingerprint."""

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
from offload_core.cli.tier_client import TierClient

_BATCH_OBJECTS = 256


@dataclass(frozen=True)
class Criteria:
    """The criteria of the objects to delete. An object must fulfil all criteria that are set."""

    stored_before_seconds: float | None
    max_bytes: int | None
    fingerprint: str
    keep_fingerprints: tuple[str, ...]

    def match(self, stored: StoredObject) -> bool:
        """Return ``True`` if the object fulfils all criteria except ``max_bytes``."""
        if self.stored_before_seconds is not None and stored.stored_at_seconds >= self.stored_before_seconds:
            return False
        namespace = stored.key.namespace
        return namespace.startswith(self.fingerprint) and not namespace.startswith(self.keep_fingerprints)

    def select(self, matching: list[StoredObject], total_bytes: int) -> list[StoredObject]:
        """Return the objects of ``matching`` to delete, oldest first, on a tier with ``total_bytes`` in all objects."""
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
    selected: list[StoredObject] = field(default_factory=list)
    removed_objects: int = 0
    removed_bytes: int = 0

    @property
    def selected_bytes(self) -> int:
        return sum(stored.nbytes for stored in self.selected)


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
        typer.Option(
            metavar="SIZE",
            parser=size,
            help="the oldest objects, until the tier's objects fit into this size, such as 100GiB",
        ),
    ] = None,
    fingerprint: Annotated[
        str | None,
        typer.Option(
            metavar="PREFIX", parser=fingerprint_prefix, help="objects whose fingerprint starts with these digits"
        ),
    ] = None,
    keep_fingerprint: Annotated[
        list[str] | None,
        typer.Option(
            metavar="PREFIX",
            parser=fingerprint_prefix,
            help="all objects except those whose fingerprint starts with these digits; repeat the option for several",
        ),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", "-n", help="show the objects to delete, and delete nothing")
    ] = False,
    yes: Annotated[
        bool, typer.Option("--yes", "-y", help="do not ask for confirmation; required without a terminal")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Delete objects by age, size or fingerprint. The command deletes the objects that fulfil all given criteria.

    With `--max-bytes` it deletes the oldest of these objects, until the tier's total size is within the limit. The
    total includes the objects that the other criteria exclude. Each tier has its own total. The age of an object is the
    time since it was stored.

    Engines may run meanwhile. To an engine, a deleted object is a miss. The command never deletes other files.

    Exits with 1 if a tier failed or is still over `--max-bytes`, if no tier can list its objects, or if you answer no.
    Exits with 2 if no criterion is given, or if there is neither `--yes` nor a terminal.

    Examples:

    - `offload-core prune offload.yaml --older-than 30d --dry-run`
    - `offload-core prune offload.yaml --max-bytes 100GiB --keep-fingerprint 3fa9 --yes`
    """
    if older_than is None and max_bytes is None and not fingerprint and not keep_fingerprint:
        note("no criterion; give at least one of --older-than, --max-bytes, --fingerprint and --keep-fingerprint")
        raise typer.Exit(EXIT_USAGE)
    if not (dry_run or yes or sys.stdin.isatty()):
        note("stdin is no terminal, so nobody can confirm; give --yes to delete, or --dry-run to preview")
        raise typer.Exit(EXIT_USAGE)
    before = None if older_than is None else time.time() - older_than
    criteria = Criteria(before, max_bytes, fingerprint or "", tuple(keep_fingerprint or ()))
    with open_session(config, tier, as_json=as_json) as session:
        reports = session.run_on_each_tier(
            lambda client, result: _select(client, result, criteria), _Pruned, lists=True
        )
        selected = sum(len(report.result.selected) for report in reports)
        if selected and not dry_run:
            if not yes:
                _ask(reports, selected)
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
        note(f"tier {report.tier!r}: the remaining objects have {left}, more than --max-bytes; give weaker criteria")
    finish(reports, trouble=bool(over))


def _ask(reports: Sequence[TierReport[_Pruned]], objects: int) -> None:
    nbytes = sum(report.result.selected_bytes for report in reports)
    names = ", ".join(repr(report.tier) for report in reports if report.result.selected)
    if not typer.confirm(f"Delete {objects} objects with {human_bytes(nbytes)} from {names}?", err=True):
        note("nothing was deleted")
        raise typer.Exit(EXIT_TROUBLE)


async def _select(tier: TierClient, result: _Pruned, criteria: Criteria) -> None:
    matching: list[StoredObject] = []
    async for batch in tier.objects():
        result.objects += len(batch)
        result.nbytes += sum(stored.nbytes for stored in batch)
        matching += filter(criteria.match, batch)
    result.selected = criteria.select(matching, result.nbytes)


def _delete(session: Session, reports: Sequence[TierReport[_Pruned]]) -> None:
    async def work(tier: TierClient, result: _Pruned) -> None:
        async def delete(batch: Sequence[StoredObject]) -> None:
            await tier.delete([stored.key for stored in batch])
            result.removed_objects += len(batch)
            result.removed_bytes += sum(stored.nbytes for stored in batch)

        await in_parallel(_batches(result.selected), delete, tier.io_threads)

    session.run_again(work, reports)


async def _batches(objects: Sequence[StoredObject]) -> AsyncIterator[Sequence[StoredObject]]:
    for start in range(0, len(objects), _BATCH_OBJECTS):
        yield objects[start : start + _BATCH_OBJECTS]


def _left_bytes(result: _Pruned) -> int:
    return result.nbytes - result.selected_bytes


def _document(report: TierReport[_Pruned]) -> dict[str, object]:
    result = report.result
    return report.document(
        objects=result.objects,
        bytes=result.nbytes,
        selected_objects=len(result.selected),
        selected_bytes=result.selected_bytes,
        removed_objects=result.removed_objects,
        removed_bytes=result.removed_bytes,
    )


def _row(report: TierReport[_Pruned]) -> list[object]:
    result = report.result
    return [
        report.tier,
        result.objects,
        human_bytes(result.nbytes),
        len(result.selected),
        human_bytes(result.selected_bytes),
        result.removed_objects,
        human_bytes(result.removed_bytes),
    ]
