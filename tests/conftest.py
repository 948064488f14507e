"""What holds for all tests."""

from __future__ import annotations

import os
from collections.abc import Iterator
from unittest import mock

import pytest


@pytest.fixture(autouse=True)
def _environment_as_it_was() -> Iterator[None]:
    """vLLM sets variables when it makes a configuration; the engines of later tests must not see them."""
    with mock.patch.dict(os.environ):
        yield
