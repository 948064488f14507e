"""Rules of the house that a reader would otherwise have to check in every change."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

from offload_core.api.hooks import HookSpecs
from tests.support.paths import ROOT, TEMPLATE
from tests.support.source_files import imported, relative

CORE = sorted((ROOT / "offload_core").rglob("*.py"))
BACKENDS = sorted([*(ROOT / "backends").rglob("*.py"), *(TEMPLATE / "offload_backend_sqlite").rglob("*.py")])
ADAPTER = ROOT / "offload_core" / "vllm"
ELSEWHERE = ROOT / "offload_core" / "elsewhere"
TIERING = ELSEWHERE / "vllm_tiering.py"
"""A module that vLLM loads: a secondary tier of its own tiering."""
PLUGIN = ELSEWHERE / "vllm_plugin.py"
"""The module that vLLM loads at its start, which works without vLLM too."""
LMCACHE = {ELSEWHERE / "lmcache_l2.py", ELSEWHERE / "lmcache_results.py"}
"""The modules that LMCache's server loads: an L2 adapter."""
LMCACHE_MODULES = {f"offload_core.elsewhere.{path.stem}" for path in LMCACHE}
SGLANG = ELSEWHERE / "sglang_hicache.py"
"""The module that SGLang loads: a storage backend of HiCache."""
LMCACHE_SERVER = ROOT / "backends" / "lmcache" / "offload_backend_lmcache" / "server"


def test_the_rules_are_checked_on_the_real_files() -> None:
    assert ROOT / "offload_core" / "planning" / "planner.py" in CORE
    assert ROOT / "backends" / "disk" / "offload_backend_disk" / "backend.py" in BACKENDS
    assert TEMPLATE / "offload_backend_sqlite" / "database.py" in BACKENDS
    assert ADAPTER / "connector.py" in CORE
    assert {TIERING, PLUGIN, SGLANG, *LMCACHE} <= set(CORE)


@pytest.mark.parametrize(
    "path", [p for p in CORE + BACKENDS if not {ADAPTER, TIERING, PLUGIN} & {p, *p.parents}], ids=relative
)
def test_nothing_outside_the_adapter_imports_vllm(path: Path) -> None:
    for module, names in imported(path):
        assert module.split(".")[0] != "vllm"
        assert not module.startswith("offload_core.vllm")
        assert not (module == "offload_core" and "vllm" in names)


@pytest.mark.parametrize(
    "path", [p for p in CORE + BACKENDS if p not in LMCACHE and LMCACHE_SERVER not in p.parents], ids=relative
)
def test_nothing_outside_its_own_modules_imports_lmcache(path: Path) -> None:
    for module, names in imported(path):
        assert module.split(".")[0] != "lmcache"
        assert not LMCACHE_MODULES & {module, *(f"{module}.{name}" for name in names)}


@pytest.mark.parametrize("path", [p for p in CORE + BACKENDS if p != SGLANG], ids=relative)
def test_nothing_outside_its_own_module_imports_sglang(path: Path) -> None:
    for module, names in imported(path):
        assert module.split(".")[0] != "sglang"
        assert "offload_core.elsewhere.sglang_hicache" not in {module, *(f"{module}.{name}" for name in names)}


@pytest.mark.parametrize("path", CORE + BACKENDS, ids=relative)
def test_nothing_stored_can_run_code(path: Path) -> None:
    loaders = {"pickle", "_pickle", "cPickle", "marshal", "shelve", "dill", "cloudpickle", "joblib"}
    assert not loaders & {module.split(".")[0] for module, _ in imported(path)}
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "load":
            assert ast.unparse(node.func.value) != "torch", "torch.load unpickles"
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            assert ast.unparse(node.func) not in {"yaml.load", "yaml.unsafe_load", "yaml.full_load"}


@pytest.mark.parametrize("path", CORE + BACKENDS, ids=relative)
def test_modules_of_the_wheel_do_not_name_the_labs(path: Path) -> None:
    assert re.findall(r"\btests[./]\w+", path.read_text()) == []


def test_the_core_and_the_backends_work_without_the_systems_that_they_serve() -> None:
    modules = [
        ".".join(path.relative_to(root).with_suffix("").parts).removesuffix(".__init__")
        for root, paths in ((ROOT, CORE), *((p, sorted(p.rglob("*.py"))) for p in (ROOT / "backends").iterdir()))
        for path in paths
        if ADAPTER not in path.parents and path not in {TIERING, SGLANG, *LMCACHE}
    ]
    assert {"offload_core", "offload_core.transfer.engine", "offload_backend_disk.plugin"} <= set(modules)
    systems = ("vllm", "lmcache", "sglang")
    script = f"import sys; sys.modules.update(dict.fromkeys({systems}))\nfor name in {modules!r}: __import__(name)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr


def test_every_hook_has_a_test_named_after_it() -> None:
    hooks = [name for name in vars(HookSpecs) if name.startswith("offload_")]
    assert hooks
    tests = {
        node.name
        for path in (ROOT / "tests").rglob("test_*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef)
    }
    assert {f"test_{hook}" for hook in hooks} <= tests
