"""Objects that are read and written past the page cache, and file systems without direct I/O."""

from __future__ import annotations

import asyncio
import errno
import logging
import mmap
import os
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import example, given, settings
from hypothesis import strategies as st
from offload_backend_disk import DiskBackend, DiskOptions

from offload_core.api.backend import LoadOutcome, StoreOutcome
from tests.backends.disk.conftest import Disk, files_under, key, mount, tmpfs

HIT, CORRUPT = LoadOutcome.HIT, LoadOutcome.CORRUPT
PAGE = 4096
SIZES = st.one_of(
    st.integers(0, 3 * PAGE),
    st.builds(lambda pages, more: max(0, pages * PAGE + more), st.integers(0, 5), st.integers(-2, 2)),
)


@contextmanager
def ramfs() -> Iterator[Path]:
    """A real file system that refuses O_DIRECT."""
    folder = Path(tempfile.mkdtemp(prefix="offload-no-direct-io-"))
    try:
        mount("-t", "ramfs", "-o", "mode=700", "ramfs", folder)
        yield folder
        subprocess.run(["umount", "--lazy", str(folder)], check=True)  # the backend is closed later
    finally:
        folder.rmdir()


@contextmanager
def on_temporary_folder() -> Iterator[Path]:
    """Use the folder of temporary files, on any file system."""
    with tempfile.TemporaryDirectory(prefix="offload-direct-io-") as folder:
        yield Path(folder)


@contextmanager
def on_tmpfs() -> Iterator[Path]:
    with tmpfs("4m") as folder:
        yield folder


FILE_SYSTEMS = {"the folder for temporary files": on_temporary_folder, "tmpfs": on_tmpfs}


@pytest.fixture(params=list(FILE_SYSTEMS.values()), ids=list(FILE_SYSTEMS))
def folder(request: pytest.FixtureRequest) -> Iterator[Path]:
    with request.param() as path:
        yield path


