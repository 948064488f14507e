"""The nixl backend keeps the contract, on files and on a server that speaks S3."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from offload_backend_nixl.naming import name_of
from offload_backend_nixl.plugin import NIXL

from offload_core.api.keys import ObjectKey
from offload_core.testing.contract.suite import BackendContract
from offload_core.testing.state_machine.machine import EXAMPLES
from tests.support import outages
from tests.support.clusters.nixl import BucketLab


class TestFolder(BackendContract):
    backend_type = NIXL
    machine_examples = 2  # each opens several children; the long tests run them all

    @pytest.fixture
    def options(self, tmp_path: Path) -> dict[str, Any]:
        (tmp_path / "disk" / "kv").mkdir(parents=True)
        return {"plugin": "POSIX", "path": str(tmp_path / "disk" / "kv" / "objects")}

    @pytest.fixture(autouse=True)
    def _mount_point(self, tmp_path: Path) -> None:
        self.mount_point = tmp_path / "disk"

    def take_away(self, options: Mapping[str, Any]) -> None:
        outages.leave_bare_mount_point(self.mount_point)

    def bring_back(self, options: Mapping[str, Any]) -> None:
        outages.bring_back(self.mount_point)

    def damage(self, options: Mapping[str, Any], key: ObjectKey) -> None:
        with Path(options["path"], name_of(key)).open("r+b") as file:
            file.truncate(500)


@pytest.mark.long
@pytest.mark.timeout(1200)
class TestFolderAtLength(TestFolder):
    machine_examples = EXAMPLES


@pytest.mark.long
@pytest.mark.timeout(600)
class TestFolderByUring(TestFolder):
    machine_examples = 30

    @pytest.fixture
    def options(self, tmp_path: Path) -> dict[str, Any]:
        (tmp_path / "disk" / "kv").mkdir(parents=True)
        return {"plugin": "POSIX", "path": str(tmp_path / "disk" / "kv" / "objects"), "params": {"use_uring": True}}


@pytest.mark.long
@pytest.mark.timeout(1200)
class TestBucket(BackendContract):
    backend_type = NIXL
    machine_examples = 30  # seconds each
    largest_object_bytes = 8 * 1024**2  # the server takes seconds for larger ones

    @pytest.fixture
    def options(self, bucket_options: dict[str, Any]) -> dict[str, Any]:
        return bucket_options

    @pytest.fixture(autouse=True)
    def _lab(self, bucket_lab: BucketLab) -> None:
        self.lab = bucket_lab

    def damage(self, options: Mapping[str, Any], key: ObjectKey) -> None:
        client, bucket = self.lab.server.client(), options["params"]["bucket"]
        name = f"{options['prefix']}/{name_of(key)}"
        body = client.get_object(Bucket=bucket, Key=name)["Body"].read()
        client.put_object(Bucket=bucket, Key=name, Body=body[:500])
