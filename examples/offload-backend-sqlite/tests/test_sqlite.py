from pathlib import Path

import pytest
from offload_backend_sqlite.plugin import SQLITE

from offload_core.testing import BackendContract


class TestSqlite(BackendContract):
    backend_type = SQLITE

    @pytest.fixture
    def options(self, tmp_path: Path) -> dict[str, object]:
        return {"path": tmp_path / "kv-cache.sqlite", "capacity": "1GiB"}
