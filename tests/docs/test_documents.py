"""What the documents show is run: every code block, every configuration, every name of a hook."""

from __future__ import annotations

import asyncio
import inspect
import json
import os
import re
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Callable, Sequence
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path

import hypothesis
import jsonschema
import pytest
import typer.main
import yaml
from pydantic import TypeAdapter

from offload_core.api.backend import Backend, BackendContext, BackendType, Capabilities, LoadOutcome, StoreOutcome
from offload_core.api.events import LoadsEnded, TierFailing
from offload_core.api.hooks import HookSpecs
from offload_core.api.keys import ObjectKey
from offload_core.api.options import BackendOptions, Bytes, Seconds
from offload_core.cli import app
from offload_core.cli.application import main
from offload_core.config.file import read_keys
from offload_core.config.json_schema import config_schema
from offload_core.config.loading import load_config
from offload_core.config.model import BackendConfig, OffloadSettings
from offload_core.config.secrets import secret_fields, variable_name
from offload_core.plugins.registry import PluginRegistry, load_plugins
from offload_core.runtime.io_loop import IoLoop
from offload_core.runtime.metrics import COUNTERS, Counters
from offload_core.runtime.threads import DaemonExecutor
from offload_core.testing.contract.suite import BackendContract, contract_tests
from offload_core.testing.state_machine.machine import STATE_MACHINE_SETTINGS, check_with_state_machine
from offload_core.tiers.opening import close_tiers, open_tiers
from tests.docs.test_house_rules import PUBLIC_MODULES
from tests.support.paths import ROOT, TEMPLATE
from tests.support.staged_objects import StagedObjects

pytest_plugins = ["pytester"]

README = (ROOT / "README.md").read_text()
PLUGINS = (ROOT / "plugins.md").read_text()
TIERS = (ROOT / "docs" / "tiers.md").read_text()


RUN_BY = {
    "README.md": {
        "$ make demo": "test_the_demo_is_served_from_disk_with_the_same_outputs",
        "$ vllm serve MODEL": "test_two_server_lifetimes",
        "# offload.yaml": "test_readme_configuration_is_valid_and_is_the_example_file",
        "$ offload-core plugins": "test_readme_commands_run_as_shown",
        "$ offload-core plan": "test_the_readme_shows_what_the_command_prints",
    },
    "docs/tiers.md": {"# offload.yaml": "test_the_example_of_three_tiers_is_valid"},
    "plugins.md": {
        "from collections.abc import Sequence\n\nfrom pydantic": "test_plugin_example_works_as_shown",
        "[project.entry-points": "test_plugin_example_works_as_shown",
        "import pytest": "test_plugin_example_is_proved_as_shown",
        "C5: ": "test_plugins_md_shows_a_report_of_the_state_machine_as_it_is",
        "import hypothesis": "test_plugin_example_runs_on_the_harness",
        "import asyncio": "test_plugin_example_runs_on_the_harness",
        "from collections.abc import Sequence\nfrom typing": "test_the_example_of_a_wrapper_makes_a_tier_read_only",
        "import logging": "test_the_example_of_an_observer_logs_what_it_says",
        "pyproject.toml": "test_packaging_section_shows_what_the_template_has",
        "[project]": "test_packaging_section_shows_what_the_template_has",
    },
}
"""What each code block begins with, and the test that runs it."""


