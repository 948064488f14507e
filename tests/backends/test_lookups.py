"""A lookup on a file system does not wait for transfers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from offload_backend_disk.plugin import DISK
from offload_backend_nfs.plugin import NFS

from offload_core.api import BackendType
from tests.support.held_threads import lookups_beside_held_threads


@pytest.mark.parametrize(
    ("backend_type", "key", "more"),
    [(DISK, "path", {}), (NFS, "url", {"lookup_cache_seconds": 0})],
    ids=["disk", "nfs"],
)
def test_lookups_are_answered_while_transfers_hold_all_threads(
    backend_type: BackendType, key: str, more: dict[str, Any], tmp_path: Path
) -> None:
    place = tmp_path / "objects"
    options = {key: str(place) if key == "path" else place.as_uri(), **more}
    assert lookups_beside_held_threads(backend_type, options) == [[True], [True]]
