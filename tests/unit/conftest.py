"""Fixtures of the unit tests."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
from hypothesis import settings

from offload_core.runtime import IoLoop
from offload_core.stats import Counters

# No time limit per example: the machine that runs the tests may be busy with an engine.
settings.register_profile("offload-core", deadline=None, max_examples=200)
settings.load_profile("offload-core")


@pytest.fixture
def io() -> Iterator[IoLoop]:
    """The process's I/O loop, given back after the test."""
    loop = IoLoop.acquire()
    yield loop
    loop.release()
    gc.collect()  # so that a coroutine or loop that the test left behind is reported here and not in a later test


@pytest.fixture
def counters() -> Counters:
    return Counters()