def _blocks(text: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("document", RUN_BY)
def test_every_code_block_is_run_by_a_test(document: str) -> None:
    beginnings = RUN_BY[document]
    blocks = re.findall(r"^```\w*\n(.*?)^```", (ROOT / document).read_text(), re.MULTILINE | re.DOTALL)
    for block in blocks:
        assert [begin for begin in beginnings if block.startswith(begin)], f"no test is known to run:\n{block}"
    for begin in beginnings:
        assert any(block.startswith(begin) for block in blocks), f"no block begins so any more: {begin!r}"
    sources = "".join(path.read_text() for path in (ROOT / "tests").rglob("test_*.py"))
    assert all(f"\ndef {test}(" in sources for test in beginnings.values())


def test_readme_configuration_is_valid_and_is_the_example_file() -> None:
    (block,) = _blocks(README, "yaml")
    assert load_config(yaml.safe_load(block)).settings.hybrid_chunk_size == 256
    example = yaml.safe_load((ROOT / "examples" / "offload.yaml").read_text())
    assert example == yaml.safe_load(block)


EXAMPLES = sorted(path for kind in ("yaml", "yml", "toml", "json") for path in (ROOT / "examples").glob(f"*.{kind}"))


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_every_example_file_is_valid(path: Path) -> None:
    jsonschema.Draft202012Validator(config_schema(load_plugins())).validate(read_keys(path))
    assert load_config({"config_file": str(path)}).tiers


def test_the_example_files_mean_the_same_in_every_notation() -> None:
    small = [path for path in EXAMPLES if path.stem == "offload"]
    assert [path.suffix for path in small] == [".json", ".toml", ".yaml"]
    first, second, third = (load_config({"config_file": str(path)}) for path in small)
    assert first == second == third


def test_the_example_of_all_keys_has_them_all() -> None:
    content = read_keys(ROOT / "examples" / "offload-all-keys.yaml")
    assert set(content) == set(OffloadSettings.model_fields)
    types = load_plugins().backend_types
    for name in types:
        options = types[name].options
        expected = {*BackendConfig.model_fields, *options.model_fields} - {s.name for s in secret_fields(options)}
        assert expected in [set(entry) for entry in content["backends"] if entry["type"] == name]


def test_the_example_of_three_tiers_is_valid() -> None:
    (block,) = _blocks(TIERS, "yaml")
    assert [tier.backend_type.name for tier in load_config(yaml.safe_load(block)).tiers] == ["cpu", "disk", "nfs"]


@pytest.mark.parametrize("name", ["cpu", "disk", "nfs"])
def test_every_key_of_the_bundled_backends_is_listed_with_its_default(name: str) -> None:
    options = load_plugins().backend_types[name].options
    (table,) = re.findall(rf"^\| key of `{name}` \| .*?\n\n", TIERS, re.MULTILINE | re.DOTALL)
    listed: dict[str, str] = {}
    for keys, defaults in re.findall(r"^\| (`\w+`(?:, `\w+`)*) \| ([^|]+?) \|", table, re.MULTILINE):
        listed.update(zip(re.findall(r"\w+", keys), defaults.split(", "), strict=True))
    assert listed.keys() == options.model_fields.keys()
    for key, field in options.model_fields.items():
        shown = listed[key].strip("`")
        if field.is_required():
            assert shown == "required"
        elif not (default := field.get_default(call_default_factory=True, validated_data={})):
            assert shown in ("none", str(default).lower())
        else:
            assert TypeAdapter(Bytes if key == "part_size" else type(default)).validate_python(shown) == default


def test_durations_and_sizes_in_the_readme_are_understood() -> None:
    sentence = re.search(r"^Sizes are bytes.*$", README, re.MULTILINE)
    assert sentence is not None
    sizes, durations = (re.findall(r"`([^`]+)`", part) for part in sentence[0].split("Durations"))
    assert [TypeAdapter[int](Bytes).validate_python(size) for size in sizes] == [1 << 29, 20 << 30, 1_500_000_000]
    seconds = [TypeAdapter[float](Seconds).validate_python(yaml.safe_load(written)) for written in durations]
    assert seconds == [30.0, 0.5, 90.0, 7200.0]


def test_the_variable_of_a_secret_in_the_readme_is_the_one_that_is_read() -> None:
    found = re.search(r"A tier named `(.+?)` finds its `(.+?)`\s+in\s+`(.+?)`", README)
    assert found is not None
    assert variable_name(found[1], found[2]) == found[3]


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
    of_all, of_backends = (
        dict(re.findall(r"^\| `(\w+)` \| ([^|]+?) \|", table, re.MULTILINE))
        for table in re.findall(r"^\| (?:key|key of every backend) \| .*?\n\n", README, re.MULTILINE | re.DOTALL)
    )
    assert set(of_all) == set(OffloadSettings.model_fields)
    assert set(of_backends) == set(BackendConfig.model_fields)
    for name in [name for name in OffloadSettings.model_fields if re.search("_timeout_|_grace_|^breaker_", name)]:
        assert float(of_all[name].strip("`")) == OffloadSettings.model_fields[name].default
    plugins = " ".join(PLUGINS.split())
    for name in BackendConfig.model_fields:
        assert f"`{name}`" in plugins[plugins.index("The keys that every tier has") :]


def _commands() -> list[str]:
    lines = [line for block in _blocks(README, "console") for line in block.splitlines()]
    shown = [line.removeprefix("$ ") for line in lines if line.startswith("$ offload-core")]
    return shown + re.findall(r"`(offload-core \S+ .*?)`", README)


def test_readme_shows_every_command_of_the_command_line() -> None:
    assert {command.split()[1] for command in _commands()} == set(typer.main.get_group(app).commands)


@pytest.mark.parametrize("command", _commands())
def test_readme_commands_run_as_shown(command: str, tmp_path: Path) -> None:
    (tmp_path / "offload.yaml").write_text(_blocks(README, "yaml")[0])
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        ["bash", "-c", command], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout or ">" in command or "verify" in command


def test_readme_exit_codes_are_those_of_the_help() -> None:
    codes = re.findall(r"^\| (\d+) \|", README, re.MULTILINE)
    assert codes == re.findall(r"^ +- (\d+):", main.__doc__ or "", re.MULTILINE)


def test_readme_commands_are_make_targets() -> None:
    makefile = (ROOT / "Makefile").read_text()
    for target in set(re.findall(r"\bmake ([a-z-]+)", README)):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target


def test_every_hook_and_only_hooks_have_a_heading_which_is_its_signature() -> None:
    headings = set(re.findall(r"^### (offload_\w+.*)$", PLUGINS, re.MULTILINE))
    assert headings == {
        name + _signature(hook) for name, hook in vars(HookSpecs).items() if name.startswith("offload_")
    }


def _signature(hook: Callable[..., object]) -> str:
    """The signature as it is written, without ``self``."""
    signature = inspect.signature(hook)
    _, *arguments = signature.parameters.values()
    return str(signature.replace(parameters=arguments)).replace("'", "")


def test_the_public_modules_are_those_that_the_house_rules_know() -> None:
    (listed,) = re.findall(r"The public modules are (.*?)\.\n", PLUGINS, re.DOTALL)
    assert {name.removeprefix("offload_core.") for name in re.findall(r"`([\w.]+)`", listed)} == {
        name.removeprefix("offload_core.") for name in PUBLIC_MODULES
    }


def test_every_cited_clause_is_in_the_contract() -> None:
    clauses = set(re.findall(r"^\| (C\d+) \|", PLUGINS, re.MULTILINE))
    sources = [path for folder in ("offload_core", "backends", "examples") for path in (ROOT / folder).rglob("*.py")]
    cited = {clause for path in sources for clause in re.findall(r"\b(C\d+)\b", path.read_text())}
    assert cited
    assert cited <= clauses


def _plugin(
    hook: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, name: str = "example", module: str = "example"
) -> PluginRegistry:
    """Load the example of a hook in plugins.md as its entry point would be, and the bundled plugins beside it."""
    (block,) = [block for block in _blocks(PLUGINS, "python") if f"def {hook}(" in block]
    (tmp_path / f"{module}.py").write_text(block)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, module, raising=False)
    registry = load_plugins([*entry_points(group="offload_core"), EntryPoint(name, module, "offload_core")])
    registry.require(name)
    return registry


