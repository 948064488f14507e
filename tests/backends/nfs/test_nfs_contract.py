"""The nfs backend keeps the contract, on a share, on a store in memory, and on a server that speaks S3."""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import boto3
import fsspec
import pytest
from offload_backend_nfs.plugin import NFS
from offload_backend_nfs.storage import layout

from offload_core.api.keys import ObjectKey
from offload_core.testing.contract.suite import BackendContract
from offload_core.testing.rig.killed_process import hold_in_killed_process
from offload_core.testing.state_machine.machine import EXAMPLES
from tests.support import outages
from tests.support.s3_server import S3Server


def url_on_share(folder: Path) -> str:
    """Return the URL of a tier's folder. Its parent is on the share as well, so ``open`` fails without the share."""
    parent = folder / "share" / "kv"
    parent.mkdir(parents=True)
    return f"file://{parent}/objects"


def mount_point(options: Mapping[str, Any]) -> Path:
    """Return the place where the share is mounted."""
    return Path(options["url"].removeprefix("file://")).parents[1]


def bucket_of(options: Mapping[str, Any]) -> str:
    """Return the name of a tier's bucket."""
    bucket: str = options["url"].removeprefix("s3://").partition("/")[0]
    return bucket


class TestShare(BackendContract):
    backend_type = NFS
    machine_examples = 60  # the long tests run them all

    @pytest.fixture
    def options(self, tmp_path: Path) -> dict[str, Any]:
        return {"url": url_on_share(tmp_path)}

    def take_away(self, options: Mapping[str, Any]) -> None:
        outages.move_away(mount_point(options))

    def bring_back(self, options: Mapping[str, Any]) -> None:
        outages.bring_back(mount_point(options))

    def damage(self, options: Mapping[str, Any], key: ObjectKey) -> None:
        (path,) = Path(options["url"].removeprefix("file://")).rglob(f"{key.chunk_hash.hex()}.kv")
        with path.open("r+b") as file:
            file.truncate(500)


@pytest.mark.long
class TestShareAtLength(TestShare):
    machine_examples = EXAMPLES


@pytest.mark.long
class TestShareThatIsAlwaysAsked(TestShareAtLength):
    @pytest.fixture
    def options(self, tmp_path: Path) -> dict[str, Any]:
        return {"url": url_on_share(tmp_path), "lookup_cache_seconds": 0}


class TestShareWithALimit(TestShare):
    machine_examples = 10

    @pytest.fixture
    def options(self, memory_folder: Path) -> dict[str, Any]:
        return {"url": url_on_share(memory_folder), "capacity": "1GiB"}

    def take_away(self, options: Mapping[str, Any]) -> None:
        outages.leave_bare_mount_point(mount_point(options))


class TestShareThatEvictsAtOnce(TestShareWithALimit):
    """The clauses about the order of eviction are checked in full here; else the grace lasts longer than the tests."""

    machine_capacity_bytes = 1 << 30  # the machine does not know that a medium evicts in the background
    machine_examples = 1
    recovery_seconds = 20.0  # a lease runs out first

    def bounded_options(self, options: Mapping[str, Any], capacity_bytes: int) -> dict[str, Any]:
        return {**options, "capacity": capacity_bytes, "eviction_grace": 0, "lease_seconds": 3}

    def die_holding(self, options: Mapping[str, Any], keys: Sequence[ObjectKey], nbytes: Sequence[int]) -> None:
        hold_in_killed_process(NFS, options, keys, nbytes)


@pytest.mark.long
@pytest.mark.timeout(600)
class TestShareWithALimitAtLength(TestShareWithALimit):
    machine_examples = EXAMPLES


@pytest.mark.long
class TestMemory(BackendContract):
    backend_type = NFS
    largest_object_bytes = 4 * 1024 * 1024  # fsspec copies them while it holds the interpreter

    @pytest.fixture
    def options(self) -> dict[str, Any]:
        return {"url": f"memory://{uuid.uuid4().hex}"}

    def damage(self, options: Mapping[str, Any], key: ObjectKey) -> None:
        path = f"{options['url']}/{layout.name_of(key)}"
        fs = fsspec.filesystem("memory")
        fs.pipe_file(path, fs.cat_file(path)[:500])


@pytest.mark.long
@pytest.mark.timeout(600)
class TestS3(BackendContract):
    backend_type = NFS
    machine_examples = 30  # a second each

    @pytest.fixture
    def options(self, s3_options: dict[str, Any]) -> dict[str, Any]:
        return {**s3_options, "retry_seconds": 2}  # each call without a server takes so long

    @pytest.fixture(autouse=True)
    def _server(self, s3_server: S3Server) -> None:
        self.server = s3_server

    def take_away(self, options: Mapping[str, Any]) -> None:
        self.content = self.server.content(bucket_of(options))
        self.server.kill()

    def bring_back(self, options: Mapping[str, Any]) -> None:
        self.server.start()
        self.server.fill(self.server.make_bucket(bucket_of(options)), self.content)

    def damage(self, options: Mapping[str, Any], key: ObjectKey) -> None:
        bucket, _, prefix = options["url"].removeprefix("s3://").partition("/")
        client = boto3.client("s3", endpoint_url=options["storage_options"]["endpoint_url"])
        name = f"{prefix}/{layout.name_of(key)}"
        body = client.get_object(Bucket=bucket, Key=name)["Body"].read()
        client.put_object(Bucket=bucket, Key=name, Body=body[:500])


@pytest.mark.long
@pytest.mark.timeout(600)
class TestS3WithALimit(TestS3):
    machine_examples = 10
    test_seconds = 180.0  # hundreds of requests in turn, and a slow processor has other work

    @pytest.fixture
    def options(self, s3_options: dict[str, Any]) -> dict[str, Any]:
        return {**s3_options, "capacity": "1GiB", "retry_seconds": 2}
