"""The objects that commands write to test a tier, and their removal."""

from __future__ import annotations

import secrets
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from offload_core.api.keys import ObjectKey
from offload_core.cli.output import note
from offload_core.cli.tier_client import OperationError, TierClient
from offload_core.objects import format as object_format

PROBE_NAMESPACE = "0" * 64
"""The namespace of probes. No engine has it, because an engine's namespace is a SHA-256 digest.

``prune`` and ``ls`` accept it as a fingerprint.
"""


def probe_key(pack: str) -> ObjectKey:
    """Return a new random key."""
    return ObjectKey(PROBE_NAMESPACE, pack, secrets.token_bytes(32))


def sealed(key: ObjectKey, payload: bytes | memoryview) -> memoryview:
    """Return a whole object in memory of its own."""
    view = memoryview(bytearray(object_format.object_bytes(len(payload))))
    view[object_format.HEADER_BYTES :] = payload
    object_format.seal(view, key)
    return view


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
