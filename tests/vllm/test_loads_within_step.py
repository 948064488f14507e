"""The scheduler half and loads within the step: the answers to the engine, and all that can come between them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from offload_core.api.keys import ObjectKey
from offload_core.config.loading import load_config
from offload_core.planning.planner import GroupGeometry, HitPolicy, HybridOffloadPlanner
from offload_core.tiers.changes import TierChange
from offload_core.vllm.metadata import StepMetadata, StepReport, WorkerIdentity
from offload_core.vllm.scheduler.half import SchedulerHalf
from tests.vllm.test_scheduler_half import BLOCK, request

OBJECT_BYTES = 1000
TOKENS = 80
"""Length of the prompts; 64 of their tokens can be loaded."""
LOADED = 64


class Engine:
    """The calls of vLLM's scheduler to a scheduler half over a ``cpu`` tier, and the reports of its one worker."""

    def __init__(self, **options: Any) -> None:
        within_step = options.pop("loads_within_step", True)
        config = load_config(
            {
                "backends": [{"name": "ram", "type": "cpu", "capacity": "64MiB"}],
                "io_process": "off",
                "load_when": "always",
                "hybrid_chunk_size": BLOCK,
                **options,
            }
        )
        planner = HybridOffloadPlanner.build(
            [GroupGeometry(0, BLOCK, HitPolicy("full"))],
            hash_block_size=BLOCK,
            max_model_len=4096,
            hybrid_chunk_size=BLOCK,
        )
        self.half = SchedulerHalf(
            config, planner, {"model": "m"}, 1, 100, 4096, loads_within_step=within_step, engine_name="engine"
        )
        self.half.set_workers({0: WorkerIdentity({}, {planner.packs[0].name: OBJECT_BYTES})})
        self.kept: set[int] = set()

    def ask(self, item: Any) -> tuple[int | None, bool]:
        """Ask as the connector does; return the tokens, and whether they load within the step."""
        if item.request_id not in self.half._requests:
            self.half.on_new_request(item)
        matched = self.half.matched_tokens(item, 0)
        return matched, bool(matched) and self.half.may_load_within_step(item)

    def allocate(self, item: Any) -> None:
        blocks = [SimpleNamespace(block_id=number + 1, is_null=False) for number in range(TOKENS // BLOCK)]
        self.half.blocks_allocated(item, SimpleNamespace(blocks=(blocks,)), LOADED)

    def step(self, *running: Any) -> StepMetadata:
        """Build a step, let the worker obey it, and take its report: all loads succeed, and lend."""
        scheduled = {item.request_id: TOKENS - LOADED for item in running}
        output: Any = SimpleNamespace(
            total_num_scheduled_tokens=sum(scheduled.values()),
            num_scheduled_tokens=scheduled,
            scheduled_new_reqs=[SimpleNamespace(req_id=name, num_computed_tokens=LOADED) for name in scheduled],
            scheduled_cached_reqs=SimpleNamespace(req_ids=[], num_computed_tokens=[]),
            kv_connector_block_state=SimpleNamespace(
                get_block_ids=lambda _: (list(range(1, 100)),), boundary_state_offloads={}
            ),
        )
        step = self.half.build_step(output)
        self.kept.difference_update(step.given_back)
        keeping = {load.job_id for load in step.loads if load.keep}
        self.kept |= keeping
        ended = {load.request_id for load in step.loads if not load.within_step}
        self.half.take_output(ended, set(), StepReport(kept_jobs=Counter(keeping)))
        return step

    def put(self, item: Any, *, present: bool = True) -> None:
        """Report the objects of a prompt as stored or gone."""
        namespace = self.half.fingerprints[0]
        (pack,) = self.half._planner.packs
        keys = [ObjectKey(namespace, pack.name, block_hash) for block_hash in item.block_hashes]
        report = StepReport(changes=[TierChange("ram", key, present) for key in keys])
        self.half.take_output(set(), set(), report)

    def keep(self) -> None:
        """Load the prompt once, so that its objects are kept."""
        first = request("first")
        self.put(first)
        assert self.ask(first) == (LOADED, False)
        self.allocate(first)
        assert [load.keep for load in self.step().loads] == [True]
        self.half.request_finished(first)


@pytest.fixture
def engine() -> Iterator[Engine]:
    engine = Engine()
    engine.keep()
    yield engine
    engine.half.shutdown()


def test_a_load_of_kept_objects_is_part_of_the_step_and_leaves_nothing_to_wait_for(engine: Engine) -> None:
    item = request()
    assert engine.ask(item) == (LOADED, True)
    engine.allocate(item)
    (load,) = engine.step(item).loads
    assert load.within_step
    assert not load.keep
    assert len(load.chunks) == LOADED // BLOCK
    engine.half.request_finished(item)
    step = engine.step()
    assert not step.cancelled_jobs
    assert not step.failures_to_report
    counts = engine.half.counters.take()
    assert counts["loads_within_step", "ram"] == 1
    assert counts["hit_tokens", "ram"] == 2 * LOADED
    assert ("pending_loads", "ram") not in counts or not counts["pending_loads", "ram"]


def test_an_answer_without_blocks_for_it_is_given_again(engine: Engine) -> None:
    item = request()
    for _ in range(3):
        assert engine.ask(item) == (LOADED, True)
        assert engine.step().loads == []
    assert engine.ask(item) == (LOADED, True)
    engine.allocate(item)
    assert [load.within_step for load in engine.step(item).loads] == [True]


def test_a_request_that_ends_before_its_load_leaves_the_objects_for_others(engine: Engine) -> None:
    gone, item = request("gone"), request()
    assert engine.ask(gone) == (LOADED, True)
    engine.allocate(gone)
    engine.half.request_finished(gone)  # the worker makes the load all the same, before its blocks are used again
    assert [load.within_step for load in engine.step().loads] == [True]
    assert engine.ask(item) == (LOADED, True)


def test_a_preempted_request_may_load_within_the_step_again(engine: Engine) -> None:
    item = request()
    for _ in range(2):
        assert engine.ask(item) == (LOADED, True)
        engine.allocate(item)
        assert [load.within_step for load in engine.step(item).loads] == [True]


def test_a_step_has_one_budget_for_all_requests() -> None:
    engine = Engine(sync_load_budget_bytes=OBJECT_BYTES * LOADED // BLOCK)
    engine.keep()
    first, second = request("a"), request("b")
    assert engine.ask(first) == (LOADED, True)
    assert engine.ask(second) == (LOADED, False)
    engine.allocate(first)
    engine.step(first)
    assert engine.ask(second) == (LOADED, True)
    engine.half.shutdown()


def test_a_reset_between_the_loads_gives_the_objects_back(engine: Engine) -> None:
    assert engine.kept
    engine.half.reset()
    assert engine.ask(request()) == (0, False)
    engine.step()
    assert not engine.kept


def test_objects_that_their_tier_has_lost_are_given_back_and_not_offered(engine: Engine) -> None:
    engine.put(request(), present=False)
    assert engine.ask(request("gone")) == (0, False)
    engine.step()
    assert not engine.kept
    item = request()
    engine.put(item)
    assert engine.ask(item) == (LOADED, False), "the objects are there, and not kept"


@pytest.mark.parametrize("options", [{"sync_load_budget_bytes": 0}, {"loads_within_step": False}])
def test_nothing_is_kept_if_the_configuration_or_the_engine_excludes_it(options: dict[str, Any]) -> None:
    engine = Engine(**options)
    for name in ("first", "second"):
        item = request(name)
        engine.put(item)
        assert engine.ask(item) == (LOADED, False)
        engine.allocate(item)
        assert [load.keep for load in engine.step().loads] == [False]
        engine.half.request_finished(item)
    engine.half.shutdown()
