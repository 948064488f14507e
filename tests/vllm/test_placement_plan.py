"""Placement in the scheduler half: spare chunks, junctions, and the touches after a request has ended."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from offload_core.planning.end_worth import MIN_PARTED_PATHS
from offload_core.planning.planner import HitPolicy
from offload_core.vllm.metadata import StepMetadata, WorkerIdentity
from offload_core.vllm.model.groups import handed_over
from tests.support.memory_backend import MemoryBackend
from tests.vllm.test_scheduler_half import BLOCK, Half, request

FULL, STATE = HitPolicy("full"), HitPolicy("state")
WINDOW = HitPolicy("window", BLOCK + 1)  # a boundary needs one chunk of it
FULL_NAME, WINDOW_NAME, STATE_NAME = "full-u16", "window-u16-w17", "state-u16"


def _shared(backend: MemoryBackend) -> None:
    backend.bounded = backend.spares = True


def _private(backend: MemoryBackend) -> None:
    _shared(backend)
    backend.shared = False


class PlacedHalf(Half):
    """A scheduler half over a bounded tier that knows spare objects."""

    def __init__(self, *policies: HitPolicy, prepare: Callable[[MemoryBackend], None] = _shared, **options: Any):
        super().__init__(prepare, policies=policies, **options)

    def finish(self, item: Any, *, tokens: int | None = None) -> None:
        """End a request that has computed ``tokens`` tokens."""
        item.num_computed_tokens = item.num_tokens if tokens is None else tokens
        self.half.request_finished(item)

    def touched(self) -> list[tuple[str, int, bool]]:
        """Return the touches of the next step: the pack, the index of the chunk, and whether it is spare."""
        step = self.step()
        assert step.namespaces.keys() == ({""} if step.touches else set())
        return [(chunk.pack, chunk.chunk_hash[1], spare) for chunk, spare in step.touches]


Make = Callable[..., PlacedHalf]


@pytest.fixture
def make() -> Iterator[Make]:
    made: list[PlacedHalf] = []

    def make_half(*policies: HitPolicy, **options: Any) -> PlacedHalf:
        made.append(PlacedHalf(*policies, **options))
        return made[-1]

    yield make_half
    for half in made:
        half.half.shutdown()


def spare_of(step: StepMetadata, pack: str = WINDOW_NAME) -> dict[int, bool]:
    """Per stored chunk of a pack, by its index, whether it is spare."""
    return {item.chunk.chunk_hash[1]: item.spare for item in step.stores if item.chunk.pack == pack}


def _evicting(backend: MemoryBackend) -> None:
    backend.evicts = True


def branch(name: str, shared: int, family: int, tokens: int = 80, of: int = 0) -> Any:
    """A request whose first ``shared`` chunks are those of the family ``of``."""
    own, others = request(name, tokens, family), request(name, tokens, of)
    own.block_hashes[:shared] = others.block_hashes[:shared]
    return own


def test_windows_within_a_prompt_are_spare_and_full_attention_never(make: Make) -> None:
    half = make(FULL, WINDOW)
    half.follow(request("a"))
    step = half.step(a=80)
    assert spare_of(step) == {0: True, 1: True, 2: True, 3: False, 4: False}, "the prompt can resume after 64 tokens"
    assert spare_of(step, FULL_NAME) == dict.fromkeys(range(5), False)


@pytest.mark.parametrize(("placement", "stored"), [("kept", {3: False, 4: False}), ("everything", range(5))])
def test_the_option_placement(make: Make, placement: str, stored: Any) -> None:
    half = make(FULL, WINDOW, placement=placement)
    half.follow(request("a"))
    assert spare_of(half.step(a=80)) == dict.fromkeys(stored, False)


@pytest.mark.parametrize(
    ("prepare", "placement", "spare"),
    [(_shared, "kept and spare", True), (_shared, "kept", False), (_evicting, "kept and spare", False)],
)
def test_ends_are_spare_where_prompts_part_anywhere_and_nobody_comes_back(
    make: Make, prepare: Callable[[MemoryBackend], None], placement: str, spare: bool
) -> None:
    half = make(FULL, WINDOW, prepare=prepare, placement=placement)
    for family in range(2, 2 + 2 * MIN_PARTED_PATHS, 2):
        for item in (request(f"a{family}", 80, family), branch(f"b{family}", 2, family + 1, of=family)):
            half.follow(item)
            assert half.matched(item) in (0, 32)
            stored = spare_of(half.store(**{item.request_id: 80}))
            assert stored[4] is False or item.request_id == f"b{2 * MIN_PARTED_PATHS}", "too little was seen"
            half.finish(item)
    half.touched()
    item = half.follow(request("c"))
    assert half.matched(item) == 0
    assert spare_of(half.store(c=80))[4] is spare
    half.finish(item)
    touched = {unit: is_spare for pack, unit, is_spare in half.touched() if pack == WINDOW_NAME}
    assert touched == ({} if prepare is _evicting else {3: spare, 4: spare})


def test_ends_and_other_boundaries_are_compared_by_the_sizes_that_workers_report(make: Make) -> None:
    half = make(FULL, WINDOW)
    half.half.set_workers({0: WorkerIdentity({}, {FULL_NAME: 10, WINDOW_NAME: 30})})
    worth = half.half._placement._worth
    assert worth is not None
    assert worth.object_bytes == {FULL_NAME: 10, WINDOW_NAME: 30}


def test_the_windows_of_a_junction_are_kept_at_its_second_sight(make: Make) -> None:
    half = make(FULL, WINDOW, placement="kept")
    assert half.matched(half.follow(request("a"))) == 0
    half.store(a=80)
    second = half.follow(branch("b", 3, family=1))
    assert half.matched(second) == 0, "there are no windows at the junction"
    assert 2 in spare_of(half.store(b=80))
    assert half.matched(half.follow(branch("c", 3, family=2))) == 48


def test_a_preempted_request_looks_up_its_generated_tokens_too(make: Make) -> None:
    half = make(FULL, WINDOW, placement="kept")
    assert half.matched(half.follow(request("a", tokens=160))) == 0
    half.store(a=160)
    preempted = branch("b", 6, family=1, tokens=160)
    preempted.num_prompt_tokens = 40
    assert half.matched(half.follow(preempted)) == 0
    assert 5 in spare_of(half.store(b=160)), "it parts from the other one behind its prompt"


def test_without_full_attention_a_junction_is_found_by_the_prompts_seen(make: Make) -> None:
    half = make(WINDOW, placement="kept")
    assert half.matched(half.follow(request("a"))) == 0
    assert spare_of(half.store(a=80)) == {3: False, 4: False}
    assert half.matched(half.follow(branch("b", 3, family=1))) == 0
    assert spare_of(half.store(b=80)) == {2: False, 3: False, 4: False}
    assert half.matched(half.follow(branch("c", 3, family=2))) == 48


def test_the_engine_is_asked_to_keep_the_state_at_a_junction(make: Make) -> None:
    half = make(FULL, STATE)
    half.follow(request("a"))
    half.store(a=80)
    second = half.follow(branch("b", 3, family=1, tokens=96))
    second.shared_prefix_boundary = 0
    assert half.matched(second) == 0
    assert second.shared_prefix_boundary == 48
    half.states = {"b": [(1, 7, 48), (1, 8, 64), (1, 9, 80)]}
    assert spare_of(half.step(b=96), STATE_NAME) == {2: False, 3: True, 4: False}


def test_what_lies_behind_a_missing_chunk_is_spare_until_that_chunk_is_stored(make: Make) -> None:
    half = make(FULL, WINDOW)
    item = half.follow(request("a"))
    step = half.step(a=80)
    (missing,) = (one.chunk for one in step.stores if one.chunk.pack == FULL_NAME and one.chunk.chunk_hash[1] == 2)
    half.report([one.chunk for one in step.stores], not_stored={missing})
    half.finish(item)
    touched = half.touched()
    assert {(pack, unit) for pack, unit, spare in touched if not spare} == {(FULL_NAME, 0), (FULL_NAME, 1)}
    assert {(pack, unit) for pack, unit, spare in touched if spare} > {(FULL_NAME, 3), (FULL_NAME, 4), (WINDOW_NAME, 4)}

    again = half.follow(request("b"))
    assert [one.chunk for one in half.store(b=80).stores] == [missing]
    half.finish(again)
    assert {(pack, unit) for pack, unit, spare in half.touched() if spare} == set()


def test_a_request_is_touched_from_its_end_to_its_head(make: Make) -> None:
    half = make(FULL, WINDOW)
    item = half.follow(request("a"))
    half.store(a=80)
    half.finish(item)
    assert half.touched() == [
        (WINDOW_NAME, 4, False),
        (FULL_NAME, 4, False),
        (WINDOW_NAME, 3, False),
        (FULL_NAME, 3, False),
        (FULL_NAME, 2, False),
        (FULL_NAME, 1, False),
        (FULL_NAME, 0, False),
    ]


def test_the_next_turn_makes_the_turn_before_it_spare(make: Make) -> None:
    half = make(FULL, WINDOW)
    first = half.follow(request("a"))
    half.store(a=80)
    half.finish(first)
    half.touched()
    second = half.follow(request("b", tokens=200))
    half.store(b=200)
    half.finish(second)
    assert [(unit, spare) for pack, unit, spare in half.touched() if pack == WINDOW_NAME] == [
        (11, False),
        (4, True),
        (3, True),
    ]


def test_touches_wait_for_the_request_s_stores(make: Make) -> None:
    half = make(FULL, WINDOW)
    item = half.follow(request("a"))
    step = half.step(a=80)
    half.finish(item)
    assert half.touched() == half.touched() == []
    half.report([stored.chunk for stored in step.stores])
    assert len(half.touched()) == 7
    assert half.touched() == []


@pytest.mark.parametrize(("prepare", "touches"), [(_shared, 7), (_private, 0)])
def test_at_shutdown_nothing_waits(make: Make, prepare: Callable[[MemoryBackend], None], touches: int) -> None:
    half = make(FULL, WINDOW, prepare=prepare)
    item = half.follow(request("a"))
    half.step(a=80)
    half.finish(item)
    half.half.shutdown()
    assert len(half.backend.touches) == touches, "a tier that only workers see goes away with them"


def test_a_tier_that_does_not_know_spare_objects_is_not_touched(make: Make) -> None:
    half = make(FULL, WINDOW, prepare=lambda _: None)
    item = half.follow(request("a"))
    half.store(a=80)
    half.finish(item)
    assert half.touched() == []


def test_the_head_that_a_lookup_finds_is_touched_at_once(make: Make) -> None:
    half = make(FULL, WINDOW, placement="kept")
    half.follow(request("a"))
    half.store(a=80)
    assert half.matched(half.follow(branch("b", 3, family=1))) == 0
    assert half.touched() == [(FULL_NAME, 2, False), (FULL_NAME, 1, False), (FULL_NAME, 0, False)]


def test_of_two_touches_of_a_chunk_in_a_step_the_last_counts(make: Make) -> None:
    half = make(FULL, WINDOW)
    first, second = half.follow(request("a")), half.follow(branch("b", 3, family=1))
    half.store(a=80, b=80)
    half.finish(first)
    half.finish(second)
    touches = half.touched()
    assert len(touches) == 7 + 7 - 3
    assert touches[-3:] == [(FULL_NAME, 2, False), (FULL_NAME, 1, False), (FULL_NAME, 0, False)]


def test_a_request_that_stores_nothing_refreshes_what_it_has_loaded(make: Make) -> None:
    half = make(FULL, WINDOW)
    half.follow(request("a"))
    half.store(a=80)
    item = half.follow(request("b", kv_transfer_params={"hybrid_offload": {"store": False}}))
    half.load(item, half.matched(item), groups=2)
    half.touched()
    half.finish(item)
    assert half.touched()[0] == (WINDOW_NAME, 3, False)


def test_after_a_reset_nothing_older_is_touched_or_superseded(make: Make) -> None:
    half = make(FULL, WINDOW)
    item = half.follow(request("a"))
    half.store(a=80)
    half.finish(item)
    half.half.reset()
    assert half.touched() == []
    second = half.follow(request("b", tokens=200))
    half.store(b=200)
    half.finish(second)
    assert True not in {spare for _, _, spare in half.touched()}


@pytest.mark.parametrize(
    ("policies", "interval", "sentence"),
    [
        ((FULL, WINDOW), 0, "every block of every group"),
        ((FULL, STATE), 0, "the end of a prompt and at junctions"),
        ((FULL, STATE), 512, "every 512 tokens"),
        ((FULL, STATE), None, "all block boundaries"),
    ],
)
def test_the_log_says_what_the_engine_hands_over(
    make: Make, policies: tuple[HitPolicy, ...], interval: int | None, sentence: str
) -> None:
    config: Any = SimpleNamespace(cache_config=SimpleNamespace(prefix_cache_retention_interval=interval))
    assert sentence in handed_over(config, make(*policies).half._planner)
