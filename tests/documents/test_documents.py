"""What the documents show is run: every code block, every configuration, every name of a hook."""

from __future__ import annotations

import asyncio
import json
import re
import shlex
import sys
import tomllib
from collections.abc import Sequence
from importlib.metadata import EntryPoint
from pathlib import Path

import hypothesis
import pytest
import yaml

from offload_core.backend import (
    Backend,
    BackendContext,
    BackendOptions,
    BackendType,
    Capabilities,
    LoadOutcome,
    StoreOutcome,
)
from offload_core.config import BackendConfig, OffloadSettings, load_config
from offload_core.hookspecs import HookSpecs
from offload_core.keys import ObjectKey
from offload_core.plugins import load_plugins
from offload_core.runtime import DaemonExecutor
from offload_core.stats import COUNTERS
from offload_core.testing.contract import contract_tests
from offload_core.testing.machine import SETTINGS, check_with_machine

pytest_plugins = ["pytester"]

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text()
PLUGINS = (ROOT / "plugins.md").read_text()


def _blocks(text: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.MULTILINE | re.DOTALL)


def test_readme_configuration_is_valid_and_is_the_example_file() -> None:
    (block,) = _blocks(README, "yaml")
    assert load_config(yaml.safe_load(block)).settings.hybrid_chunk_size == 256
    example = yaml.safe_load((ROOT / "examples" / "offload.yaml").read_text())
    assert example == yaml.safe_load(block)


def test_readme_command_line_names_our_connector(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    command = next(block for block in _blocks(README, "console") if "vllm serve" in block)
    words = shlex.split(command.removeprefix("$ "))
    transfer = json.loads(words[words.index("--kv-transfer-config") + 1])
    assert transfer["kv_connector"] == "HybridOffloadConnector"
    assert transfer["kv_connector_module_path"] == "offload_core.vllm"
    (tmp_path / transfer["kv_connector_extra_config"]["config_file"]).write_text(_blocks(README, "yaml")[0])
    monkeypatch.chdir(tmp_path)
    assert load_config(transfer["kv_connector_extra_config"]).tiers


def test_readme_lists_every_configuration_key_with_its_default() -> None:
    rows = dict(re.findall(r"^\| `(\w+)` \| ([^|]+?) \|", README, re.MULTILINE))
    assert set(rows) == set(OffloadSettings.model_fields)
    for name in ("load_timeout_seconds", "load_timeout_seconds_per_mib", "lookup_timeout_seconds"):
        assert float(rows[name].strip("`")) == OffloadSettings.model_fields[name].default
    for name in BackendConfig.model_fields:
        assert f"`{name}`" in README


def test_readme_commands_are_make_targets() -> None:
    makefile = (ROOT / "Makefile").read_text()
    for target in set(re.findall(r"\bmake ([a-z-]+)", README)):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target


def test_every_hook_and_only_hooks_have_a_heading() -> None:
    headings = set(re.findall(r"^### (offload_\w+)$", PLUGINS, re.MULTILINE))
    assert headings == {name for name in vars(HookSpecs) if name.startswith("offload_")}


def test_every_cited_clause_is_in_the_contract() -> None:
    clauses = set(re.findall(r"^\| (C\d+) \|", PLUGINS, re.MULTILINE))
    sources = [*(ROOT / "offload_core").rglob("*.py"), *(ROOT / "backends").rglob("*.py")]
    cited = {clause for path in sources for clause in re.findall(r"\b(C\d+)\b", path.read_text())}
    assert cited
    assert cited <= clauses


def test_plugin_example_works_as_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "offload_memory.py").write_text(_blocks(PLUGINS, "python")[0])
    declared = tomllib.loads(_blocks(PLUGINS, "toml")[0])["project"]["entry-points"]["offload_core"]
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "offload_memory", raising=False)
    registry = load_plugins([EntryPoint(name, value, "offload_core") for name, value in declared.items()])
    config = load_config({"backends": [{"name": "m", "type": "memory", "max_objects": 1}]}, registry)
    tier = config.tiers[0]
    backend = tier.backend_type.backend(tier.options, BackendContext("m", DaemonExecutor(1, "m")))
    asyncio.run(_round_trip(backend))


