"""The nixl backend keeps the contract, on files and on a server that speaks S3."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from offload_backend_nixl.backend import NixlBackend
from offload_backend_nixl.naming import name_of
from offload_backend_nixl.plugin import NIXL

from offload_core.api import LoadCheck, LoadOutcome, ObjectKey, SharedMemory, StoreOutcome, StoreSeal
from offload_core.memory.staging_pool import StagingPool
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


class InPlace(NixlBackend):
    """A backend whose callers have their buffers in shared memory, as an engine with an I/O process does."""

    _memory: SharedMemory | None = None

    def _open(self) -> None:
        self._memory = memory = SharedMemory.create("in place", 48 * 1024**2)
        self._pool = StagingPool(memory.nbytes, 1.0, arena=memory.view)
        super()._open()

    async def close(self) -> None:
        await super().close()
        if self._memory is not None:
            await self.run_blocking(self._memory.close)

    def _load(
        self, keys: Sequence[ObjectKey], buffers: Sequence[memoryview], checks: Sequence[LoadCheck] = ()
    ) -> list[LoadOutcome]:
        with self._shared(buffers) as parts:
            copied = [_CopiedCheck(*one) for one in zip(checks, parts, buffers, strict=True)] if checks else ()
            outcomes = super()._load(keys, parts, copied)
            for part, buffer in zip(parts, buffers, strict=True):
                buffer[:] = part
        return outcomes

    def _store(
        self, keys: Sequence[ObjectKey], buffers: Sequence[memoryview], seals: Sequence[StoreSeal] = ()
    ) -> list[StoreOutcome]:
        for seal in seals:
            seal.seal()
        with self._shared(buffers) as parts:
            return super()._store(keys, parts)

    @contextmanager
    def _shared(self, buffers: Sequence[memoryview]) -> Iterator[list[memoryview]]:
        """Copy buffers to shared memory. Without room for them, and for empty ones, they stay as they are."""
        sizes = [max(len(buffer), 1) for buffer in buffers]
        leases = self._pool.try_acquire_all(sizes)
        if leases is None:
            yield list(buffers)
            return
        parts = [lease.view[: len(buffer)] for lease, buffer in zip(leases, buffers, strict=True)]
        for part, buffer in zip(parts, buffers, strict=True):
            part[:] = buffer
        try:
            yield parts
        finally:
            for lease in leases:
                lease.release()


class _CopiedCheck(LoadCheck):
    """Copies what has arrived to the buffer that the check reads."""

    def __init__(self, check: LoadCheck, part: memoryview, buffer: memoryview) -> None:
        self._check = check
        self._part = part
        self._buffer = buffer
        self._checked_bytes = 0

    def filled(self, nbytes: int) -> bool:
        end = self._checked_bytes + nbytes
        self._buffer[self._checked_bytes : end] = self._part[self._checked_bytes : end]
        self._checked_bytes = end
        return self._check.filled(nbytes)

    @property
    def hash_start(self) -> int | None:
        return self._check.hash_start

    def hashed(self, digest: bytes) -> bool:
        self._buffer[:] = self._part
        return self._check.hashed(digest)


@pytest.mark.long
@pytest.mark.timeout(1200)
class TestFolderInPlace(TestFolder):
    backend_type = replace(NIXL, backend=InPlace)
    machine_examples = 30


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
