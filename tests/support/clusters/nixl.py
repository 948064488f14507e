"""Media behind NIXL: a bucket of an S3-compatible server, and a folder."""

from __future__ import annotations

import importlib.util
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

from tests.support.s3_server import S3Server
from tests.support.server_process import LOOPBACK, ServerProcess


def why_not() -> str | None:
    """Return the reason that NIXL cannot be used here, or ``None``."""
    if importlib.util.find_spec("nixl_cu12") is None:
        return "NIXL is not installed: pip install 'offload-core[nixl]'"
    if not hasattr(os, "memfd_create"):
        return "NIXL's child process needs Linux"
    return None


class BucketLab:
    """A bucket of an S3-compatible server, which loses its objects when it is killed.

    Args:
        log: file that gets a line for each answered request.
        host: the server's address.
    """

    def __init__(self, log: Path | None = None, host: str = LOOPBACK) -> None:
        self._log = log
        self._host = host
        self.parts: dict[str, S3Server] = {}
        self.bucket = ""

    @property
    def server(self) -> S3Server:
        """The server."""
        return self.parts["server"]

    def start(self) -> None:
        """Start the server and make a bucket."""
        self.parts["server"] = S3Server(self._log, self._host)
        self.bucket = self.server.make_bucket()

    def stop(self) -> None:
        """End the server."""
        self.server.stop()

    def tier(self, **keys: Any) -> dict[str, Any]:
        """Return the keys of a tier in the bucket."""
        params = {"bucket": self.bucket, "endpoint_override": self.server.url}
        return {"type": "nixl", "plugin": "OBJ", "params": params, **keys}


class FolderLab:
    """A folder. It has no servers: the engine's own child process does everything."""

    def __init__(self) -> None:
        self.parts: dict[str, ServerProcess] = {}
        self._folder: tempfile.TemporaryDirectory[str] | None = None

    def start(self) -> None:
        """Make the folder."""
        self._folder = tempfile.TemporaryDirectory(prefix="offload-nixl-")

    def stop(self) -> None:
        """Remove the folder."""
        if self._folder is not None:
            self._folder.cleanup()

    def clear(self) -> None:
        """Remove all objects. The folder keeps its marker, so the tier goes on."""
        for path in Path(self.tier()["path"]).iterdir():
            if not path.name.startswith("."):
                shutil.rmtree(path)

    def tier(self, **keys: Any) -> dict[str, Any]:
        """Return the keys of a tier in the folder."""
        assert self._folder is not None, "it was not started"
        return {"type": "nixl", "plugin": "POSIX", "path": f"{self._folder.name}/objects", **keys}
