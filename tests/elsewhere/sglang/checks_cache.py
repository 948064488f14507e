"""SGLang's prefix cache with our tiers below it: its tree, controller and host pools, on a CPU."""

from __future__ import annotations

import base64
import json
import time
from functools import partial
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from offload_core.cli import app
from offload_core.config.loading import load_config
from offload_core.elsewhere import sglang_hicache
from offload_core.plugins.registry import PluginRegistry, load_plugins
from offload_core.testing.faults.script import FaultScript, ScriptSettings
from tests.elsewhere.sglang.backends import DEADLINES, LONG, settings, use_memory
from tests.elsewhere.sglang.machinery import MODELS, same, server
from tests.support.damage import flipped
from tests.support.polling import wait_until

WAYS = [
    ("full", "page_first", 1), ("full", "page_first", 0), ("full", "layer_first", 1), ("full", "layer_first", 0),
    ("mamba", "page_first", 1), ("mamba", "page_first", 0), ("window", "page_first", 1), ("window", "layer_first", 0),
]  # fmt: skip


@pytest.mark.parametrize(("model", "layout", "interface_v1"), WAYS)
def test_a_prompt_comes_back_after_a_restart(tmp_path: Path, model: str, layout: str, interface_v1: int) -> None:
    way: dict[str, Any] = {"layout": layout, "interface_v1": interface_v1}
    with server(MODELS[model], settings(tmp_path), **way) as one:
        prompt = one.tokens(1, 5)
        computed = one.compute(prompt, seed=1)
        one.store(prompt)
    with server(MODELS[model], settings(tmp_path), **way) as other:
        assert other.prefetch(prompt + other.tokens(500, 2)) == len(prompt)
        assert same(other.load(prompt), computed)


def test_another_model_identity_finds_nothing(tmp_path: Path) -> None:
    with server(MODELS["full"], settings(tmp_path)) as one:
        prompt = one.tokens(1, 5)
        one.compute(prompt, seed=1)
        one.store(prompt)
    with server(MODELS["full"], settings(tmp_path, model_identity="other weights")) as other:
        assert other.prefetch(prompt) == 0


