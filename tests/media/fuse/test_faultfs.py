"""The fault file system: all that goes wrong is what the rules say, and nothing of it stays behind."""

from __future__ import annotations

import errno
import os
import signal
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.media.fuse import connections
from tests.media.fuse.mount import FaultFs, why_not
from tests.support.paths import ROOT
from tests.support.polling import wait_until
from tests.support.process_state import is_running, process_state

SECONDS = 30
CONTENT = bytes(range(256)) * 4096


@pytest.fixture
def file(fault_fs: FaultFs) -> Path:
    path = fault_fs.path / "folder" / "object.kv"
    path.parent.mkdir()
    path.write_bytes(CONTENT)
    return path


@pytest.fixture
def threads() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(4) as pool:
        yield pool


def _errno_of(call: Future[bytes]) -> int | None:
    error = call.exception(SECONDS)
    assert isinstance(error, OSError)
    return error.errno


def test_without_rules_it_is_the_folder_behind_it(fault_fs: FaultFs, file: Path) -> None:
    behind = fault_fs.backing / "folder" / "object.kv"
    assert behind.read_bytes() == file.read_bytes() == CONTENT
    assert file.stat().st_ino == behind.stat().st_ino
    other = file.rename(file.with_name("renamed.kv"))
    other.with_name("link.kv").hardlink_to(other)
    assert sorted(os.listdir(file.parent)) == ["link.kv", "renamed.kv"]  # noqa: PTH208
    assert other.stat().st_nlink == 2
    other.chmod(0o600)
    os.truncate(other, 5)
    os.utime(other, ns=(1, 2))
    status = behind.with_name("renamed.kv").stat()
    assert (status.st_mode & 0o777, status.st_mtime_ns, status.st_size) == (0o600, 2, 5)
    other.unlink()
    other.with_name("link.kv").unlink()
    file.parent.rmdir()
    assert os.listdir(fault_fs.backing) == []  # noqa: PTH208
    with pytest.raises(FileNotFoundError):
        file.read_bytes()


def test_databases_with_shared_memory_work_on_it(fault_fs: FaultFs) -> None:
    for _ in range(2):
        database = sqlite3.connect(fault_fs.path / "database")
        assert database.execute("PRAGMA journal_mode = WAL").fetchone() == ("wal",)
        with database:
            database.execute("CREATE TABLE IF NOT EXISTS numbers (number INTEGER)")
            database.execute("INSERT INTO numbers VALUES (1)")
        rows = database.execute("SELECT count(*) FROM numbers").fetchone()
        database.close()
    assert rows == (2,)


@pytest.mark.parametrize("number", [errno.EIO, errno.ESTALE, errno.ENOSPC])
def test_error_only_where_the_rule_says(fault_fs: FaultFs, file: Path, number: int) -> None:
    with fault_fs.fault("read write", "*.kv", "error", number=number) as rule:
        with pytest.raises(OSError, match=os.strerror(number)) as raised:
            file.read_bytes()
        assert raised.value.errno == number
        with pytest.raises(OSError, match=os.strerror(number)):
            file.write_bytes(b"new")
        file.with_name("other").write_bytes(CONTENT)
        assert file.with_name("other").read_bytes() == CONTENT
        assert set(fault_fs.hits(rule)) == {("read", "/folder/object.kv"), ("write", "/folder/object.kv")}
    file.write_bytes(CONTENT)
    assert file.read_bytes() == CONTENT


