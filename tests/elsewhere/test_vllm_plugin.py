"""The short name of our tier, which vLLM's own loader of plugins registers."""

from __future__ import annotations

import logging
import subprocess
import sys
from importlib.metadata import entry_points
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import vllm.plugins
from vllm.v1.kv_offload.tiering.factory import SecondaryTierFactory

from offload_core.elsewhere import vllm_plugin
from offload_core.elsewhere.vllm_tiering import OffloadCoreTier
from tests.elsewhere.test_vllm_tiering import our_tier
from tests.elsewhere.tiering_rig import content, engine

FACTORY = "vllm.v1.kv_offload.tiering.factory"


@pytest.fixture
def registry(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """vLLM's registry without our tier."""
    others = {name: load for name, load in SecondaryTierFactory._registry.items() if name != vllm_plugin.TIER}
    monkeypatch.setattr(SecondaryTierFactory, "_registry", others)
    return others


@pytest.fixture
def load_plugins(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return vLLM's loader of plugins, as in a new process, for our plugin only."""
    monkeypatch.setenv("VLLM_PLUGINS", "offload_core")

    def load() -> None:
        monkeypatch.setattr(vllm.plugins, "plugins_loaded", False)
        vllm.plugins.load_general_plugins()

    return load


def test_vllm_finds_the_tier_by_its_short_name(registry: dict[str, Any], load_plugins: Any, tmp_path: Path) -> None:
    assert vllm_plugin.TIER not in registry
    load_plugins()
    assert SecondaryTierFactory.get_tier_class({"type": "OffloadCoreTier"}) is OffloadCoreTier
    with engine({key: value for key, value in our_tier(tmp_path).items() if key != "module_path"}) as one:
        one.store(range(4))
        one.forget_primary()
        assert one.fetch(range(4)) == list(map(content, range(4)))


def test_the_long_way_works_beside_the_short_name(registry: dict[str, Any], load_plugins: Any, tmp_path: Path) -> None:
    load_plugins()
    with engine(our_tier(tmp_path)) as one:
        assert isinstance(one.tier, OffloadCoreTier)


def test_vllm_may_load_the_plugin_twice(registry: dict[str, Any], load_plugins: Any) -> None:
    load_plugins()
    load_plugins()
    assert vllm_plugin.TIER in registry


@pytest.mark.parametrize("factory", [None, ModuleType(FACTORY)], ids=["no module", "no registry"])
def test_a_vllm_without_the_registry_starts_as_before(
    factory: ModuleType | None, load_plugins: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, FACTORY, factory)
    with caplog.at_level(logging.WARNING):
        load_plugins()
    assert not caplog.records


def test_the_plugin_imports_nothing_heavy() -> None:
    (entry,) = entry_points(group="vllm.general_plugins", name="offload_core")
    assert entry.value == "offload_core.elsewhere.vllm_plugin:register"
    script = (
        "import sys\nfor name in ('vllm', 'lmcache', 'torch', 'numpy'): sys.modules[name] = None\n"
        "from offload_core.elsewhere.vllm_plugin import register\nregister()\n"
        "print(sorted(name for name in sys.modules if name.startswith('offload_core')))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split("\n")[0] == str(
        ["offload_core", "offload_core.elsewhere", "offload_core.elsewhere.vllm_plugin"]
    )
