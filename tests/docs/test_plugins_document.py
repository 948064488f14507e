"""plugins.md: every example is run, every hook has its heading, every clause is in the contract."""

from __future__ import annotations

import asyncio
import inspect
import os
import re
import sys
import tomllib
from collections.abc import Callable, Sequence
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Any

import hypothesis
import pytest

from offload_core.api.backend import Backend, BackendContext, BackendType, LoadOutcome, StoreOutcome
from offload_core.api.capabilities import Capabilities
from offload_core.api.events import LoadsEnded, TierFailing
from offload_core.api.hooks import HookSpecs
from offload_core.api.keys import ObjectKey
from offload_core.api.one_pass import CHECK_BYTES
from offload_core.api.options import BackendOptions
from offload_core.config.loading import load_config
from offload_core.config.model import BackendConfig
from offload_core.plugins.registry import PluginRegistry, load_plugins
from offload_core.runtime.io_loop import IoLoop
from offload_core.runtime.metrics import Counters
from offload_core.runtime.threads import DaemonExecutor
from offload_core.testing.contract.suite import BackendContract, contract_tests
from offload_core.testing.rig.recording_check import RecordingCheck
from offload_core.testing.rig.recording_seal import RecordingSeal
from offload_core.testing.state_machine.machine import STATE_MACHINE_SETTINGS, check_with_state_machine
from offload_core.tiers.opening import close_tiers, open_tiers
from tests.docs.test_rooms import PUBLIC
from tests.support.documents import blocks as _blocks
from tests.support.paths import ROOT, TEMPLATE
from tests.support.staged_objects import StagedObjects

pytest_plugins = ["pytester"]

PLUGINS = (ROOT / "plugins.md").read_text()


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


def test_the_public_modules_are_those_that_plugins_may_import() -> None:
    (listed,) = re.findall(r"The public modules are (.*?)\.\n", PLUGINS, re.DOTALL)
    assert tuple(re.findall(r"`([\w.]+)`", listed)) == PUBLIC


def test_the_keys_of_the_core_are_listed() -> None:
    (listed,) = re.findall(r"every tier has belong to the core: (.*?)\.\n", PLUGINS, re.DOTALL)
    assert set(re.findall(r"`(\w+)`", listed)) == set(BackendConfig.model_fields)


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


def test_the_example_of_a_load_in_one_call_reads_and_checks(tmp_path: Path) -> None:
    (block,) = [block for block in _blocks(PLUGINS, "python") if "def read_and_check(" in block]
    example: dict[str, Any] = {}
    exec(block, example)
    content = os.urandom(2 * CHECK_BYTES + 1)
    path = tmp_path / "object"
    path.write_bytes(content)
    for nbytes, outcome in ((len(content), LoadOutcome.HIT), (5, LoadOutcome.CORRUPT)):
        buffer = memoryview(bytearray(nbytes))
        check = RecordingCheck(buffer)
        with path.open("rb") as file:
            assert example["read_and_check"](file.fileno(), buffer, check) is outcome
        assert check.problem is None
        assert bytes(check.told) == (content if outcome is LoadOutcome.HIT else b"")


def test_the_example_of_a_store_that_seals_writes_the_sealed_object(tmp_path: Path) -> None:
    (block,) = [block for block in _blocks(PLUGINS, "python") if "def write_and_seal(" in block]
    example: dict[str, Any] = {}
    exec(block, example)
    for nbytes in (0, 1, 5000, 2 * CHECK_BYTES - 1, 2 * CHECK_BYTES, 3 * CHECK_BYTES + 1):
        content = os.urandom(nbytes)
        path = tmp_path / str(nbytes)
        for _ in range(2):  # a store that begins again
            buffer = memoryview(bytearray(content))
            with path.open("wb") as file:
                example["write_and_seal"](file.fileno(), buffer.toreadonly(), RecordingSeal(buffer))
            assert path.read_bytes() == content


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
    monkeypatch.setattr(BackendContract, "machine_examples", 20)  # of 200
    pytester.syspathinsert()
    result = pytester.runpytest_inprocess("-k", "" if machine else "not state_machine").parseoutcomes()
    skipped = {"test_c05": 4, "test_c06": 1, "test_c09": 2, "test_c10": 6, "test_c11": 7, "test_c16": 1}
    skipped |= {
        "test_c18": 7,
        "test_c19": 2,
        "test_c20": 3,
        "test_c21": 3,
        "test_c22": 3,
        "test_c23": 3,
        "test_c24": 2,
        "test_c25": 7,
        "test_c26": 3,
    }
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
    pytester.makepyfile(offload_memory=blocks[0], test_harness=example.replace("max_examples=1000", "max_examples=20"))
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
