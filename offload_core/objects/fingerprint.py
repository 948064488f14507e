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

import xxhash

Json: TypeAlias = "bool | int | float | str | list[Json] | dict[str, Json] | None"

_READ_BYTES = 16 * 1024 * 1024
_CONFIG_SUFFIXES = (".json",)
_WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".gguf")


def fingerprint(identity: Mapping[str, Json]) -> str:
    """Return the hex SHA-256 (64 characters) of ``identity`` as canonical JSON.

    Raises:
        TypeError: a value is not JSON. There is no fallback to ``str(object)``, which may contain an address.
    """
    text = json.dumps(identity, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()


def weights_identity(folder: Path) -> dict[str, Json]:
    """Identify the model in ``folder`` by its content: a copy is the same model, an edited copy is another.

    Usually a file is hashed whole with XXH3-128. This runs at the speed of the page cache, which the engine has just
    filled. A weight file that links into a hub cache's ``blobs`` folder is identified by its blob, whose name is a
    hash.

    Returns:
        ``{relative file name: digest}`` for all configuration and weight files directly in ``folder``.
    """
    identity: dict[str, Json] = {}
    for path in sorted(folder.iterdir()):
        if not path.is_file() or path.suffix not in _CONFIG_SUFFIXES + _WEIGHT_SUFFIXES:
            continue
        target = path.resolve()
        if path.is_symlink() and target.parent.name == "blobs" and path.suffix in _WEIGHT_SUFFIXES:
            identity[path.name] = f"blob:{target.name}"
        else:
            identity[path.name] = f"xxh3:{_file_digest(path)}"
    return identity


def _file_digest(path: Path) -> str:
    digest = xxhash.xxh3_128()
    with path.open("rb") as file:
        while block := file.read(_READ_BYTES):
            digest.update(block)
    return digest.hexdigest()
