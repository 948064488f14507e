"""The pytest plugin of offload-core. Every run of pytest imports it, so it is light to import."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from offload_core.testing.throughput import Throughput

MARK = "offload_throughput"

# Failures in the harness then show the compared values.
pytest.register_assert_rewrite("offload_core.testing")

_measured = pytest.StashKey[list[tuple[str, "Throughput"]]]()


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option for the report."""
    parser.getgroup("offload-core").addoption(
        "--offload-throughput",
        action="store_true",
        help="measure stores and loads of each backend with a contract class, and report them at the end",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Create the list of measurements, and register the mark of the tests that measure."""
    config.stash[_measured] = []
    config.addinivalue_line("markers", f"{MARK}: measures throughput; left out without --offload-throughput")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out measurements unless the option asks for them; refuse a contract with a replaced or skipped test."""
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
    """Measurements for the report, which tests append to: pairs of a backend's name and a measurement."""
    return pytestconfig.stash[_measured]


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Report the measurements."""
    if measured := config.stash[_measured]:
        from offload_core.testing.throughput import report  # the tests have loaded it already

        terminalreporter.section("throughput, one object after the other")
        terminalreporter.write("\n".join([*report(measured), ""]))
