"""Every configuration of storage that the engine is proved on, by name: one table.

A :class:`Storage` is one test's copy of such a configuration: its own folders, and its own bucket where it has one.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import fsspec

from tests.support.engine.lab import ours

TierKeys = dict[str, Any]

_MIB = 1024 * 1024
SMALL_BYTES = 8 * _MIB
"""The limit of the media that evict: a fraction of what the tests store."""


@dataclass(frozen=True)
class Place:
    """Where a configuration may put its tiers.

    Args:
        folder: empty; of one test.
        bucket: keys of a tier on a bucket of one test, or ``None`` where no server runs.
    """

    folder: Path
    bucket: TierKeys | None = None


@dataclass(frozen=True)
class Medium:
    """One row of the table.

    Args:
        tiers: makes the entries of ``backends`` for a place.
        lasts: a second process finds what a first one has stored.
        evicts: holds a fraction of what the tests store.
        needs_bucket: runs on an S3 server.
    """

    tiers: Callable[[Place], list[TierKeys]]
    lasts: bool = True
    evicts: bool = False
    needs_bucket: bool = False


def _cpu(place: Place, **keys: Any) -> TierKeys:
    return {"name": "ram", "type": "cpu", "capacity": "256MiB", **keys}


def _disk(place: Place, **keys: Any) -> TierKeys:
    return {"name": "disk", "type": "disk", "path": str(place.folder / "disk"), **keys}


def _nfs(place: Place, **keys: Any) -> TierKeys:
    return {"name": "shared", "type": "nfs", "url": (place.folder / "nfs").as_uri(), **keys}


def _s3(place: Place, **keys: Any) -> TierKeys:
    return {"name": "bucket", "type": "nfs", **(place.bucket or {}), **keys}


MEDIA: dict[str, Medium] = {
    "cpu": Medium(lambda place: [_cpu(place)], lasts=False),
    "cpu-evicting": Medium(lambda place: [_cpu(place, capacity=SMALL_BYTES)], lasts=False, evicts=True),
    "disk": Medium(lambda place: [_disk(place)]),
    "disk-evicting": Medium(lambda place: [_disk(place, capacity=SMALL_BYTES)], evicts=True),
    "disk-zstd": Medium(lambda place: [_disk(place, compression="zstd-planes")]),
    "nfs-file": Medium(lambda place: [_nfs(place)]),
    "nfs-s3": Medium(lambda place: [_s3(place)], needs_bucket=True),
    "stack": Medium(
        lambda place: [_cpu(place, load_weight=40), _disk(place, capacity="200MiB", load_weight=10), _nfs(place)]
    ),
    "stack-evicting": Medium(
        lambda place: [
            _cpu(place, capacity=SMALL_BYTES, load_weight=40),
            _disk(place, capacity=2 * SMALL_BYTES, load_weight=10),
            _nfs(place),
        ],
    ),
    "stack-s3": Medium(
        lambda place: [_cpu(place, load_weight=40), _disk(place, load_weight=10), _s3(place)], needs_bucket=True
    ),
}

ALL = tuple(MEDIA)
LASTING = tuple(name for name, medium in MEDIA.items() if medium.lasts)


class Storage:
    """One row of the table for one test."""

    def __init__(self, name: str, place: Place) -> None:
        self.medium = MEDIA[name]
        self.place = place
        self.tiers = self.medium.tiers(place)

    @property
    def names(self) -> list[str]:
        """The names of its tiers."""
        return [tier["name"] for tier in self.tiers]

    def transfer(self, **extra_config: Any) -> dict[str, Any]:
        """Our connector on these tiers, with every block that it is about to load filled with a pattern first."""
        return ours(self.place.folder / "unused", **{"backends": self.tiers, **extra_config})

    def config_file(self) -> Path:
        """Write the same configuration down for the command line."""
        path = self.place.folder / "offload.json"
        path.write_text(json.dumps({"backends": self.tiers}))
        return path

    def objects(self) -> Iterator[StoredFile]:
        """All objects of all tiers that can be reached from outside of the engine."""
        for tier in self.tiers:
            url = tier.get("url") or (Path(tier["path"]).as_uri() if "path" in tier else None)
            if url is not None:
                yield from _files_under(tier["name"], url, tier.get("storage_options", {}))


@dataclass(frozen=True)
class StoredFile:
    """One object as it lies on its medium."""

    tier: str
    files: Any
    path: str

    def read(self) -> bytes | None:
        """Return its content, or ``None`` when it is gone."""
        with suppress(FileNotFoundError):
            return bytes(self.files.cat_file(self.path))
        return None

    def write(self, content: bytes) -> None:
        """Put other content in its place."""
        self.files.pipe_file(self.path, content)

    def delete(self) -> None:
        """Remove it, as another host's eviction does; one that is gone already is no error."""
        with suppress(FileNotFoundError):
            self.files.rm_file(self.path)


def _files_under(tier: str, url: str, options: TierKeys) -> Iterator[StoredFile]:
    files, root = fsspec.url_to_fs(url, use_listings_cache=False, **options)
    with suppress(FileNotFoundError):
        for path in sorted(files.find(root)):
            if path.endswith(".kv"):
                yield StoredFile(tier, files, path)
