"""The contract's tests pass for a backend that keeps the contract, and each fails for one that breaks its clause."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from offload_core.testing.contract.checks import clause_of
from offload_core.testing.contract.suite import contract_tests
from tests.support.paths import ROOT
from tests.testing.contract import inner_run
from tests.testing.contract.broken import BROKEN
from tests.testing.contract.defects import Broken

CLAUSES = re.findall(r"^\| (C\d+) \|", (ROOT / "plugins.md").read_text(), re.MULTILINE)


class Results:
    """The outcome of each test of a pytest run."""

    def __init__(self) -> None:
        self.passed: set[str] = set()
        self.skipped: dict[str, str] = {}
        self.failed: dict[str, str] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        name = report.nodeid.rpartition("::")[2]
        if report.skipped:
            assert isinstance(report.longrepr, tuple)
            self.skipped[name] = report.longrepr[2]
        elif report.failed:
            crash = getattr(report.longrepr, "reprcrash", None)
            self.failed[name] = crash.message if crash else str(report.longrepr)
        elif report.when == "call":
            self.passed.add(name)


@pytest.fixture(autouse=True)
def _no_options_of_the_outer_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYTEST_ADDOPTS", raising=False)  # the inner run knows none of the terminal's options


def run_contract(class_name: str, tmp_path: Path, *tests: str) -> Results:
    """Run tests of single clauses of a class of ``inner_run`` in this process: all, or those that are named."""
    results = Results()
    node = f"{inner_run.__file__}::{class_name}"
    quiet = ["-p", "no:terminal", "-p", "no:cacheprovider", "-p", "no:faulthandler", "-p", "no:logging"]
    arguments = [
        *([f"{node}::{test}" for test in tests] or [node]),
        "-o",
        "addopts=",
        "-k",
        "test_c",
        "--basetemp",
        str(tmp_path / "inner"),
    ]
    code = pytest.main([*arguments, *quiet], plugins=[results])
    assert code in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED), code
    return results


def test_a_backend_that_keeps_the_contract_passes_all_of_it(tmp_path: Path) -> None:
    results = run_contract("TestReference", tmp_path)
    assert results.failed == {}
    assert results.skipped == {
        "test_c18_a_backend_that_cannot_list_says_so": "Skipped: capability lists is declared",
    }
    assert results.passed | results.skipped.keys() == contract_tests().keys()


def test_a_backend_without_thread_calls_is_told_which_tests_need_them(tmp_path: Path) -> None:
    results = run_contract("TestAsyncReference", tmp_path)
    assert results.failed == {}
    reasons = {name: reason for name, reason in results.skipped.items() if "no thread calls" in reason}
    assert reasons.keys() == {
        "test_c07_a_load_that_failed_does_not_touch_its_buffer_afterwards",
        "test_c07_a_store_that_failed_does_not_read_its_buffer_afterwards",
        "test_c10_stores_that_failed_give_their_room_back",
    }


def test_a_medium_that_evicts_by_itself_need_not_know_sizes(tmp_path: Path) -> None:
    names = [name for name in contract_tests() if name.startswith("test_c19_")]
    results = run_contract("TestEvictingReference", tmp_path, *names)
    assert (results.failed, results.passed) == ({}, set(names))


def test_a_test_of_a_slow_medium_says_how_to_give_it_more_time(tmp_path: Path) -> None:
    names = {"test_c01_a_load_returns_the_bytes_that_were_stored", "test_c11_what_was_granted_can_be_stored"}
    results = run_contract("TestSlowReference", tmp_path, *names)
    assert results.failed.keys() == names
    for text in results.failed.values():
        assert "the operations under test did not end within 0.2 s (raise test_seconds for a slow medium)" in text


def test_a_medium_in_the_memory_of_one_process_is_found(tmp_path: Path) -> None:
    name = "test_c05_a_process_that_is_killed_sees_objects_and_leaves_its_own"
    results = run_contract("TestReferenceInTwoProcesses", tmp_path, name)
    wanted = "C5: prepare_load in another process returned [False, False]; it should return [True, True]"
    assert wanted in results.failed[name]


def _id(index: int) -> str:
    return f"{BROKEN[index].clause}-{BROKEN[index].name}"


@pytest.mark.long  # the whole contract for each of the backends
@pytest.mark.parametrize("index", range(len(BROKEN)), ids=_id)
def test_a_backend_that_breaks_one_clause_fails_its_tests_and_no_other(index: int, tmp_path: Path) -> None:
    broken = BROKEN[index]
    results = run_contract(inner_run.class_name(index), tmp_path)
    assert {name: text.splitlines()[0] for name, text in results.failed.items() if name[5:] not in broken.tests} == {}
    _check_failed(results, broken)


@pytest.mark.parametrize("index", range(len(BROKEN)), ids=_id)
def test_a_backend_that_breaks_one_clause_fails_its_tests(index: int, tmp_path: Path) -> None:
    broken = BROKEN[index]
    results = run_contract(inner_run.class_name(index), tmp_path, *(f"test_{name}" for name in broken.tests))
    _check_failed(results, broken)


def _check_failed(results: Results, broken: Broken) -> None:
    assert set(results.failed) == {f"test_{name}" for name in broken.tests}
    for name, text in results.failed.items():
        assert clause_of(name) == broken.clause
        assert re.match(rf"(?:\w+: )?{broken.message}", text), text


def test_every_clause_has_a_backend_that_breaks_it() -> None:
    assert {broken.clause for broken in BROKEN} == set(CLAUSES)
    assert [f"C{number}" for number in range(1, 27)] == CLAUSES


def test_every_test_of_the_contract_fails_for_some_backend() -> None:
    assert {f"test_{name}" for broken in BROKEN for name in broken.tests} == contract_tests().keys()
