"""What pytest loads by itself where offload-core is installed. Light to import: every run of pytest pays for it."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from offload_core.testing.throughput import Throughput

MARK = "offload_throughput"

# Failures in the harness are to show the values that were compared.
pytest.register_assert_rewrite("offload_core.testing")

_measured = pytest.StashKey[list[tuple[str, "Throughput"]]]()


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option for the report."""
    parser.getgroup("offload-core").addoption(
        "--offload-throughput",
        action="store_true",
        help="measure how fast each backend with a contract class stores and loads, and report it at the end",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Make room for what is measured, and register the mark of the tests that do it."""
    config.stash[_measured] = []
    config.addinivalue_line("markers", f"{MARK}: measures throughput; left out without --offload-throughput")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out measurements that nobody asked for; refuse a contract of which a test was replaced or skipped."""
    if not config.getoption("offload_throughput"):
        measuring = [item for item in items if item.get_closest_marker(MARK)]
        if measuring:
            config.hook.pytest_deselected(items=measuring)
            items[:] = [item for item in items if item not in measuring]
    contract = sys.modules.get("offload_core.testing.contract.suite")
    if contract is None:
        return
    functions = [item for item in items if isinstance(item, pytest.Function)]
    reasons = [contract.weakened(item.cls, item.originalname, item.iter_markers()) for item in functions]
    if any(reasons):
        raise pytest.UsageError("\n".join(reason for reason in reasons if reason))


@pytest.fixture
def offload_throughput(pytestconfig: pytest.Config) -> list[tuple[str, Throughput]]:
    """Where tests leave what they have measured for the report: pairs of a backend's name and a measurement."""
    return pytestconfig.stash[_measured]


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Report what was measured."""
    if measured := config.stash[_measured]:
        from offload_core.testing.throughput import report  # by now it is loaded

        terminalreporter.section("throughput, one object after the other")
        terminalreporter.write("\n".join([*report(measured), ""]))
