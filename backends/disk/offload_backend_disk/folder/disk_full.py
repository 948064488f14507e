"""A full disk or quota."""

from __future__ import annotations

import errno

DISK_FULL_ERRNOS = frozenset({errno.ENOSPC, errno.EDQUOT})
"""Errors that mean a full disk or quota, and nothing worse."""
