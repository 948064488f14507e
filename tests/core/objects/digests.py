"""Identities of folders with digests that are kept at once, and the bytes that it takes to compute them."""

from __future__ import annotations

import os
from pathlib import Path

from offload_core.objects.file_digests import FileDigests
from offload_core.objects.fingerprint import files_identity, fingerprint

MIB = 1024 * 1024
CACHE = "file-digests.json"


def write(path: Path, content: bytes) -> None:
    """Write a file whose change time is not a whole second, and later than before."""
    before = path.stat().st_ctime_ns if path.exists() else 0
    path.write_bytes(content)
    while (changed := path.stat().st_ctime_ns) == before or changed % 1_000_000_000 == 0:
        os.utime(path)


def identity(model: Path, cache: Path | None, settled_seconds: float = 0.0) -> str:
    """Return the fingerprint of a folder, as an engine that starts now computes it."""
    return fingerprint(files_identity(model, FileDigests(cache, settled_seconds)))