def test_plugin_example_works_as_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ((name, module),) = tomllib.loads(_blocks(PLUGINS, "toml")[0])["project"]["entry-points"]["offload_core"].items()
    assert f"Save it as `{module}.py`" in PLUGINS
    registry = _plugin("offload_register_backends", tmp_path, monkeypatch, name=name, module=module)
    config = load_config({"backends": [{"name": "m", "type": "memory", "max_objects": 1}]}, registry)
    tier = config.tiers[0]
    backend = tier.backend_type.backend(tier.options, BackendContext("m", DaemonExecutor(1, "m")))
    asyncio.run(_round_trip(backend))


@pytest.mark.parametrize(
    ("number", "outcomes", "machine"),
    [(0, {}, True), (1, {"xpassed": 1}, False)],
    ids=["whole file", "opting out, without the state machine"],
)
def test_plugin_example_is_proved_as_shown(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch, number: int, outcomes: dict[str, int], machine: bool
) -> None:
    blocks = _blocks(PLUGINS, "python")
    proof = [block for block in blocks if "(BackendContract)" in block][number]
    pytester.makepyfile(offload_memory=blocks[0], test_offload_memory=proof)
    monkeypatch.delitem(sys.modules, "offload_memory", raising=False)
    monkeypatch.setattr(BackendContract, "machine_examples", 50)  # of 200
    pytester.syspathinsert()
    result = pytester.runpytest_inprocess("-k", "" if machine else "not state_machine").parseoutcomes()
    skipped = {"test_c05": 2, "test_c06": 1, "test_c09": 2, "test_c10": 5, "test_c11": 3, "test_c16": 1}
    skipped |= {"test_c18": 3, "test_c19": 2}
    expected = {"skipped": sum(skipped.values()), **outcomes}
    passed = len(contract_tests()) + machine - sum(expected.values())
    assert result == {"passed": passed, "deselected": 2 - machine, **expected}