class RecordedOpens:
    """A record per opened object, in order: true if it was opened with O_DIRECT."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, refuse: bool = False) -> None:
        self.direct: list[bool] = []
        real = os.open

        def spy(path: Any, flags: int, *arguments: Any, **keywords: Any) -> int:
            if flags & os.O_DIRECT and refuse:
                raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
            descriptor = real(path, flags, *arguments, **keywords)
            if str(path).endswith((".kv", ".tmp")) and not Path(path).name.startswith(".direct-io"):
                self.direct.append(bool(flags & os.O_DIRECT))
            return descriptor

        monkeypatch.setattr(os, "open", spy)


def page_aligned(nbytes: int, offset: int = 0) -> memoryview:
    """Return memory of its own that starts ``offset`` bytes after the beginning of a page."""
    return memoryview(mmap.mmap(-1, nbytes + offset + 1))[offset : offset + nbytes]


def filled(data: bytes, offset: int = 0) -> memoryview:
    view = page_aligned(len(data), offset)
    view[:] = data
    return view


async def round_trip(backend: DiskBackend, data: bytes, store_offset: int, load_offset: int) -> tuple[object, bytes]:
    """Store and load; the memory around the buffers must not change."""
    assert await backend.store([key(1)], [filled(data, store_offset).toreadonly()]) == [StoreOutcome.STORED]
    around = page_aligned(load_offset + len(data) + PAGE)
    around[:] = b"\x5a" * len(around)
    (outcome,) = await backend.load_into([key(1)], [around[load_offset : load_offset + len(data)]])
    assert bytes(around[:load_offset]) == b"\x5a" * load_offset
    assert bytes(around[load_offset + len(data) :]) == b"\x5a" * PAGE
    return outcome, bytes(around[load_offset : load_offset + len(data)])


@pytest.mark.parametrize("path_of", FILE_SYSTEMS.values(), ids=FILE_SYSTEMS)
def test_objects_of_every_size_come_back_from_and_to_any_address(path_of: Any, disk: Disk) -> None:
    with path_of() as folder:
        backend = disk(folder / "objects", direct_io="on")
        asyncio.run(backend.open())

        @settings(max_examples=60, deadline=None)
        @given(nbytes=SIZES, store_offset=st.sampled_from([0, 1, 512]), load_offset=st.sampled_from([0, 1, 512]))
        @example(nbytes=PAGE, store_offset=0, load_offset=0)
        @example(nbytes=2 * PAGE + 1, store_offset=0, load_offset=0)
        @example(nbytes=2 * PAGE - 1, store_offset=0, load_offset=0)
        def check(nbytes: int, store_offset: int, load_offset: int) -> None:
            data = os.urandom(nbytes)
            assert asyncio.run(round_trip(backend, data, store_offset, load_offset)) == (HIT, data)
            (path,) = files_under(folder)
            assert path.read_bytes() == data, "other programs would see other bytes"
            asyncio.run(backend.delete([key(1)]))

        check()


@pytest.mark.parametrize("change", [-2 * PAGE, -PAGE, -1, 1, PAGE, 2 * PAGE])
@pytest.mark.parametrize("more", [0, 1, PAGE - 1])
@pytest.mark.parametrize("option", ["on", "off"])
def test_c16_a_file_of_another_size_is_corrupt(disk: Disk, tmp_path: Path, option: str, more: int, change: int) -> None:
    nbytes = 3 * PAGE + more
    backend = disk(tmp_path / "objects", direct_io=option)

    async def main() -> list[LoadOutcome]:
        await backend.open()
        await backend.store([key(1)], [filled(os.urandom(nbytes))])
        (path,) = files_under(tmp_path)
        os.truncate(path, nbytes + change)
        return list(await backend.load_into([key(1)], [page_aligned(nbytes)]))

    assert asyncio.run(main()) == [CORRUPT]


@pytest.mark.parametrize(
    ("option", "offset", "nbytes", "expected"),
    [("on", 0, 2 * PAGE, True), ("auto", 0, 2 * PAGE + 1, True), ("off", 0, 2 * PAGE, False),
     ("on", 1, 2 * PAGE, False), ("on", 0, PAGE - 1, False)],
)  # fmt: skip
def test_whole_pages_at_aligned_addresses_go_past_the_page_cache(
    disk: Disk, folder: Path, monkeypatch: pytest.MonkeyPatch, option: str, offset: int, nbytes: int, expected: bool
) -> None:
    opens = RecordedOpens(monkeypatch)
    backend = disk(folder / "objects", direct_io=option)

    async def main() -> None:
        await backend.open()
        await round_trip(backend, os.urandom(nbytes), offset, offset)

    asyncio.run(main())
    assert opens.direct == [expected, expected]


def test_c16_a_file_with_anything_in_it_is_no_empty_object(disk: Disk, tmp_path: Path) -> None:
    backend = disk(tmp_path / "objects")

    async def main() -> list[LoadOutcome]:
        await backend.open()
        await backend.store([key(1)], [memoryview(b"x")])
        return list(await backend.load_into([key(1)], [memoryview(bytearray())]))

    assert asyncio.run(main()) == [CORRUPT]


@pytest.mark.parametrize("option", ["on", "off"])
@pytest.mark.parametrize("nbytes", [2 * PAGE, 2 * PAGE + 1])
def test_an_object_is_read_by_one_system_call(
    disk: Disk, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, option: str, nbytes: int
) -> None:
    backend = disk(tmp_path / "objects", direct_io=option)
    asyncio.run(backend.open())
    calls: list[int] = []
    real = os.preadv

    def counting(descriptor: int, views: Any, start: int) -> int:
        calls.append(start)
        return real(descriptor, views, start)

    monkeypatch.setattr(os, "preadv", counting)
    data = os.urandom(nbytes)
    assert asyncio.run(round_trip(backend, data, 0, 0)) == (HIT, data)
    assert calls == [0]


def test_on_is_refused_at_open_on_a_file_system_without_direct_io(disk: Disk) -> None:
    with ramfs() as folder:
        with pytest.raises(OSError, match="direct_io: on") as caught:
            asyncio.run(disk(folder, direct_io="on").open())
        assert caught.value.errno == errno.EINVAL
        assert str(caught.value) == (
            f"[Errno 22] {folder}: direct_io: on, but its file system does not open a file with O_DIRECT (Invalid "
            "argument); set direct_io to off or auto, or choose a folder on a file system that supports O_DIRECT, such "
            "as ext4 or xfs"
        )
        assert files_under(folder) == []


def test_auto_uses_the_page_cache_on_a_file_system_without_direct_io(
    disk: Disk, caplog: pytest.LogCaptureFixture
) -> None:
    data = os.urandom(2 * PAGE)
    with ramfs() as folder, caplog.at_level(logging.INFO):
        backend = disk(folder, direct_io="auto")
        asyncio.run(backend.open())
        assert asyncio.run(round_trip(backend, data, 0, 0)) == (HIT, data)
    (record,) = caplog.records
    assert record.levelno == logging.INFO
    assert record.getMessage() == (
        f"tier 'disk': {folder}: direct_io: auto uses the page cache: its file system does not open a file with "
        "O_DIRECT (Invalid argument)"
    )


def test_a_simulated_refusal_is_treated_the_same(disk: Disk, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    RecordedOpens(monkeypatch, refuse=True)
    with pytest.raises(OSError, match="set direct_io to off or auto"):
        asyncio.run(disk(tmp_path / "objects", direct_io="on").open())
    backend = disk(tmp_path / "objects", direct_io="auto")
    asyncio.run(backend.open())
    assert asyncio.run(round_trip(backend, b"x" * PAGE, 0, 0)) == (HIT, b"x" * PAGE)


@pytest.mark.parametrize("option", ["on", "auto"])
def test_a_file_system_that_returns_other_bytes_is_refused(
    disk: Disk, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, option: str
) -> None:
    monkeypatch.setattr(os, "pwrite", lambda descriptor, data, offset: len(data))
    backend = disk(tmp_path / "objects", direct_io=option)
    if option == "on":
        with pytest.raises(OSError, match="other bytes came back"):
            asyncio.run(backend.open())
    else:
        asyncio.run(backend.open())
        monkeypatch.undo()
        assert asyncio.run(round_trip(backend, b"x" * PAGE, 0, 0)) == (HIT, b"x" * PAGE)
    assert not list((tmp_path / "objects").glob(".direct-io*"))


def test_a_read_only_disk_is_read_through_the_page_cache(
    disk: Disk, small_disk: Path, caplog: pytest.LogCaptureFixture
) -> None:
    data = os.urandom(2 * PAGE + 7)
    backend = disk(small_disk, direct_io="on")
    asyncio.run(backend.open())
    assert asyncio.run(round_trip(backend, data, 0, 0)) == (HIT, data)
    mount("-o", "remount,ro", small_disk)
    reader = disk(small_disk, direct_io="on")
    asyncio.run(reader.open())
    buffer = page_aligned(len(data))
    assert asyncio.run(loaded(reader, buffer)) == [HIT]
    assert buffer == data
    assert "direct_io: on uses the page cache: it cannot open a file with O_DIRECT (Read-only" in caplog.text


async def loaded(backend: DiskBackend, buffer: memoryview) -> list[LoadOutcome]:
    return list(await backend.load_into([key(1)], [buffer]))


def test_no_probe_leaves_a_file_even_if_it_was_killed(disk: Disk, folder: Path) -> None:
    (folder / "objects").mkdir()
    (folder / "objects" / ".direct-io.0123456789abcdef.tmp").write_bytes(b"x")
    asyncio.run(disk(folder / "objects", direct_io="on").open())
    assert files_under(folder) == []


def test_on_a_full_disk_the_probe_is_no_obstacle(small_disk: Path, disk: Disk) -> None:
    with pytest.raises(OSError, match="No space left"):
        (small_disk / "full").write_bytes(bytes(1024 * 1024))
    asyncio.run(disk(small_disk, direct_io="on").open())


@pytest.mark.parametrize(("written", "meant"), [("on", "on"), ("off", "off"), ("'on'", "on"), ("auto", "auto")])
def test_on_and_off_mean_the_same_with_and_without_quotes(tmp_path: Path, written: str, meant: str) -> None:
    read = yaml.safe_load(f"direct_io: {written}")  # YAML makes a boolean of some of them
    assert DiskOptions.model_validate({"path": tmp_path, **read}).direct_io == meant


def test_a_wrong_word_is_refused_with_the_good_ones(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="'off', 'on' or 'auto'"):
        DiskOptions.model_validate({"path": tmp_path, "direct_io": "yes"})


def test_a_short_write_is_finished(disk: Disk, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = os.urandom(4 * PAGE + 9)
    backend = disk(folder / "objects", direct_io="on")
    asyncio.run(backend.open())
    real = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda descriptor, view, start: real(descriptor, view[: 2 * PAGE], start))
    assert asyncio.run(round_trip(backend, data, 0, 0)) == (HIT, data)


def test_a_short_read_is_finished(disk: Disk, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = os.urandom(4 * PAGE + 9)
    backend = disk(folder / "objects", direct_io="on")
    asyncio.run(backend.open())
    real = os.preadv
    monkeypatch.setattr(os, "preadv", lambda descriptor, views, start: real(descriptor, [views[0][: 2 * PAGE]], start))
    assert asyncio.run(round_trip(backend, data, 0, 0)) == (HIT, data)
