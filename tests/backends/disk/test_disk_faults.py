"""The disk backend on file systems that are full, read-only or slow, and with many writers."""

from __future__ import annotations

import asyncio
import errno
import os
from pathlib import Path

import pytest
from offload_backend_disk import DiskBackend

from offload_core.backend import LoadOutcome, StoreOutcome
from tests.backends.disk.conftest import Disk, files_under, key, mount

HIT, MISS, CORRUPT = LoadOutcome.HIT, LoadOutcome.MISS, LoadOutcome.CORRUPT
KIB = 1024


def load(backend: DiskBackend, number: int, size: int) -> tuple[LoadOutcome, bytes]:
    buffer = bytearray(size)
    (outcome,) = asyncio.run(_load(backend, number, buffer))
    return outcome, bytes(buffer)


async def _load(backend: DiskBackend, number: int, buffer: bytearray) -> list[LoadOutcome]:
    return list(await backend.load_into([key(number)], [memoryview(buffer)]))


def store(backend: DiskBackend, *objects: tuple[int, bytes]) -> list[StoreOutcome]:
    async def main() -> list[StoreOutcome]:
        return list(await backend.store([key(n) for n, _ in objects], [memoryview(data) for _, data in objects]))

    return asyncio.run(main())


def test_c6_on_a_full_disk_a_store_fails_and_leaves_nothing_behind(disk: Disk, small_disk: Path) -> None:
    backend = disk(small_disk)
    asyncio.run(backend.open())
    with pytest.raises(OSError, match="No space left") as caught:
        store(backend, (0, bytes(1024 * KIB)))
    assert caught.value.errno == errno.ENOSPC
    assert files_under(small_disk) == []
    data = os.urandom(100 * KIB)  # the room is there again
    store(backend, (0, data))
    assert load(backend, 0, len(data)) == (HIT, data)


def test_c6_on_a_full_disk_the_old_object_and_the_rest_of_the_batch_stay_whole(disk: Disk, small_disk: Path) -> None:
    backend = disk(small_disk)
    asyncio.run(backend.open())
    old, small = os.urandom(20 * KIB), os.urandom(10 * KIB)
    store(backend, (0, old))
    with pytest.raises(OSError, match="No space left"):
        store(backend, (0, bytes(1024 * KIB)), (1, small))
    assert load(backend, 0, len(old)) == (HIT, old)
    outcome, got = load(backend, 1, len(small))
    assert outcome is MISS or got == small
    assert all(path.suffix == ".kv" for path in files_under(small_disk))


def test_a_read_only_disk_is_opened_and_read_and_rejects_stores(disk: Disk, small_disk: Path) -> None:
    backend = disk(small_disk)
    asyncio.run(backend.open())
    store(backend, (0, b"before"))
    mount("-o", "remount,ro", small_disk)
    reader = disk(small_disk)
    asyncio.run(reader.open())
    assert load(reader, 0, 6) == (HIT, b"before")
    with pytest.raises(OSError, match="Read-only") as caught:
        store(reader, (1, b"after"))
    assert caught.value.errno == errno.EROFS
    with pytest.raises(OSError, match="Read-only"):
        asyncio.run(reader.delete([key(0)]))
    assert load(reader, 0, 6) == (HIT, b"before")


def test_a_read_only_disk_without_the_folder_cannot_be_opened(disk: Disk, small_disk: Path) -> None:
    backend = disk(small_disk / "objects")
    mount("-o", "remount,ro", small_disk)
    with pytest.raises(OSError, match="Read-only"):
        asyncio.run(backend.open())


def test_a_folder_that_cannot_be_made_is_an_error_at_open(disk: Disk, tmp_path: Path) -> None:
    backend = disk(tmp_path / "objects")
    (tmp_path / "objects").write_text("in the way")
    with pytest.raises(OSError, match="objects"):
        asyncio.run(backend.open())


def test_c6_writers_of_one_key_leave_one_whole_object_and_readers_see_only_whole_ones(
    disk: Disk, tmp_path: Path
) -> None:
    size, rounds = 256 * KIB, 15
    writers = [disk(tmp_path / "objects") for _ in range(3)]
    reader = disk(tmp_path / "objects")

    async def write(backend: DiskBackend, letter: bytes) -> None:
        for _ in range(rounds):
            await backend.store([key(0)], [memoryview(letter * size)])

    async def read(until: asyncio.Task[None]) -> set[bytes]:
        seen: set[bytes] = set()
        while not until.done():
            buffer = bytearray(size)
            outcome = (await _load(reader, 0, buffer))[0]
            assert outcome is HIT
            seen.add(bytes(set(buffer)))
        return seen

    async def write_all() -> None:
        await asyncio.gather(*(write(backend, b"%d" % index) for index, backend in enumerate(writers)))

    async def main() -> set[bytes]:
        await reader.open()
        await reader.store([key(0)], [memoryview(b"x" * size)])
        return await read(asyncio.ensure_future(write_all()))

    seen = asyncio.run(main())
    assert seen <= {b"x", b"0", b"1", b"2"}, "a reader saw two writers' bytes in one object"
    (left,) = files_under(tmp_path)
    assert left.read_bytes() in {letter * size for letter in (b"0", b"1", b"2")}


def replace_by_fifo(backend: DiskBackend, number: int) -> Path:
    """Put a pipe in an object's place: whoever opens it hangs until it is opened for writing, as on a dead mount."""
    store(backend, (number, b""))
    (path,) = backend.options.path.rglob(f"{key(number).chunk_hash.hex()}.kv")
    path.unlink()
    os.mkfifo(path)
    return path


async def turns(count: int = 20) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


async def opened_for_writing(fifo: Path) -> None:
    """Let the reader of ``fifo`` go on; waits until there is one."""
    os.close(await asyncio.to_thread(os.open, fifo, os.O_WRONLY))


def test_c7_a_cancelled_load_ends_when_its_thread_has_ended(backend: DiskBackend) -> None:
    asyncio.run(backend.open())
    fifo = replace_by_fifo(backend, 0)

    async def main() -> None:
        task = asyncio.ensure_future(_load(backend, 0, bytearray(4)))
        await turns()
        for _ in range(2):
            task.cancel()
            await turns()
            assert not task.done()
        await opened_for_writing(fifo)
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(main())


def test_c7_an_error_of_one_key_waits_for_the_threads_of_the_others(backend: DiskBackend) -> None:
    asyncio.run(backend.open())
    fifo = replace_by_fifo(backend, 0)
    store(backend, (1, b""))
    (other,) = backend.options.path.rglob(f"{key(1).chunk_hash.hex()}.kv")
    other.unlink()
    other.symlink_to(other)  # a loop: opening it is an error

    async def main() -> None:
        buffers = [memoryview(bytearray(4)), memoryview(bytearray(4))]
        task = asyncio.ensure_future(backend.load_into([key(0), key(1)], buffers))
        await turns()  # both loads are queued
        # The executor has two threads, one of which hangs: when the other has answered, the error is known.
        assert await backend.contains([key(2)]) == [False]
        await turns()
        assert not task.done()
        await opened_for_writing(fifo)
        with pytest.raises(OSError, match="Too many levels of symbolic links"):
            await task

    asyncio.run(main())
