"""Media behind NIXL: a bucket of an S3-compatible server, and a folder."""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys
import tempfile
import uuid
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from tests.support.server_process import ServerProcess, accepts, free_port

S3_CREDENTIALS = {
    "AWS_ACCESS_KEY_ID": "testing",
    "AWS_SECRET_ACCESS_KEY": "testing",
    "AWS_DEFAULT_REGION": "us-east-1",
    "AWS_CONFIG_FILE": os.devnull,
    "AWS_SHARED_CREDENTIALS_FILE": os.devnull,
}


def why_not() -> str | None:
    """Return the reason that NIXL cannot be used here, or ``None``."""
    if importlib.util.find_spec("nixl_cu12") is None:
        return "NIXL is not installed: pip install 'offload-core[nixl]'"
    if not hasattr(os, "memfd_create"):
        return "NIXL's child process needs Linux"
    return None


class BucketLab:
    """A bucket of a moto server in its own process. The server loses its objects when it is killed.

    Args:
        log: file that gets a line for each answered request.
    """

    environment: Mapping[str, str] = S3_CREDENTIALS
    """Environment variables that the engine needs."""

    def __init__(self, log: Path | None = None) -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.bucket = ""
        command = [sys.executable, "-m", "moto.server", "--host", "127.0.0.1", "--port", str(self.port)]
        self.parts = {"server": ServerProcess(command, lambda: accepts(self.port), log)}

    def start(self) -> None:
        """Start the server and make a bucket."""
        self.parts["server"].start()
        self.bucket = self.make_bucket()

    def stop(self) -> None:
        """End the server."""
        self.parts["server"].stop()

    def tier(self, **keys: Any) -> dict[str, Any]:
        """Return the keys of a tier in the bucket."""
        params = {"bucket": self.bucket, "endpoint_override": self.url}
        return {"type": "nixl", "plugin": "OBJ", "params": params, **keys}

    def client(self) -> Any:
        """Return a client of the server."""
        import boto3
        from botocore.config import Config

        return boto3.client(
            "s3",
            endpoint_url=self.url,
            aws_access_key_id="testing",
            aws_secret_access_key="testing",
            region_name="us-east-1",
            config=Config(retries={"total_max_attempts": 3}),
        )

    def make_bucket(self, name: str | None = None) -> str:
        """Make a bucket and return its name."""
        name = name or f"kv-{uuid.uuid4().hex[:12]}"
        self.client().create_bucket(Bucket=name)
        return name


class FolderLab:
    """A folder. It has no servers: the engine's own child process does everything."""

    environment: Mapping[str, str] = MappingProxyType({})
    """Environment variables that the engine needs."""

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
