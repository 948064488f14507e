"""Fixtures for :mod:`.checks`."""

from __future__ import annotations

from tests.core.conftest import _frozen_imports as _frozen_imports
from tests.core.conftest import io as io
