"""The disk backend keeps the contract."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from offload_backend_disk.plugin import DISK

from offload_core.api.keys import ObjectKey
from offload_core.testing.contract.suite import BackendContract
from offload_core.testing.rig.killed_process import hold_in_killed_process
from offload_core.testing.state_machine.machine import EXAMPLES
from tests.support import outages


def folder_on_disk(tmp_path: Path) -> Path:
    """Return a tier's folder. Its parent is on the disk as well, so ``open`` fails without the disk."""
    parent = tmp_path / "disk" / "kv"
    parent.mkdir(parents=True)
    return parent / "objects"


class TestDisk(BackendContract):
    backend_type = DISK
    machine_examples = 60  # the long tests run them all

    @pytest.fixture
    def options(self, tmp_path: Path) -> dict[str, Any]:
        return {"path": str(folder_on_disk(tmp_path))}

    @pytest.fixture(autouse=True)
    def _mount_point(self, tmp_path: Path) -> None:
        self.mount_point = tmp_path / "disk"

    def take_away(self, options: Mapping[str, Any]) -> None:
        outages.move_away(self.mount_point)

    def bring_back(self, options: Mapping[str, Any]) -> None:
        outages.bring_back(self.mount_point)

    def damage(self, options: Mapping[str, Any], key: ObjectKey) -> None:
        (path,) = Path(options["path"]).rglob(f"{key.chunk_hash.hex()}.kv")
        with path.open("r+b") as file:
            file.truncate(500)


@pytest.mark.long
class TestDiskAtLength(TestDisk):
    machine_examples = EXAMPLES


class TestDiskWithALimit(TestDisk):
    @pytest.fixture
    def options(self, tmp_path: Path) -> dict[str, Any]:
        return {"path": str(folder_on_disk(tmp_path)), "capacity": "1GiB"}

    def take_away(self, options: Mapping[str, Any]) -> None:
        outages.leave_bare_mount_point(self.mount_point)

    def die_holding(self, options: Mapping[str, Any], keys: Sequence[ObjectKey], nbytes: Sequence[int]) -> None:
        hold_in_killed_process(DISK, options, keys, nbytes)


@pytest.mark.long
class TestDiskWithALimitAtLength(TestDiskWithALimit):
    machine_examples = EXAMPLES


@pytest.mark.long
class TestDiskPastThePageCache(TestDiskAtLength):
    @pytest.fixture
    def options(self, tmp_path: Path) -> dict[str, Any]:
        return {"path": str(folder_on_disk(tmp_path)), "direct_io": "on"}


@pytest.mark.long
class TestDiskPastThePageCacheWithALimit(TestDiskAtLength):
    @pytest.fixture
    def options(self, tmp_path: Path) -> dict[str, Any]:
        return {"path": str(folder_on_disk(tmp_path)), "direct_io": "on", "capacity": "1GiB"}
