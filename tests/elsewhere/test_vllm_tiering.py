"""Our tiers below vLLM's own tiering: its spec, its manager and its primary tier, without a GPU."""

from __future__ import annotations

import base64
import json
import logging
import time
from dataclasses import replace
from importlib.metadata import EntryPoint
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from offload_backend_cpu import CpuOptions
from typer.testing import CliRunner
from vllm.lora.request import LoRARequest
from vllm.plugins import load_general_plugins
from vllm.v1.core.kv_cache_utils import _gen_lora_extra_hash_keys
from vllm.v1.kv_offload.base import LookupResult
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec

from offload_core.api.backend import BackendType, StoreOutcome
from offload_core.api.errors import ConfigError
from offload_core.api.keys import ObjectKey
from offload_core.cli import app
from offload_core.config.loading import load_config
from offload_core.config.model import BackendConfig, TierConfig
from offload_core.elsewhere import vllm_tiering
from offload_core.elsewhere.host_store import HostStore
from offload_core.elsewhere.jobs.host_jobs import PlacedObject
from offload_core.elsewhere.jobs.prompt_uses import PromptUses
from offload_core.plugins.registry import PluginRegistry, load_plugins
from offload_core.testing.faults.script import FaultScript, ScriptSettings
from tests.elsewhere.tiering_rig import (
    CHUNK_BYTES,
    CHUNKS,
    OUR_TIER,
    Engine,
    content,
    engine,
    offload_key,
    offloading_config,
)
from tests.support.damage import flipped
from tests.support.memory_backend import MemoryBackend, config_of, memory_config
from tests.support.paths import ROOT
from tests.support.polling import wait_until
from tests.support.rotting_cpu import RottingCpu

MIB = 1 << 20
DEADLINES = {"lookup_timeout_seconds": 0.3, "load_timeout_seconds": 0.3, "store_timeout_seconds": 0.3}


def disk_file(folder: Path, *further: dict[str, Any], **keys: Any) -> Path:
    path = folder / "offload.json"
    backend = {"name": "nvme", "type": "disk", "path": str(folder / "kv"), **keys}
    settings = {"staging_bytes": "32MiB", "model_identity": "a-model", "io_process": "off"}
    path.write_text(json.dumps({**settings, "backends": [backend, *further]}))
    return path


