"""The identity of all inputs that decide the meaning of a KV cache's bytes.

Two configurations that could differ in bytes must not share a key (invariant I7). The inputs are: model and weights,
dtype, layout, group geometry, parallel sizes and rank, block hash algorithm and seed, and the object format version.
The identity of a request is part of the engine's block hashes.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import TypeAlias

from offload_core.objects.file_digests import FileDigests
from offload_core.objects.model_files import model_files

Json: TypeAlias = "bool | int | float | str | list[Json] | dict[str, Json] | None"


def fingerprint(identity: Mapping[str, Json]) -> str:
    """Return the hex SHA-256 (64 characters) of ``identity`` as canonical JSON.

    Raises:
        TypeError: a value is not JSON. There is no fallback to ``str(object)``, which may contain an address.
    """
    text = json.dumps(identity, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()


def files_identity(folder: Path, digests: FileDigests) -> dict[str, Json]:
    """Identify the model in ``folder`` by its content: a copy is the same model, an edited copy is another.

    Returns:
        ``{name relative to the folder: digest}`` for all files that can decide the bytes of a KV cache.

    Raises:
        OSError: a file or folder cannot be read; the message names it.
    """
    found = model_files(folder)
    by_path = digests.of(found.files.values())
    return {**{name: by_path[path] for name, path in found.files.items()}, **found.others}
