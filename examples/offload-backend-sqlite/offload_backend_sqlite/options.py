"""The options of the ``sqlite`` type."""

from __future__ import annotations

from pathlib import Path

from pydantic import Field, field_validator

from offload_core.api import BackendOptions, Bytes, Seconds


class SqliteOptions(BackendOptions):
    """Options of the ``sqlite`` type."""

    path: Path = Field(description="database file, on a local file system; created when its folder exists")
    capacity: Bytes = Field(
        gt=0, description="limit on the bytes of all objects; the least recently used are evicted first"
    )
    busy_timeout_seconds: Seconds = Field(
        5.0, gt=0, description="longest wait of a call for another process that is writing"
    )

    @field_validator("path")
    @classmethod
    def _folder_exists(cls, path: Path) -> Path:
        path = path.expanduser().absolute()
        if not path.parent.is_dir():
            raise ValueError(f"the folder {path.parent} does not exist; create it, or mount the disk that has it")
        if path.is_dir():
            raise ValueError(f"{path} is a folder; name a file in it, for example {path / 'kv-cache.sqlite'}")
        return path
