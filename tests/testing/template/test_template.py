"""The template is built, installed in a clean environment, found, tested against the contract, and served from."""

from __future__ import annotations

import json
import re
import stat
import tomllib
from importlib.metadata import version
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement

from offload_core.testing.contract.suite import contract_tests
from tests.support.engine.spec import RunResult, compare
from tests.support.paths import TEMPLATE
from tests.testing.template.conftest import CleanEnvironment

TEST_FILE = "tests/test_sqlite.py"


def test_the_clean_environment_imports_no_sources_of_the_project(clean: CleanEnvironment) -> None:
    script = """if True:
        import importlib.metadata, json, offload_core, offload_backend_sqlite
        files = [offload_core.__file__, offload_backend_sqlite.__file__]
        found = [d.name for d in importlib.metadata.distributions() if d.name and d.name.startswith("offload")]
        print(json.dumps([files, sorted(found)]))"""
    done = clean.run("-c", script)
    assert done.returncode == 0, done.stderr
    files, distributions = json.loads(done.stdout)
    assert all(Path(file).is_relative_to(clean.python.parents[1]) for file in files), files
    assert distributions == ["offload-backend-sqlite", "offload-core"]


def test_an_operator_sees_the_template_beside_the_bundled_plugins(clean: CleanEnvironment) -> None:
    done = clean.run(str(clean.python.with_name("offload-core")), "plugins", "--strict", "--json")
    assert done.returncode == 0, done.stderr
    found = {(one["name"], one["distribution"], one["version"]) for one in json.loads(done.stdout)["plugins"]}
    core = version("offload-core")
    assert found == {
        *((name, "offload-core", core) for name in ("cpu", "disk", "lmcache", "mooncake", "nfs", "nixl")),
        ("sqlite", "offload-backend-sqlite", "0.1.0"),
    }


def test_the_configuration_in_its_readme_is_accepted(clean: CleanEnvironment) -> None:
    readme = (TEMPLATE / "README.md").read_text()
    (block,) = re.findall(r"^```yaml\n(.*?)^```", readme, re.MULTILINE | re.DOTALL)
    script = """if True:
        import json, sys
        from offload_core.config.loading import load_config
        print(load_config(json.loads(sys.argv[1])).tiers[0].options)"""
    done = clean.run("-c", script, json.dumps(yaml.safe_load(block)))
    assert done.returncode == 0, done.stderr
    options = dict(re.findall(r"(\w+)=(\S+)", done.stdout))
    assert options["capacity"] == str(20 * 1024**3)
    documented = dict(re.findall(r"^\| `(\w+)` \| `?([^|`]+)`? \|", readme, re.MULTILINE))
    assert set(documented) == set(options)
    assert float(options["busy_timeout_seconds"]) == float(documented["busy_timeout_seconds"])


def test_it_depends_on_this_version_of_the_core_only() -> None:
    project = tomllib.loads((TEMPLATE / "pyproject.toml").read_text())["project"]
    (requirement,) = map(Requirement, project["dependencies"])
    assert requirement.name == "offload-core"
    assert requirement.specifier.contains(version("offload-core"))


def test_its_test_file_is_a_few_lines() -> None:
    assert len((TEMPLATE / TEST_FILE).read_text().splitlines()) < 20


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "selected",
    ["not state_machine", pytest.param("", marks=pytest.mark.long)],
    ids=["every clause", "the state machine too"],
)
def test_it_passes_the_whole_contract(clean: CleanEnvironment, template: Path, selected: str) -> None:
    done = clean.run("-m", "pytest", "-rs", "-k", selected, template / TEST_FILE, timeout_seconds=500)
    assert done.returncode == 0, done.stdout + done.stderr
    skipped = re.findall(r"^SKIPPED .*?: (.*)$", done.stdout, re.MULTILINE)
    assert sorted(skipped) == [
        *["capability lends is not declared" for name in contract_tests() if name.startswith("test_c25_")],
        "capability lists is declared",
        *["capability spares is not declared" for name in contract_tests() if re.match("test_c2[01]_", name)],
        "no method damage(self, options, key) that cuts an object short",
        "no methods take_away(self, options) and bring_back(self, options) that make the medium fail and work again",
        *["the backend has no load_and_check" for name in contract_tests() if name.startswith("test_c22_")],
        *["the backend has no store_and_seal" for name in contract_tests() if name.startswith("test_c26_")],
    ]
    (passed,) = re.findall(r"(\d+) passed", done.stdout)
    count = sum(map(int, re.findall(r"^SKIPPED \[(\d+)\]", done.stdout, re.MULTILINE)))
    assert int(passed) >= len(contract_tests()) - count + (not selected)


def test_a_copy_that_leaves_a_clause_out_is_refused(clean: CleanEnvironment, template: Path, tmp_path: Path) -> None:
    clause = next(name for name in contract_tests() if name.startswith("test_c12_"))
    text = (template / TEST_FILE).read_text()
    weak, honest = tmp_path / "test_weak.py", tmp_path / "test_honest.py"
    weak.write_text(f"{text}\n    def {clause}(self) -> None:\n        assert True\n")
    honest.write_text(
        f"{text}\n    @pytest.mark.xfail(reason='nothing is ever deleted')\n"
        f"    def {clause}(self) -> None:\n        raise AssertionError\n"
    )
    refused = clean.run("-m", "pytest", weak)
    assert refused.returncode == 2
    assert f"TestSqlite.{clause} is replaced" in refused.stdout
    accepted = clean.run("-m", "pytest", honest, "-k", clause)
    assert accepted.returncode == 0, accepted.stdout
    assert "1 xfailed" in accepted.stdout


@pytest.mark.engine
@pytest.mark.long
@pytest.mark.timeout(600)
def test_a_second_engine_is_served_from_the_database(clean: CleanEnvironment, tmp_path: Path) -> None:
    done = clean.run("-P", Path(__file__).with_name("serve.py"), tmp_path, timeout_seconds=500)
    assert done.returncode == 0, done.stderr

    first, second = (
        RunResult.model_validate_json((tmp_path / f"{name}.json").read_text()) for name in ("first", "second")
    )
    assert compare(first, second) == []
    assert [prompt.external_cached_tokens for prompt in first.rounds[0].prompts] == [0, 0, 0]
    assert [prompt.external_cached_tokens for prompt in second.rounds[0].prompts] == [256, 1280, 1792]

    def count(name: str, result: RunResult) -> int:
        return int(result.metrics.get(f'vllm:hybrid_offload_{name}_total{{tier="database"}}', 0))

    assert count("stores", first) > 0
    assert count("load_hits", second) > 0
    for problem in ("load_failures", "store_failures", "lookup_failures", "load_corrupt", "load_missing"):
        assert count(problem, first) == count(problem, second) == 0, problem
    left = [path for path in tmp_path.iterdir() if path.name.startswith("kv-cache")]
    assert [path.name for path in left] == ["kv-cache.sqlite"], "everything was closed"
    assert stat.S_IMODE(left[0].stat().st_mode) == 0o600
