"""Our tiers as an L2 adapter of LMCache: its factory, its controllers and its memory tier, without a GPU."""

from __future__ import annotations

import base64
import json
import logging
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from offload_core.api.backend import StoreOutcome
from offload_core.api.errors import ConfigError
from offload_core.api.keys import ObjectKey
from offload_core.cli import app
from offload_core.config.loading import load_config
from offload_core.plugins.registry import PluginRegistry, load_plugins
from offload_core.testing.faults.script import FaultScript, ScriptSettings
from tests.support.clusters import lmcache
from tests.support.memory_backend import MemoryBackend, memory_config
from tests.support.polling import wait_until

if reason := lmcache.why_not():
    pytest.skip(reason, allow_module_level=True)

from offload_core.elsewhere import lmcache_l2
from tests.elsewhere.lmcache_rig import NBYTES, Controllers, content, lm_key, make_adapter, memory, server
from tests.support.damage import flipped

DEADLINES = {"lookup_timeout_seconds": 1, "load_timeout_seconds": 1, "store_timeout_seconds": 1}
LONG = dict.fromkeys(DEADLINES, 30)


def config_file(folder: Path, *backends: dict[str, Any], **settings: Any) -> Path:
    path = folder / "offload.json"
    disk = {"name": "nvme", "type": "disk", "path": str(folder / "kv")}
    keys = {"staging_bytes": "32MiB", "model_identity": "a-model", "io_process": "off", **settings}
    path.write_text(json.dumps({**keys, "backends": [disk, *backends]}))
    return path


@pytest.fixture
def start() -> Any:
    """Return a function that starts an adapter on a configuration file."""

    def start(path: Path) -> Controllers:
        started.append(make_adapter(config_file=str(path)))
        return Controllers(started[-1])

    started: list[Any] = []
    yield start
    for adapter in started:
        adapter.close()


