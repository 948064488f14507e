"""Objects that commands write to try a tier out, and how they are got rid of."""

from __future__ import annotations

import secrets
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from offload_core.api.keys import ObjectKey
from offload_core.cli.output import note
from offload_core.cli.watched_tier import OperationError, WatchedTier
from offload_core.objects import format as object_format

PROBE_NAMESPACE = "0" * 64
"""An engine's namespace is a SHA-256 digest, which is never this. ``prune`` and ``ls`` take it as a fingerprint."""


def probe_key(pack: str) -> ObjectKey:
    """Return a key that nobody else has."""
    return ObjectKey(PROBE_NAMESPACE, pack, secrets.token_bytes(32))


def sealed(key: ObjectKey, payload: bytes | memoryview) -> memoryview:
    """Return a whole object in memory of its own."""
    view = memoryview(bytearray(object_format.object_bytes(len(payload))))
    view[object_format.HEADER_BYTES :] = payload
    object_format.seal(view, key)
    return view


@asynccontextmanager
async def removed_on_failure(tier: WatchedTier, keys: Sequence[ObjectKey], seconds: float) -> AsyncIterator[None]:
    """Delete ``keys`` when the block fails or is cancelled, after the stores that it gave up have ended.

    Waiting and deleting may each take ``seconds``. What may be left is said, in the error or on stderr.
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


async def _remove(tier: WatchedTier, keys: Sequence[ObjectKey], seconds: float) -> str | None:
    """Return what may be left, and why, or ``None``."""
    settled = await tier.settle("store", seconds)
    problem = "a store is still running"
    try:
        try:
            await tier.delete(keys, seconds)
        except OperationError as error:
            if not error.late:
                raise
            await tier.delete_on_new_threads(keys, seconds)
    except OperationError as error:
        settled, problem = False, str(error)
    if settled or not keys:
        return None
    names = keys[0].path if len(keys) == 1 else f"{len(keys)} objects under {keys[0].namespace}/{keys[0].pack}"
    return f"{names} may be left behind ({problem})"
