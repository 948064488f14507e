"""In memory and on a file system, a lookup does not wait for transfers, and a load does not wait for stores."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from offload_backend_cpu.plugin import CPU
from offload_backend_disk.plugin import DISK
from offload_backend_nfs.plugin import NFS

from offload_core.api import BackendType
from tests.support.held_threads import check_that_nothing_waits_for_slower_work

CAPACITY = {"capacity": "64MiB"}


@pytest.mark.parametrize("limit", [{}, CAPACITY], ids=["without a limit", "with a capacity"])
@pytest.mark.parametrize("backend_type", [DISK, NFS], ids=lambda backend_type: backend_type.name)
def test_lookups_wait_for_no_transfers_and_loads_for_no_stores(
    backend_type: BackendType, limit: dict[str, Any], tmp_path: Path
) -> None:
    folder = tmp_path / "share" / "kv"
    folder.mkdir(parents=True)
    place = folder / "objects"
    where = {"path": str(place)} if backend_type is DISK else {"url": place.as_uri(), "lookup_cache_seconds": 0}
    check_that_nothing_waits_for_slower_work(backend_type, {**where, **limit})


def test_loads_from_memory_wait_for_no_stores() -> None:
    check_that_nothing_waits_for_slower_work(CPU, CAPACITY)
