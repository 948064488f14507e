"""``offload-core ls``: a list of the objects."""

from __future__ import annotations

import time
from contextlib import aclosing
from functools import partial
from typing import Annotated

import typer

from offload_core.api.backend import StoredObject
from offload_core.cli.application import app
from offload_core.cli.arguments import AsJson, ConfigFile, TierNames, fingerprint_prefix
from offload_core.cli.output import human_age, human_bytes, note, print_json, print_table
from offload_core.cli.session import finish, open_session
from offload_core.cli.tier_client import TierClient


@app.command()
def ls(
    config: ConfigFile,
    tier: TierNames = None,
    namespace: Annotated[
        str | None,
        typer.Option(
            metavar="PREFIX", parser=fingerprint_prefix, help="only fingerprints that start with these digits"
        ),
    ] = None,
    pack: Annotated[str | None, typer.Option(help="only objects of this pack")] = None,
    limit: Annotated[int, typer.Option(min=0, help="number of objects per tier to list; 0 lists all of them")] = 1000,
    as_json: AsJson = False,
) -> None:
    """List objects: tier, fingerprint of the writing engine, pack, chunk hash, size and age.

    The backend decides the order. Tables shorten fingerprints and hashes to 16 digits; `--json` shows all of them.
    Exits with 1 if a tier failed, or if no tier can list its objects.

    Example: `offload-core ls offload.yaml --pack full-u256 --limit 20`
    """
    with open_session(config, tier, as_json=as_json) as session:
        work = partial(_list, namespace=namespace or "", pack=pack, limit=limit)
        reports = session.run_on_each_tier(work, list[StoredObject], lists=True)
    cut = [bool(limit) and len(report.result) > limit for report in reports]
    for report in reports:
        del report.result[limit or len(report.result) :]
    now = time.time()
    if as_json:
        found = [_document(report.tier, stored, now) for report in reports for stored in report.result]
        tiers = [report.document(truncated=more) for report, more in zip(reports, cut, strict=True)]
        print_json({"objects": found, "tiers": tiers})
    else:
        rows = (_row(report.tier, stored, now) for report in reports for stored in report.result)
        print_table(["tier", "fingerprint", "pack", "hash", "size|", "age|"], rows)
    for report, more in zip(reports, cut, strict=True):
        if more:
            note(f"tier {report.tier!r}: there are more than {limit} objects; --limit 0 lists all of them")
    finish(reports)


async def _list(tier: TierClient, result: list[StoredObject], *, namespace: str, pack: str | None, limit: int) -> None:
    """Collect the matching objects, up to one more than ``limit``."""
    async with aclosing(tier.objects()) as batches:
        async for batch in batches:
            for stored in batch:
                if stored.key.namespace.startswith(namespace) and pack in (None, stored.key.pack):
                    result.append(stored)
            if limit and len(result) > limit:
                return


def _document(tier: str, stored: StoredObject, now: float) -> dict[str, object]:
    return {
        "tier": tier,
        "fingerprint": stored.key.namespace,
        "pack": stored.key.pack,
        "hash": stored.key.chunk_hash.hex(),
        "bytes": stored.nbytes,
        "stored_at_seconds": stored.stored_at_seconds,
        "age_seconds": now - stored.stored_at_seconds,
    }


def _row(tier: str, stored: StoredObject, now: float) -> list[object]:
    namespace, pack, chunk_hash = stored.key
    age = human_age(now - stored.stored_at_seconds)
    return [tier, namespace[:16], pack, chunk_hash.hex()[:16], human_bytes(stored.nbytes), age]
