"""Listings of a share during which another host replaces files or folders (ESTALE)."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from offload_backend_nfs import NfsBackend
from offload_backend_nfs.storage import posix_files
from offload_backend_nfs.storage.posix import PosixShare

from offload_core.api.keys import ObjectKey
from tests.backends.nfs.calls import listed, run
from tests.backends.nfs.conftest import Nfs

COUNT = 9
KEYS = [ObjectKey("ab" * 32, "full-u256", bytes([0x5F, number]) * 16) for number in range(COUNT)]
STALE = OSError(errno.ESTALE, "Stale file handle")


class OsWith:
    """The module ``os`` with another ``scandir``."""

    def __init__(self, scandir: Callable[[str], Any]) -> None:
        self.scandir = scandir

    def __getattr__(self, name: str) -> Any:
        return getattr(os, name)


class StaleEntry:
    """An entry whose handle is stale."""

    def __init__(self, entry: os.DirEntry[str]) -> None:
        self.name, self.path = entry.name, entry.path

    def stat(self, **_: Any) -> os.stat_result:
        raise STALE

    is_dir = is_file = stat


class Scan:
    """A listing of a real folder, changed by a test."""

    def __init__(self, folder: str, change: Callable[[Iterator[os.DirEntry[str]]], Iterator[Any]]) -> None:
        self._entries = os.scandir(folder)
        self._change = change

    def __enter__(self) -> Scan:
        return self

    def __exit__(self, *_: object) -> None:
        self._entries.close()

    def __iter__(self) -> Iterator[Any]:
        return self._change(self._entries)


async def fill_and_list(backend: NfsBackend, scandir: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch) -> None:
    await backend.store(KEYS, [memoryview(b"object")] * COUNT)
    monkeypatch.setattr(posix_files, "os", OsWith(scandir))
    assert {found.key for found in await listed(backend)} == set(KEYS)


def test_an_entry_that_is_stale_is_asked_once_more(nfs: Nfs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def change(entries: Iterator[os.DirEntry[str]]) -> Iterator[Any]:
        return (StaleEntry(entry) if number == 1 else entry for number, entry in enumerate(entries))

    backend = nfs(url=f"file://{tmp_path}/kv", retry_seconds=0)
    run(backend, lambda backend: fill_and_list(backend, lambda folder: Scan(folder, change), monkeypatch))


@pytest.mark.parametrize("opened", [False, True], ids=["at its opening", "between two entries"])
def test_a_folder_that_is_stale_is_listed_again(
    nfs: Nfs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, opened: bool
) -> None:
    stale: set[str] = set()

    def change(entries: Iterator[os.DirEntry[str]]) -> Iterator[Any]:
        yield from list(entries)[:2]
        raise STALE

    def scandir(folder: str) -> Any:
        if folder in stale or not folder.endswith("/5f"):
            return os.scandir(folder)
        stale.add(folder)
        if not opened:
            raise STALE
        return Scan(folder, change)

    run(nfs(url=f"file://{tmp_path}/kv"), lambda backend: fill_and_list(backend, scandir, monkeypatch))
    assert stale


def test_the_names_in_a_stale_folder_are_not_an_empty_list(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    share = PosixShare(tmp_path / "kv")
    share.open()

    def listdir(_: str) -> list[str]:
        raise STALE

    monkeypatch.setattr(os, "listdir", listdir)
    with pytest.raises(OSError, match="Stale"):
        share.names("records")
