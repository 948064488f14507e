"""Lent memory that is pinned for a device: in the background, as a whole, and until nobody uses it."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Iterator
from typing import NoReturn

import pytest

from offload_core.api.memory.addresses import address_of
from offload_core.api.memory.shared_memory import SharedMemory
from offload_core.io_process.lent_mapping import PIECE_BYTES, LentMapping
from offload_core.tiers.storage import StorageAwayError
from tests.support.polling import wait_until
from tests.support.process_state import own_files
from tests.support.recorded_pinning import RecordedPinning

NBYTES = 3 * PIECE_BYTES + 4096


@pytest.fixture
def mapping() -> Iterator[LentMapping]:
    made = LentMapping(SharedMemory.create("lent", NBYTES), may_be_pinned=True, label="tier 'ram'")
    yield made
    made.close()


def test_it_is_pinned_as_a_whole_in_the_background(mapping: LentMapping) -> None:
    pinning = RecordedPinning()
    pinning.may_go_on.clear()
    mapping.pin(pinning)
    mapping.pin(pinning)
    assert not mapping.is_pinned
    pinning.may_go_on.set()
    wait_until(lambda: mapping.is_pinned, "it is not pinned")
    start = address_of(mapping.view)
    pieces = {start + offset: min(PIECE_BYTES, NBYTES - offset) for offset in range(0, NBYTES, PIECE_BYTES)}
    assert pinning.pinned == pieces


def test_its_bytes_stay_as_they_are(mapping: LentMapping) -> None:
    mapping.view[:] = bytes(range(256)) * (NBYTES // 256)
    mapping.pin(RecordedPinning())
    wait_until(lambda: mapping.is_pinned, "it is not pinned")
    assert mapping.view == bytes(range(256)) * (NBYTES // 256)


def test_it_stays_pinned_after_its_close_until_nobody_uses_it(mapping: LentMapping) -> None:
    pinning = RecordedPinning()
    mapping.pin(pinning)
    wait_until(lambda: mapping.is_pinned, "it is not pinned")
    given_back: list[int] = []
    ends = [mapping.use(lambda number=number: given_back.append(number)) for number in range(2)]  # type: ignore[misc]
    mapping.close()
    ends[1]()
    assert given_back == [1]
    assert len(pinning.pinned) == 4, "memory in use is not pinned"
    ends[0]()
    assert given_back == [1, 0]
    wait_until(lambda: not pinning.pinned, "it stays pinned for ever")


def test_closed_meanwhile_it_leaves_nothing_pinned(mapping: LentMapping) -> None:
    pinning = RecordedPinning()
    pinning.may_go_on.clear()
    mapping.pin(pinning)
    mapping.close()
    pinning.may_go_on.set()
    wait_until(lambda: mapping._pins is not None and not mapping._pins.is_alive(), "the thread goes on")
    assert pinning.pinned == {}
    assert not mapping.is_pinned


def test_memory_that_cannot_be_pinned_is_reported_and_let_go(
    mapping: LentMapping, caplog: pytest.LogCaptureFixture
) -> None:
    pinning = RecordedPinning(limit=2)
    mapping.pin(pinning)
    wait_until(lambda: mapping._pins is not None and not mapping._pins.is_alive(), "the thread goes on")
    assert not mapping.is_pinned
    assert pinning.pinned == {}
    (message,) = caplog.messages
    assert message == (
        "tier 'ram': its memory is not pinned, so a GPU copies its objects through staging memory: no more can be "
        "pinned; lower the tier's capacity, or set pin to off"
    )


def test_memory_that_the_system_does_not_have_is_reported(
    mapping: LentMapping, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(descriptor: int, offset: int, nbytes: int) -> None:
        if offset:
            raise OSError(errno.ENOMEM, "Cannot allocate memory")

    monkeypatch.setattr(os, "posix_fallocate", refuse)
    pinning = RecordedPinning()
    mapping.pin(pinning)
    wait_until(lambda: mapping._pins is not None and not mapping._pins.is_alive(), "the thread goes on")
    assert "Cannot allocate memory; lower the tier's capacity" in caplog.text
    assert pinning.pinned == {}


def test_memory_that_finds_no_thread_is_reported_and_may_be_pinned_later(
    mapping: LentMapping, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(thread: threading.Thread) -> NoReturn:
        raise RuntimeError("can't start new thread")

    before = own_files()
    with monkeypatch.context() as without_threads:
        without_threads.setattr(threading.Thread, "start", refuse)
        mapping.pin(RecordedPinning())
    assert "its memory is not pinned, so a GPU copies its objects through staging memory: can't start" in caplog.text
    assert own_files() == before
    mapping.pin(RecordedPinning())
    wait_until(lambda: mapping.is_pinned, "it is not pinned")


def test_closed_memory_is_not_used_and_is_given_back(mapping: LentMapping) -> None:
    """The answer of a request may be read after the process's end."""
    mapping.close()
    given_back: list[bool] = []
    with pytest.raises(StorageAwayError, match="tier 'ram': its memory is not lent any more"):
        mapping.use(lambda: given_back.append(True))
    assert given_back == [True]


def test_a_backend_may_forbid_it() -> None:
    mapping = LentMapping(SharedMemory.create("lent", NBYTES), may_be_pinned=False, label="tier 'ram'")
    mapping.pin(RecordedPinning(limit=0))
    assert mapping._pins is None
    assert not mapping.is_pinned
    mapping.close()
