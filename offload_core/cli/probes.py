"""The objects that commands write to test a tier, and their removal."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from offload_core.api.backend import StoreOutcome
from offload_core.api.keys import ObjectKey
from offload_core.cli.output import note
from offload_core.cli.tier_client import OperationError, Stored, TierClient
from offload_core.objects import format as object_format

PROBE_NAMESPACE = "0" * 64
"""The namespace of probes. No engine has it, because an engine's namespace is a SHA-256 digest.

``prune`` and ``ls`` accept it as a fingerprint.
"""


PROBE_PAYLOAD_BYTES = 64 * 1024

_RETRY_SECONDS = 0.1


def probe_key(pack: str) -> ObjectKey:
    """Return a new random key."""
    return ObjectKey(PROBE_NAMESPACE, pack, secrets.token_bytes(32))


def sealed(key: ObjectKey, payload: bytes | memoryview) -> memoryview:
    """Return a whole object in memory of its own."""
    view = memoryview(bytearray(object_format.object_bytes(len(payload))))
    view[object_format.HEADER_BYTES :] = payload
    object_format.seal(view, key)
    return view


async def store_probe(tier: TierClient, key: ObjectKey, view: memoryview) -> Stored:
    """Store one object. A tier with a capacity counts as full until it has scanned its folder, so wait for that.

    The wait ends with the tier's deadline for a load of this size. There is none if the tier has no capacity, or one
    that is too small for the object.

    Raises:
        OperationError: the store failed, was late, or was rejected.
    """
    seconds = tier.tier.limits.load_seconds(len(view))
    end = time.monotonic() + seconds
    may_scan = (tier.capacity_bytes or 0) >= len(view)
    evicted = 0
    while True:
        stored = await tier.store([key], [view])
        evicted += stored.evicted
        (outcome,) = stored.outcomes
        if outcome is StoreOutcome.STORED:
            return Stored([outcome], evicted)
        if outcome is not StoreOutcome.REJECTED or not may_scan:
            raise OperationError(f"store: {outcome.value}; is there capacity for {len(view)} bytes?")
        if time.monotonic() >= end:
            raise OperationError(
                f"store: rejected for {seconds:g} s; a tier counts as full until a scan of its folder ends, "
                "or the capacity is too small"
            )
        await asyncio.sleep(_RETRY_SECONDS)


@asynccontextmanager
async def deleted_on_failure(tier: TierClient, keys: Sequence[ObjectKey], seconds: float) -> AsyncIterator[None]:
    """Delete ``keys`` if the block fails or is cancelled, after its late stores have ended.

    The wait and the deletion may take ``seconds`` each. The error, or a line on stderr, names the objects that may
    remain.
    """
    try:
        yield
    except BaseException as error:
        left = await _remove(tier, list(keys), seconds)
        if left and isinstance(error, OperationError):
            raise OperationError(f"{error}; {left}", late=error.late) from error
        if left:
            note(f"tier {tier.name!r}: {left}")
        raise


async def _remove(tier: TierClient, keys: Sequence[ObjectKey], seconds: float) -> str | None:
    """Delete ``keys``. Return a text about the objects that may remain, with the reason, or ``None``."""
    stores_ended = await tier.wait_for_late_calls("store", seconds)
    problem = "a store is still running"
    try:
        try:
            await tier.delete(keys, seconds)
        except OperationError as error:
            if not error.late:
                raise
            await tier.delete_on_new_threads(keys, seconds)
    except OperationError as error:
        stores_ended, problem = False, str(error)
    if stores_ended or not keys:
        return None
    names = keys[0].path if len(keys) == 1 else f"{len(keys)} objects under {keys[0].namespace}/{keys[0].pack}"
    return f"{names} may be left behind ({problem})"
