"""On a file system, a lookup does not wait for transfers, and a load does not wait for stores."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from offload_backend_disk.plugin import DISK
from offload_backend_nfs.plugin import NFS

from offload_core.api import BackendType
from tests.support.held_threads import check_that_nothing_waits_for_slower_work


@pytest.mark.parametrize(
    ("backend_type", "key", "more"),
    [(DISK, "path", {}), (NFS, "url", {"lookup_cache_seconds": 0})],
    ids=["disk", "nfs"],
)
def test_lookups_wait_for_no_transfers_and_loads_for_no_stores(
    backend_type: BackendType, key: str, more: dict[str, Any], tmp_path: Path
) -> None:
    place = tmp_path / "objects"
    options = {key: str(place) if key == "path" else place.as_uri(), **more}
    check_that_nothing_waits_for_slower_work(backend_type, options)
