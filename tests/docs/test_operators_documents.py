"""README and docs/: every configuration, command, variable and name that they show is real."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import typer.main
import yaml
from pydantic import TypeAdapter
from typer.testing import CliRunner

from offload_core.api import Bytes, Seconds
from offload_core.cli import app
from offload_core.cli.application import main
from offload_core.config.encryption_keys import FIELD, parse_keys
from offload_core.config.file import read_keys
from offload_core.config.json_schema import config_schema
from offload_core.config.loading import load_config
from offload_core.config.model import BackendConfig, OffloadSettings
from offload_core.config.secrets import secret_fields, variable_name
from offload_core.plugins.registry import load_plugins, missing_requirements
from offload_core.runtime.metrics import COUNTERS, GAUGES, HISTOGRAMS
from tests.support.documents import blocks
from tests.support.live_curves import shown
from tests.support.paths import ROOT
from tests.support.prompt_traces import conversations, trace_of, write_trace

README = (ROOT / "README.md").read_text()
CONFIGURATION, CLI, SECURITY, QUICKSTART, SIZING = (
    (ROOT / "docs" / f"{name}.md").read_text() for name in ("configuration", "cli", "security", "quickstart", "sizing")
)
OPERATORS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]


def test_readme_configuration_is_valid_and_is_the_example_file() -> None:
    (block,) = blocks(README, "yaml")
    assert load_config(yaml.safe_load(block)).tiers[0].backend_type.name == "disk"
    example = yaml.safe_load((ROOT / "examples" / "offload.yaml").read_text())
    assert example == yaml.safe_load(block)


@pytest.mark.parametrize("path", OPERATORS, ids=lambda path: path.name)
def test_configurations_of_the_documents_are_valid(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for block in blocks(path.read_text(), "yaml"):
        keys = yaml.safe_load(block)
        _skip_without_modules(keys)
        for tier in keys["backends"]:
            if "encryption" in tier:
                monkeypatch.setenv(variable_name(tier["name"], FIELD), f"2026-11:{'ab' * 32}")
        assert load_config(keys).tiers


def test_the_command_of_the_document_makes_a_key() -> None:
    (command,) = (block.removeprefix("$ ").strip() for block in blocks(SECURITY) if block.startswith("$ export"))
    if shutil.which("openssl") is None:
        pytest.skip("needs openssl")
    script = f"{command}\nprintenv {variable_name('shared', FIELD)}"
    text = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=True).stdout
    assert [key.id for key in parse_keys(text).keys] == ["2026-11"]


def _skip_without_modules(keys: dict[str, Any]) -> None:
    """Skip the test if a backend type needs a module that has no wheel for this platform."""
    types = load_plugins().backend_types
    for entry in keys["backends"]:
        if missing := missing_requirements(types[entry["type"]]):
            pytest.skip(missing[0])


EXAMPLES = sorted(path for kind in ("yaml", "yml", "toml", "json") for path in (ROOT / "examples").glob(f"*.{kind}"))


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_every_example_file_is_valid(path: Path) -> None:
    jsonschema.Draft202012Validator(config_schema(load_plugins())).validate(read_keys(path))
    _skip_without_modules(read_keys(path))
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


def test_durations_and_sizes_of_the_document_are_understood() -> None:
    sentence = re.search(r"^Sizes are bytes.*$", CONFIGURATION, re.MULTILINE)
    assert sentence is not None
    sizes, durations = (re.findall(r"`([^`]+)`", part) for part in sentence[0].split("Durations"))
    assert [TypeAdapter[int](Bytes).validate_python(size) for size in sizes] == [1 << 29, 20 << 30, 1_500_000_000]
    seconds = [TypeAdapter[float](Seconds).validate_python(yaml.safe_load(written)) for written in durations]
    assert seconds == [30.0, 0.5, 90.0, 7200.0]


def test_the_variable_of_a_secret_is_the_one_that_is_read() -> None:
    found = re.search(r"a tier named `(.+?)` finds its `(.+?)`\s+in\s+`(.+?)`", SECURITY)
    assert found is not None
    assert variable_name(found[1], found[2]) == found[3]


def _serve(text: str) -> list[str]:
    (command,) = (block for block in blocks(text, "console") if "vllm serve" in block)
    return shlex.split(command.removeprefix("$ "))


def test_readme_command_line_names_our_connector(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = _serve(README)
    transfer = json.loads(words[words.index("--kv-transfer-config") + 1])
    assert transfer["kv_connector"] == "HybridOffloadConnector"
    assert transfer["kv_connector_module_path"] == "offload_core.vllm"
    (tmp_path / transfer["kv_connector_extra_config"]["config_file"]).write_text(blocks(README, "yaml")[0])
    monkeypatch.chdir(tmp_path)
    assert load_config(transfer["kv_connector_extra_config"]).tiers


def test_the_quickstart_serves_as_the_readme_does() -> None:
    assert _serve(QUICKSTART) == _serve(README)


def _commands() -> list[str]:
    """Return the commands to run. Engine tests run `prove`, since it needs a model."""
    texts = [path.read_text() for path in OPERATORS]
    lines = [line for text in texts for block in blocks(text, "console") for line in block.splitlines()]
    shown = [line.removeprefix("$ ") for line in lines if line.startswith("$ offload-core")]
    inline = [command for text in texts for command in re.findall(r"`(offload-core \S+ .*?)`", text)]
    return [command for command in dict.fromkeys(shown + inline) if "offload-core prove" not in command]


def test_the_document_shows_every_command() -> None:
    shown = {line.split()[2] for block in blocks(CLI, "console") for line in block.splitlines() if line[:1] == "$"}
    assert shown == set(typer.main.get_group(app).commands)


@pytest.mark.parametrize("command", _commands())
def test_commands_run_as_shown(command: str, tmp_path: Path) -> None:
    (tmp_path / "offload.yaml").write_text(blocks(README, "yaml")[0])
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    write_trace(tmp_path / "trace.jsonl", trace_of(conversations(2, 2, 1000), 512))
    (tmp_path / "metrics.txt").write_text(shown((0.48, 0.61, 0.70, 0.72)))
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        ["bash", "-c", command], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout or ">" in command or "verify" in command


def test_the_advice_is_that_of_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "metrics.txt").write_text(shown((0.48, 0.61, 0.70, 0.72)))
    monkeypatch.chdir(tmp_path)
    [block] = (block for block in blocks(SIZING, "console") if block.startswith("$ offload-core advise"))
    command, text = block.split("\n", 1)
    done = CliRunner().invoke(app, command.split()[2:])
    assert done.stdout.strip() == text.strip()


def test_exit_codes_are_those_of_the_help() -> None:
    codes = re.findall(r"^\| (\d+) \|", CLI, re.MULTILINE)
    assert codes == re.findall(r"^ +- (\d+):", main.__doc__ or "", re.MULTILINE)


@pytest.mark.parametrize("path", OPERATORS, ids=lambda path: path.name)
def test_make_targets_of_the_documents_exist(path: Path) -> None:
    makefile = (ROOT / "Makefile").read_text()
    for target in set(re.findall(r"(?:`|\$ )make ([a-z-]+)", path.read_text())):
        assert re.search(rf"^{target}:|^\.PHONY:.* {target} ", makefile, re.MULTILINE), target


def test_folders_named_in_contributing_exist() -> None:
    named = re.findall(r"\b((?:tests|offload_core|backends|benchmarks)/[\w/]*)", (ROOT / "CONTRIBUTING.md").read_text())
    assert [folder for folder in named if not (ROOT / folder).exists() and not (ROOT / f"{folder}.py").exists()] == []


@pytest.mark.parametrize("path", OPERATORS, ids=lambda path: path.name)
def test_metrics_of_the_documents_exist(path: Path) -> None:
    named = set(re.findall(r"vllm:hybrid_offload_(\w+)", path.read_text()))
    assert {name.removesuffix("_total") for name in named} <= COUNTERS.keys() | GAUGES.keys() | HISTOGRAMS.keys()


def test_places_to_change_exist() -> None:
    section = (ROOT / "docs" / "architecture.md").read_text().split("## To change X, open Y")[1]
    files = [name for name in re.findall(r"`([\w/.]+\.py|[\w/]+/)`", section) if name != "offload_core/"]
    assert files
    assert [name for name in files if not (ROOT / "offload_core" / name).exists()] == []
