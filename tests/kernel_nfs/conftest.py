"""Fixtures for :mod:`.checks`."""

from __future__ import annotations

from tests.unit.conftest import _frozen_imports as _frozen_imports
from tests.unit.conftest import io as io
