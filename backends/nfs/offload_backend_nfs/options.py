"""The options of the ``nfs`` type, and which kinds of storage it takes."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

import fsspec
from fsspec.implementations.local import LocalFileSystem
from pydantic import Field, field_validator, model_validator

from offload_core.api import BackendOptions, Bytes, Seconds, check_folder

Kind = Literal["share", "s3", "store", "renaming"]

KINDS: Mapping[str, Kind] = {
    "file": "share",
    "s3": "s3",
    "s3a": "s3",
    **dict.fromkeys(["gs", "gcs", "abfs", "az", "oci", "oss", "tos", "memory"], "store"),
    **dict.fromkeys(["sftp", "ssh", "smb"], "renaming"),
}
"""Per protocol, how an object gets there whole: a ``store`` has an atomic put, the others rename."""

_CREATES_EXCLUSIVELY = ("file", "s3", "s3a", "gs", "gcs", "abfs", "az", "memory")
"""Protocols whose fsspec file systems pass an exclusive create on to the storage, and do not look first."""

_CREDENTIAL = re.compile(
    r"(^|_)(key|secret|token|pass|password|passwd|passphrase|credentials?|auth|signature|connection_string|sas)$"
    r"|access_key_id$"
)
_CREDENTIALS_CURE = (
    "credentials come from the environment (AWS_…, FSSPEC_S3_KEY, FSSPEC_S3_SECRET, …) or from fsspec's own "
    "configuration (~/.config/fsspec), not from this one, which vLLM logs"
)
MIN_PART_BYTES = 5 * 1024**2
"""What S3 wants of every part but the last."""


class NfsOptions(BackendOptions):
    """Options of the ``nfs`` type."""

    url: str = Field(
        description="where the objects lie: file:///mnt/kv for a mounted share, s3://bucket/prefix and the like for an "
        "object store"
    )
    storage_options: dict[str, Any] = Field(
        default_factory=dict,
        description="handed to fsspec's file system for the URL, such as endpoint_url; no credentials",
    )
    lookup_cache_seconds: Seconds = Field(
        1.0,
        le=60,
        description="for how long a lookup's answer is good, so how late stores and evictions by other processes are "
        "seen; 0 asks the medium every time",
    )
    retry_seconds: Seconds = Field(
        5.0, le=600, description="for how long an operation that fails for a passing reason is tried again; 0 for never"
    )
    part_size: Bytes = Field(
        32 * 1024**2,
        ge=MIN_PART_BYTES,
        description="s3: objects of at least twice this size are sent in parts of it, several at once",
    )

    capacity: Annotated[
        Bytes | None,
        Field(
            gt=0,
            description="limit on all objects under the URL, whichever engine on whichever host stored them; none by "
            "default. Give it the same value everywhere",
        ),
    ] = None
    high_watermark: float = Field(
        0.9, gt=0, le=1, description="part of the capacity above which the objects used longest ago are evicted"
    )
    low_watermark: float = Field(
        0.8, gt=0, le=1, description="part of the capacity that an eviction leaves; no more than high_watermark"
    )
    eviction_grace: Seconds = Field(
        60.0,
        le=3600,
        description="how long an object stays after it was chosen for eviction, so that other hosts' loads can end; "
        "longer than a load may take",
    )
    lease_seconds: Seconds = Field(
        60.0,
        gt=0,
        le=3600,
        description="a process that has not renewed its lease on the capacity for so long is taken for dead",
    )

    @model_validator(mode="before")
    @classmethod
    def _no_credentials(cls, given: Any) -> Any:
        """Refuse credentials before anything else is checked, since other messages show the value."""
        if isinstance(given, Mapping):
            places = list(_credentials(given.get("storage_options"), "storage_options"))
            if isinstance(given.get("url"), str) and _has_password(given["url"]):
                places.append("url")
            if places:
                raise ValueError(f"{', '.join(places)}: holds a credential; remove it: {_CREDENTIALS_CURE}")
        return given

    @field_validator("url")
    @classmethod
    def _is_usable(cls, url: str) -> str:
        protocol, separator, path = url.partition("://")
        if not separator:
            raise ValueError(f"not a URL; write file://{Path(url).absolute()} for a folder, or s3://bucket/prefix")
        if protocol not in KINDS or "::" in url:
            raise ValueError(f"unknown protocol {protocol!r}; known are {', '.join(KINDS)}")
        if KINDS[protocol] == "share":
            return f"file://{_checked_folder(url)}"
        if not path.strip("/"):
            what = "a bucket, such as s3://bucket/prefix" if KINDS[protocol] in ("s3", "store") else "a folder"
            raise ValueError(f"names no place; add {what}")
        try:
            fsspec.get_filesystem_class(protocol)
        except ImportError as error:
            cure = "pip install 'offload-core[s3]'" if KINDS[protocol] == "s3" else str(error)
            raise ValueError(f"the package for {protocol}:// is not installed or does not load: {cure}") from error
        return url.rstrip("/")

    @model_validator(mode="after")
    def _can_be_bounded(self) -> NfsOptions:
        if self.low_watermark > self.high_watermark:
            raise ValueError(
                f"low_watermark {self.low_watermark:g} is above high_watermark {self.high_watermark:g}; lower it"
            )
        protocol = self.url.partition("://")[0]
        if self.capacity is not None and protocol not in _CREATES_EXCLUSIVELY:
            raise ValueError(
                f"no capacity can be kept on {protocol}://, where a file cannot be created only if there is none; "
                f"leave it out, or use one of {', '.join(_CREATES_EXCLUSIVELY)}"
            )
        return self

    @property
    def kind(self) -> Kind:
        """How objects get there whole."""
        return KINDS[self.url.partition("://")[0]]

    @property
    def folder(self) -> Path:
        """The local folder of a ``share``."""
        return Path(LocalFileSystem._strip_protocol(self.url))


def _checked_folder(url: str) -> Path:
    folder = Path(LocalFileSystem._strip_protocol(url))
    check_folder(folder, "mount the share that should be there")
    return folder


def _credentials(value: Any, place: str) -> Iterator[str]:
    """Yield the dotted places under ``value`` that hold credentials."""
    if isinstance(value, Mapping):
        for key, inner in value.items():
            words = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", str(key)).lower()
            if _CREDENTIAL.search(words) and inner not in (None, ""):
                yield f"{place}.{key}"
            else:
                yield from _credentials(inner, f"{place}.{key}")
    elif isinstance(value, list | tuple):
        for index, inner in enumerate(value):
            yield from _credentials(inner, f"{place}.{index}")
    elif isinstance(value, str) and "://" in value and _has_password(value):
        yield place


def _has_password(url: str) -> bool:
    try:
        return urlsplit(url).password is not None
    except ValueError:
        return "@" in url  # not a URL that can be read; rather not shown
