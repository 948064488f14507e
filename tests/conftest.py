"""What holds for all tests."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pytest
from hypothesis import settings

from offload_core.runtime.io_loop import IoLoop

# Before any of them is imported: helpers in files of other names than test_*.py explain their assertions too.
pytest.register_assert_rewrite(
    *(f"tests.{folder.name}" for folder in Path(__file__).parent.iterdir() if folder.is_dir())
)

from tests.support import random_examples  # noqa: E402
from tests.support.processor import processor_line  # noqa: E402

__all__ = ["random_examples"]

settings.load_profile("quick")  # what the command line says comes later


def pytest_configure() -> None:
    os.umask(0o022)  # the file backends refuse folders that a group may write to


def pytest_report_header() -> str:
    return processor_line()


def pytest_collection_finish() -> None:
    """Keep all that was imported by now out of the collections of garbage: torch and vLLM make each take 0.3 s."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _environment_as_it_was() -> Iterator[None]:
    """vLLM sets variables when it makes a configuration; the engines of later tests must not see them."""
    with mock.patch.dict(os.environ):
        yield


@pytest.fixture(autouse=True)
def _io_loop_is_let_go() -> Iterator[None]:
    """The process has one loop for all I/O: a test that keeps it would be a part of every later one."""
    users = IoLoop._users
    yield
    assert users == IoLoop._users, "the test has acquired the I/O loop and not released it"