def test_wrong_and_missing_bytes(fault_fs: FaultFs, file: Path) -> None:
    with fault_fs.fault("read", "*", "cut"):
        assert file.read_bytes() == CONTENT[: len(CONTENT) // 2]
        assert file.stat().st_size == len(CONTENT), "nothing else tells of it"
    with fault_fs.fault("read", "*", "flip"):
        wrong = file.read_bytes()
        assert len(wrong) == len(CONTENT)
        assert wrong[0] == CONTENT[0] ^ 0x80
    with file.open("rb", buffering=0) as unbuffered, fault_fs.fault("read", "*", "part"):
        assert unbuffered.read(4096) == CONTENT[:2048]
    with fault_fs.fault("write", "*", "flip"):
        file.write_bytes(CONTENT)
    assert file.read_bytes()[1:4096] == CONTENT[1:4096]
    assert file.read_bytes()[0] == CONTENT[0] ^ 0x80
    with file.open("wb", buffering=0) as unbuffered, fault_fs.fault("write", "*", "part"):
        assert unbuffered.write(CONTENT[:4096]) == 2048
    assert file.read_bytes() == CONTENT[:2048]


def test_hang_until_it_is_released(fault_fs: FaultFs, file: Path, threads: ThreadPoolExecutor) -> None:
    with fault_fs.fault("read", "*.kv", "hang") as rule:
        hung = threads.submit(file.read_bytes)
        fault_fs.wait_for_hit(rule)
        assert file.stat().st_size == len(CONTENT), "others are served meanwhile"
        assert not hung.done()
    assert hung.result(SECONDS) == CONTENT


def test_hang_of_one_rule_outlasts_changes_of_others(
    fault_fs: FaultFs, file: Path, threads: ThreadPoolExecutor
) -> None:
    rule = fault_fs.add("getattr", "*.kv", "hang")
    hung = threads.submit(file.read_bytes)
    fault_fs.wait_for_hit(rule)
    with fault_fs.fault("write", "*", "error"), pytest.raises(OSError, match="Input/output"):
        file.with_name("other").write_bytes(b"1")
    assert not hung.done()
    fault_fs.remove(rule)
    assert hung.result(SECONDS) == CONTENT


def test_delay(fault_fs: FaultFs, file: Path) -> None:
    with fault_fs.fault("open", "*.kv", "delay", seconds=0.2):
        started = time.monotonic()
        assert file.read_bytes() == CONTENT
        assert time.monotonic() - started >= 0.2


def test_stopped_daemon_goes_on(fault_fs: FaultFs, file: Path, threads: ThreadPoolExecutor) -> None:
    fault_fs.pause()
    hung = threads.submit(file.read_bytes)
    connection = connections.connection_of(fault_fs.path)
    assert connection is not None
    wait_until(lambda: int((connection / "waiting").read_text()) > 0, "no operation waits")
    assert not hung.done()
    fault_fs.resume()
    assert hung.result(SECONDS) == CONTENT


def test_mount_vanishes_and_comes_back(fault_fs: FaultFs, file: Path, threads: ThreadPoolExecutor) -> None:
    rule = fault_fs.add("read", "*.kv", "hang")
    hung = threads.submit(file.read_bytes)
    fault_fs.wait_for_hit(rule)
    fault_fs.abort()
    assert _errno_of(hung) in (errno.ECONNABORTED, errno.ENOTCONN)
    assert _errno_of(threads.submit(file.read_bytes)) == errno.ENOTCONN
    fault_fs.clear()
    fault_fs.mount()
    assert file.read_bytes() == CONTENT
    fault_fs.unmount()
    assert os.listdir(fault_fs.path) == []  # noqa: PTH208
    fault_fs.mount()
    assert file.read_bytes() == CONTENT


_READ = "import sys; open(sys.argv[1], 'rb').read()"


def test_process_that_sigkill_does_not_end_ends_with_the_mount(fault_fs: FaultFs) -> None:
    with FaultFs() as own:
        (own.path / "object.kv").write_bytes(CONTENT)
        rule = own.add("read", "*.kv", "hang")
        reader = subprocess.Popen([sys.executable, "-c", _READ, str(own.path / "object.kv")])
        own.wait_for_hit(rule)
        reader.kill()
        wait_until(lambda: process_state(reader.pid) == "D", "it does not hang")
        assert reader.poll() is None
    assert reader.wait(SECONDS) == -signal.SIGKILL


_TEST = """
import subprocess, sys, threading
from tests.media.fuse.mount import FaultFs

mounted = FaultFs().__enter__()
(mounted.path / "file").write_bytes(bytes(1000))
rule = mounted.add("read", "*", "hang")
reader = subprocess.Popen([sys.executable, "-c", sys.argv[1], str(mounted.path / "file")])
mounted.wait_for_hit(rule)
if sys.argv[2] == "stopped":
    mounted.pause()
print(mounted.path, reader.pid, flush=True)
threading.Event().wait()
"""


@pytest.mark.parametrize("daemon", ["hangs", "stopped"])
def test_nothing_stays_when_the_test_is_killed(fault_fs: FaultFs, daemon: str) -> None:
    test = subprocess.Popen(
        [sys.executable, "-c", _TEST, _READ, daemon],
        cwd=ROOT, stdout=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip
    assert test.stdout is not None
    with test.stdout:
        folder, reader = test.stdout.readline().split()
        assert connections.connection_of(Path(folder)) is not None
        os.killpg(test.pid, signal.SIGKILL)
        test.wait()
    wait_until(lambda: connections.connection_of(Path(folder)) is None, "it is mounted still")
    wait_until(lambda: not Path(folder).parent.exists(), "its folder is there still")
    wait_until(lambda: not is_running(int(reader)), "it hangs still")


def test_reason_to_skip_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    reason = why_not()
    assert reason is not None
    assert "root" in reason


def test_nothing_stays_when_it_is_closed(fault_fs: FaultFs) -> None:
    threads, descriptors = threading.active_count(), len(os.listdir("/proc/self/fd"))  # noqa: PTH208
    own = FaultFs()
    with own:
        own.pause()
    own.close()
    assert connections.connection_of(own.path) is None
    assert not own.path.exists()
    assert threading.active_count() == threads
    assert len(os.listdir("/proc/self/fd")) == descriptors  # noqa: PTH208


def test_restored_it_is_as_it_was(fault_fs: FaultFs, file: Path) -> None:
    fault_fs.add("*", "*", "error")
    fault_fs.unmount()
    fault_fs.restore()
    assert os.listdir(fault_fs.path) == []  # noqa: PTH208
    file.parent.mkdir()
    file.write_bytes(CONTENT)
    fault_fs.pause()
    fault_fs.abort()
    fault_fs.restore()
    assert os.listdir(fault_fs.path) == []  # noqa: PTH208
