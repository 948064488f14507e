"""Loads in one call: objects are checked as they are read, a read that begins again is not, and pins are kept."""

from __future__ import annotations

import asyncio
import errno
import os
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from offload_backend_nfs import NfsBackend

from offload_core.api import CHECK_BYTES, ObjectKey
from offload_core.api.backend import LoadOutcome
from offload_core.testing.rig.recording_check import RecordingCheck
from tests.backends.nfs.calls import run, store
from tests.backends.nfs.conftest import Nfs, key

HIT, MISS = LoadOutcome.HIT, LoadOutcome.MISS
SIZE = 3 * CHECK_BYTES


async def loaded(backend: NfsBackend, *numbers: int) -> list[tuple[LoadOutcome, memoryview, RecordingCheck]]:
    views = [memoryview(bytearray(SIZE)) for _ in numbers]
    checks = [RecordingCheck(view) for view in views]
    outcomes = await backend.load_and_check([key(number) for number in numbers], views, checks)
    return list(zip(outcomes, views, checks, strict=True))


@pytest.mark.parametrize("number", [errno.ESTALE, errno.EIO])
def test_a_read_that_begins_again_tells_its_check_no_more(
    nfs: Nfs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    content = os.urandom(SIZE)
    preadv = os.preadv
    offsets: list[int] = []

    def failing(descriptor: int, buffers: Any, offset: int) -> int:
        offsets.append(offset)
        if len(offsets) == 2:
            raise OSError(number, os.strerror(number))
        return preadv(descriptor, buffers, offset)

    async def work(backend: NfsBackend) -> None:
        await store(backend, (1, content))
        monkeypatch.setattr(os, "preadv", failing)
        ((outcome, view, check),) = await loaded(backend, 1)
        assert (outcome, bytes(view)) == (HIT, content)
        assert offsets == [0, CHECK_BYTES, 0], "the second time it is read at once"
        assert (bytes(check.told), check.problem) == (content[:CHECK_BYTES], None)

    run(nfs(url=f"file://{tmp_path}"), work)


@pytest.mark.parametrize("number", [errno.ESTALE, errno.EIO])
def test_an_object_that_its_check_has_found_right_is_not_read_again(
    nfs: Nfs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    content = os.urandom(SIZE)
    close, preadv = os.close, os.preadv
    offsets: list[int] = []

    def reading(descriptor: int, buffers: Any, offset: int) -> int:
        offsets.append(offset)
        return preadv(descriptor, buffers, offset)

    def failing(descriptor: int) -> None:
        close(descriptor)
        if len(offsets) == 3:
            raise OSError(number, os.strerror(number))

    async def work(backend: NfsBackend) -> None:
        await store(backend, (1, content))
        with monkeypatch.context() as patch:
            patch.setattr(os, "preadv", reading)
            patch.setattr(os, "close", failing)
            ((outcome, view, check),) = await loaded(backend, 1)
        assert (outcome, bytes(view), bytes(check.told)) == (HIT, content, content)
        assert offsets == [0, CHECK_BYTES, 2 * CHECK_BYTES], "a second read has overwritten checked bytes"

    run(nfs(url=f"file://{tmp_path}"), work)


def test_objects_are_pinned_while_they_are_loaded_and_hidden_ones_are_misses(nfs: Nfs, tmp_path: Path) -> None:
    content = os.urandom(SIZE)

    async def work(backend: NfsBackend) -> None:
        reservation = await backend.prepare_store([key(1), key(2)], [SIZE, SIZE])
        await store(backend, (1, content), (2, content))
        await reservation.release()
        assert backend._reservations is not None
        bounded_store = backend._reservations.bounded_store
        calls: list[tuple[str, list[ObjectKey]]] = []
        load = backend.medium.load

        def hidden(keys: Sequence[ObjectKey]) -> list[bool]:
            return [one == key(2) for one in keys]

        def record(name: str) -> None:
            real = getattr(bounded_store, name)

            def recorded(keys: Sequence[ObjectKey]) -> None:
                calls.append((name, list(keys)))
                real(keys)

            setattr(bounded_store, name, recorded)

        def loading(name: str, *rest: Any) -> LoadOutcome:
            calls.append(("load", []))
            return load(name, *rest)

        for name in ("pin", "unpin", "mark_used"):
            record(name)
        bounded_store.hidden = hidden  # type: ignore[method-assign]
        backend.medium.load = loading  # type: ignore[assignment, method-assign]
        outcomes = [outcome for outcome, _, _ in await loaded(backend, 1, 2, 3)]
        asked = [key(1), key(2), key(3)]
        assert outcomes == [HIT, MISS, MISS]
        assert calls == [("pin", asked), ("load", []), ("load", []), ("mark_used", [key(1)]), ("unpin", asked)]

        calls.clear()
        backend.medium.load = None  # type: ignore[assignment, method-assign]
        with pytest.raises(OSError, match="not callable"):
            await loaded(backend, 1)
        assert calls == [("pin", [key(1)]), ("unpin", [key(1)])]

    run(nfs(url=f"file://{tmp_path}", capacity=10 * SIZE, retry_seconds=0), work)


def test_the_objects_of_a_call_use_all_threads(nfs: Nfs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    content = os.urandom(SIZE)
    together = threading.Barrier(4)

    async def work(backend: NfsBackend) -> None:
        await store(backend, *((number, content) for number in range(8)))
        load = backend.medium.load
        threads: list[int] = []

        def loading(name: str, *rest: Any) -> LoadOutcome:
            threads.append(threading.get_ident())
            if len(threads) <= 4:
                together.wait(30)
            return load(name, *rest)

        backend.medium.load = loading  # type: ignore[assignment, method-assign]
        assert [outcome for outcome, _, _ in await loaded(backend, *range(8))] == [HIT] * 8
        assert len(set(threads)) == 4

    run(nfs(url=f"file://{tmp_path}"), work)


def test_a_call_that_waited_for_another_one_uses_all_threads_too(nfs: Nfs, tmp_path: Path) -> None:
    content = os.urandom(SIZE)
    together = threading.Barrier(4)

    async def work(backend: NfsBackend) -> None:
        await store(backend, *((number, content) for number in range(12)))
        load = backend.medium.load
        began: list[str] = []

        def loading(name: str, *rest: Any) -> LoadOutcome:
            began.append(name)
            if len(began) <= 8:  # the first call's objects, then four of the second call's
                together.wait(30)
            return load(name, *rest)

        backend.medium.load = loading  # type: ignore[assignment, method-assign]
        first, second = await asyncio.gather(loaded(backend, *range(4)), loaded(backend, *range(4, 12)))
        assert [outcome for outcome, _, _ in first + second] == [HIT] * 12

    run(nfs(url=f"file://{tmp_path}"), work)


def test_an_error_of_one_object_is_raised_after_the_others_were_loaded(nfs: Nfs, tmp_path: Path) -> None:
    async def work(backend: NfsBackend) -> None:
        count = 0

        def loading(name: str, *rest: Any) -> LoadOutcome:
            nonlocal count
            count += 1
            raise OSError(errno.EACCES, f"number {count}")

        backend.medium.load = loading  # type: ignore[assignment, method-assign]
        with pytest.raises(OSError, match="number"):
            await loaded(backend, *range(8))
        assert count == 8

    run(nfs(url=f"file://{tmp_path}", retry_seconds=0), work)
