"""Fixtures for tests on a fault file system; a ``conftest.py`` imports both."""

from __future__ import annotations

import functools
from collections.abc import Iterator

import pytest

from tests.media.fuse.mount import FaultFs, why_not

_why_not = functools.cache(why_not)


@pytest.fixture(scope="session")
def _session_fault_fs() -> Iterator[FaultFs]:
    """Mounted once, since that takes a quarter of a second."""
    reason = _why_not()
    if reason is not None:
        pytest.skip(f"no fault file system: {reason}")
    with FaultFs() as mounted:
        yield mounted


@pytest.fixture
def fault_fs(_session_fault_fs: FaultFs) -> Iterator[FaultFs]:
    """A mounted file system, empty and without rules. Skips where FUSE cannot be mounted.

    Whatever happens, nothing hangs in it after the test, and nothing is mounted after the last one.
    """
    _session_fault_fs.restore()
    yield _session_fault_fs
    _session_fault_fs.clear()
    _session_fault_fs.resume()
