"""LoRA adapters are identified by the content of their files, and only if that content is certain."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from vllm.lora.request import LoRARequest

from offload_core.vllm.model import lora
from offload_core.vllm.model.lora import Adapter, AdapterIdentities

SECONDS = 30.0


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return _write(tmp_path / "adapter", b"weights")


@pytest.fixture
def identities(folder: Path) -> Iterator[AdapterIdentities]:
    """Made by an engine that started after ``folder`` was written."""
    made = AdapterIdentities(SECONDS, started_ns=_changed_ns(folder))
    yield made
    made.shutdown()


class DeadMount:
    """A folder whose calls hang until ``back`` is set."""

    def __init__(self, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.path = path
        self.back = threading.Event()
        self.asked = threading.Event()
        self.calls = 0
        self._answer = lora._signature
        monkeypatch.setattr(lora, "_signature", self._signature)

    def _signature(self, folder: Path) -> lora.Signature:
        if folder == self.path:
            self.calls += 1
            self.asked.set()
            assert self.back.wait(2 * SECONDS)
        return self._answer(folder)


@pytest.fixture
def dead(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[DeadMount]:
    made = DeadMount(_write(tmp_path / "dead", b"far away"), monkeypatch)
    yield made
    made.back.set()


def _changed_ns(folder: Path) -> int:
    return max(path.stat().st_ctime_ns for path in folder.iterdir())


def _write(folder: Path, weights: bytes) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "adapter_config.json").write_text("{}")
    (folder / "adapter_model.safetensors").write_bytes(weights)
    return folder


def _settled(adapter: Adapter) -> Adapter:
    limit = time.monotonic() + SECONDS
    while adapter.pending:
        assert time.monotonic() < limit
    return adapter


def _lora(folder: Path, *, load_inplace: bool = False) -> LoRARequest:
    return LoRARequest("tuned", 1, str(folder), load_inplace=load_inplace)


def test_the_same_files_are_the_same_adapter_wherever_they_lie(folder: Path, tmp_path: Path) -> None:
    copy = _write(tmp_path / "copy", b"weights")
    other = _write(tmp_path / "other", b"different")
    identities = AdapterIdentities(SECONDS, started_ns=_changed_ns(other))
    digests = [_settled(identities.of(_lora(path))).digest for path in (folder, copy, other)]
    identities.shutdown()
    assert digests[0] == digests[1] != digests[2]
    assert all(digests)


@pytest.mark.parametrize("name", ["sub/weights.npz", "code.py"])
def test_all_files_of_an_adapter_count(folder: Path, tmp_path: Path, name: str) -> None:
    other = _write(tmp_path / "other", b"weights")
    for place, content in ((folder, b"one"), (other, b"two")):
        (place / name).parent.mkdir(exist_ok=True)
        (place / name).write_bytes(content)
    identities = AdapterIdentities(SECONDS, started_ns=time.time_ns())
    first, second = (_settled(identities.of(_lora(path))).digest for path in (folder, other))
    identities.shutdown()
    assert first
    assert second
    assert first != second


def test_files_in_sub_folders_that_change_under_a_running_engine_are_not_trusted(folder: Path) -> None:
    (folder / "sub").mkdir()
    identities = AdapterIdentities(SECONDS, started_ns=_changed_ns(folder))
    (folder / "sub/weights.bin").write_bytes(b"first")
    while (folder / "sub/weights.bin").stat().st_ctime_ns <= _changed_ns(folder):
        os.utime(folder / "sub/weights.bin")
    assert not _settled(identities.of(_lora(folder))).usable
    identities.shutdown()


def test_a_pipe_holds_nothing_up(folder: Path) -> None:
    os.mkfifo(folder / "pipe.bin")
    identities = AdapterIdentities(SECONDS, started_ns=time.time_ns())
    assert _settled(identities.of(_lora(folder))).usable
    identities.shutdown()


def test_files_that_change_under_a_running_engine_are_not_trusted(
    identities: AdapterIdentities, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert _settled(identities.of(_lora(folder))).usable
    before = _changed_ns(folder)
    while _changed_ns(folder) == before:  # until the file system's clock has ticked
        _write(folder, b"changed")
    with caplog.at_level(logging.WARNING):
        adapters = [_settled(identities.of(_lora(folder))) for _ in range(2)]
    assert not any(adapter.usable for adapter in adapters)
    assert caplog.text.count("have changed since this engine started") == 1


def test_a_changed_file_with_its_old_modification_time_is_not_trusted(
    identities: AdapterIdentities, folder: Path
) -> None:
    weights = folder / "adapter_model.safetensors"
    before = weights.stat()
    while weights.stat().st_ctime_ns == before.st_ctime_ns:
        weights.write_bytes(b"WEIGHTS")
        os.utime(weights, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert not _settled(identities.of(_lora(folder))).usable


@pytest.mark.parametrize("kind", ["in place", "missing"])
def test_an_adapter_without_a_certain_identity_is_not_offloaded(
    identities: AdapterIdentities, folder: Path, kind: str, tmp_path: Path
) -> None:
    lora = _lora(folder, load_inplace=True) if kind == "in place" else _lora(tmp_path / "organisation/name-on-a-hub")
    assert not _settled(identities.of(lora)).usable


def test_no_request_waits_longer_than_the_limit(folder: Path) -> None:
    identities = AdapterIdentities(0.0)
    adapter = identities.of(_lora(folder))
    assert not adapter.pending
    identities.shutdown()


def test_a_folder_that_hangs_delays_no_other_adapter(folder: Path, dead: DeadMount) -> None:
    identities = AdapterIdentities(SECONDS, started_ns=time.time_ns())
    hung = identities.of(_lora(dead.path))
    assert dead.asked.wait(SECONDS)
    assert _settled(identities.of(_lora(folder))).usable
    assert hung.pending
    identities.shutdown()


def test_requests_share_the_next_look_at_a_folder_that_hangs(dead: DeadMount) -> None:
    identities = AdapterIdentities(SECONDS, started_ns=time.time_ns())
    first = identities.of(_lora(dead.path))
    assert dead.asked.wait(SECONDS)
    others = [identities.of(_lora(dead.path)) for _ in range(100)]
    assert dead.calls == 1
    dead.back.set()
    assert len({_settled(adapter).digest for adapter in (first, *others)}) == 1
    assert dead.calls == 3, "before and after the files were read, and once more for all others"
    identities.shutdown()


def test_a_folder_that_hangs_makes_requests_wait_once_and_is_one_warning(
    dead: DeadMount, caplog: pytest.LogCaptureFixture
) -> None:
    identities = AdapterIdentities(0.05, started_ns=time.time_ns())
    late = [identities.of(_lora(dead.path))]
    assert dead.asked.wait(SECONDS)
    late.append(identities.of(_lora(dead.path)))
    for adapter in late:
        _settled(adapter)
    late.append(identities.of(_lora(dead.path)))
    assert not late[-1].pending
    assert not any(adapter.usable for adapter in late)
    assert caplog.text.count("its files were not read within 0.05 s (lookup_timeout_seconds)") == 1
    dead.back.set()
    limit = time.monotonic() + SECONDS
    while not identities.of(_lora(dead.path)).usable:
        assert time.monotonic() < limit
    identities.shutdown()
