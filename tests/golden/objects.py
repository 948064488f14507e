"""Fixed keys and payloads, and the objects, names and fingerprints that come of them."""

from __future__ import annotations

import hashlib
import re
import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import fsspec
import torch

from tests.golden import subject
from tests.golden.masks import DATA
from tests.golden.subject import ObjectKey

NAMESPACE = hashlib.sha256(b"golden").hexdigest()
KEY = ObjectKey(NAMESPACE, "full-u256", hashlib.sha256(b"chunk").digest())
_RANDOM = hashlib.shake_256(b"payload").digest(3002)
PAYLOAD = bytes(
    octet for low, high in zip(_RANDOM[0::2], _RANDOM[1::2], strict=True) for octet in (low, 0x3C + high % 4)
)[:-1]
"""16-bit numbers with few different high bytes, as a KV cache has them, and an odd number of bytes."""

KEYS = {
    "usual": KEY,
    "shortest hash": KEY._replace(chunk_hash=b"\x00"),
    "hash of 8 bytes": KEY._replace(chunk_hash=bytes.fromhex("ff00000000000001")),
    "longest hash": KEY._replace(chunk_hash=bytes(range(0x40, 0x80))),
    "hash with zeros at its end": KEY._replace(chunk_hash=bytes([7]) + bytes(31)),
    "shortest pack": KEY._replace(pack="a"),
    "longest pack": KEY._replace(pack="window-u256-w" + "1" * 51),
    "fingerprint of zeros": KEY._replace(namespace="0" * 64),
}


def golden_object(codec: str, version: int = subject.FORMAT_VERSION) -> Path:
    """Return the file that holds :data:`PAYLOAD` under :data:`KEY`."""
    return DATA / f"object-v{version}-{codec}.bin"


def writer(codec: str) -> Callable[[Path], bytes]:
    """Return the producer of an object's golden file."""
    return lambda folder: subject.written(codec, KEY, PAYLOAD)


def names_on_media(folder: Path) -> dict[str, Any]:
    """Return where each backend puts the objects of :data:`KEYS`, and what else it leaves there."""
    objects = {key: subject.sealed(key, b"payload") for key in KEYS.values()}
    share, bounded_share = folder / "share", folder / "bounded share"
    share.mkdir()
    bounded_share.mkdir()
    media: dict[str, dict[str, Any]] = {
        "disk": {"type": "disk", "path": str(folder / "disk")},
        "nfs on a share": {"type": "nfs", "url": f"file://{share}"},
        "nfs on an object store": {"type": "nfs", "url": "memory://bucket/golden"},
        "disk with a capacity": {"type": "disk", "path": str(folder / "bounded"), "capacity": "1MiB"},
        "nfs with a capacity": {"type": "nfs", "url": f"file://{bounded_share}", "capacity": "1MiB"},
    }
    for options in media.values():
        subject.store_on_backend({"backends": [{"name": "golden", **options}]}, objects)
    store = fsspec.filesystem("memory")
    found = {
        "disk": _files(folder / "disk"),
        "nfs on a share": _files(share),
        "nfs on an object store": [name.removeprefix("/bucket/golden/") for name in store.find("/bucket/golden")],
        "disk with a capacity": _files(folder / "bounded"),
        "nfs with a capacity": _files(bounded_share),
    }
    store.rm("/bucket", recursive=True)
    return {
        "keys": {
            name: {"path": key.path, "namespace": key.namespace, "pack": key.pack, "hash": key.chunk_hash.hex()}
            for name, key in KEYS.items()
        },
        "objects": {
            medium: {name: _object_of(key, names) for name, key in KEYS.items()} for medium, names in found.items()
        },
        "other files": {
            medium: sorted({_without_chance(name) for name in names if not name.endswith(".kv")})
            for medium, names in found.items()
        },
        "account on disk": _tables(folder / "bounded" / ".offload-core" / "account.sqlite"),
        "modes on disk": sorted(
            {
                f"{'folder' if path.is_dir() else 'file'} {path.stat().st_mode & 0o777:o}"
                for path in (folder / "disk" / NAMESPACE).rglob("*")
            }
        ),
    }


def _object_of(key: ObjectKey, names: list[str]) -> str:
    begin, end = f"{key.namespace}/{key.pack}/", f"/{key.chunk_hash.hex()}.kv"
    (name,) = (name for name in names if name.startswith(begin) and name.endswith(end))
    return name


def _without_chance(name: str) -> str:
    name = re.sub(r"(folder|uncounted)-([0-9a-f]{16}){1,2}", r"\1-<random>", name)
    return re.sub(r"\d{9,}", "<number>", name)


def _tables(database: Path) -> list[str]:
    with closing(sqlite3.connect(database)) as connection:
        return sorted(sql for (sql,) in connection.execute("SELECT sql FROM sqlite_master WHERE sql IS NOT NULL"))


def _files(folder: Path) -> list[str]:
    return [path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()]


