"""Changes that wait for an account that cannot be written."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.backends.disk.conftest import key, open_account
from tests.backends.disk.hostile.test_disk_stopped_processes import stopped_process
from tests.backends.disk.test_disk_eviction import evicted_by, store


def test_touches_pile_up_only_to_a_limit_and_the_latest_are_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("offload_backend_disk.capacity.write_behind._MAX_RECENCY_CHANGES", 4, raising=False)
    account = open_account(tmp_path, 80)
    account.finish_scan()
    store(account, tmp_path, *range(8))
    with stopped_process(tmp_path, "transaction"):
        for numbers in ([5, 0, 1], [2, 3, 5]):
            account.touch([key(number) for number in numbers], [False] * 3)
            account.flush()
            assert len(account._write_behind._pending.recency) <= 4
        account.touch([key(0), key(1)], [False] * 2)
        assert len(account._write_behind._pending.recency) == 4
        account.flush()
        assert len(account._write_behind._pending.recency) == 4
    account.flush()
    assert not account.needs_flush
    assert evicted_by(account, *[10] * 8) == [2, 4, 6, 7, 3, 5, 0, 1]
    account.close()