def use_memory(monkeypatch: pytest.MonkeyPatch, **common: object) -> list[MemoryBackend]:
    """Give all adapters a tier in memory; returns the list to which each one's backend is appended."""
    config, made = memory_config(**common)
    monkeypatch.setattr(lmcache_l2, "load_config", lambda keys, source: config)
    return made


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a function that starts an adapter on a tier in memory, whose calls the test can hold and break."""

    def start(nbytes: int = NBYTES, **common: object) -> tuple[Controllers, MemoryBackend]:
        made = use_memory(monkeypatch, **common)
        started.append((make_adapter(), made[0]))
        return Controllers(started[-1][0], nbytes), made[0]

    started: list[tuple[Any, MemoryBackend]] = []
    yield start
    for adapter, backend in started:
        for gate in backend.gates.values():
            gate.open()
        adapter.close()


def test_chunks_that_left_lmcaches_memory_come_back_also_after_a_restart(tmp_path: Path) -> None:
    path = config_file(tmp_path)
    with server(config_file=str(path)) as one:
        one.write(range(8))
        one.settle()
        one.evict(range(4))
        assert one.fetch(range(8)) == (list(map(content, range(8))), 4)
        status = one.manager.report_status()
        assert status["is_healthy"], status
    with server(config_file=str(path)) as other:
        assert other.fetch(range(9)) == ([*map(content, range(8)), None], 8)


@pytest.mark.parametrize("use", ["store", "lookup", "load"])
def test_the_end_of_a_prompt_is_evicted_first(tmp_path: Path, use: str) -> None:
    mib = 1 << 20
    disk = {"name": "nvme", "type": "disk", "path": str(tmp_path / "kv"), "capacity": 12 * (mib + 8192)}
    with closing(make_adapter(staging_bytes="64MiB", model_identity="m", io_process="off", backends=[disk])) as adapter:
        one = Controllers(adapter, mib)
        assert one.store(range(8))
        if use == "lookup":
            assert all(one.look_up(range(8)))
        elif use == "load":
            assert None not in one.fetch(range(8))
        assert one.store(range(100, 108))
        assert one.look_up(range(8)) == [True] * 4 + [False] * 4
        assert all(one.look_up(range(100, 108)))


def test_the_three_descriptors_are_distinct(tmp_path: Path, start: Any) -> None:
    one = start(config_file(tmp_path)).adapter
    assert len({one.get_store_event_fd(), one.get_lookup_and_lock_event_fd(), one.get_load_event_fd()}) == 3


def test_chunks_with_another_key_are_other_objects(tmp_path: Path, start: Any) -> None:
    one = start(config_file(tmp_path))
    assert one.store([1])
    others = [
        lm_key(1, model_name="b/model"), lm_key(1, kv_rank=2), lm_key(1, cache_salt="you"),
        lm_key(1, object_group_id=1), lm_key(2), lm_key(1),
    ]  # fmt: skip
    task = one.adapter.submit_lookup_and_lock_task(others, {})
    assert one.found(task, len(others)) == [False] * 5 + [True]


def test_another_model_identity_has_other_objects(tmp_path: Path, start: Any) -> None:
    assert start(config_file(tmp_path)).store([1])
    assert start(config_file(tmp_path, model_identity="b-model")).fetch([1]) == [None]


def test_without_a_model_identity_nothing_starts(tmp_path: Path, start: Any) -> None:
    with pytest.raises(ConfigError, match="model_identity is missing: LMCache gives"):
        start(config_file(tmp_path, model_identity=None))


def test_wrong_keys_are_named_with_their_place() -> None:
    with pytest.raises(ConfigError, match=r"adapter_params(.|\n)*stagin_bytes"):
        make_adapter(stagin_bytes=1, backends=[{"name": "a", "type": "cpu", "capacity": "1MiB"}])


def test_the_template_plugin_serves_unchanged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    entry = EntryPoint("sqlite", "offload_backend_sqlite.plugin", "offload_core")
    plugins = load_plugins([entry])
    monkeypatch.setattr(lmcache_l2, "load_config", lambda keys, source: load_config(keys, plugins, source=source))
    backends = [{"name": "lite", "type": "sqlite", "path": str(tmp_path / "kv.db"), "capacity": "64MiB"}]
    settings = {"staging_bytes": "32MiB", "model_identity": "a", "io_process": "off"}
    with server(**settings, backends=backends) as one:
        one.write(range(8))
        one.settle()
        one.evict(range(8))
        assert one.fetch(range(8)) == (list(map(content, range(8))), 8)


def test_several_tiers_compression_and_an_io_process_serve(tmp_path: Path, start: Any) -> None:
    slow = {"name": "slow", "type": "disk", "path": str(tmp_path / "slow"), "compression": "zstd"}
    path = config_file(tmp_path, slow, io_process="engine")
    one = start(path)
    assert one.store(range(8))
    assert one.fetch(range(8)) == list(map(content, range(8)))
    wait_until(lambda: len(list((tmp_path / "slow").rglob("*.kv"))) == 8, "the second tier gets nothing")
    assert sum(file.stat().st_size for file in (tmp_path / "slow").rglob("*.kv")) < 8 * NBYTES
    assert one.adapter.report_status()["tiers"]["nvme"]["available"]


def test_encrypted_chunks_return_to_a_tier_that_has_lost_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, start: Any
) -> None:
    monkeypatch.setenv("OFFLOAD_CORE_SLOW_ENCRYPTION_KEYS", f"1:{base64.b64encode(bytes(32)).decode()}")
    slow = {"name": "slow", "type": "disk", "path": str(tmp_path / "slow"), "encryption": "aes-256-gcm"}
    path = config_file(tmp_path, slow)
    one = start(path)
    assert one.store(range(8))
    wait_until(lambda: len(list((tmp_path / "slow").rglob("*.kv"))) == 8, "the second tier gets nothing")
    assert not any(content(1)[:64] in file.read_bytes() for file in (tmp_path / "slow").rglob("*.kv"))
    for file in (tmp_path / "kv").rglob("*.kv"):
        file.unlink()
    assert start(path).fetch(range(8)) == list(map(content, range(8)))
    wait_until(lambda: len(list((tmp_path / "kv").rglob("*.kv"))) == 8, "nothing is promoted")


def test_a_held_medium_never_holds_a_controllers_thread(held: Any) -> None:
    """Every call returns although no call of the medium does: the test goes on, and opens the gates afterwards."""
    one, backend = held(**LONG)
    adapter, keys = one.adapter, list(map(lm_key, range(4)))
    backend.gates["store"].shut()
    store = one.submit_store(range(4))
    backend.gates["store"].wait_for_a_call()
    assert adapter.pop_completed_store_tasks() == {}
    backend.gates["store"].open()
    assert one.stored(store).is_successful()
    backend.gates["contains"].shut()
    lookup = adapter.submit_lookup_and_lock_task(keys, {})
    backend.gates["contains"].wait_for_a_call()
    assert adapter.query_lookup_and_lock_result(lookup) is None
    adapter.delete([lm_key(9)])
    adapter.submit_unlock(keys)
    assert adapter.list_l2_keys().entries
    wait_until(lambda: adapter.get_usage().total_bytes_used == 4 * NBYTES, "the account does not follow the result")
    assert adapter.report_status()["is_healthy"]
    backend.gates["contains"].open()
    assert one.found(lookup, 4) == [True] * 4
    backend.gates["load_into"].shut()
    objects = [memory(bytes(NBYTES)) for _ in keys]
    load = adapter.submit_load_task(keys, objects)
    backend.gates["load_into"].wait_for_a_call()
    assert adapter.query_load_result(load) is None
    backend.gates["load_into"].open()
    assert one.loaded(load, objects) == list(map(content, range(4)))


def test_a_hung_medium_is_a_miss_at_its_deadlines_and_its_late_bytes_go_nowhere(held: Any) -> None:
    one, backend = held(**DEADLINES)
    assert one.store(range(4))
    backend.gates["load_into"].shut()
    objects = [memory(b"\xee" * NBYTES) for _ in range(4)]
    load = one.adapter.submit_load_task(list(map(lm_key, range(4))), objects)
    assert one.loaded(load, objects) == [None] * 4
    backend.gates["load_into"].open()
    backend.gates["contains"].shut()
    assert one.look_up(range(4)) == [False] * 4
    backend.gates["contains"].open()
    backend.gates["store"].shut()
    assert not one.store(range(4, 8))
    assert {bytes(one.byte_array) for one in objects} == {b"\xee" * NBYTES}


def test_a_hung_medium_leaves_lmcaches_controllers_and_its_memory_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    made = use_memory(monkeypatch, **DEADLINES, breaker_failures=1_000_000)
    with server() as one:
        (backend,) = made
        one.write(range(4))
        one.settle()
        for gate in ("store", "load_into", "contains"):
            backend.gates[gate].shut()
        one.write(range(4, 8))
        backend.gates["store"].wait_for_a_call()
        one.settle()  # the hung store gives its chunks back
        one.evict(range(8))
        assert one.fetch(range(8)) == ([None] * 8, 0)
        backend.gates["contains"].open()
        assert one.fetch(range(4)) == ([None] * 4, 0)
        for gate in ("store", "load_into"):
            backend.gates[gate].open()
        wait_until(lambda: one.fetch(range(4)) == (list(map(content, range(4))), 4), "the tier is not used again")
        assert one.manager.report_status()["is_healthy"]


def test_a_full_medium_is_a_miss(held: Any) -> None:
    one, backend = held()
    backend.faults["prepare_store"] = [StoreOutcome.REJECTED] * 8
    assert not one.store(range(8))
    backend.faults.clear()
    assert one.fetch(range(8)) == [None] * 8
    assert one.store(range(8))
    assert one.fetch(range(8)) == list(map(content, range(8)))


def test_a_failing_medium_is_a_miss(held: Any) -> None:
    one, backend = held()
    assert one.store(range(4))
    for call in ("contains", "prepare_load", "load_into", "prepare_store", "delete"):
        backend.faults[call] = OSError(5, "broken")
    assert one.load(range(4)) == [None] * 4
    assert one.fetch(range(4)) == [None] * 4
    assert not one.store(range(4, 8))
    backend.faults.clear()
    assert one.fetch(range(4)) == list(map(content, range(4)))


def test_damage_is_a_miss_of_the_damaged_chunk_only(held: Any) -> None:
    one, backend = held()
    assert one.store(range(4))
    (damaged,) = (key for key in backend.objects if key.chunk_hash[-1] == 2)
    backend.objects[damaged] = flipped(backend.objects[damaged])
    expected = [None if number == 2 else content(number) for number in range(4)]
    assert one.fetch(range(4)) == expected
    assert damaged not in backend.objects
    assert one.store([2])
    assert one.fetch([2]) == [content(2)]


def test_a_chunk_of_another_size_is_a_miss(held: Any) -> None:
    one, _ = held()
    assert one.store([1])
    assert Controllers(one.adapter, NBYTES // 2).load([1]) == [None]


def test_chunks_of_many_sizes_serve(held: Any) -> None:
    one, _ = held()
    sizes = [1, 4095, 65_537, 3_000_001]
    for number, nbytes in enumerate(sizes):
        assert Controllers(one.adapter, nbytes).store([number])
    for number, nbytes in enumerate(sizes):
        assert Controllers(one.adapter, nbytes).load([number]) == [content(number, nbytes)]


def test_chunks_too_large_for_the_staging_memory_are_refused_with_the_cure(
    held: Any, caplog: pytest.LogCaptureFixture
) -> None:
    _, backend = held()
    adapter = Controllers(make_adapter(), 16 << 20)
    with caplog.at_level(logging.ERROR):
        assert not adapter.store([1])
        assert adapter.load([1]) == [None]
    adapter.adapter.close()
    assert caplog.text.count("objects of 16777216 bytes are neither stored nor loaded: staging_bytes is 33554432") == 1
    assert not backend.objects


def test_a_chunk_asked_for_twice_in_one_load_is_loaded_once(held: Any) -> None:
    one, _ = held()
    assert one.store([1, 2])
    got = one.load([1, 2, 1])
    assert got == [content(1), content(2), None]


def test_a_hash_that_no_object_can_have_is_a_miss(held: Any) -> None:
    one, _ = held()
    keys = [lm_key(1), lm_key(0, chunk_hash=b""), lm_key(0, chunk_hash=bytes(65))]
    objects = [memory(content(1)) for _ in keys]
    assert not one.stored(one.adapter.submit_store_task(keys, objects)).is_successful()
    task = one.adapter.submit_lookup_and_lock_task(keys, {})
    assert one.found(task, 3) == [True, False, False]
    load = one.adapter.submit_load_task(keys, objects)
    assert one.loaded(load, objects) == [content(1), None, None]


def test_two_controllers_at_once_get_their_own_results(tmp_path: Path, start: Any) -> None:
    one = start(config_file(tmp_path))
    assert one.store(range(64))

    def store() -> None:
        for number in range(64, 128, 4):
            assert one.store(range(number, number + 4))

    def prefetch() -> None:
        for number in range(0, 64, 4):
            assert one.fetch(range(number, number + 5))[:4] == list(map(content, range(number, number + 4)))

    with ThreadPoolExecutor(2) as threads:
        for done in [threads.submit(store), threads.submit(prefetch)]:
            done.result(60)
    assert one.fetch(range(128)) == list(map(content, range(128)))


class Listener:
    """LMCache's listener of an adapter."""

    def __init__(self) -> None:
        self.stored: dict[Any, int] = {}
        self.deleted: set[Any] = set()
        self.accessed: set[Any] = set()

    def on_l2_keys_stored(self, keys: list[Any], sizes: list[int]) -> None:
        self.stored.update(zip(keys, sizes, strict=True))

    def on_l2_keys_accessed(self, keys: list[Any]) -> None:
        self.accessed.update(keys)

    def on_l2_keys_deleted(self, keys: list[Any]) -> None:
        self.deleted.update(keys)


