"""What pytest loads by itself where offload-core is installed. Light to import."""

from __future__ import annotations

import sys

import pytest


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Refuse to run a contract of which a test was replaced or skipped."""
    contract = sys.modules.get("offload_core.testing.contract")
    if contract is None:
        return
    functions = [item for item in items if isinstance(item, pytest.Function)]
    reasons = [contract.weakened(item.cls, item.originalname, item.iter_markers()) for item in functions]
    if any(reasons):
        raise pytest.UsageError("\n".join(reason for reason in reasons if reason))
