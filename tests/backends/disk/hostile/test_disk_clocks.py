"""A clock that is ahead, and is set back."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
from offload_backend_disk.folder.processes import STATE_FOLDER

from tests.backends.disk.conftest import key, open_account, recover
from tests.backends.disk.test_disk_eviction import evicted_by, path_of, store

YEAR_NS = 365 * 86400 * 10**9


class Clock:
    """The machine's clock, some time ahead."""

    def __init__(self) -> None:
        self.ahead_ns = 0
        self._time_ns = time.time_ns

    def __call__(self) -> int:
        return self._time_ns() + self.ahead_ns


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(time, "time_ns", clock)
    return clock


def test_objects_from_before_a_clock_was_set_back_are_evicted_first_and_in_their_order(
    tmp_path: Path, clock: Clock
) -> None:
    clock.ahead_ns = YEAR_NS
    account = open_account(tmp_path, 60)
    account.finish_scan()
    store(account, tmp_path, 2, 1, 0)
    account.close()
    clock.ahead_ns = 0
    account = open_account(tmp_path, 60, "next")
    account.release_dead_reservations()  # as every opened tier does
    store(account, tmp_path, 3, 4, 5)
    account.touch([key(1)], [False])
    assert evicted_by(account, *[10] * 6) == [2, 0, 3, 4, 5, 1]
    account.close()


def test_a_clock_that_is_set_back_while_processes_run_keeps_their_order(tmp_path: Path, clock: Clock) -> None:
    clock.ahead_ns = YEAR_NS
    one, other = open_account(tmp_path, 50), open_account(tmp_path, 50, "other")
    one.finish_scan()
    store(one, tmp_path, 0, 1)
    store(other, tmp_path, 2)
    clock.ahead_ns = 0
    one.release_dead_reservations()  # as housekeeping does every ten seconds
    store(other, tmp_path, 3)
    store(one, tmp_path, 4)
    one.touch([key(0)], [False])
    one.flush()
    assert evicted_by(other, *[10] * 5) == [1, 2, 3, 4, 0]
    one.close()
    other.close()


def test_a_scan_takes_no_time_from_the_future(tmp_path: Path) -> None:
    account = open_account(tmp_path, 40)
    account.finish_scan()
    store(account, tmp_path, 0, 1)
    later = time.time() + 86400
    os.utime(path_of(tmp_path, key(0)), (later, later))
    account.close()
    for file in (tmp_path / STATE_FOLDER).glob("account.sqlite*"):
        file.unlink()
    assert recover(tmp_path, 40) == (20, [])
    account = open_account(tmp_path, 40)
    store(account, tmp_path, 2, 3)
    assert evicted_by(account, *[10] * 4) == [1, 0, 2, 3]
    account.close()
