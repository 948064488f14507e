"""The options of the ``nfs`` type, and the kinds of storage that it supports."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import fsspec
from fsspec.implementations.local import LocalFileSystem
from pydantic import Field, field_validator, model_validator

from offload_core.api import BackendOptions, Bytes, Seconds, check_folder

StorageKind = Literal["share", "s3", "store", "renaming"]

KIND_OF_PROTOCOL: Mapping[str, StorageKind] = {
    "file": "share",
    "s3": "s3",
    "s3a": "s3",
    **dict.fromkeys(["gs", "gcs", "abfs", "az", "oci", "oss", "tos", "memory"], "store"),
    **dict.fromkeys(["sftp", "ssh", "smb"], "renaming"),
}
"""The kind of storage per protocol. ``s3`` and ``store`` have an atomic put; the others need a rename."""

_EXCLUSIVE_CREATE_PROTOCOLS = ("file", "s3", "s3a", "gs", "gcs", "abfs", "az", "memory")
"""Protocols whose fsspec file systems leave an exclusive creation to the storage, without a check of their own."""

MIN_PART_BYTES = 5 * 1024**2
"""The smallest part that S3 accepts, except for the last."""


class NfsOptions(BackendOptions):
    """Options of the ``nfs`` type."""

    credentials_cure: ClassVar[str] = (
        "credentials come from the environment (AWS_…, FSSPEC_S3_KEY, FSSPEC_S3_SECRET, …) or from fsspec's own "
        "configuration (~/.config/fsspec)"
    )

    url: str = Field(
        description="place of the objects: file:///mnt/kv for a mounted share, s3://bucket/prefix and the like for an "
        "object store"
    )
    storage_options: dict[str, Any] = Field(
        default_factory=dict,
        description="options for fsspec's file system, such as endpoint_url; no credentials",
    )
    lookup_cache_seconds: Seconds = Field(
        1.0,
        le=60,
        description="seconds for which the answer to a lookup is valid; stores and evictions by other processes become "
        "visible after this time; 0 asks the medium every time",
    )
    retry_seconds: Seconds = Field(
        5.0, le=600, description="seconds for which an operation is retried after a transient error; 0 for no retries"
    )
    part_size: Bytes = Field(
        32 * 1024**2,
        ge=MIN_PART_BYTES,
        description="s3: objects of at least twice this size are sent in parts of this size, several at once",
    )

    capacity: Annotated[
        Bytes | None,
        Field(
            gt=0,
            description="limit on all objects under the URL, by all engines on all hosts; none by default. "
            "Use the same value everywhere",
        ),
    ] = None
    high_watermark: float = Field(
        0.9, gt=0, le=1, description="part of the capacity above which the least recently used objects are evicted"
    )
    low_watermark: float = Field(
        0.8,
        gt=0,
        le=1,
        description="part of the capacity at which an eviction stops; at most high_watermark. Spare objects are stored "
        "only below it",
    )
    eviction_grace: Seconds = Field(
        60.0,
        le=3600,
        description="time between the selection of an object for eviction and its deletion, so that loads on other "
        "hosts can end; longer than a load may take",
    )
    lease_seconds: Seconds = Field(
        60.0,
        gt=0,
        le=3600,
        description="a process that has not renewed its lease on the capacity for this long is taken for dead",
    )

    @field_validator("url")
    @classmethod
    def _is_usable(cls, url: str) -> str:
        protocol, separator, path = url.partition("://")
        if not separator:
            raise ValueError(f"not a URL; write file://{Path(url).absolute()} for a folder, or s3://bucket/prefix")
        if protocol not in KIND_OF_PROTOCOL or "::" in url:
            raise ValueError(f"unknown protocol {protocol!r}; use one of {', '.join(KIND_OF_PROTOCOL)}")
        if KIND_OF_PROTOCOL[protocol] == "share":
            return f"file://{_checked_folder(url)}"
        if not path.strip("/"):
            missing = (
                "a bucket, such as s3://bucket/prefix" if KIND_OF_PROTOCOL[protocol] in ("s3", "store") else "a folder"
            )
            raise ValueError(f"names no bucket or folder; add {missing}")
        try:
            fsspec.get_filesystem_class(protocol)
        except ImportError as error:
            cure = "pip install 'offload-core[s3]'" if KIND_OF_PROTOCOL[protocol] == "s3" else str(error)
            raise ValueError(f"the package for {protocol}:// is not installed or does not load: {cure}") from error
        return url.rstrip("/")

    @model_validator(mode="after")
    def _supports_the_capacity(self) -> NfsOptions:
        if self.low_watermark > self.high_watermark:
            raise ValueError(
                f"low_watermark {self.low_watermark:g} is above high_watermark {self.high_watermark:g}; lower it"
            )
        protocol = self.url.partition("://")[0]
        if self.capacity is not None and protocol not in _EXCLUSIVE_CREATE_PROTOCOLS:
            raise ValueError(
                f"no capacity can be kept on {protocol}://, which cannot create a file only if it does not exist; "
                f"remove the capacity, or use one of {', '.join(_EXCLUSIVE_CREATE_PROTOCOLS)}"
            )
        return self

    @property
    def kind(self) -> StorageKind:
        """The kind of storage: it decides how a whole object gets its name."""
        return KIND_OF_PROTOCOL[self.url.partition("://")[0]]

    @property
    def folder(self) -> Path:
        """The local folder of a ``share``."""
        return Path(LocalFileSystem._strip_protocol(self.url))


def _checked_folder(url: str) -> Path:
    if not url.partition("://")[2].strip():
        raise ValueError(f"{url!r} names no folder; write its path, such as file:///mnt/kv")
    folder = Path(LocalFileSystem._strip_protocol(url))
    check_folder(folder, "mount the share that should be there")
    return folder
