"""Versions of vLLM: which are accepted, and what the older ones need beside the connector."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import vllm
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1

import offload_core.vllm
from offload_core.vllm import compat

pytestmark = pytest.mark.every_version

ADAPTER = Path(offload_core.vllm.__file__).parent


def test_a_vllm_that_is_too_old_is_refused_before_anything_of_it_is_missed() -> None:
    script = (
        "import sys, types; sys.modules['vllm'] = vllm = types.ModuleType('vllm'); vllm.__version__ = '0.29.1'; "
        "import offload_core.vllm"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False)
    last_line = done.stderr.strip().splitlines()[-1]
    assert "PlanError: vLLM 0.29.1 is too old" in last_line
    assert "0.30, 0.31, 0.32, 0.33" in last_line


@pytest.mark.parametrize("version", ["0.34.0", "1.0.0rc1", "0.34.1.dev7+gabc", "dev"])
def test_a_version_that_is_not_tested_is_warned_about(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    monkeypatch.setattr(vllm, "__version__", version)
    problem = compat.version_problem()
    assert problem is not None
    assert version in problem
    assert "0.30, 0.31, 0.32, 0.33" in problem


@pytest.mark.parametrize("version", ["0.30.0", "0.31.2", "0.32.0", "0.33.0", "0.33.1.dev7+gabc"])
def test_a_tested_version_is_not(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    monkeypatch.setattr(vllm, "__version__", version)
    assert compat.version_problem() is None


@pytest.mark.parametrize(("sleeps", "is_told"), [(True, False), (True, True), (False, False)])
def test_sleep_mode_of_a_vllm_that_does_not_tell_connectors_is_warned_about(
    monkeypatch: pytest.MonkeyPatch, sleeps: bool, is_told: bool
) -> None:
    monkeypatch.delattr(KVConnectorBase_V1, "unregister_kv_caches", raising=False)
    if is_told:
        monkeypatch.setattr(KVConnectorBase_V1, "unregister_kv_caches", lambda self: None, raising=False)
    config: Any = SimpleNamespace(model_config=SimpleNamespace(enable_sleep_mode=sleeps))
    problem = compat.sleep_problem(config)
    assert (problem is not None) == (sleeps and not is_told)
    assert problem is None or "Use vLLM 0.33, or run without enable_sleep_mode" in problem


@pytest.mark.parametrize("path", [p for p in sorted(ADAPTER.rglob("*.py")) if p.name != "compat.py"], ids=str)
def test_no_other_module_asks_what_this_version_has(path: Path) -> None:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ExceptHandler) and node.type is not None:
            caught = {name.id for name in ast.walk(node.type) if isinstance(name, ast.Name)}
            assert not caught & {"ImportError", "ModuleNotFoundError", "AttributeError"}, node.lineno
        if isinstance(node, ast.Compare):
            assert "__version__" not in ast.unparse(node), node.lineno


class _Connector:
    """Stands for the connector: counts what reaches it."""

    def __init__(self) -> None:
        self.saves = 0

    def wait_for_save(self) -> None:
        self.saves += 1

    def get_transfer_results(self, finished_req_ids: set[str]) -> int:
        return self.saves

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        return 0, False

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None: ...

    def update_connector_output(self, connector_output: Any) -> None: ...

    def build_connector_meta(self, scheduler_output: Any) -> None: ...

    def request_finished_all_groups(self, request: Any, block_ids: Any) -> None: ...


@pytest.fixture
def on_030(monkeypatch: pytest.MonkeyPatch) -> _Connector:
    monkeypatch.setattr(vllm, "__version__", "0.30.0")
    return compat.adapt_to_installed_vllm(_Connector)()


@pytest.mark.parametrize("version", ["0.31.0", "0.32.0", "0.33.0"])
def test_newer_engines_need_nothing_more(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    monkeypatch.setattr(vllm, "__version__", version)
    assert compat.adapt_to_installed_vllm(_Connector) is _Connector


def test_030_saves_once_in_every_step(on_030: _Connector) -> None:
    on_030.wait_for_save()
    assert on_030.get_transfer_results(set()) == 1, "a step with a forward pass: vLLM has called it"
    assert on_030.get_transfer_results(set()) == 2, "a step without one: it has not"


def _load(connector: _Connector, name: str) -> Any:
    request = SimpleNamespace(request_id=name)
    connector.update_state_after_alloc(request, None, 256)
    return request


def _is_passed_over(connector: _Connector, name: str) -> bool:
    return connector.get_num_new_matched_tokens(SimpleNamespace(request_id=name), 0)[0] is None


def test_030_lets_a_request_whose_load_has_ended_run_before_the_others(on_030: _Connector) -> None:
    _load(on_030, "loads")
    assert not _is_passed_over(on_030, "other")
    on_030.update_connector_output(SimpleNamespace(finished_recving={"loads"}))
    assert _is_passed_over(on_030, "other")
    on_030.build_connector_meta(SimpleNamespace(num_scheduled_tokens={"running": 1}))
    assert _is_passed_over(on_030, "other")
    on_030.build_connector_meta(SimpleNamespace(num_scheduled_tokens={"loads": 7, "running": 1}))
    assert not _is_passed_over(on_030, "other")


def test_030_failed_loads_do_not_wait_for_each_other(on_030: _Connector) -> None:
    for name in ("a", "b"):
        _load(on_030, name)
    on_030.update_connector_output(SimpleNamespace(finished_recving={"a", "b"}))
    assert _is_passed_over(on_030, "a"), "b may hold what a needs"
    assert not _is_passed_over(on_030, "b"), "b is asked for again, so it holds nothing, and neither does a"
    assert not _is_passed_over(on_030, "a")


@pytest.mark.parametrize("ends_first", ["request", "load"])
def test_030_a_request_that_is_aborted_holds_nobody_up(on_030: _Connector, ends_first: str) -> None:
    request = _load(on_030, "aborted")
    load_ended = SimpleNamespace(finished_recving={"aborted"})
    if ends_first == "load":
        on_030.update_connector_output(load_ended)
    on_030.request_finished_all_groups(request, ())
    if ends_first == "request":
        on_030.update_connector_output(load_ended)
    assert not _is_passed_over(on_030, "other")
