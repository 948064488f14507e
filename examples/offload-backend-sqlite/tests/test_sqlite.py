from pathlib import Path

import pytest
from offload_backend_sqlite.plugin import SQLITE

from offload_core.testing import BackendContract, hold_in_killed_process


class TestSqlite(BackendContract):
    backend_type = SQLITE

    @pytest.fixture
    def options(self, tmp_path: Path) -> dict[str, object]:
        return {"path": tmp_path / "kv-cache.sqlite", "capacity": "1GiB"}

    def die_holding(self, options, keys, nbytes):  # type: ignore[no-untyped-def]
        hold_in_killed_process(SQLITE, options, keys, nbytes)
