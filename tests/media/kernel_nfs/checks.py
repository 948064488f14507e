"""A tier on a hard mount of a kernel's NFS server that hangs. Run by ``test_guest.py`` on a machine of their own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from offload_core.config.loading import load_config
from offload_core.config.model import TierConfig
from offload_core.runtime.io_loop import IoLoop
from tests.media.fuse.rig_steps import (
    KEYS,
    STORE_DEADLINE_SECONDS,
    cache_untouched,
    fill,
    in_time,
    is_well,
    keeps_serving,
    load_four,
    short_load_deadline,
)
from tests.media.fuse.worker import EXIT_SECONDS, Worker
from tests.media.kernel_nfs.server import KernelNfs
from tests.support.polling import wait_until
from tests.support.transfer_rig import Rig, disk_tier, item

Hang = Callable[[], None]


@pytest.fixture(scope="session")
def nfs() -> KernelNfs:
    return KernelNfs()


@pytest.fixture(params=["3", "4.2"])
def folder(nfs: KernelNfs, request: pytest.FixtureRequest) -> Iterator[Path]:
    """An empty folder on the mount, by a version of the protocol."""
    yield nfs.mount(request.param)
    nfs.recover()
    nfs.unmount()


@pytest.fixture(params=["disk", "network"])
def hang(nfs: KernelNfs, request: pytest.FixtureRequest) -> Hang:
    """What makes the server hang."""
    return {"disk": nfs.hang_disk, "network": nfs.cut_network}[request.param]


@pytest.fixture
def rig(io: IoLoop, nfs: KernelNfs) -> Iterator[Rig]:
    made = Rig(io)
    yield made
    nfs.recover()
    made.finish()


def _settings(folder: Path, **keys: Any) -> dict[str, Any]:
    place = {"type": "nfs", "url": (folder / "kv").as_uri(), "lookup_cache_seconds": 0, "retry_seconds": 0}
    return {"backends": [{"name": "files", **place, **keys}]}


def _tier(folder: Path, **keys: Any) -> TierConfig:
    (tier,) = load_config(_settings(folder, **keys)).tiers
    return tier


def test_i3_load_that_hangs_ends_at_its_deadline_and_its_buffers_when_the_call_does(
    rig: Rig, nfs: KernelNfs, folder: Path, hang: Hang
) -> None:
    rig.add_tier(_tier(folder))
    fill(rig)
    with cache_untouched(rig):
        hang()
        with in_time(), short_load_deadline(rig):
            result = load_four(rig)
        assert (result.status, result.failed_keys) == ("timed out", KEYS)
        assert rig.counted("load_timeouts", "files") == 1
        assert rig.staging.used_bytes > 0, "timed out is not ended: the kernel may still write into the buffers"
    rig.kv_cache[8:12].random_()  # the blocks belong to other requests by now
    with cache_untouched(rig):
        nfs.recover()
        rig.all_leases_are_back()
        assert rig.engine.poll() == []
    assert rig.counted("load_late", "files") > 0
    is_well(rig)


def test_i3_store_that_hangs_ends_at_its_deadline_and_its_buffers_when_the_call_does(
    rig: Rig, nfs: KernelNfs, folder: Path, hang: Hang
) -> None:
    rig.add_tier(_tier(folder, store_timeout_seconds=STORE_DEADLINE_SECONDS))
    rig.start()
    hang()
    told: dict[int, bool] = {}
    with in_time():
        rig.engine.submit_stores([item(60, block=5)])
        rig.step_until(lambda: bool(told.update(rig.store_results()) or told))
    assert told == {60: False}
    assert rig.staging.used_bytes > 0, "the kernel may still read from the buffer"
    nfs.recover()
    rig.all_leases_are_back()
    assert rig.store_results() == {}, "each object has one result"
    assert rig.counted("store_late", "files") == 1


def test_i4_a_healthy_tier_serves_while_the_share_hangs(
    rig: Rig, nfs: KernelNfs, folder: Path, hang: Hang, tmp_path: Path
) -> None:
    rig.add_tier(_tier(folder))
    rig.add_tier(disk_tier("healthy", str(tmp_path / "healthy")))
    fill(rig)
    hang()
    with short_load_deadline(rig):
        assert load_four(rig).status == "timed out"
    keeps_serving(rig, "healthy")
    nfs.recover()
    is_well(rig)


def test_process_whose_threads_hang_in_the_share_is_gone_in_time(
    nfs: KernelNfs, folder: Path, hang: Hang, tmp_path: Path
) -> None:
    worker = Worker(_settings(folder), tmp_path / "errors")
    try:
        hang()
        worker.begin()
        assert worker.shut_down() < EXIT_SECONDS
        wait_until(worker.is_gone, "a thread that waits for a share keeps the process")
        assert worker.exit_status == 0
        assert worker.errors == ""
    finally:
        nfs.recover()
        worker.close()