@pytest.mark.parametrize(("number", "outcomes"), [(0, {}), (1, {"xpassed": 1})], ids=["whole file", "opting out"])
def test_plugin_example_is_proved_as_shown(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch, number: int, outcomes: dict[str, int]
) -> None:
    blocks = _blocks(PLUGINS, "python")
    proof = [block for block in blocks if "(BackendContract)" in block][number]
    pytester.makepyfile(offload_memory=blocks[0], test_offload_memory=proof)
    monkeypatch.delitem(sys.modules, "offload_memory", raising=False)
    pytester.syspathinsert()
    result = pytester.runpytest_inprocess().parseoutcomes()
    skipped = {"test_c05": 2, "test_c06": 1, "test_c09": 2, "test_c10": 5, "test_c11": 3, "test_c16": 1, "test_c18": 3}
    expected = {"skipped": sum(skipped.values()), **outcomes}
    passed = len(contract_tests()) + 1 - sum(expected.values())  # and the state machine
    assert result == {"passed": passed, "deselected": 1, **expected}


@pytest.mark.parametrize("test", ["test_a_thousand_examples", "test_what_goes_wrong_is_known"])
def test_plugin_example_runs_on_the_harness(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch, test: str
) -> None:
    blocks = _blocks(PLUGINS, "python")
    (example,) = (block for block in blocks if f"def {test}(" in block)
    pytester.makepyfile(offload_memory=blocks[0], test_harness=example.replace("max_examples=1000", "max_examples=50"))
    monkeypatch.delitem(sys.modules, "offload_memory", raising=False)
    pytester.syspathinsert()
    pytester.runpytest_inprocess().assert_outcomes(passed=1)


def test_plugins_md_shows_a_report_of_the_state_machine_as_it_is() -> None:
    class LosesEverything(Backend[BackendOptions]):
        capabilities = Capabilities(medium="host", persistent=False, shared=False)

        async def contains(self, keys: Sequence[ObjectKey]) -> list[bool]:
            return [False for _ in keys]

        async def load_into(self, keys: Sequence[ObjectKey], buffers: Sequence[memoryview]) -> list[LoadOutcome]:
            return [LoadOutcome.MISS for _ in keys]

        async def store(self, keys: Sequence[ObjectKey], buffers: Sequence[memoryview]) -> list[StoreOutcome]:
            return [StoreOutcome.STORED for _ in keys]

        async def delete(self, keys: Sequence[ObjectKey]) -> None:
            pass

    settings = hypothesis.settings(SETTINGS, derandomize=True, database=None)
    with pytest.raises(AssertionError) as caught:
        check_with_machine(BackendType("loses", LosesEverything, BackendOptions), {}, settings=settings)
    key = r"[0-9a-f]{12}…/[a-z0-9-]+/[0-9a-f]+"
    answers = r"steps:\n  1\. open client 0\n(  \d\. .+ -> .+\n)+"
    report = rf"C5: contains\({key}\) is False; it may hold Content\(\d+, \d\)\n{answers}keys:(\n  k\d = {key})+"
    (shown,) = (block for block in _blocks(PLUGINS, "text") if block.startswith("C5"))
    assert re.fullmatch(report, shown.rstrip())
    assert re.fullmatch(report, str(caught.value))


async def _round_trip(backend: Backend[BackendOptions]) -> None:
    first, second = (ObjectKey("0" * 64, "full-u256", bytes([digit])) for digit in (1, 2))
    await backend.open()
    buffers = [memoryview(b"abc"), memoryview(b"def")]
    assert list(await backend.store([first, second], buffers)) == [StoreOutcome.STORED, StoreOutcome.REJECTED]
    target = bytearray(3)
    keys, targets = [first, second, first], [memoryview(target), memoryview(bytearray(3)), memoryview(bytearray(2))]
    outcomes = list(await backend.load_into(keys, targets))
    assert outcomes == [LoadOutcome.HIT, LoadOutcome.MISS, LoadOutcome.CORRUPT]
    assert target == b"abc"
    await backend.delete([first, second])
    assert list(await backend.contains([first])) == [False]
    await backend.close()


def test_counters_in_the_readme_exist() -> None:
    assert "vllm:hybrid_offload_" in README
    assert all(re.fullmatch(r"[a-z_]+", name) for name in COUNTERS)