def our_tier(folder: Path, **keys: Any) -> dict[str, Any]:
    return {**OUR_TIER, "config_file": str(disk_file(folder, **keys))}


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a function that starts an engine on a tier in memory, whose calls the test can hold and break."""

    def start(chunk_bytes: int = CHUNK_BYTES, chunks: int = CHUNKS, **common: object) -> tuple[Engine, MemoryBackend]:
        config, made = memory_config(**common)
        monkeypatch.setattr(vllm_tiering, "load_config", lambda keys: config)
        started = Engine(offloading_config(OUR_TIER, chunk_bytes=chunk_bytes, chunks=chunks))
        engines.append((started, made[0]))
        return started, made[0]

    engines: list[tuple[Engine, MemoryBackend]] = []
    yield start
    for one, backend in engines:
        for gate in backend.gates.values():
            gate.open()
        one.close()


def test_the_issues_configuration_round_trips_through_vllms_own_classes(tmp_path: Path) -> None:
    with engine(our_tier(tmp_path)) as one:
        assert isinstance(one.spec, TieringOffloadingSpec)
        one.store(range(8))
        one.forget_primary()
        assert one.fetch(range(9)) == [*map(content, range(8)), None]
    with engine(our_tier(tmp_path)) as other:  # a new engine of the same identity
        assert other.fetch([3]) == [content(3)]


def test_the_tiers_may_be_in_a_process_of_their_own(tmp_path: Path) -> None:
    path = disk_file(tmp_path)
    path.write_text(path.read_text().replace('"off"', '"engine"'))
    with engine({**OUR_TIER, "config_file": str(path)}) as one:
        one.store(range(8))
        one.forget_primary()
        assert one.fetch(range(8)) == list(map(content, range(8)))


def test_compression_serves_too(tmp_path: Path) -> None:
    with engine(our_tier(tmp_path, compression="zstd")) as one:
        one.store(range(8))
        one.forget_primary()
        assert one.fetch(range(8)) == list(map(content, range(8)))
    assert sum(path.stat().st_size for path in (tmp_path / "kv").rglob("*.kv")) < 8 * CHUNK_BYTES


def test_encrypted_chunks_return_to_a_tier_that_has_lost_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OFFLOAD_CORE_SLOW_ENCRYPTION_KEYS", f"1:{base64.b64encode(bytes(32)).decode()}")
    slow = {"name": "slow", "type": "disk", "path": str(tmp_path / "slow"), "encryption": "aes-256-gcm"}
    path = disk_file(tmp_path, slow)
    with engine({**OUR_TIER, "config_file": str(path)}) as one:
        one.store(range(8))
        wait_until(lambda: len(list((tmp_path / "slow").rglob("*.kv"))) == 8, "the second tier gets nothing")
    assert not any(content(1)[:64] in file.read_bytes() for file in (tmp_path / "slow").rglob("*.kv"))
    for file in (tmp_path / "kv").rglob("*.kv"):
        file.unlink()
    with engine({**OUR_TIER, "config_file": str(path)}) as other:
        assert other.fetch(range(8)) == list(map(content, range(8)))
        wait_until(lambda: len(list((tmp_path / "kv").rglob("*.kv"))) == 8, "nothing is promoted")


def small_tier(folder: Path) -> dict[str, Any]:
    """Return a tier for 12 chunks of ``MIB``."""
    return our_tier(folder, capacity=12 * (MIB + 8192))


@pytest.mark.parametrize("use", ["store", "jobs", "lookup", "load", "touch"])
def test_the_end_of_a_prompt_is_evicted_first(tmp_path: Path, use: str) -> None:
    with engine(small_tier(tmp_path), chunk_bytes=MIB, chunks=32) as one:
        if use == "jobs":
            with one.request() as context:
                for start in range(0, 8, 2):
                    one.offer(range(start, start + 2), context)  # a part of the prompt for each step of the engine
            one.settle()
        else:
            one.store(range(8))
        one.forget_primary()
        with one.request() as context:
            if use == "touch":
                one.tier.touch(list(map(offload_key, range(8))), context)
            elif use == "lookup":
                one.look_up(range(8), context)
        if use == "load":
            assert one.fetch(range(8)) == [content(number, MIB) for number in range(8)]
            one.forget_primary()
        one.store(range(100, 108))
        one.forget_primary()
        assert [got is not None for got in one.fetch(range(8))] == [True] * 4 + [False] * 4
        one.forget_primary()
        assert None not in one.fetch(range(100, 108))


def test_a_request_without_jobs_and_a_job_without_a_request_leave_nothing_behind() -> None:
    uses: PromptUses[str] = PromptUses()
    uses.request_begins("one")
    uses.job_begins(1, "one", ["a", "b"])
    uses.job_begins(2, "one", ["c"])
    assert uses.job_ended(1) == []
    assert uses.request_ended("one") == []
    assert uses.job_ended(2) == ["c", "b", "a"]
    uses.job_begins(3, "one", ["d", "e"])
    assert uses.job_ended(3) == ["e", "d"]
    uses.request_begins("two")
    assert uses.request_ended("two") == []
    assert not uses._uses


def test_another_model_identity_has_other_objects(tmp_path: Path) -> None:
    with engine(our_tier(tmp_path)) as one:
        one.store([1])
    path = tmp_path / "offload.json"
    path.write_text(path.read_text().replace("a-model", "b-model"))
    with engine({**OUR_TIER, "config_file": str(path)}) as other:
        assert other.fetch([1]) == [None]


def test_a_model_that_only_its_name_tells_from_others_is_refused(tmp_path: Path) -> None:
    tier = our_tier(tmp_path)
    path = Path(tier["config_file"])
    settings = json.loads(path.read_text())
    del settings["model_identity"]
    path.write_text(json.dumps(settings))
    with pytest.raises(ConfigError, match="model_identity is missing"), engine(tier):
        pass


def test_a_changed_adapter_keeps_its_keys_as_the_document_says(tmp_path: Path) -> None:
    """If vLLM's hashes depend on an adapter's content one day, the sentence can go."""

    def extra_keys(weights: bytes, name: str = "sql") -> list[Any]:
        (tmp_path / "adapter_model.safetensors").write_bytes(weights)
        adapter = LoRARequest(name, 1, str(tmp_path))
        return list(_gen_lora_extra_hash_keys(SimpleNamespace(lora_request=adapter)))

    assert extra_keys(b"one") == extra_keys(b"two, retrained")
    assert extra_keys(b"one") != extra_keys(b"one", name="another")
    document = (ROOT / "docs" / "elsewhere.md").read_text()
    assert document.count("The weights of a LoRA adapter are not part of the identity here.") == 2
    assert "LMCache's keys do not name the LoRA adapter." in document


def test_the_template_plugin_serves_unchanged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = {"staging_bytes": "32MiB", "model_identity": "a", "io_process": "off"}
    backends = [{"name": "lite", "type": "sqlite", "path": str(tmp_path / "kv.db"), "capacity": "64MiB"}]
    tier = {**OUR_TIER, **settings, "backends": backends}
    entry = EntryPoint("sqlite", "offload_backend_sqlite.plugin", "offload_core")
    monkeypatch.setattr(vllm_tiering, "load_config", lambda keys: load_config(keys, load_plugins([entry])))
    with engine(tier) as one:
        one.store(range(8))
        one.forget_primary()
        assert one.fetch(range(8)) == list(map(content, range(8)))


def test_a_held_medium_never_holds_the_schedulers_thread(memory: Any) -> None:
    one, backend = memory(lookup_timeout_seconds=30, load_timeout_seconds=30, store_timeout_seconds=30)
    backend.gates["store"].shut()
    with one.request() as context:
        one.offer(range(4), context)
        backend.gates["store"].wait_for_a_call()
        one.step()
        assert one.manager.has_pending_work()  # the store is held, and the scheduler is here
    backend.gates["store"].open()
    one.settle()
    one.forget_primary()
    backend.gates["contains"].shut()
    with one.request() as context:
        assert one.look_up(range(4), context) == [LookupResult.RETRY] * 4
        one.step()
        backend.gates["contains"].wait_for_a_call()
        assert one.look_up(range(4), context) == [LookupResult.RETRY] * 4
        backend.gates["load_into"].shut()
        backend.gates["contains"].open()
        while LookupResult.HIT_PENDING not in one.look_up(range(4), context):
            one.step()
        one.step()
        backend.gates["load_into"].wait_for_a_call()
        assert one.look_up(range(4), context) == [LookupResult.HIT_PENDING] * 4
        backend.gates["load_into"].open()
        assert one.resolve(range(4), context) == [LookupResult.HIT] * 4


def test_a_hung_medium_is_a_miss_at_its_deadlines_and_its_late_bytes_go_nowhere(memory: Any) -> None:
    one, backend = memory(**DEADLINES)
    one.store(range(4))
    one.forget_primary()
    backend.gates["load_into"].shut()
    assert one.fetch(range(4)) == [None] * 4
    one.rows[:] = b"\xee" * len(one.rows)  # the chunks belong to others now
    backend.gates["load_into"].open()
    backend.gates["contains"].shut()
    assert one.fetch(range(4)) == [None] * 4
    backend.gates["contains"].open()
    one.manager.reset_cache()
    assert bytes(one.rows) == b"\xee" * len(one.rows)
    assert one.fetch(range(4)) in ([None] * 4, list(map(content, range(4))))


def test_a_hung_store_gives_its_chunks_back(memory: Any) -> None:
    one, backend = memory(**DEADLINES)
    backend.gates["store"].shut()
    for start in range(0, 64, 16):  # each round needs all chunks of the primary tier
        one.store(range(start, start + 16))


def test_stores_that_wait_for_staging_memory_end_at_their_deadline(memory: Any) -> None:
    one, backend = memory(chunk_bytes=1 << 20, chunks=96, breaker_failures=1_000_000, **DEADLINES)
    backend.gates["store"].shut()
    one.store(range(96))
    late = one.tier.get_stats().data["data"]["vllm:hybrid_offload_store_timeouts"][("memory",)]
    assert 0 < late <= 32, "two windows of 16 MiB at most can reach the tier before the deadline of all"


def test_stores_before_a_slow_medium_end_at_their_deadline(memory: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """One chunk at a time is in staging memory. Its own call is in time, and the others wait longer and longer."""
    one, backend = memory(chunk_bytes=8 << 20, chunks=12, **DEADLINES | {"store_timeout_seconds": 1.0})
    wait = backend.gates["store"].pass_through

    def pass_slowly() -> None:
        time.sleep(0.2)
        wait()

    monkeypatch.setattr(backend.gates["store"], "pass_through", pass_slowly)
    one.store(range(12))
    assert 0 < len(backend.objects) <= 6


def test_a_full_medium_is_a_miss_and_pins_nothing(memory: Any) -> None:
    one, backend = memory()
    backend.faults["prepare_store"] = [StoreOutcome.REJECTED] * 8
    one.store(range(8))
    backend.faults.clear()
    one.forget_primary()
    assert one.fetch(range(8)) == [None] * 8
    one.store(range(8))
    one.forget_primary()
    assert one.fetch(range(8)) == list(map(content, range(8)))


def test_a_damaged_object_is_a_miss_and_the_others_of_its_job_are_hits(memory: Any) -> None:
    one, backend = memory()
    one.store(range(8))
    one.forget_primary()
    damaged = next(key for key in backend.objects if key.chunk_hash == offload_key(3)[:32])
    backend.objects[damaged] = flipped(backend.objects[damaged])
    assert one.fetch(range(8)) == [None if number == 3 else content(number) for number in range(8)]
    assert damaged not in backend.objects
    hits = one.tier.get_stats().data["data"]["vllm:hybrid_offload_load_hits"][("memory",)]
    assert hits == 7, "the chunks that were loaded are loaded again"


def test_an_object_that_is_damaged_in_lent_memory_is_a_miss(monkeypatch: pytest.MonkeyPatch) -> None:
    tier = TierConfig(
        BackendConfig.model_validate({"name": "ram", "type": "rotting-cpu"}),
        BackendType("rotting-cpu", RottingCpu, CpuOptions),
        CpuOptions.model_validate({"capacity": "64MiB"}),
    )
    monkeypatch.setattr(vllm_tiering, "load_config", lambda keys: config_of(tier))
    with engine(OUR_TIER) as one:
        one.store(range(4))
        one.forget_primary()
        assert one.fetch(range(4)) == [None] * 4
        counted = one.tier.get_stats().data["data"]
        assert counted["vllm:hybrid_offload_load_corrupt"][("ram",)] == 4
        one.store(range(4))  # it damages an object once only
        one.forget_primary()
        assert one.fetch(range(4)) == list(map(content, range(4)))
        counted = one.tier.get_stats().data["data"]
        assert counted["vllm:hybrid_offload_load_lent"][("ram",)] == 4


@pytest.mark.parametrize("call", ["contains", "load_into", "prepare_load"])
def test_a_failing_medium_is_a_miss(memory: Any, call: str) -> None:
    one, backend = memory()
    one.store(range(4))
    one.forget_primary()
    backend.faults[call] = OSError("broken")
    assert one.fetch(range(4)) == [None] * 4


def test_a_burst_beyond_the_staging_memory_loses_nothing(tmp_path: Path) -> None:
    chunk_bytes, chunks = 1 << 20, 96
    with engine(our_tier(tmp_path), chunk_bytes=chunk_bytes, chunks=chunks) as one:
        one.store(range(chunks))
        one.forget_primary()
        expected = [content(number, chunk_bytes) for number in range(chunks)]
        assert one.fetch(range(chunks)) == expected


def test_stored_chunks_are_events_and_counts_are_metrics(tmp_path: Path) -> None:
    with engine({**our_tier(tmp_path), "enable_kv_events": True, "locality": "LOCAL"}) as one:
        one.store(range(4))
        events = list(one.tier.take_events())
        assert sorted(key for event in events for key in event.keys) == sorted(map(offload_key, range(4)))
        assert not any(event.removed for event in events)
        one.forget_primary()
        one.fetch(range(4))
        stats = one.tier.get_stats()
        assert stats is not None
        definitions = one.tier.build_metric_definitions({})
        names = set(stats.data["data"])
        assert {"vllm:hybrid_offload_stores", "vllm:hybrid_offload_load_hits"} <= names <= set(definitions)
        assert one.manager.get_stats() is not None


def test_vllms_detector_of_back_pressure_takes_our_results(tmp_path: Path) -> None:
    tier = {**our_tier(tmp_path), "backpressure": {"backpressure_cls": "EMABackpressureDetector"}}
    with engine(tier) as one:
        for number in range(12):
            one.store([number])
        assert one.tier.bp_detector is not None
        assert one.tier.bp_detector.stats["store_latency_ema"] > 0


def test_wrong_keys_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="stagin_bytes"):
        Engine(offloading_config({**OUR_TIER, "stagin_bytes": 1, "backends": [{"name": "a", "type": "cpu"}]}))


def test_staging_memory_that_is_too_small_is_refused_with_the_right_number(tmp_path: Path) -> None:
    path = disk_file(tmp_path)
    path.write_text(path.read_text().replace("32MiB", "1MiB"))
    with pytest.raises(ConfigError, match="staging_bytes: 1048576 is too small for objects of 8192 bytes; set it to"):
        Engine(offloading_config({**OUR_TIER, "config_file": str(path)}))


def test_the_end_of_an_engine_leaves_no_view_of_its_memory(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING), engine(our_tier(tmp_path)) as one:
        one.store(range(4))
    assert "mmap" not in caplog.text


def test_a_start_that_fails_leaves_no_view_of_its_memory(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = disk_file(tmp_path)
    path.write_text(path.read_text().replace("32MiB", "1MiB"))
    with caplog.at_level(logging.WARNING), pytest.raises(ConfigError, match="staging_bytes"):
        Engine(offloading_config({**OUR_TIER, "config_file": str(path)}))
    assert "mmap" not in caplog.text


def test_after_a_defect_of_our_thread_the_end_of_an_engine_still_ends_the_io_process(tmp_path: Path) -> None:
    path = disk_file(tmp_path)
    path.write_text(path.read_text().replace('"off"', '"engine"'))
    with engine({**OUR_TIER, "config_file": str(path)}) as one:
        one.store(range(2))
        store: HostStore = one.tier._store
        assert store._processes is not None
        (process,) = store._processes.all
        pid = process.pid
        assert pid is not None
        store.load(9_999, [PlacedObject(one.tier._key(offload_key(0)), 0)], ["no such tier"])
        wait_until(lambda: not store.is_running, "the defect has not ended the thread")
        store.store(10_000, [PlacedObject(one.tier._key(offload_key(0)), 0)])
        assert [(ended.job_id, len(ended.moved)) for ended in store.take_ended()] == [(9_999, 0), (10_000, 0)]
    assert not Path(f"/proc/{pid}").exists()
    store.close()


def test_the_commands_know_the_objects_and_their_owner(tmp_path: Path) -> None:
    path = disk_file(tmp_path)
    with engine({**OUR_TIER, "config_file": str(path)}) as one:
        one.store(range(4))
    listed = CliRunner().invoke(app, ["ls", str(path), "--json"])
    assert {found["pack"] for found in json.loads(listed.stdout)["objects"]} == {"vllm-tiering-g0"}
    verified = CliRunner().invoke(app, ["verify", str(path)])
    assert verified.exit_code == 0, verified.output


def test_objects_are_named_by_the_identity_the_group_and_the_hash(memory: Any) -> None:
    one, backend = memory()
    one.store([5])
    (key,) = backend.objects
    assert key == ObjectKey(key.namespace, "vllm-tiering-g0", offload_key(5)[:32])


def test_under_the_fault_script_every_hit_has_its_bytes(memory: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = ScriptSettings(
        deadline_seconds=0.05,
        hang_seconds=(0.06, 0.2),
        sick_seconds=(0.05, 0.2),
        sick_calls=(3, 10),
        well_seconds=(0.0, 0.1),
        well_calls=(1, 10),
    )
    script = FaultScript(settings)
    monkeypatch.setattr(PluginRegistry, "wrap", lambda registry, backend, tier: script.wrap(backend))
    one, _ = memory(**dict.fromkeys(DEADLINES, 0.05), breaker_pause_seconds=0.02, breaker_max_pause_seconds=0.05)
    script.start(7)
    hits = 0
    for turn in range(40):
        numbers = range(turn * 4 % 32, turn * 4 % 32 + 4)
        one.store(numbers)
        one.forget_primary()
        for number, got in zip(numbers, one.fetch(numbers), strict=True):
            assert got in (None, content(number))
            hits += got is not None
    script.stop()
    assert hits
    assert sum(map(len, script.injected().values())) > 5


def test_the_recipe_of_the_document_serves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vllm.plugins.plugins_loaded", False)
    load_general_plugins()
    document = (ROOT / "docs" / "elsewhere.md").read_text()
    monkeypatch.chdir(tmp_path)
    Path("offload.yaml").write_text(document.split("```yaml\n")[1].split("```")[0])
    transfer = json.loads(document.split("--kv-transfer-config '")[1].split("'\n")[0])
    assert transfer["kv_connector"] == "OffloadingConnector"
    extra = transfer["kv_connector_extra_config"]
    (tier,) = extra["secondary_tiers"]
    config = offloading_config(tier)
    small = {**extra, "cpu_bytes_to_use": config.extra_config["cpu_bytes_to_use"]}
    one = Engine(replace(config, extra_config=small))
    try:
        one.store(range(8))
        one.forget_primary()
        assert one.fetch(range(8)) == list(map(content, range(8)))
    finally:
        one.close()
