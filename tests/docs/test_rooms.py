"""The rooms of the package: their one direction of imports, their size, and the one door for plugins."""

from __future__ import annotations

import ast
import graphlib
import subprocess
import sys
from pathlib import Path

import pytest

import offload_core.api
import offload_core.testing
from tests.support.paths import ROOT, TEMPLATE
from tests.support.source_files import imported, relative

FLOORS = (
    ("api", "runtime"),
    ("planning", "objects", "plugins", "testing"),
    ("memory", "simulation"),
    ("config",),
    ("tiers",),
    ("lookup", "transfer", "cli", "io_process"),
    ("vllm", "elsewhere"),
)
"""The rooms, lowest floor first. A room imports from the floors below it only."""

ENTRANCES = {"__init__.py", "pytest_plugin.py"}
"""The modules at the top of the package; everything else has a room."""

PUBLIC = ("offload_core.api", "offload_core.testing")
MAX_FILES = 14
MAX_LINES = 400

CORE = ROOT / "offload_core"
PACKAGES = [CORE, *(path for path in (ROOT / "backends").glob("*/offload_backend_*") if path.is_dir())]
MODULES = sorted(path for package in PACKAGES for path in package.rglob("*.py"))
ROOMED = [path for path in MODULES if CORE in path.parents and path.parent != CORE]
STRANGERS = sorted([*(ROOT / "backends").rglob("*.py"), *(ROOT / "examples").rglob("*.py")])
"""Code that may use the public door only."""


def floor(room: str) -> int:
    (number,) = (number for number, rooms in enumerate(FLOORS) if room in rooms)
    return number


def test_the_rooms_are_the_folders_and_the_top_has_entrances_only() -> None:
    folders = {path.name for path in CORE.iterdir() if path.is_dir() and path.name != "__pycache__"}
    assert folders == {room for rooms in FLOORS for room in rooms}
    assert {path.name for path in CORE.glob("*.py")} == ENTRANCES


@pytest.mark.parametrize("path", ROOMED, ids=relative)
def test_imports_point_down(path: Path) -> None:
    own = path.relative_to(CORE).parts[0]
    for module, names in imported(path):
        whole = [f"{module}.{name}" for name in names] if module == "offload_core" else [module]
        for parts in (name.split(".") for name in whole if name.startswith("offload_core.")):
            room = parts[1]
            if room in (own, "__version__"):
                continue
            assert floor(room) < floor(own), f"{relative(path)} imports {'.'.join(parts)}, which is not below {own}"


@pytest.mark.parametrize("package", [*PACKAGES, CORE / "vllm", CORE / "testing"], ids=relative)
def test_the_folders_of_a_package_form_no_circle(package: Path) -> None:
    name = ".".join(package.parts[package.parts.index(CORE.name) :]) if package.is_relative_to(CORE) else package.name
    folders = {path.parent.name for path in package.glob("*/__init__.py")}
    arrows = {folder: _folders_imported(package / folder, name) & folders - {folder} for folder in folders}
    tuple(graphlib.TopologicalSorter(arrows).static_order())  # CycleError names the circle


def _folders_imported(folder: Path, package: str) -> set[str]:
    """Return the first name below ``package`` of everything that the modules of a folder import."""
    found: set[str] = set()
    for path in folder.rglob("*.py"):
        for module, names in imported(path):
            whole = [module, *(f"{module}.{name}" for name in names)]
            found |= {one.removeprefix(f"{package}.").split(".")[0] for one in whole if one.startswith(f"{package}.")}
    return found


@pytest.mark.parametrize("package", PACKAGES, ids=relative)
def test_folders_have_at_most_14_files(package: Path) -> None:
    folders = [package, *(path for path in package.rglob("*") if path.is_dir() and path.name != "__pycache__")]
    counts = {relative(folder): len(list(folder.glob("*.py"))) for folder in folders}
    assert {folder: count for folder, count in counts.items() if count > MAX_FILES} == {}


@pytest.mark.parametrize("path", MODULES, ids=relative)
def test_modules_have_at_most_400_lines(path: Path) -> None:
    assert len(path.read_text().splitlines()) <= MAX_LINES


@pytest.mark.parametrize(
    "package", [path for package in PACKAGES for path in package.rglob("__init__.py")], ids=relative
)
def test_every_folder_says_its_job_in_one_sentence(package: Path) -> None:
    first = (ast.get_docstring(ast.parse(package.read_text())) or "").split("\n\n")[0]
    assert first.endswith(".")
    assert len(first.split()) <= 25


@pytest.mark.parametrize("path", STRANGERS, ids=relative)
def test_backends_examples_and_template_use_the_public_door_only(path: Path) -> None:
    for module, names in imported(path):
        if module.split(".")[0] == "offload_core":
            assert module in PUBLIC, f"{relative(path)} imports {module}; import from {' or '.join(PUBLIC)}"
            assert not [name for name in names if name.startswith("_")]


@pytest.mark.parametrize("door", [offload_core.api, offload_core.testing], ids=lambda door: door.__name__)
def test_a_door_lists_its_names_sorted_and_has_them_all(door: object) -> None:
    names = list(vars(door)["__all__"])
    assert names == sorted(names, key=lambda name: (not name.isupper(), name))
    assert set(names) <= vars(door).keys()


def test_the_rules_are_checked_on_the_real_files() -> None:
    assert CORE / "planning" / "planner.py" in MODULES
    assert ROOT / "backends" / "disk" / "offload_backend_disk" / "backend.py" in STRANGERS
    assert TEMPLATE / "offload_backend_sqlite" / "database.py" in STRANGERS


@pytest.mark.parametrize("door", PUBLIC)
def test_plugin_authors_need_neither_torch_nor_vllm(door: str) -> None:
    script = f"import sys\nimport {door}\nprint({{'torch', 'vllm'}} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=100, check=False)
    assert (done.returncode, done.stdout) == (0, "set()\n"), done.stderr
