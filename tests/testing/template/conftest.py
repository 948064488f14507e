"""The template as a plugin author has it: a copy outside the project, installed in an environment of its own."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.support.paths import ROOT, TEMPLATE


@dataclass(frozen=True)
class CleanEnvironment:
    """A virtual environment with the wheels of the core and of the template, and an empty folder to run in."""

    python: Path
    folder: Path

    def run(self, *arguments: str | Path, timeout_seconds: float = 60) -> subprocess.CompletedProcess[str]:
        """Run its Python in the folder, without access to the sources of this project."""
        return _run(self.python, *arguments, cwd=self.folder, timeout_seconds=timeout_seconds)


def _run(
    *command: str | Path, cwd: Path | None = None, timeout_seconds: float = 60
) -> subprocess.CompletedProcess[str]:
    variables = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    variables["PYTHONDONTWRITEBYTECODE"] = "1"
    return subprocess.run(
        command, cwd=cwd, env=variables, capture_output=True, text=True, timeout=timeout_seconds, check=False
    )


def _must(*command: str | Path) -> None:
    done = _run(*command)
    assert done.returncode == 0, f"{command}:\n{done.stdout}{done.stderr}"


@pytest.fixture(scope="session")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the template."""
    folder = tmp_path_factory.mktemp("authors") / TEMPLATE.name
    return Path(shutil.copytree(TEMPLATE, folder, ignore=shutil.ignore_patterns("__pycache__", "dist", ".*")))


@pytest.fixture(scope="session")
def clean(tmp_path_factory: pytest.TempPathFactory, template: Path) -> CleanEnvironment:
    """Install both wheels in a new environment. Their dependencies come from this one, since tests have no network."""
    folder = tmp_path_factory.mktemp("clean")
    wheels, venv, dependencies = folder / "wheels", folder / "venv", folder / "dependencies"
    for source in (ROOT, template):
        _must(sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", wheels, source)
    _must(sys.executable, "-m", "venv", "--without-pip", venv)
    pip = (sys.executable, "-m", "pip", "--python", venv / "bin" / "python", "--disable-pip-version-check")
    _must(*pip, "install", "--quiet", "--no-deps", "--no-index", *wheels.iterdir())
    # Not the folder of this environment itself: it contains the project's own editable installation.
    dependencies.mkdir()
    for entry in Path(sysconfig.get_path("purelib")).iterdir():
        if not entry.name.startswith(("offload_", "_editable_impl_offload_")):
            (dependencies / entry.name).symlink_to(entry)
    (dependencies / "tests").symlink_to(ROOT / "tests")  # the labs that run an engine; no sources of the packages
    (site_packages,) = venv.glob("lib/python*/site-packages")
    (site_packages / "dependencies.pth").write_text(f"{dependencies}\n")
    elsewhere = folder / "elsewhere"
    elsewhere.mkdir()
    return CleanEnvironment(venv / "bin" / "python", elsewhere)
