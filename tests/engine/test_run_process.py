"""Processes of engine runs: a fork behaves like a fresh interpreter, and no process of a run is left."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from tests.support.engine.spec import RunSpec, fork_server, logged_problems, run_environment
from tests.support.process_state import is_running
from tests.support.processes import Program, run_program

_MODULE = """
import json, os, subprocess, sys

def main(arguments):
    if arguments[0] == "describe":
        server = f"/proc/{os.getppid()}"
        facts = {
            "preloaded": "vllm.v1.engine.llm_engine" in sys.modules,
            "own_session": os.getsid(0) == os.getpid(),
            "variable": os.environ.get("RUN_VARIABLE"),
            "foreign_variable": os.environ.get("OPENBLAS_NUM_THREADS"),
            "search_path": sys.path,
            "parent_threads": len(os.listdir(f"{server}/task")),
        }
        print(json.dumps(facts))
        return 0
    if arguments[0] == "hang":
        child = subprocess.Popen(["sleep", "1000"])
        print("pids", os.getpid(), child.pid, flush=True)
        child.wait()
    for number in range(300):
        print("line", number)
    raise ValueError("the reason")

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
"""


@pytest.fixture
def module_folder(tmp_path: Path) -> Path:
    (tmp_path / "run_of_a_test.py").write_text(_MODULE)
    return tmp_path


def _program(folder: Path, behaviour: str, *, forked: bool = True, **variables: str) -> Program:
    search_path = os.pathsep.join([str(folder), *(entry for entry in sys.path if entry)])
    environment = {**run_environment(RunSpec(model="", rounds=[])), **os.environ, "PYTHONPATH": search_path}
    return Program("run_of_a_test", (behaviour,), environment | variables, fork_server() if forked else None)


def _run(program: Program, timeout_seconds: float = 60.0) -> tuple[str | None, list[str]]:
    lines: list[str] = []

    def keep(line: str) -> bool:
        lines.append(line)
        return False

    return run_program(program, timeout_seconds, keep), lines


def describe(folder: Path, *, forked: bool = True, **variables: str) -> dict[str, Any]:
    """Return the facts that a run sees of its process."""
    problem, lines = _run(_program(folder, "describe", forked=forked, **variables))
    assert problem is None, problem
    facts: dict[str, Any] = json.loads(lines[-1])
    return facts


@pytest.mark.parametrize(
    ("forked", "variables", "preloaded"),
    [(True, {}, True), (False, {}, False), (True, {"RUN_VARIABLE": "1"}, False)],
    ids=["forked", "fresh", "a variable of its own"],
)
def test_run_sees_its_environment(
    module_folder: Path, forked: bool, variables: dict[str, str], preloaded: bool
) -> None:
    facts = describe(module_folder, forked=forked, **variables)
    assert facts["preloaded"] == preloaded
    assert facts["own_session"]
    assert facts["variable"] == variables.get("RUN_VARIABLE")
    assert facts["foreign_variable"] == os.environ.get("OPENBLAS_NUM_THREADS")
    assert str(module_folder) in facts["search_path"]
    if preloaded:
        assert facts["parent_threads"] == 1, "a process must not be forked from one with threads"


_FIRST_RUN_WITH_ITS_OWN_VARIABLE = """
import json, sys
from pathlib import Path
from tests.engine.test_run_process import describe

if __name__ == "__main__":
    first = describe(Path(sys.argv[1]), RUN_VARIABLE="1")
    print(json.dumps([first, describe(Path(sys.argv[1]))]))
"""


@pytest.mark.long
def test_a_first_run_with_its_own_variables_leaves_the_server_to_the_others(module_folder: Path) -> None:
    script = module_folder / "first_run.py"
    script.write_text(_FIRST_RUN_WITH_ITS_OWN_VARIABLE)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(entry for entry in sys.path if entry)}
    command = [sys.executable, str(script), str(module_folder)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=True)
    first, second = json.loads(done.stdout.splitlines()[-1])
    assert (first["preloaded"], first["variable"]) == (False, "1")
    assert (second["preloaded"], second["variable"]) == (True, None)


@pytest.mark.parametrize("forked", [True, False], ids=["forked", "fresh"])
def test_failed_run_tells_its_last_lines(module_folder: Path, forked: bool) -> None:
    problem, lines = _run(_program(module_folder, "fail", forked=forked))
    assert problem is not None
    first, *rest = problem.splitlines()
    assert first == "the engine run failed: exit code 1"
    assert "line 299" in rest
    assert rest[-1] == "ValueError: the reason"
    assert len(rest) == 200 < len(lines)


@pytest.mark.parametrize("forked", [True, False], ids=["forked", "fresh"])
def test_late_run_is_ended_with_all_it_started(module_folder: Path, forked: bool) -> None:
    problem, lines = _run(_program(module_folder, "hang", forked=forked), timeout_seconds=8.0)
    assert problem is not None
    assert problem.startswith("the engine run failed: no end after 8 s")
    pids = [int(pid) for pid in lines[-1].split()[1:]]
    assert len(pids) == 2
    pause = threading.Event()
    for _ in range(100):
        if not any(is_running(pid) for pid in pids):
            return
        pause.wait(0.05)
    pytest.fail(f"still running: {[pid for pid in pids if is_running(pid)]}")


def test_what_vllm_says_by_itself_is_no_problem_of_a_run() -> None:
    lines = [
        "INFO 11-21 10:00:00 [core.py:1] Initializing an engine",
        "WARNING 11-21 10:00:00 [config.py:2] no GPU was found",
        "WARNING offload_core.tiers.tier: tier 'disk': damaged object, deleting it",
        "ERROR asyncio: Task exception was never retrieved",
        "(EngineCore pid=7) Traceback (most recent call last):",
        "WARNING vllm.triton_utils.importing: Triton is installed, but doesn't include CPU backend",
        "{'WARNING': 'in a text'}",
    ]
    assert logged_problems(lines) == lines[2:5]
