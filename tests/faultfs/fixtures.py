"""Fixtures for tests on a fault file system; a ``conftest.py`` imports what its tests use."""

from __future__ import annotations

import functools
from collections.abc import Iterator

import pytest

from tests.faultfs.mount import FaultFs, why_not

_why_not = functools.cache(why_not)


@pytest.fixture
def fault_fs() -> Iterator[FaultFs]:
    """A mounted file system of the test's own. Skips where FUSE cannot be mounted.

    Whatever happens, nothing hangs in it and nothing is mounted afterwards.
    """
    reason = _why_not()
    if reason is not None:
        pytest.skip(f"no fault file system: {reason}")
    with FaultFs() as mounted:
        yield mounted
