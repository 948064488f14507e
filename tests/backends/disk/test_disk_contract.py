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


class TestDisk(BackendContract):
    backend_type = DISK
    machine_examples = 60  # the long tests run them all

    @pytest.fixture
    def options(self, tmp_path: Path) -> dict[str, Any]:
        return {"path": str(tmp_path / "objects")}

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
        return {"path": str(tmp_path / "objects"), "capacity": "1GiB"}

    def die_holding(self, options: Mapping[str, Any], keys: Sequence[ObjectKey], nbytes: Sequence[int]) -> None:
        hold_in_killed_process(DISK, options, keys, nbytes)


@pytest.mark.long
class TestDiskWithALimitAtLength(TestDiskWithALimit):
    machine_examples = EXAMPLES


@pytest.mark.long
class TestDiskPastThePageCache(TestDiskAtLength):
    @pytest.fixture
    def options(self, tmp_path: Path) -> dict[str, Any]:
        return {"path": str(tmp_path / "objects"), "direct_io": "on"}


@pytest.mark.long
class TestDiskPastThePageCacheWithALimit(TestDiskAtLength):
    @pytest.fixture
    def options(self, tmp_path: Path) -> dict[str, Any]:
        return {"path": str(tmp_path / "objects"), "direct_io": "on", "capacity": "1GiB"}
