"""The models of tests that `make test` runs on one model only."""

from __future__ import annotations

import pytest

QUICK_LABS = ["gemma3", pytest.param("qwen3_next", marks=pytest.mark.long)]
"""Parameters for the fixture ``lab``."""
