"""Recorded traces: they can be read, they show shared prefixes and nothing else, and they are bounded."""

from __future__ import annotations

import logging
import stat
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from offload_core.simulation.trace import read_trace
from offload_core.simulation.trace_recorder import TraceRecorder

LIMIT = 1 << 20
HASHES = [bytes([number]) * 32 for number in range(4)]


def record(path: Path, *prompts: tuple[int, list[bytes]], limit: int = LIMIT) -> None:
    recorder = TraceRecorder(path, 16, limit)
    for tokens, hashes in prompts:
        recorder.record(time.monotonic(), tokens, 5, hashes)
    recorder.close()


def test_a_recorded_trace_can_be_read(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    record(path, (40, HASHES[:2]), (70, HASHES[:4]), (7, []))
    trace = read_trace(path)
    assert trace.block_tokens == 16
    assert [(one.input_tokens, len(one.ids)) for one in trace.requests] == [(40, 2), (70, 4), (7, 0)]
    assert trace.requests[0].ids == trace.requests[1].ids[:2], "they share a prefix"
    assert len(set(trace.requests[1].ids)) == 4


def test_requests_are_read_in_the_order_of_their_arrival(tmp_path: Path) -> None:
    recorder = TraceRecorder(tmp_path / "trace.jsonl", 16, LIMIT)
    now = time.monotonic()
    for tokens, arrived in ((3, now + 3), (1, now + 1), (2, now + 2)):
        recorder.record(arrived, tokens, 0, [])
    recorder.close()
    assert [one.input_tokens for one in read_trace(tmp_path / "trace.jsonl").requests] == [1, 2, 3]


def test_ids_of_different_files_have_nothing_in_common_and_hold_no_hash(tmp_path: Path) -> None:
    paths = tmp_path / "a.jsonl", tmp_path / "b.jsonl"
    for path in paths:
        record(path, (64, HASHES))
        assert not any(chunk_hash.hex() in path.read_text() for chunk_hash in HASHES)
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
    one, two = (set(read_trace(path).requests[0].ids) for path in paths)
    assert one.isdisjoint(two)


def test_an_existing_file_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text("precious")
    record(path, (40, HASHES[:2]))
    record(path, (70, HASHES[:4]))
    assert path.read_text() == "precious"
    assert read_trace(tmp_path / "trace-2.jsonl").input_tokens == 40
    assert read_trace(tmp_path / "trace-3.jsonl").input_tokens == 70


def test_the_file_never_exceeds_its_limit(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "trace.jsonl"
    with caplog.at_level(logging.WARNING):
        record(path, *[(64, HASHES)] * 100, limit=1000)
    assert 900 < path.stat().st_size <= 1000
    assert len(read_trace(path).requests) > 5
    (message,) = (record.getMessage() for record in caplog.records)
    assert message == (
        "trace_file: it has reached its limit of 1000 bytes (trace_file_bytes); nothing more is recorded, and the "
        "engine runs on"
    )


def test_a_file_that_ends_because_the_disk_is_full_can_be_read(tmp_path: Path) -> None:
    """The limit on the size of a file stands for a full disk: both take a part of a line, and then no more."""
    path = tmp_path / "trace.jsonl"
    script = (
        "import resource, sys, pathlib\n"
        "from tests.core.simulation.test_trace_recorder import HASHES, record\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (950, 950))\n"
        "record(pathlib.Path(sys.argv[1]), *[(64, HASHES)] * 100)\n"
    )
    done = subprocess.run([sys.executable, "-c", script, str(path)], capture_output=True, text=True, check=True)
    assert "it could not be written" in done.stderr
    assert 700 < path.stat().st_size < 950
    assert len(read_trace(path).requests) > 4


def test_a_file_that_cannot_be_created_is_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        record(tmp_path / "absent" / "trace.jsonl", (64, HASHES))
    (message,) = (record.getMessage() for record in caplog.records)
    assert "could not be created" in message
    assert str(tmp_path / "absent" / "trace.jsonl") in message


def test_a_recorder_without_a_thread_is_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    with caplog.at_level(logging.WARNING):
        record(tmp_path / "trace.jsonl", (64, HASHES))
    (message,) = caplog.messages
    assert "can't start new thread; nothing more is recorded, and the engine runs on" in message


def test_after_its_end_a_recorder_takes_nothing(tmp_path: Path) -> None:
    recorder = TraceRecorder(tmp_path / "trace.jsonl", 16, LIMIT)
    recorder.close()
    recorder.close()
    recorder.record(0.0, 64, 0, HASHES)
    assert (tmp_path / "trace.jsonl").read_text().count("\n") == 1