def test_accounts_listeners_and_deletions_agree(held: Any) -> None:
    one, backend = held()
    adapter, listener = one.adapter, Listener()
    adapter.register_listener(listener)
    assert one.store(range(4))
    assert one.store(range(4)), "present already"
    wait_until(lambda: len(listener.stored) == 4, "the listener hears nothing")
    assert set(listener.stored.values()) == {NBYTES}
    assert adapter.get_usage().total_bytes_used == 4 * NBYTES
    assert one.load([1]) == [content(1)]
    wait_until(lambda: listener.accessed == {lm_key(1)}, "the listener hears nothing")
    assert one.look_up([0]) == [True]  # locks it
    adapter.delete(list(map(lm_key, [0, 1, 2, 77])))
    wait_until(lambda: listener.deleted == set(map(lm_key, [1, 2, 77])), "the deletion does not end")
    assert adapter.get_usage().total_bytes_used == 2 * NBYTES
    assert sorted(key.chunk_hash[-1] for key in backend.objects) == [0, 3]
    adapter.submit_unlock([lm_key(0)])
    adapter.delete([lm_key(0)])
    wait_until(lambda: len(backend.objects) == 1, "an unlocked chunk cannot be deleted")


def test_a_chunk_that_is_stored_with_another_size_counts_with_that_size(held: Any) -> None:
    one, _ = held()
    assert one.store([1, 2])
    listener = Listener()
    one.adapter.register_listener(listener)
    half = Controllers(one.adapter, NBYTES // 2)
    assert half.load([1]) == [None], "the object has another size, and goes"
    assert half.store([1])
    wait_until(lambda: listener.stored == {lm_key(1): NBYTES // 2}, "the listener hears nothing")
    assert listener.deleted == {lm_key(1)}
    assert half.load([1]) == [content(1, NBYTES // 2)]
    assert one.adapter.get_usage().total_bytes_used == NBYTES + NBYTES // 2
    one.adapter.delete([lm_key(1)])
    wait_until(lambda: one.adapter.get_usage().total_bytes_used == NBYTES, "the deletion does not end")


def test_a_deletion_that_fails_is_not_reported(held: Any) -> None:
    one, backend = held()
    listener = Listener()
    one.adapter.register_listener(listener)
    assert one.store([1])
    backend.faults["delete"] = OSError(5, "broken")
    one.adapter.delete([lm_key(1)])
    failures = "delete_failures"
    wait_until(lambda: one.adapter.report_status()["tiers"]["memory"].get(failures) == 1, "the medium is not asked")
    assert one.look_up([1]) == [True]
    one.adapter.submit_unlock([lm_key(1)])
    assert not listener.deleted
    backend.faults.clear()
    one.adapter.delete([lm_key(1)])
    wait_until(lambda: listener.deleted == {lm_key(1)}, "the second deletion does not end")
    assert one.adapter.get_usage().total_bytes_used == 0


def test_the_listing_has_pages(held: Any) -> None:
    one, _ = held()
    assert one.store(range(5))
    task = one.adapter.submit_store_task([lm_key(9, model_name="b/model", cache_salt="s")], [memory(content(9))])
    assert one.stored(task).is_successful()
    numbers, cursor = [], None
    while True:
        page = one.adapter.list_l2_keys("a/model", 2, cursor)
        numbers += [entry.key.to_object_key().chunk_hash[-1] for entry in page.entries]
        assert {entry.size_bytes for entry in page.entries} == {NBYTES}
        cursor = page.next_page_token
        if cursor is None:
            break
    assert numbers == list(range(5))
    assert len(one.adapter.list_l2_keys().entries) == 6
    with pytest.raises(ValueError, match="page_size must be positive"):
        one.adapter.list_l2_keys(page_size=0)
    with pytest.raises(ValueError, match="is no cursor"):
        one.adapter.list_l2_keys(cursor="x")


def test_the_status_counts_per_tier(held: Any) -> None:
    one, _ = held()
    assert one.store(range(4))
    assert one.fetch(range(4)) == list(map(content, range(4)))
    wait_until(lambda: one.adapter.report_status()["tiers"]["memory"].get("stores") == 4, "nothing is counted")
    status = one.adapter.report_status()["tiers"]["memory"]
    assert (status["available"], status["load_hits"]) == (True, 4)
    one.adapter.close()
    assert not one.adapter.report_status()["is_healthy"]


def test_a_closed_adapter_answers_nobody_and_touches_no_descriptor(held: Any, caplog: pytest.LogCaptureFixture) -> None:
    one, backend = held(**LONG)
    backend.gates["contains"].shut()
    one.adapter.submit_lookup_and_lock_task([lm_key(1)], {})
    backend.gates["contains"].wait_for_a_call()
    threading.Timer(0.05, backend.gates["contains"].open).start()
    one.adapter.close()
    one.adapter.close()
    one.submit_store([1])
    one.adapter.submit_lookup_and_lock_task([lm_key(1)], {})
    one.adapter.submit_load_task([lm_key(1)], [memory(content(1))])
    one.adapter.delete([lm_key(1)])
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]


def test_the_commands_know_the_objects_and_their_owner(tmp_path: Path, start: Any) -> None:
    path = config_file(tmp_path)
    assert start(path).store(range(4))
    listed = CliRunner().invoke(app, ["ls", str(path), "--json"])
    assert {found["pack"] for found in json.loads(listed.stdout)["objects"]} == {"lmcache-g0"}
    verified = CliRunner().invoke(app, ["verify", str(path)])
    assert verified.exit_code == 0, verified.output


def test_objects_are_named_by_the_identity_the_group_and_the_hash(held: Any) -> None:
    one, backend = held()
    assert one.store([5])
    (key,) = backend.objects
    assert key == ObjectKey(key.namespace, "lmcache-g0", lm_key(5).chunk_hash)


def test_under_the_fault_script_every_hit_has_its_bytes(held: Any, monkeypatch: pytest.MonkeyPatch) -> None:
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
    one, _ = held(**dict.fromkeys(DEADLINES, 0.05), breaker_pause_seconds=0.02, breaker_max_pause_seconds=0.05)
    script.start(7)
    hits = 0
    for turn in range(40):
        numbers = range(turn * 4 % 32, turn * 4 % 32 + 4)
        one.store(numbers)
        for number, got in zip(numbers, one.fetch(numbers), strict=True):
            assert got in (None, content(number))
            hits += got is not None
        one.adapter.delete(list(map(lm_key, numbers[:1])))
    script.stop()
    assert hits
    assert sum(map(len, script.injected().values())) > 5
