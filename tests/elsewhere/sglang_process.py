"""The checks on SGLang's own machinery, run by pytest in processes of their own.

SGLang changes transformers at its import, and the checks stand in for packages that it needs. Neither belongs in the
process of all other tests.
"""

from __future__ import annotations

import ast
import importlib.util
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

from tests.support.paths import ROOT

FOLDER = Path(__file__).with_name("sglang")
_PROBLEMS = {"failure", "error", "skipped"}
_NEEDED = ("sglang", "torch", "transformers", "orjson", "IPython", "traitlets", "gguf")


def why_not() -> str | None:
    """Return the reason for which SGLang's modules cannot run here, if there is one."""
    for module in _NEEDED:
        if importlib.util.find_spec(module) is None:
            return f"the module {module} is not installed; `make install` installs SGLang where it has a wheel"
    return None


def names() -> Iterator[tuple[str, str]]:
    """Yield the file and the function of each check."""
    for path in sorted(FOLDER.glob("checks_*.py")):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
                yield path.name, node.name


def outcomes() -> dict[tuple[str, str], list[str]]:
    """Run all checks, once; returns, per file and function, the problem of each case, or an empty text."""
    found = _run()
    assert not isinstance(found, str), found
    return found


@cache
def _run() -> dict[tuple[str, str], list[str]] | str:
    with TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--junitxml={report}"]
        files = sorted(map(str, FOLDER.glob("checks_*.py")))
        try:
            done = subprocess.run(
                [*command, *files], cwd=ROOT, capture_output=True, text=True, timeout=380, check=False
            )
        except subprocess.TimeoutExpired as late:
            return str(late)
        if not report.exists():
            return done.stdout + done.stderr
        found: dict[tuple[str, str], list[str]] = {}
        for case in ElementTree.parse(report).iter("testcase"):
            file = str(case.get("classname")).split(".")[-1] + ".py"
            problems = [part.text or part.get("message") or part.tag for part in case if part.tag in _PROBLEMS]
            found.setdefault((file, str(case.get("name")).split("[")[0]), []).append("\n".join(problems))
    return found
