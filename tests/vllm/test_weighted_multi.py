"""Several connectors behind one: what is forwarded, what is refused, and the fate of those that misbehave."""

from __future__ import annotations

import inspect
import json
import logging
import shlex
from types import SimpleNamespace
from typing import Any

import pytest
import vllm
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiConnector

from offload_core.api.errors import ConfigError
from offload_core.runtime.metrics import CONNECTOR_COUNTERS, CONNECTOR_GAUGES
from offload_core.vllm import WeightedMultiConnector
from offload_core.vllm.metrics import HybridOffloadStats
from offload_core.vllm.multi import questions
from offload_core.vllm.multi.configuration import multi_config
from offload_core.vllm.multi.metrics import OWN_STATS
from tests.support.documents import blocks
from tests.support.engine import misbehaving
from tests.support.paths import ROOT

pytestmark = pytest.mark.every_version

OF_THE_WRAPPER_ITSELF = {
    "role": "its own",
    "has_connector_metadata": "looks at the bound metadata of all",
    "_get_connector_metadata": "for the connector itself",
}
TIMEOUT, GRACE = 10.0, 3.0


class Scripted(misbehaving.FindsNothing):
    """Gives the answers of a script; the last one remains."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self.answers: list[tuple[int | None, bool]] = [(0, False)]
        self.told: list[int] = []

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        return self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        self.told.append(num_external_tokens)


class ScriptedToo(Scripted):
    """A second class."""


def entry(kind: str, module: str = __name__, **keys: Any) -> dict[str, Any]:
    return {"kv_connector": kind, "kv_connector_module_path": module, "kv_role": "kv_both", **keys}


def engine_config(*connectors: dict[str, Any], hybrid: bool = True, **extra: Any) -> Any:
    transfer = KVTransferConfig(
        **entry("WeightedMultiConnector", "offload_core.vllm"),
        kv_connector_extra_config={"connectors": list(connectors), **extra},
    )
    scheduler = SimpleNamespace(disable_hybrid_kv_cache_manager=not hybrid)
    return SimpleNamespace(kv_transfer_config=transfer, scheduler_config=scheduler)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    time = SimpleNamespace(now=100.0)
    monkeypatch.setattr(questions.Questions.__init__, "__defaults__", (lambda: time.now,))
    return time


class Rig:
    """A scheduler half and its requests."""

    def __init__(self, *kinds: str, **extra: Any) -> None:
        connectors = [
            entry(
                kind,
                __name__ if kind.startswith("Scripted") else misbehaving.__name__,
                name=f"c{place}",
                kv_connector_extra_config={"place": place},
                **keys,
            )
            for place, (kind, keys) in enumerate((kind, extra.pop(f"c{place}", {})) for place, kind in enumerate(kinds))
        ]
        limits = {"lookup_timeout_seconds": TIMEOUT, "lookup_grace_seconds": GRACE, **extra}
        self.kv_cache: Any = SimpleNamespace(prefix_cacheable_group_ids=(0,))
        self.config = engine_config(*connectors, **limits)
        self.connector: Any = WeightedMultiConnector(self.config, KVConnectorRole.SCHEDULER, self.kv_cache)
        self.children: list[Any] = self.connector.sub_connectors
        self.gauges: dict[str, float] = {}
        self.counts: dict[str, float] = {}

    def request(self, name: str = "r") -> Any:
        return SimpleNamespace(request_id=name, num_tokens=1000, num_computed_tokens=0)

    def ask(self, request: Any, computed_tokens: int = 0) -> tuple[int | None, bool]:
        answer: tuple[int | None, bool] = self.connector.get_num_new_matched_tokens(request, computed_tokens)
        return answer

    def load(self, request: Any, computed_tokens: int = 0, held_blocks: int = 0) -> None:
        """Ask, and take the offered tokens."""
        tables = ([SimpleNamespace(is_null=False)] * held_blocks, [SimpleNamespace(is_null=True)])
        tokens, loads_meanwhile = self.ask(request, computed_tokens)
        assert tokens
        assert loads_meanwhile
        self.connector.update_state_after_alloc(request, SimpleNamespace(blocks=tables), tokens)
        request.num_computed_tokens = computed_tokens + tokens

    def bind_blocks(self, *block_sizes: int) -> SimpleNamespace:
        """Give the connector a pool for groups with blocks of such sizes. Its attribute ``free`` counts free blocks."""
        groups = [SimpleNamespace(kv_cache_spec=SimpleNamespace(block_size=size)) for size in block_sizes]
        self.kv_cache.kv_cache_groups = groups
        pool = SimpleNamespace(free=0)
        pool.get_num_free_blocks = lambda: pool.free
        self.connector.bind_kv_cache_manager(SimpleNamespace(block_pool=pool))
        return pool

    def end_loads(self, *requests: Any, failed: bool = False) -> None:
        names = {request.request_id for request in requests}
        output = SimpleNamespace(
            finished_recving=names, failed_recving=names if failed else set(), kv_connector_worker_meta=None
        )
        for request in requests if failed else ():
            request.num_computed_tokens = 0
        self.connector.update_connector_output(output)

    def step(self, *running: Any) -> None:
        names = {request.request_id: 1 for request in running}
        self.connector.build_connector_meta(SimpleNamespace(num_scheduled_tokens=names))

    def finish(self, request: Any) -> None:
        self.connector.request_finished_all_groups(request, ([],))

    def count(self, name: str, connector: str) -> float:
        """The sum of a counter so far, or the value of a gauge."""
        stats = self.connector.get_kv_connector_stats()
        for key, value in stats[OWN_STATS].data.items() if stats is not None else ():
            self.counts[key] = self.counts.get(key, 0) + value
            assert self.counts[key] >= 0, key
        return self.counts.get(f"{name}|{connector}", 0)


# Forwarding


def _methods(*classes: type) -> set[str]:
    return {
        name
        for one in classes
        for name, value in vars(one).items()
        if callable(value) or isinstance(value, property | classmethod)
        if not name.startswith("__")
    }


def test_every_method_of_vllms_base_class_is_forwarded() -> None:
    forwarded = _methods(*(one for one in WeightedMultiConnector.__mro__ if issubclass(one, MultiConnector)))
    assert _methods(KVConnectorBase_V1) - forwarded - OF_THE_WRAPPER_ITSELF.keys() == set()


@pytest.mark.parametrize(
    "name", sorted(name for name, value in vars(MultiConnector).items() if isinstance(value, classmethod))
)
def test_every_class_method_takes_entries_with_weights(name: str) -> None:
    config = engine_config(entry("Scripted", load_weight=4, name="one"), lookup_grace_seconds=1)
    values = {
        "vllm_config": config,
        "kv_transfer_config": config.kv_transfer_config,
        "extra_config": config.kv_transfer_config.kv_connector_extra_config,
        "data": {},
        "metric_types": _metric_types(CollectorRegistry()),
        "labelnames": ["engine"],
        "per_engine_labelvalues": {0: ["0"]},
    }
    method = getattr(WeightedMultiConnector, name)
    method(**{parameter: values[parameter] for parameter in inspect.signature(method).parameters})


def test_every_connector_gets_its_own_part_of_the_handshake() -> None:
    parts = {(rank, place): object() for rank in (0, 1) for place in (0, 2)}
    workers = [Rig("Scripted", "ScriptedToo", "ScriptedToo") for _ in (0, 1)]
    sent: dict[tuple[int, int], Any] = {}
    for rank, worker in enumerate(workers):
        for place, child in enumerate(worker.children):
            child.get_handshake_metadata = lambda key=(rank, place): parts.get(key)
        sent[0, rank] = worker.connector.get_handshake_metadata()
    scheduler = Rig("Scripted", "ScriptedToo", "ScriptedToo")
    got: dict[int, Any] = {}
    for place, child in enumerate(scheduler.children):
        child.set_xfer_handshake_metadata_pp_aware = lambda metadata, place=place: got.update({place: metadata})
    scheduler.connector.set_xfer_handshake_metadata_pp_aware(sent)
    assert got == {place: {(0, rank): parts[rank, place] for rank in (0, 1)} for place in (0, 2)}
    assert Rig("Scripted").connector.get_handshake_metadata() is None


def test_all_kv_events_of_the_workers_arrive() -> None:
    class Events(list[str]):
        add_events = list[str].extend

        def get_all_events(self) -> list[str]:
            return self

    rig = Rig("Scripted", "ScriptedToo", "ScriptedToo")
    assert rig.connector.get_kv_connector_kv_cache_events() is None
    for child, events in zip(rig.children, (None, Events("a"), Events("bc")), strict=True):
        child.get_kv_connector_kv_cache_events = lambda events=events: events
    assert rig.connector.get_kv_connector_kv_cache_events() == ["a", "b", "c"]


# Refusals and policies


def test_a_connector_that_cannot_serve_hybrids_is_named() -> None:
    children = [entry("Scripted"), entry("WithoutHybridSupport", misbehaving.__name__, name="old")]
    with pytest.raises(ConfigError, match=r"connectors\.1: 'old' \(WithoutHybridSupport\) cannot serve hybrid models"):
        WeightedMultiConnector.get_required_kvcache_layout(engine_config(*children))
    assert WeightedMultiConnector.get_required_kvcache_layout(engine_config(*children, hybrid=False)) is None


def test_unknown_keys_and_impossible_connectors_are_named() -> None:
    with pytest.raises(ConfigError, match=r"connectors\.0\.lod_weight: unknown key \(did you mean 'load_weight'\?\)"):
        Rig("Scripted", c0={"lod_weight": 2})
    hisparse = engine_config({"kv_connector": "HiSparseConnector", "kv_role": "kv_both"})
    with pytest.raises(ConfigError, match=r"connectors\.0\.kv_connector: .*its own MultiConnector only"):
        WeightedMultiConnector.get_required_kvcache_layout(hisparse)


def test_the_engine_recomputes_if_a_connector_needs_it() -> None:
    assert Rig("Scripted").config.kv_transfer_config.kv_load_failure_policy == "fail"
    rig = Rig("Scripted", "ScriptedToo", c1={"kv_load_failure_policy": "recompute"})
    assert rig.config.kv_transfer_config.kv_load_failure_policy == "recompute"


def test_the_recipe_of_the_document_starts() -> None:
    (command,) = (
        block
        for block in blocks((ROOT / "docs" / "multi-connector.md").read_text())
        if "WeightedMultiConnector" in block
    )
    words = shlex.split(command)
    config = engine_config()
    config.kv_transfer_config = KVTransferConfig(**json.loads(words[words.index("--kv-transfer-config") + 1]))
    assert multi_config(config.kv_transfer_config.kv_connector_extra_config).names == ("nvme", "ram")
    assert KVConnectorFactory.get_connector_class(config.kv_transfer_config) is WeightedMultiConnector
    classes = [one.__name__ for one, _ in WeightedMultiConnector._get_connector_classes_and_configs(config)]
    assert classes == ["HybridOffloadConnector", "OffloadingConnector"]


# The choice


def test_the_chosen_one_loads_and_all_others_are_told_that_they_do_not() -> None:
    rig = Rig("Scripted", "ScriptedToo", c1={"load_weight": 3})
    rig.children[0].answers, rig.children[1].answers = [(512, True)], [(256, True)]
    request = rig.request()
    rig.load(request, 100)
    assert [child.told for child in rig.children] == [[0], [256]]
    assert [rig.count("pending_loads", name) for name in ("c0", "c1")] == [0, 1]
    rig.end_loads(request)
    rig.connector.update_state_after_alloc(request, None, 0)  # as vLLM does when it runs
    rig.step(request)
    rig.finish(request)
    for name, hit_tokens in (("c0", 0), ("c1", 256)):
        names = ("queries", "query_hits", "query_misses", "hit_tokens", "pending_loads", "load_failures")
        assert [rig.count(one, name) for one in names] == [1, 1, 0, hit_tokens, 0, 0]


def test_a_preempted_request_is_asked_for_anew() -> None:
    rig = Rig("Scripted", "ScriptedToo")
    rig.children[0].answers = [(512, True), (0, False)]
    rig.children[1].answers = [(0, False), (128, True)]
    request = rig.request()
    for place in (0, 1):
        rig.load(request)
        rig.end_loads(request)
        rig.connector.update_state_after_alloc(request, None, 0)
        rig.step(request)
        request.num_computed_tokens = 0  # preempted
        assert rig.count("hit_tokens", f"c{place}") == (512, 128)[place]
    assert [rig.count(name, "c0") for name in ("queries", "query_hits", "query_misses")] == [2, 1, 1]


def test_a_load_that_vllm_declines_is_nobodys() -> None:
    rig = Rig("Scripted")
    rig.children[0].answers = [(512, True)]
    request = rig.request()
    assert rig.ask(request) == (512, True)
    rig.connector.update_state_after_alloc(request, None, 0)
    assert rig.children[0].told == [0]
    assert rig.count("query_hits", "c0") == 1
    assert rig.count("pending_loads", "c0") == 0


def test_a_load_inside_a_step_ends_with_it() -> None:
    rig = Rig("Scripted")
    rig.children[0].answers = [(512, False)]
    request = rig.request()
    assert rig.ask(request) == (512, False)
    rig.connector.update_state_after_alloc(request, None, 512)
    assert rig.count("pending_loads", "c0") == 1
    rig.step(request)
    assert rig.count("pending_loads", "c0") == 0
    assert rig.count("hit_tokens", "c0") == 512


@pytest.mark.parametrize("how", ["waiting", "loading"])
def test_an_aborted_request_leaves_nothing(how: str) -> None:
    rig = Rig("Scripted")
    rig.children[0].answers = [(None, False) if how == "waiting" else (512, True)]
    request = rig.request()
    if how == "waiting":
        assert rig.ask(request) == (None, False)
    else:
        rig.load(request)
    rig.finish(request)
    if how == "loading":
        rig.end_loads(request)
    assert rig.count("pending_loads", "c0") == rig.count("hit_tokens", "c0") == 0
    held = {name: value for name, value in vars(rig.connector._questions).items() if isinstance(value, dict | set)}
    assert not any(len(value) for name, value in held.items() if name not in ("_loads_of", "_chosen")), held


def test_a_part_of_a_load_counts_as_far_as_the_engine_uses_it() -> None:
    rig = Rig("Scripted")
    rig.children[0].answers = [(512, True)]
    request = rig.request()
    rig.load(request, 64)
    request.num_computed_tokens = 192  # vLLM has found a block without data
    rig.end_loads(request)
    assert rig.count("hit_tokens", "c0") == 128


# Those that misbehave


def test_one_that_never_decides_holds_nobody_up_for_ever(clock: SimpleNamespace) -> None:
    rig = Rig("NeverDecides", "Scripted")
    rig.children[1].answers = [(0, False)]
    request = rig.request()
    assert rig.ask(request) == (None, False)
    clock.now += TIMEOUT
    assert rig.ask(request) == (0, False)
    rig.connector.update_state_after_alloc(request, None, 0)
    names = ("queries", "query_hits", "query_misses", "query_timeouts")
    assert [rig.count(name, "c0") for name in names] == [1, 0, 1, 1]
    rig.children[1].answers = [(256, True)]
    other = rig.request("other")
    assert rig.ask(other) == (None, False)
    clock.now += GRACE
    assert rig.ask(other) == (256, True)


@pytest.mark.parametrize("answer", [-1, 1001, "many"])
def test_an_answer_that_cannot_be_is_an_error(answer: Any, caplog: pytest.LogCaptureFixture) -> None:
    rig = Rig("Scripted", "ScriptedToo")
    rig.children[0].answers, rig.children[1].answers = [(answer, True)], [(256, True)]
    assert rig.ask(rig.request()) == (256, True)
    assert rig.count("query_errors", "c0") == 1
    assert "connector 'c0' raised an error" in caplog.text


def test_errors_are_logged_once_and_then_the_connector_gets_a_pause(caplog: pytest.LogCaptureFixture) -> None:
    rig = Rig("RaisesErrors", "Scripted")
    rig.children[1].answers = [(256, True)]
    with caplog.at_level(logging.WARNING):
        for number in range(20):
            request = rig.request(str(number))
            assert rig.ask(request) == (256, True)
            rig.connector.update_state_after_alloc(request, None, 256)
    assert caplog.text.count("ConnectionError: no answer from the store); later errors") == 1
    assert caplog.text.count("connector 'c0' keeps raising errors; for 1 s its answers count as misses") == 1
    assert [rig.count(name, "c0") for name in ("query_misses", "query_errors")] == [20, 20]


def test_loads_wait_until_a_request_whose_load_has_failed_runs(clock: SimpleNamespace) -> None:
    rig = Rig("Scripted")
    rig.children[0].answers = [(512, True)]
    fails, other = rig.request("fails"), rig.request("other")
    rig.load(fails)
    rig.end_loads(fails, failed=True)
    assert rig.count("load_failures", "c0") == 1
    assert rig.count("hit_tokens", "c0") == 0
    assert rig.ask(other) == (None, False)
    assert [rig.ask(fails)[0] for _ in range(5)] == [512] * 4 + [0], "its own reservation may be in the way"
    rig.step(fails)
    assert rig.ask(other) == (512, True)


@pytest.mark.skipif(vllm.__version__.startswith("0.30."), reason="0.30 lets a request whose load has ended go first")
def test_a_request_whose_load_has_failed_holds_others_back_only_if_blocks_are_short() -> None:
    rig = Rig("Scripted")
    pool = rig.bind_blocks(100, 200)
    needed = 1000 // 100 + 1000 // 200 + 2 * 3
    rig.children[0].answers = [(512, True)]
    fails, loads, other = (rig.request(name) for name in ("fails", "loads", "other"))
    rig.load(loads, held_blocks=8)
    rig.load(fails, held_blocks=8)
    rig.end_loads(fails, failed=True)
    rig.end_loads(loads)
    both = 2 * needed  # the blocks of the failed request, and of the one that asks
    pool.free = both + needed - 8 - 1
    assert rig.ask(other) == (None, False), "the one that has loaded still needs more than it holds"
    pool.free += 1
    assert rig.ask(other) == (512, True)
    rig.step(loads)
    pool.free = both
    assert rig.ask(other) == (512, True)
    pool.free -= 1
    assert rig.ask(other) == (None, False)
    rig.finish(fails)
    assert rig.ask(other) == (512, True), "without a failed load, vLLM itself sees to the blocks"


def test_loads_do_not_wait_longer_than_for_an_undecided_connector(clock: SimpleNamespace) -> None:
    rig = Rig("Scripted")
    rig.children[0].answers = [(512, True)]
    fails, other = rig.request("fails"), rig.request("other")
    rig.load(fails)
    rig.end_loads(fails, failed=True)
    assert rig.ask(fails) == (512, True)  # vLLM 0.30 lets a request whose load has ended go first
    assert rig.ask(other) == (None, False)
    clock.now += TIMEOUT
    assert rig.ask(other) == (0, False)


def test_after_a_second_failure_a_request_is_computed() -> None:
    rig = Rig("Scripted")
    rig.children[0].answers = [(512, True)]
    request = rig.request()
    for _ in range(2):
        rig.load(request)
        rig.end_loads(request, failed=True)
    assert rig.ask(request) == (0, False)


# Metrics


def _metric_types(registry: CollectorRegistry) -> dict[Any, Any]:
    def registered(metric: Any) -> Any:
        return lambda **fields: metric(**fields, registry=registry)

    return {metric: registered(metric) for metric in (Counter, Gauge, Histogram)}


def test_the_counts_of_all_connectors_are_shown() -> None:
    registry = CollectorRegistry()
    module = "tests.support.engine.poisoning"
    children = [entry("HybridOffloadConnector", "offload_core.vllm"), entry("PoisoningConnector", module)]
    arguments: Any = (_metric_types(registry), ["engine"], {0: ["0"]})
    shown = WeightedMultiConnector.build_prom_metrics(engine_config(*children, entry("Scripted")), *arguments)
    assert shown is not None
    report = {
        OWN_STATS: {"queries|one": 3, "query_hits|one": 1, "pending_loads|one": 2},
        "HybridOffloadConnector": {"stores|disk": 2},
        "PoisoningConnector": {"stores|disk": 3},
        "Scripted": {"anything": [1]},
    }
    stats = WeightedMultiConnector.build_kv_connector_stats(report)
    assert stats is not None
    assert set(stats.data) == {OWN_STATS, "HybridOffloadConnector", "PoisoningConnector"}
    assert isinstance(stats.data[OWN_STATS], HybridOffloadStats)
    assert stats.reduce()[OWN_STATS] == report[OWN_STATS]
    shown.observe(report)
    for name, expected in {
        "queries_total": 3,
        "query_hits_total": 1,
        "pending_loads": 2,
        "hit_tokens_total": 0,
    }.items():
        labels = {"engine": "0", "connector": "one"}
        assert registry.get_sample_value(f"vllm:weighted_multi_{name}", labels) == expected
    labels = {"engine": "0", "tier": "disk"}
    assert registry.get_sample_value("vllm:hybrid_offload_stores_total", labels) == 5
    names = {metric.name for metric in registry.collect() if metric.name.startswith("vllm:weighted_multi_")}
    assert names == {f"vllm:weighted_multi_{name}" for name in (*CONNECTOR_COUNTERS, *CONNECTOR_GAUGES)}


def test_reports_add_up_in_one_process_and_across() -> None:
    rig = Rig("Scripted")
    for number in range(3):
        request = rig.request(str(number))
        assert rig.ask(request) == (0, False)
        rig.connector.update_state_after_alloc(request, None, 0)
    first = rig.connector.get_kv_connector_stats()
    again = WeightedMultiConnector.build_kv_connector_stats(first.to_dict())
    assert again is not None
    assert first.aggregate(again).data[OWN_STATS].data == {"queries|c0": 6, "query_misses|c0": 6}
    assert rig.connector.get_kv_connector_stats() is None
