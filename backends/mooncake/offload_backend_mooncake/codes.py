"""Mooncake's return codes: their kinds, and their words for messages."""

from __future__ import annotations

import errno

OK = 0
EXISTS = -705
TRANSFER_FAILED = -800
INVALID_PARAMETERS = -600
REQUEST_TIMED_OUT = -901

ABSENT = frozenset({-702, -703, -704, -710, -712})
"""The object does not exist, is not written to its end, or has no copy left."""

FULL = frozenset({-200, -1700, -1701})
"""There is no room now. Mooncake evicts in the background, so it may help to try again."""

BUSY = frozenset({-706, -708, -714})
"""The object is in use by a lookup or a copy."""

_WORDS = {
    -1: "internal error",
    -200: "no room on any segment owner",
    INVALID_PARAMETERS: "invalid parameters",
    -707: "the object's lease ended before the transfer: its owner hangs, or --default_kv_lease_ttl of "
    "mooncake_master is too short",
    -714: "the object is busy",
    TRANSFER_FAILED: "transfer failed; a segment owner is gone, hangs, or is not reachable from this host",
    -801: "Mooncake's own checksum differs",
    -900: "no connection to the master; see that mooncake_master runs",
    REQUEST_TIMED_OUT: "the master did not answer in time; see that mooncake_master runs",
    -1010: "the master is not in service yet",
}


def failure(place: str, action: str, code: int) -> OSError:
    """Return the error for a code.

    Args:
        place: the cluster.
        action: the work that failed, such as ``load objects``.
        code: Mooncake's return code.
    """
    number = errno.ETIMEDOUT if code == REQUEST_TIMED_OUT else errno.EIO
    return OSError(number, f"{place}: cannot {action}: {_WORDS.get(code, 'Mooncake failed')} (code {code})")
