"""``offload-core verify``: a check of every byte of every object."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Annotated, NamedTuple

import typer
from rich.progress import Progress

from offload_core.api.backend import LoadOutcome, StoredObject
from offload_core.api.errors import ObjectFormatError
from offload_core.api.keys import ObjectKey
from offload_core.cli.application import app
from offload_core.cli.arguments import AsJson, ConfigFile, TierNames
from offload_core.cli.output import human_bytes, note, print_json, print_table, progress
from offload_core.cli.parallel import ByteBudget, in_parallel
from offload_core.cli.session import TierReport, finish, open_session
from offload_core.cli.tier_client import OperationError, TierClient
from offload_core.objects.format import OtherVersionError, checksum
from offload_core.tiers.compression import Damage, TierCodec, differ

_BATCH_BYTES = 8 * 1024 * 1024
_BATCH_OBJECTS = 64


class _Bad(NamedTuple):
    key: ObjectKey
    nbytes: int
    reason: str
    damaged: bool
    """``True`` if its bytes are wrong; ``False`` if they could not be judged and may be right."""


@dataclass
class _Verified:
    objects: int = 0
    nbytes: int = 0
    vanished: int = 0
    """Objects that were evicted or deleted after the listing and before the load."""
    deleted: int = 0
    unauthenticated: int = 0
    """Encrypted objects whose checksums are right, and whose key is not here."""
    bad: list[_Bad] = field(default_factory=list)


@app.command()
def verify(
    config: ConfigFile,
    tier: TierNames = None,
    delete: Annotated[bool, typer.Option("--delete", help="delete damaged objects; engines store them again")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="no progress bar")] = False,
    as_json: AsJson = False,
) -> None:
    """Load every object, check its size, name and checksums, decompress it, and print the damaged objects.

    Encrypted objects are authenticated with the tier's keys. Without their key, only their checksums are checked.

    Engines check every object that they load too, so damage never reaches a model. This command finds damage earlier.
    It uses at most `staging_bytes` of memory. An object that vanishes meanwhile is no error.

    A damaged object is read twice. It is damaged only if both reads bring the same bytes.

    The command also prints unreadable objects, objects larger than `staging_bytes`, and objects of older or newer
    format versions. It never deletes these.

    Exits with 1 if any object was printed (deleted or not), if a tier failed, or if no tier can list its objects.

    Example: `offload-core verify offload.yaml --tier nvme --delete`
    """
    with open_session(config, tier, as_json=as_json) as session, progress(quiet=quiet) as bar:
        budget = ByteBudget(session.settings.staging_bytes)

        async def work(client: TierClient, result: _Verified) -> None:
            await _Verification(client, result, budget, session.settings.staging_bytes, delete, bar).run()

        reports = session.run_on_each_tier(work, _Verified, lists=True)
    if as_json:
        print_json({"tiers": [_document(report) for report in reports]})
    else:
        found = [(report.tier, bad) for report in reports for bad in report.result.bad]
        if found:
            print_table(
                ["tier", "object", "bytes|", "what is wrong"], [(t, b.key.path, b.nbytes, b.reason) for t, b in found]
            )
    for report in reports:
        if not report.skipped and (report.error is None or report.result != _Verified()):
            note(_summary(report))
    finish(reports, trouble=any(report.result.bad for report in reports))


class _Verification:
    """The verification of all objects of one tier."""

    def __init__(
        self, tier: TierClient, result: _Verified, budget: ByteBudget, limit_bytes: int, delete: bool, bar: Progress
    ) -> None:
        self._tier = tier
        self._result = result
        self._budget = budget
        self._limit_bytes = limit_bytes
        self._delete = delete
        self._bar = bar
        self._line = bar.add_task(tier.name, total=None)

    async def run(self) -> None:
        """Verify ``io_threads`` batches at a time."""
        if not self._bar.disable:
            total = 0
            async for listed in self._tier.objects():
                total += len(listed)
            self._bar.update(self._line, total=total)
        await in_parallel(self._batches(), self._verify, self._tier.io_threads)

    async def _batches(self) -> AsyncIterator[list[StoredObject]]:
        """Divide the listing into batches of a limited size."""
        most_bytes = min(_BATCH_BYTES, self._limit_bytes)
        batch: list[StoredObject] = []
        nbytes = 0
        async for listed in self._tier.objects():
            for stored in listed:
                if stored.nbytes > self._limit_bytes:
                    size = f"{stored.nbytes} bytes are more than staging_bytes = {self._limit_bytes}"
                    self._add_bad(stored, f"not read: {size}; raise it to verify this object", damaged=False)
                    continue
                if batch and (len(batch) == _BATCH_OBJECTS or nbytes + stored.nbytes > most_bytes):
                    yield batch
                    batch, nbytes = [], 0
                batch.append(stored)
                nbytes += stored.nbytes
        if batch:
            yield batch

    async def _verify(self, batch: Sequence[StoredObject]) -> None:
        async with self._budget.reserve(sum(stored.nbytes for stored in batch)):
            reads = await self._read(batch)
            damaged = [index for index, read in enumerate(reads) if read.damage]
            second = await self._read([batch[index] for index in damaged])
            for index, again in zip(damaged, second, strict=True):
                reads[index] = _second(reads[index], again)
        for stored, read in zip(batch, reads, strict=True):
            self._record(stored, read)
        damaged_keys = [stored.key for stored, read in zip(batch, reads, strict=True) if read.damage]
        if damaged_keys and self._delete:
            await self._tier.delete(damaged_keys)
            self._result.deleted += len(damaged_keys)
        self._bar.advance(self._line, len(batch))

    async def _read(self, batch: Sequence[StoredObject]) -> list[_Read]:
        """Load and check a batch. After an error, each object is loaded on its own, to find the one that fails."""
        if not batch:
            return []
        keys = [stored.key for stored in batch]
        buffers = [memoryview(bytearray(stored.nbytes)) for stored in batch]
        try:
            outcomes = await self._tier.load_stored(keys, buffers)
        except OperationError as error:
            if error.late:
                raise
            if len(batch) > 1:
                return [read for stored in batch for read in await self._read([stored])]
            return [_Read(unverified=str(error))]
        return await asyncio.to_thread(_check_all, self._tier.tier.storage.codec, keys, buffers, outcomes)

    def _record(self, stored: StoredObject, read: _Read) -> None:
        self._result.vanished += read.vanished
        self._result.unauthenticated += not read.authenticated
        if read.damage:
            self._add_bad(stored, read.damage.reason, damaged=True)
        elif read.unverified:
            self._add_bad(stored, read.unverified, damaged=False)
        elif not read.vanished:
            self._result.objects += 1
            self._result.nbytes += stored.nbytes

    def _add_bad(self, stored: StoredObject, reason: str, *, damaged: bool) -> None:
        self._result.bad.append(_Bad(stored.key, stored.nbytes, reason, damaged))


@dataclass(frozen=True)
class _Read:
    """The result of one read of one object. By default it is sound."""

    damage: Damage | None = None
    unverified: str | None = None
    """The reason if the object could not be read or judged."""
    vanished: bool = False
    authenticated: bool = True
    """``False`` if the object is encrypted with a key that is not here."""


def _second(first: _Read, second: _Read) -> _Read:
    """Return the result of an object whose first read has shown damage: as in the engine, both must show the same."""
    if second.damage and differ(first.damage, second.damage):
        return _Read(unverified=f"two reads have brought different bytes: {second.damage.reason}")
    return second


def _check_all(
    codec: TierCodec,
    keys: Sequence[ObjectKey],
    buffers: Sequence[memoryview],
    outcomes: Sequence[LoadOutcome],
) -> list[_Read]:
    return [_check(codec, *one) for one in zip(keys, buffers, outcomes, strict=True)]


def _check(codec: TierCodec, key: ObjectKey, buffer: memoryview, outcome: LoadOutcome) -> _Read:
    if outcome is LoadOutcome.CORRUPT:
        return _Read(Damage(f"the backend reports damage, or the object no longer has {len(buffer)} bytes"))
    if outcome is LoadOutcome.MISS:
        return _Read(vanished=True)
    try:
        return _Read(authenticated=codec.check_stored(buffer, key))
    except OtherVersionError as error:
        return _Read(unverified=str(error).removeprefix(f"{key}: "))
    except ObjectFormatError as error:
        return _Read(Damage(str(error).removeprefix(f"{key}: "), checksum(buffer)))


def _document(report: TierReport[_Verified]) -> dict[str, object]:
    result = report.result
    bad = [
        {
            "fingerprint": bad.key.namespace,
            "pack": bad.key.pack,
            "hash": bad.key.chunk_hash.hex(),
            "bytes": bad.nbytes,
            "damaged": bad.damaged,
            "reason": bad.reason,
        }
        for bad in result.bad
    ]
    return report.document(
        verified_objects=result.objects,
        verified_bytes=result.nbytes,
        unauthenticated_objects=result.unauthenticated,
        vanished_objects=result.vanished,
        deleted_objects=result.deleted,
        bad=bad,
    )


def _summary(report: TierReport[_Verified]) -> str:
    result = report.result
    damaged = sum(bad.damaged for bad in result.bad)
    text = (
        f"tier {report.tier!r}: {result.objects} objects with {human_bytes(result.nbytes)} are sound, {damaged} damaged"
    )
    if result.deleted:
        text += f" ({result.deleted} deleted)"
    if unverified := len(result.bad) - damaged:
        text += f", {unverified} could not be verified"
    if result.vanished:
        text += f", {result.vanished} vanished meanwhile"
    if result.unauthenticated:
        text += f"; {result.unauthenticated} of them were not authenticated, since their keys are not here"
    return text
