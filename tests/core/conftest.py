"""Fixtures of the unit tests."""

from __future__ import annotations

import asyncio
import gc
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from offload_core.runtime.io_loop import IoLoop
from offload_core.runtime.metrics import Counters
from tests.support.plugin_site import Site


@pytest.fixture(scope="session")
def _frozen_imports() -> None:
    """Keep what was imported out of the collections that each test's end runs: they take 0.2 s otherwise."""
    gc.collect()
    gc.freeze()


@pytest.fixture
def io(_frozen_imports: None) -> Iterator[IoLoop]:
    """The process's I/O loop, given back after the test."""
    loop = IoLoop.acquire()
    yield loop
    pending = loop.submit(_pending_tasks()).result(60)
    loop.release()
    assert pending == [], "the test left tasks behind that do not end"
    gc.collect()  # so that what else it left behind is reported here and not in a later test


async def _pending_tasks() -> list[str]:
    """Wait for the loop's other tasks; return those that do not end."""
    others = asyncio.all_tasks() - {asyncio.current_task()}
    return [repr(task) for task in (await asyncio.wait(others, timeout=30))[1]] if others else []


@pytest.fixture
def counters() -> Counters:
    return Counters()


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    """Two folders on the search path for distributions; what is imported from them is forgotten after the test."""
    folders = [tmp_path / "site", tmp_path / "other-site"]
    for folder in reversed(folders):
        folder.mkdir()
        monkeypatch.syspath_prepend(folder)
    before = set(sys.modules)
    yield Site(*folders)
    for module in set(sys.modules) - before:
        if str(tmp_path) in str(getattr(sys.modules[module], "__file__", None)):
            del sys.modules[module]
