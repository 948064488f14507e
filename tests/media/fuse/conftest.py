"""Fixtures for tests on the fault file system."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from offload_core.config.loading import load_config
from offload_core.config.model import TierConfig
from offload_core.runtime.io_loop import IoLoop
from tests.core.conftest import _frozen_imports as _frozen_imports
from tests.core.conftest import io as io
from tests.media.fuse.fixtures import _session_fault_fs as _session_fault_fs
from tests.media.fuse.fixtures import fault_fs as fault_fs
from tests.media.fuse.mount import FaultFs
from tests.support.transfer_rig import Rig

MakeRig = Callable[..., Rig]
TierOn = Callable[..., TierConfig]

PLACES: dict[str, Callable[[FaultFs], dict[str, Any]]] = {
    "disk": lambda fs: {"type": "disk", "path": str(fs.path / "kv")},
    "disk-bounded": lambda fs: {"type": "disk", "path": str(fs.path / "kv"), "capacity": "64MiB"},
    "nfs": lambda fs: {
        "type": "nfs", "url": (fs.path / "kv").as_uri(), "lookup_cache_seconds": 0, "retry_seconds": 0,
    },
}  # fmt: skip


@pytest.fixture
def tier_on(fault_fs: FaultFs) -> TierOn:
    """A function that configures a tier named ``files`` on the fault file system, by its kind and further keys."""

    def configured(kind: str, **keys: Any) -> TierConfig:
        (tier,) = load_config({"backends": [{"name": "files", **PLACES[kind](fault_fs), **keys}]}).tiers
        return tier

    return configured


@pytest.fixture
def make_rig(io: IoLoop, fault_fs: FaultFs) -> Iterator[MakeRig]:
    """A function that makes transfer engines; when the test ends nothing hangs any more."""
    rigs: list[Rig] = []

    def make(**sizes: Any) -> Rig:
        rigs.append(Rig(io, **sizes))
        return rigs[-1]

    yield make
    fault_fs.clear()
    fault_fs.resume()
    for rig in rigs:
        rig.finish()


@pytest.fixture
def rig(make_rig: MakeRig) -> Rig:
    """A transfer engine."""
    return make_rig()