@pytest.mark.parametrize(
    "test", ["test_a_thousand_examples", "test_what_goes_wrong_is_known", "test_a_script_has_every_kind_of_fault"]
)
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

    settings = hypothesis.settings(STATE_MACHINE_SETTINGS, derandomize=True, database=None)
    with pytest.raises(AssertionError) as caught:
        check_with_state_machine(BackendType("loses", LosesEverything, BackendOptions), {}, settings=settings)
    key = r"[0-9a-f]{12}…/[a-z0-9-]+/[0-9a-f]+"
    answers = r"steps:\n  1\. open client 0\n(  \d\. .+ -> .+\n)+"
    report = rf"C5: contains\({key}\) is False; it may hold Content\(\d+, \d\)\n{answers}keys:(\n  k\d = {key})+"
    (shown,) = (block for block in _blocks(PLUGINS, "text") if block.startswith("C5"))
    assert re.fullmatch(report, shown.rstrip())
    assert re.fullmatch(report, str(caught.value))


def test_packaging_section_shows_what_the_template_has() -> None:
    section = PLUGINS.split("\n## Packaging it\n")[1].split("\n## ")[0]
    (shown,), (layout,) = _blocks(section, "toml"), _blocks(section, "text")
    has = tomllib.loads((TEMPLATE / "pyproject.toml").read_text())
    for table, keys in tomllib.loads(shown).items():
        assert keys == {key: has[table][key] for key in keys}
    files = {path.relative_to(TEMPLATE).as_posix() for path in TEMPLATE.rglob("*") if path.is_file()}
    files = {file for file in files if not re.search(r"(^|/)(\.|__pycache__/)", file)}
    assert {line.split()[0] for line in layout.splitlines()} == files
    assert set(re.findall(r"^\| `([^`]+\.[a-z]+)` \|", (TEMPLATE / "README.md").read_text(), re.MULTILINE)) == (
        files - {"README.md", "offload_backend_sqlite/__init__.py"}
    )


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


def test_the_example_of_a_wrapper_makes_a_tier_read_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    registry = _plugin("offload_wrap_backend", tmp_path, monkeypatch)
    folder = {"type": "disk", "path": str(tmp_path / "kv")}
    config = load_config(
        {"required_plugins": ["example"], "backends": [{"name": n, **folder} for n in ("nvme", "nvme-readonly")]},
        registry,
    )
    io, counters, objects = IoLoop.acquire(), Counters(), StagedObjects()
    plain, read_only = tiers = open_tiers(config, io, counters)
    assert io.submit(read_only.store([objects.sealed(1)])).result(60) == [False]
    assert io.submit(plain.store([objects.sealed(1)])).result(60) == [True]
    assert io.submit(read_only.load([objects.staged(1)])).result(60) == [LoadOutcome.HIT]
    close_tiers(tiers, io, 60)
    io.release()


def test_the_example_of_an_observer_logs_what_it_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (observer,) = _plugin("offload_observe", tmp_path, monkeypatch).observers
    for seconds in (0.5, 1.5):
        observer.notify(LoadsEnded("nvme", 4, 0, 0, 0, nbytes=4096, seconds=seconds))
    observer.notify(TierFailing("nvme", "store", "OSError: no space"))
    assert caplog.messages == ["tier nvme took 1.5 s for 4096 bytes", "tier nvme cannot store: OSError: no space"]


def test_counters_in_the_readme_exist() -> None:
    assert "vllm:hybrid_offload_" in README
    assert all(re.fullmatch(r"[a-z_]+", name) for name in COUNTERS)