IDENTITIES: dict[str, dict[str, subject.Json]] = {
    "nothing": {},
    "every kind of value": {
        "text": 'ünïcode \u2028 "quoted"',
        "numbers": [0, -1, 2**63, 0.1, 1e300],
        "others": {"none": None, "true": True, "false": False, "empty": [{}, [], ""]},
    },
    "as an engine's": {
        "format_version": 2,
        "engine": ["vllm", "0.32.0"],
        "model": {"load_format": "auto", "files": {"config.json": "xxh3:00", "model.safetensors": "blob:11"}},
        "dtype": "torch.bfloat16",
        "groups": [{"spec": {"kind": "FullAttentionSpec", "block_size": 16}, "layers": ["model.layers.0"]}],
        "parallel": [1, 1, 1, 1],
        "block_hash": ["sha256", None],
        "reset": "",
        "rank": 0,
        "layout": {"layers": [["cpu", None, "torch.int8", [2, 16], [16, 1]]]},
    },
}


def fingerprints(folder: Path) -> dict[str, Any]:
    """Return the fingerprints of fixed identities, and the identity of a fixed model folder."""
    blobs = folder / "blobs"
    blobs.mkdir()
    (blobs / "0123abcd").write_bytes(b"content-addressed weights")
    model = folder / "model"
    (model / "inner").mkdir(parents=True)
    (model / "config.json").write_text('{"layers": 2}')
    for suffix in ("safetensors", "bin", "pt", "pth", "gguf", "txt", "py"):
        (model / f"weights.{suffix}").write_bytes(b"weights" * 1000)
    (model / "linked.safetensors").symlink_to("../blobs/0123abcd")
    return {
        "fingerprints": {name: subject.fingerprint(identity) for name, identity in IDENTITIES.items()},
        "model": subject.model_identity(model),
    }


def chunk_keys(geometry: Path) -> Callable[[Path], dict[str, Any]]:
    """Return the producer of the objects of a prompt that is three boundaries long."""
    return lambda folder: _chunk_keys(geometry)


def _chunk_keys(geometry: Path) -> dict[str, Any]:
    """Return the prompt's objects, with fixed block hashes, and those that a load takes."""
    planner = subject.planned(geometry)
    tokens = planner.covered_tokens(3)
    block_hashes = [
        hashlib.sha256(b"block %d" % number).digest() for number in range(tokens // planner.hash_block_size)
    ]
    return {
        "hash_block_size": planner.hash_block_size,
        "hybrid_chunk_size": planner.hybrid_chunk_size,
        "boundary_tokens": planner.boundary_tokens,
        "scheduler_block_size": planner.scheduler_block_size,
        "group_hash_factors": {str(group): factor for group, factor in planner.group_hash_factors.items()},
        "groups_without_objects": [group.index for group in planner.groups_without_objects],
        "packs": {
            pack.name: {
                "objects": subject.object_names(pack, range(pack.units_in(tokens)), block_hashes, NAMESPACE),
                "loaded from the start": list(pack.needed_units(0, tokens)),
                "loaded from the first boundary": list(pack.needed_units(planner.boundary_tokens, tokens)),
                "blocks of the second object": {
                    str(group.index): [blocks.start, blocks.stop]
                    for group in pack.groups
                    for blocks in [pack.block_range(group, 1)]
                },
            }
            for pack in planner.packs
        },
    }


def payloads(folder: Path) -> dict[str, Any]:
    """Return what lies where in the payloads of fixed caches: byte ``0x..`` of layer, block and position."""

    def layer(number: int, width: int, padding: int = 0) -> subject.LayerPages:
        memory = torch.zeros(4, width + padding, dtype=torch.uint8)
        for block in range(4):
            memory[block] = torch.arange(width + padding) + (number << 6) + (block << 4)
        pages = memory.view(torch.int8)[:, :width]
        return subject.LayerPages(f"layer {number}", pages, 4, width + padding, width)

    def split(number: int, width: int) -> subject.LayerPages:
        values = torch.arange(2 * 4 * width, dtype=torch.uint8).view(torch.int8).reshape(2, 4, width)
        return subject.LayerPages(f"layer {number}", values, 4, 2 * width, 2 * width, block_dim=1)

    cases = {
        "two layers, two blocks": ([[layer(0, 3), layer(1, 2)]], [[0, 1]]),
        "blocks in another order, padded pages": ([[layer(0, 3, padding=2), layer(1, 2)]], [[2, 0, 3]]),
        "two groups with one and two blocks": ([[layer(0, 4)], [layer(1, 2), layer(2, 2)]], [[3], [1, 2]]),
        "keys apart from values": ([[split(0, 2)]], [[0, 3]]),
    }
    found: dict[str, Any] = {}
    for name, (groups, blocks) in cases.items():
        description, payload = subject.payload(groups, blocks)
        found[name] = {"description": description, "payload": payload.hex(" ")}
    return found