def test_without_the_state_at_its_end_a_prefix_is_no_hit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The state of a recurrent model exists at the ends of two prompts; one of them is lost."""
    made = use_memory(monkeypatch)
    with server(MODELS["mamba"], {}) as one:
        (backend,) = made
        short = one.tokens(1, 3)
        prompt = short + one.tokens(200, 2)
        one.compute(short, seed=1)
        one.store(short)
        before = set(backend.objects)
        one.compute(prompt, seed=2)
        one.store(prompt)
        (deep,) = (key for key in set(backend.objects) - before if key.pack == "sglang-mamba")
        kept = dict(backend.objects)
        for lost, depth in ((None, len(prompt)), (deep, len(short))):
            with server(MODELS["mamba"], {}) as other:
                made[-1].objects.update({key: value for key, value in kept.items() if key != lost})
                assert other.prefetch(prompt) == depth


def test_damage_ends_the_prefix_before_it(monkeypatch: pytest.MonkeyPatch) -> None:
    made = use_memory(monkeypatch)
    with server(MODELS["full"], {}) as one:
        prompt = one.tokens(1, 5)
        computed = one.compute(prompt, seed=1)
        one.store(prompt)
        hashes = [bytes.fromhex(name) for name in one.page_names(prompt)]
        objects = dict(made[0].objects)
    with server(MODELS["full"], {}) as other:
        made[1].objects.update(objects)
        (damaged,) = (key for key in objects if key.chunk_hash == hashes[3])
        made[1].objects[damaged] = flipped(objects[damaged])
        assert other.prefetch(prompt) == 3 * other.cfg.page_size
        assert damaged not in made[1].objects
        start = [part[: 3 * other.cfg.page_size] for part in computed]
        assert same(other.load(prompt), start)


def test_a_hung_medium_leaves_sglangs_threads_and_memory_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    made = use_memory(monkeypatch, **DEADLINES, breaker_failures=1_000_000)
    with server(MODELS["full"], {}) as one:
        (backend,) = made
        prompt = one.tokens(1, 5)
        computed = one.compute(prompt, seed=1)
        for gate in ("store", "load_into", "contains"):
            backend.gates[gate].shut()
        one.store(prompt)  # the hung store ends at its deadline, and SGLang unlocks its pages
        backend.gates["store"].open()
        for number in range(3):
            assert one.backend.batch_exists(one.page_names(prompt)) == 0, number
        backend.gates["contains"].open()
        wait_until(lambda: len(backend.objects) in (0, 5), "the late store does not end")
        backend.objects.clear()
        one.store(prompt)
        assert len(backend.objects) == 5
        objects = dict(backend.objects)
    with server(MODELS["full"], {}) as other:
        made[1].objects.update(objects)
        made[1].gates["load_into"].shut()
        free = other.controller.mem_pool_host.available_size()
        assert other.prefetch(prompt) == 0
        wait_until(
            lambda: other.cache.check_hicache_events() or other.controller.mem_pool_host.available_size() == free,
            "SGLang does not get its host memory back",
        )
        made[1].gates["load_into"].open()
        assert other.prefetch(prompt) == len(prompt)
        assert same(other.load(prompt), computed)


def test_sglangs_scheduler_thread_never_waits_for_a_held_medium(monkeypatch: pytest.MonkeyPatch) -> None:
    """The medium answers nothing, with deadlines of half a minute. Each step of the scheduler returns at once."""
    made = use_memory(monkeypatch, **LONG)
    with server(MODELS["mamba"], {}) as one:
        (backend,) = made
        prompt = one.tokens(1, 5)
        one.compute(prompt, seed=1)
        for gate in ("store", "load_into", "contains"):
            backend.gates[gate].shut()
        steps = 0
        started = time.monotonic()
        one.start_backup(prompt)
        backend.gates["store"].wait_for_a_call()
        request = one.start_prefetch(one.tokens(300, 4))
        backend.gates["contains"].wait_for_a_call()
        for _ in range(50):
            one.cache.check_hicache_events()
            assert not one.cache.check_prefetch_progress(request)
            steps += 1
        assert steps == 50
        assert time.monotonic() - started < LONG["lookup_timeout_seconds"] / 2
        for gate in ("store", "load_into", "contains"):
            backend.gates[gate].open()
        one.end_backup()
        one.end_prefetch(request)


def test_a_full_medium_stores_nothing_and_breaks_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    made = use_memory(monkeypatch)
    with server(MODELS["mamba"], {}) as one:
        (backend,) = made
        backend.faults["prepare_store"] = OSError(28, "no space left")
        prompt = one.tokens(1, 5)
        one.compute(prompt, seed=1)
        one.store(prompt)
        assert not backend.objects
        backend.faults.clear()
        one.store(prompt)
        assert len(backend.objects) == 6


def test_the_template_plugin_serves_unchanged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plugins = load_plugins([EntryPoint("sqlite", "offload_backend_sqlite.plugin", "offload_core")])
    monkeypatch.setattr(sglang_hicache, "load_config", lambda keys, source: load_config(keys, plugins, source=source))
    backend = {"name": "lite", "type": "sqlite", "path": str(tmp_path / "kv.db"), "capacity": "64MiB"}
    with server(MODELS["mamba"], settings(tmp_path, backends=[backend])) as one:
        prompt = one.tokens(1, 5)
        computed = one.compute(prompt, seed=1)
        one.store(prompt)
    with server(MODELS["mamba"], settings(tmp_path, backends=[backend])) as other:
        assert other.prefetch(prompt) == len(prompt)
        assert same(other.load(prompt), computed)


def test_several_tiers_compression_encryption_and_an_io_process_serve(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OFFLOAD_CORE_SLOW_ENCRYPTION_KEYS", f"1:{base64.b64encode(bytes(32)).decode()}")
    tiers = [
        {"name": "nvme", "type": "disk", "path": str(tmp_path / "nvme"), "compression": "zstd"},
        {"name": "slow", "type": "disk", "path": str(tmp_path / "slow"), "encryption": "aes-256-gcm"},
    ]
    given = settings(tmp_path, backends=tiers, io_process="engine", staging_bytes="64MiB")
    with server(MODELS["window"], given) as one:
        prompt = one.tokens(1, 5)
        computed = one.compute(prompt, seed=1)
        one.store(prompt)
        for tier in ("nvme", "slow"):
            stored = partial(_is_stored, tmp_path / tier, 10)
            wait_until(stored, f"the tier {tier} gets too few objects")
    with server(MODELS["window"], given) as other:
        assert other.prefetch(prompt) == len(prompt)
        assert same(other.load(prompt), computed)


def test_the_commands_know_the_objects_and_their_owner(tmp_path: Path) -> None:
    with server(MODELS["mamba"], settings(tmp_path)) as one:
        prompt = one.tokens(1, 5)
        one.compute(prompt, seed=1)
        one.store(prompt)
    path = tmp_path / "offload.json"
    path.write_text(json.dumps(settings(tmp_path)))
    listed = CliRunner().invoke(app, ["ls", str(path), "--json"])
    packs = [found["pack"] for found in json.loads(listed.stdout)["objects"]]
    assert sorted(packs) == ["sglang-kv"] * 5 + ["sglang-mamba"]
    verified = CliRunner().invoke(app, ["verify", str(path)])
    assert verified.exit_code == 0, verified.output


def test_sglangs_clear_deletes_the_pages_that_it_has_stored(tmp_path: Path) -> None:
    with server(MODELS["mamba"], settings(tmp_path)) as one:
        prompt = one.tokens(1, 5)
        one.compute(prompt, seed=1)
        one.store(prompt)
        assert len(list(tmp_path.rglob("*.kv"))) == 6
        assert one.cache.clear_storage_backend()
        assert not list(tmp_path.rglob("*.kv"))
        assert one.backend.batch_exists(one.page_names(prompt)) == 0


def test_under_the_fault_script_every_hit_has_its_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    script = FaultScript(
        ScriptSettings(
            deadline_seconds=0.05, hang_seconds=(0.06, 0.2), sick_seconds=(0.05, 0.2), sick_calls=(3, 10),
            well_seconds=(0.0, 0.1), well_calls=(1, 10),
        )
    )  # fmt: skip
    monkeypatch.setattr(PluginRegistry, "wrap", lambda registry, backend, tier: script.wrap(backend))
    made = use_memory(
        monkeypatch, **dict.fromkeys(DEADLINES, 0.05), breaker_pause_seconds=0.02, breaker_max_pause_seconds=0.05
    )
    hits = 0
    script.start(7)
    with server(MODELS["mamba"], {}) as one:
        prompts = [one.tokens(100 * number + 1, 3) for number in range(4)]
        computed = []
        for number, prompt in enumerate(prompts):
            computed.append(one.compute(prompt, seed=number))
            one.store(prompt)
        for _ in range(6):
            for prompt in prompts:
                one.store(prompt)
            with server(MODELS["mamba"], {}) as other:
                made[-1].objects.update(made[0].objects)
                for prompt, content in zip(prompts, computed, strict=True):
                    if depth := other.prefetch(prompt):
                        assert depth == len(prompt), "the model has one state, at the end of the prompt"
                        assert same(other.load(prompt), content)
                        hits += 1
    script.stop()
    assert hits
    assert sum(map(len, script.injected().values())) > 5


def test_sglangs_own_injected_failures_are_misses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGLANG_TEST_HICACHE_BACKEND_RANDOM_FAILURE", "0.3")
    with server(MODELS["mamba"], settings(tmp_path)) as one:
        assert type(one.backend).__name__ == "HiCacheStorageFailureInjector"
        prompt = one.tokens(1, 5)
        computed = one.compute(prompt, seed=1)
        for _ in range(8):
            one.store(prompt)
    with server(MODELS["mamba"], settings(tmp_path)) as other:
        for _ in range(30):
            if other.prefetch(prompt) == len(prompt):
                break
        assert same(other.load(prompt), computed)


def _is_stored(folder: Path, count: int) -> bool:
    return len(list(folder.rglob("*.kv"))) == count
