"""The harness's own tests use the unit tests' loop, counters and hypothesis profile."""

from __future__ import annotations

from tests.core.conftest import _frozen_imports, counters, io

__all__ = ["_frozen_imports", "counters", "io"]
