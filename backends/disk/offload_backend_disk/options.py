"""The options of the ``disk`` type."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from pydantic import Field, ValidationInfo, field_validator

from offload_backend_disk.capacity.eviction import Policy
from offload_backend_disk.folder.direct_io import DirectIo
from offload_backend_disk.folder.files import Fsync
from offload_core.api import BackendOptions, Bytes, Folder, check_folder


class DiskOptions(BackendOptions):
    """Options of the ``disk`` type."""

    path: Folder = Field(description="folder for the objects; created when its parent exists")
    capacity: Annotated[
        Bytes | None,
        Field(gt=0, description="limit on all objects in the folder, shared by all its processes; none by default"),
    ] = None
    high_watermark: Annotated[
        float, Field(gt=0, le=1, description="an eviction begins when a store would exceed this part of the capacity")
    ] = 1.0
    low_watermark: Annotated[
        float,
        Field(
            gt=0,
            le=1,
            validate_default=True,
            description="an eviction continues until at most this part of the capacity is used; spare objects are "
            "stored only below it",
        ),
    ] = 0.95
    keep_free: Annotated[
        Bytes,
        Field(
            description="bytes that stores leave free on the file system; with a capacity, objects are evicted for "
            "that, and a store is rejected only if this is not enough; without one, it is rejected at once"
        ),
    ] = 0
    eviction: Annotated[
        Policy,
        Field(
            description="order of eviction: lru, the least recently used object first; slru, objects that were never "
            "used since their store first, then the least recently used ones"
        ),
    ] = "lru"
    fsync: Annotated[
        Fsync,
        Field(
            description="data forced to the disk before an object counts as stored: none; data, its file; data and "
            "folder, its file and its folder entry"
        ),
    ] = "none"
    direct_io: Annotated[
        DirectIo,
        Field(
            description="read and write past the page cache (O_DIRECT): off; on; auto, on if the folder's file system "
            "supports it"
        ),
    ] = "off"

    @field_validator("path")
    @classmethod
    def _parent_exists(cls, path: Path) -> Path:
        check_folder(path, "create it, or mount the disk that should be there")
        return path

    @field_validator("low_watermark")
    @classmethod
    def _is_not_above_the_high_watermark(cls, low: float, info: ValidationInfo) -> float:
        high = info.data.get("high_watermark", 1.0)
        if low > high:
            raise ValueError(
                f"low_watermark ({low}) is above high_watermark ({high}); an eviction begins at the high one and ends "
                f"at the low one, so give a low_watermark of at most {high}"
            )
        return low
