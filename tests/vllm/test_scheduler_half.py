"""The scheduler half on its own: offers to the engine and stores, step by step."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.lora.request import LoRARequest

from offload_core.api.keys import ObjectKey
from offload_core.config.model import OffloadConfig, OffloadSettings
from offload_core.planning.chunk_keys import ChunkRef
from offload_core.planning.planner import GroupGeometry, HitPolicy, HybridOffloadPlanner
from offload_core.vllm.metadata import StepMetadata, StepReport, WorkerIdentity
from offload_core.vllm.scheduler.half import SchedulerHalf
from tests.support.memory_backend import MemoryBackend, memory_tier

SECONDS = 30
BLOCK = 16


def request(name: str = "r", tokens: int = 80, family: int = 0, **fields: Any) -> Any:
    """A request of ``tokens`` prompt tokens; those of one family share all their block hashes."""
    return SimpleNamespace(
        **{
            "request_id": name,
            "num_tokens": tokens,
            "num_prompt_tokens": tokens,
            "num_computed_tokens": 0,
            "block_hashes": [bytes([family, block]) * 16 for block in range(tokens // BLOCK)],
            "kv_transfer_params": None,
            "lora_request": None,
            "skip_reading_prefix_cache": False,
            **fields,
        }
    )


class Half:
    """A scheduler half over one RAM tier. Blocks and chunks have 16 tokens.

    Args:
        prepare: gets the tier's backend before the tier opens.
        policies: one group for each; by default one group of full attention.
        lookahead_tokens: further tokens on which the cache at a position depends.
    """

    def __init__(self, prepare: Callable[[MemoryBackend], None] | None = None, /, **options: Any) -> None:
        self.patience_seconds = options.pop("patience_seconds", SECONDS)
        policies = options.pop("policies", (HitPolicy("full"),))
        lookahead_tokens = options.pop("lookahead_tokens", 0)
        roles = {name: options.pop(name) for name in ("loads", "stores") if name in options}
        options = {"load_when": "always", "io_process": "off", **options}  # the backend is an object of the test
        tier, made = memory_tier(prepare=prepare)
        settings = OffloadSettings(
            backends=[tier.common], lookup_timeout_seconds=self.patience_seconds, hybrid_chunk_size=BLOCK, **options
        )
        planner = HybridOffloadPlanner.build(
            [GroupGeometry(index, BLOCK, policy) for index, policy in enumerate(policies)],
            hash_block_size=BLOCK,
            max_model_len=4096,
            hybrid_chunk_size=BLOCK,
            lookahead_tokens=lookahead_tokens,
        )
        config = OffloadConfig(settings, (tier,))
        self.half = SchedulerHalf(
            config, planner, {"model": "m"}, num_ranks=1, num_blocks=100, step_tokens=4096, **roles
        )
        self.half.set_workers({0: WorkerIdentity({}, {})})
        self.states: dict[str, list[tuple[int, int, int]]] = {}
        """The recurrent states that the engine hands over in the next step."""
        self.backend: MemoryBackend = made[0]

    def follow(self, item: Any) -> Any:
        self.half.on_new_request(item)
        return item

    def matched(self, item: Any, computed_tokens: int = 0) -> int:
        """Ask until the answer is there, as the engine does step by step."""
        limit = time.monotonic() + SECONDS
        while (matched := self.half.matched_tokens(item, computed_tokens)) is None:
            assert time.monotonic() < limit
            self.step()
        return matched

    def step(self, **scheduled: int) -> StepMetadata:
        """Build a step that schedules tokens of the named requests; block ``i`` of each has the id ``i + 1``."""
        output: Any = SimpleNamespace(
            total_num_scheduled_tokens=sum(scheduled.values()),
            num_scheduled_tokens=scheduled,
            scheduled_new_reqs=[SimpleNamespace(req_id=name, num_computed_tokens=0) for name in scheduled],
            scheduled_cached_reqs=SimpleNamespace(req_ids=[], num_computed_tokens=[]),
            kv_connector_block_state=SimpleNamespace(
                get_block_ids=lambda _: (list(range(1, 100)),) * len(self.half._planner.groups),
                boundary_state_offloads=self.states,
            ),
        )
        return self.half.build_step(output)

    def stored(self, **scheduled: int) -> list[bytes]:
        return [item.chunk.chunk_hash for item in self.step(**scheduled).stores]

    def put(self, step: StepMetadata) -> None:
        """Put a step's stores onto the tier."""
        for item in step.stores:
            namespace = step.namespaces[item.chunk.adapter][0]
            self.backend.objects[ObjectKey(namespace, item.chunk.pack, item.chunk.chunk_hash)] = b""

    def store(self, **scheduled: int) -> StepMetadata:
        """Make a step and let all its stores succeed."""
        step = self.step(**scheduled)
        self.put(step)
        self.report([item.chunk for item in step.stores])
        return step

    def load(self, item: Any, tokens: int, groups: int = 1, computed_tokens: int = 0) -> None:
        """Allocate blocks for a load as the engine does."""
        count = (computed_tokens + tokens) // BLOCK
        blocks = [SimpleNamespace(block_id=number + 1, is_null=False) for number in range(count)]
        taken: Any = SimpleNamespace(blocks=(blocks,) * groups)
        self.half.blocks_allocated(item, taken, tokens)

    def report(self, refs: Sequence[ChunkRef], **problems: Any) -> None:
        report = StepReport(**problems)
        report.stores_ended.update(refs)
        self.half.take_output(set(), set(), report)


@pytest.fixture
def half() -> Iterator[Half]:
    made = Half()
    yield made
    made.half.shutdown()


def test_a_stored_prefix_is_offered_to_the_next_request(half: Half) -> None:
    first = half.follow(request("a"))
    assert half.matched(first) == 0
    step = half.step(a=80)
    assert [item.chunk.chunk_hash for item in step.stores] == first.block_hashes
    half.put(step)
    half.report([item.chunk for item in step.stores])

    assert half.matched(half.follow(request("b"))) == 64, "the last token is always computed"
    assert half.matched(half.follow(request("c", tokens=200))) == 80
    assert half.matched(half.follow(request("d", family=1))) == 0


def test_a_chunk_on_its_way_is_waited_for(half: Half) -> None:
    half.follow(request("a"))
    step = half.step(a=80)
    second = half.follow(request("b"))
    for _ in range(20):
        assert half.half.matched_tokens(second, 0) is None
        half.step()
    half.put(step)
    half.report([item.chunk for item in step.stores])
    assert half.matched(second) == 64


def test_a_store_that_hangs_is_not_waited_for_longer_than_a_lookup_may_take() -> None:
    half = Half(patience_seconds=0.2)
    half.follow(request("a"))
    half.step(a=80)
    assert half.matched(half.follow(request("b"))) == 0
    half.half.shutdown()


def test_a_chunk_that_a_lookup_no_longer_finds_is_stored_again_with_all_chunks_behind_it(half: Half) -> None:
    half.follow(request("a"))
    half.store(a=80)
    half.follow(request("b"))
    assert half.stored(b=80) == [], "known, so not copied again"

    half.backend.objects.clear()
    third = half.follow(request("c"))
    assert half.matched(third) == 0
    assert half.stored(c=80) == third.block_hashes


def test_a_failed_store_is_tried_again_by_the_next_request(half: Half) -> None:
    half.follow(request("a"))
    stores = half.step(a=80).stores
    half.report([item.chunk for item in stores], not_stored={stores[1].chunk})
    half.follow(request("b"))
    assert half.stored(b=80) == [stores[1].chunk.chunk_hash]


def test_generated_tokens_are_stored_unless_the_prompt_only_is_asked_for() -> None:
    for prompt_only, expected in ((False, 6), (True, 5)):
        half = Half(offload_prompt_only=prompt_only)
        item = half.follow(request("a"))
        stored = half.stored(a=80)
        item.num_computed_tokens, item.num_tokens = 80, 96
        item.block_hashes.append(b"generated")
        stored += half.stored(a=16)
        assert len(stored) == expected
        half.half.shutdown()


def test_speculated_tokens_are_not_stored(half: Half) -> None:
    item = half.follow(request("a", tokens=30))
    assert half.stored(a=30) == item.block_hashes
    item.num_computed_tokens = item.num_tokens = 31
    item.num_tokens = 31
    assert half.stored(a=8) == [], "seven drafts reach into the next block, which may be rejected"


def test_drafts_that_read_ahead_are_stored_under_the_name_of_the_next_block() -> None:
    half = Half(lookahead_tokens=1)
    item = half.follow(request("a"))
    hashes = list(item.block_hashes)
    assert half.stored(a=80) == hashes[1:], "the last block has no next one yet"
    item.num_computed_tokens = 80
    item.num_tokens = 95
    assert half.stored(a=15) == []
    item.num_computed_tokens, item.num_tokens = 95, 96
    item.block_hashes.append(b"generated")
    assert half.stored(a=8) == [b"generated"], "the fifth block, as soon as the sixth has its tokens"
    half.half.shutdown()


@pytest.mark.parametrize(
    ("tokens", "common", "hit"), [(80, 80, 64), (81, 80, 64), (96, 80, 64), (160, 33, 16), (31, 31, 0)]
)
def test_a_hit_ends_before_the_last_block_in_common_if_drafts_read_ahead(tokens: int, common: int, hit: int) -> None:
    half = Half(lookahead_tokens=1)
    half.follow(request("a", tokens=160))
    half.store(a=160)
    hashes = [bytes([int(block >= common // BLOCK), block]) * 16 for block in range(tokens // BLOCK)]
    assert half.matched(half.follow(request("b", tokens=tokens, block_hashes=hashes))) == hit
    half.half.shutdown()


def test_windows_before_the_last_block_in_common_are_kept_and_found_if_drafts_read_ahead() -> None:
    half = Half(lookahead_tokens=1, policies=(HitPolicy("full"), HitPolicy("window", window_tokens=17)))
    half.follow(request("a", tokens=160))
    spare = {item.chunk.chunk_hash for item in half.store(a=160).stores if item.spare and "window" in item.chunk.pack}
    assert request(tokens=160).block_hashes[-1] not in spare, "the window of the boundary from which it can resume"
    assert half.matched(half.follow(request("b", tokens=160))) == 144
    half.half.shutdown()


@pytest.mark.parametrize(
    ("wishes", "loads", "stores"),
    [({"load": False}, False, True), ({"store": False}, True, False), ({"load": False, "store": False}, False, False)],
)
def test_requests_opt_out(half: Half, wishes: dict[str, bool], loads: bool, stores: bool) -> None:
    half.follow(request("a"))
    half.store(a=80)
    params = {"hybrid_offload": wishes}
    assert bool(half.matched(half.follow(request("b", kv_transfer_params=params)))) == loads
    half.follow(request("c", family=1, kv_transfer_params=params))
    assert bool(half.stored(c=80)) == stores


@pytest.mark.parametrize(("role", "loads", "stores"), [("loads", False, True), ("stores", True, False)])
def test_the_role_of_the_engine(role: str, loads: bool, stores: bool) -> None:
    half = Half(**{role: False})
    half.follow(request("a"))
    step = half.step(a=80)
    assert bool(step.stores) == stores
    half.put(step)
    if not stores:
        namespace = half.half._ranks_namespaces("")[0]
        half.backend.objects.update(
            {ObjectKey(namespace, "full-u16", chunk_hash): b"" for chunk_hash in request().block_hashes}
        )
    assert bool(half.matched(half.follow(request("b")))) == loads
    half.half.shutdown()


def test_a_prefix_that_ends_inside_a_block_is_not_extended(half: Half) -> None:
    half.follow(request("a"))
    half.store(a=80)
    second = half.follow(request("b"))
    assert half.matched(second, computed_tokens=24) == 0
    assert half.matched(second, computed_tokens=32) == 32


def test_a_reset_serves_no_earlier_object_and_keeps_requests_that_have_not_begun(half: Half) -> None:
    running, waiting = half.follow(request("a")), half.follow(request("b"))
    half.store(a=80)
    running.num_computed_tokens = 80
    half.half.reset()
    assert half.matched(waiting) == 0
    assert half.stored(a=1, b=80) == waiting.block_hashes, "what the running request holds may be of other weights"


def test_an_adapter_has_names_of_its_own_and_the_same_files_share_them(half: Half, tmp_path: Path) -> None:
    for name in ("one", "same", "other"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "adapter_model.safetensors").write_bytes(b"other" if name == "other" else b"one")
    newest = max(path.stat().st_ctime_ns for path in tmp_path.rglob("*"))
    half.half._adapters._started_ns = newest  # as if the engine had started after the files were written

    def lora(name: str, request_id: str) -> Any:
        return half.follow(request(request_id, lora_request=LoRARequest("tuned", 1, str(tmp_path / name))))

    assert half.matched(lora("one", "a")) == 0
    step = half.step(a=80)
    assert len(step.stores) == 5
    half.put(step)
    half.report([item.chunk for item in step.stores])
    assert half.matched(lora("same", "b")) == 64
    assert half.matched(lora("other", "c")) == 0
    assert half.matched(half.follow(request("d"))) == 0


def test_an_adapter_that_cannot_be_identified_is_served_without_offloading(half: Half, tmp_path: Path) -> None:
    item = half.follow(request("a", lora_request=LoRARequest("tuned", 1, str(tmp_path / "not-there"))))
    assert half.matched(item) == 0
    assert half.stored(a=80) == []


def test_others_wait_for_a_request_whose_load_failed_until_it_has_blocks_again(half: Half) -> None:
    half.follow(request("a"))
    half.follow(request("x", family=1))
    half.store(a=80, x=80)
    first = half.follow(request("b"))
    assert half.matched(first) == 64
    half.load(first, 64)
    half.step()
    half.half.take_output({"b"}, {"b"}, None)

    other = half.follow(request("y", family=1))
    for _ in range(20):
        assert half.half.matched_tokens(other, 0) is None
        half.step()
    assert half.matched(first) == 64
    half.load(first, 64)
    assert half.matched(other) == 64, "a second load, however long it takes, holds nobody up"


@pytest.mark.parametrize(("missing_blocks", "held"), [(0, False), (1, True)])
def test_others_load_beside_a_request_whose_load_failed_if_there_are_blocks_for_all(
    half: Half, missing_blocks: int, held: bool
) -> None:
    """The request may wait for something else, such as the adapter of a running one."""
    half.follow(request("a"))
    half.follow(request("x", family=1))
    half.store(a=80, x=80)
    needs = 80 // BLOCK + 3  # of each request: its tokens, and the engine's additions
    pool: Any = SimpleNamespace(get_num_free_blocks=lambda: 2 * needs - missing_blocks)
    half.half.bind_block_pool(pool, 1, backfills=False)
    first = half.follow(request("b"))
    half.load(first, half.matched(first))
    half.step()
    half.half.take_output({"b"}, {"b"}, None)

    other = half.follow(request("y", family=1))
    if held:
        for _ in range(20):
            assert half.half.matched_tokens(other, 0) is None
            half.step()
        half.step(b=16)
    assert half.matched(other) == 64


def test_loads_under_way_count_among_the_blocks_that_others_need(half: Half) -> None:
    for family in range(3):
        half.follow(request(f"a{family}", family=family))
    half.store(a0=80, a1=80, a2=80)
    free = SimpleNamespace(blocks=90)
    pool: Any = SimpleNamespace(get_num_free_blocks=lambda: free.blocks)
    half.half.bind_block_pool(pool, 1, backfills=False)
    first, second, third = (half.follow(request(f"b{family}", family=family)) for family in range(3))
    for item in (first, second):
        half.load(item, half.matched(item))
    half.step()
    half.half.take_output({"b0"}, {"b0"}, None)
    needs = 80 // BLOCK + 3
    free.blocks = 2 * needs  # enough for the failed one and the third, but the second needs more than it holds
    for _ in range(20):
        assert half.half.matched_tokens(third, 0) is None
        half.step()
    half.step(b1=16)
    assert half.matched(third) == 64


def test_no_load_begins_while_a_request_whose_load_failed_waits_for_others_loads_to_end(half: Half) -> None:
    half.follow(request("a", tokens=1520))
    for family in (1, 2):
        half.follow(request(f"x{family}", family=family))
    half.store(a=1520, x1=80, x2=80)
    large = half.follow(request("b", tokens=1520))
    first, later = (half.follow(request(f"y{family}", family=family)) for family in (1, 2))
    for item in (large, first):
        half.load(item, half.matched(item))
    half.report([], failed_requests={"b"})
    for _ in range(20):
        assert half.step().failures_to_report == [], "it does not fit beside the other load"
        assert half.half.matched_tokens(later, 0) is None
    half.half.take_output({"y1"}, set(), None)
    assert half.step(y1=16).failures_to_report == ["b"]
    half.half.take_output({"b"}, {"b"}, None)
    half.step(b=16)
    assert half.matched(later) == 64


def test_the_tiers_log_lines_name_this_half(half: Half, caplog: pytest.LogCaptureFixture) -> None:
    half.backend.faults["contains"] = OSError("gone")
    assert half.matched(half.follow(request("a"))) == 0
    assert caplog.messages[0].startswith("tier 'memory' (scheduler): lookup failed ")


def test_a_tier_that_some_rank_does_not_use_is_not_asked_and_not_waited_for(half: Half) -> None:
    half.follow(request("a"))
    half.store(a=80)
    asked = half.backend.calls.count("contains")
    half.report([], ranks_refusing_loads=Counter(memory=2))
    half.report([], ranks_refusing_loads=Counter(memory=-1))
    second = half.follow(request("b"))
    assert half.half.matched_tokens(second, 0) == 0, "at once, in the first step that asks"
    assert half.backend.calls.count("contains") == asked
    assert half.half.counters.take()["breaker_refused", "memory"] == 1
    assert half.stored(b=80) == [], "what it cannot be asked for is not taken for gone"

    half.report([], ranks_refusing_loads=Counter(memory=-1))
    assert half.matched(half.follow(request("c"))) == 64


def test_ranks_reports_add_up() -> None:
    one = StepReport(ranks_refusing_loads=Counter(nvme=1, shared=-1))
    assert one.aggregate(StepReport(ranks_refusing_loads=Counter(nvme=1, ram=-1))).ranks_refusing_loads == {
        "nvme": 2,
        "shared": -1,
        "ram": -1,
    }
    assert one.aggregate(StepReport(ranks_refusing_loads=Counter(nvme=-1))).ranks_refusing_loads == {
        "nvme": 0,
        "shared": -1,
    }
    assert one.ranks_refusing_loads == {"nvme": 1, "shared": -1}, "not changed"


def test_the_end_of_another_connectors_load_is_none_of_ours(half: Half) -> None:
    """Beside another connector, the engine tells both of every load that has ended."""
    half.follow(request("r"))
    half.half.take_output({"r"}, set(), None)
    half.half.take_output({"r"}, {"r"}, None)
    half.store(r=80)


def test_queries_and_the_tokens_of_loads_are_counted_once_per_lookup_and_load(half: Half) -> None:
    half.follow(request("a"))
    half.store(a=80)
    half.half.counters.take()

    def counted(*names: str) -> list[float]:
        counts = half.half.counters.take()
        return [counts.get((name, "memory"), 0) for name in names]

    assert half.matched(half.follow(request("miss", family=1))) == 0
    assert counted("queries", "query_hits", "query_misses", "hit_tokens") == [1, 0, 1, 0]

    hit = half.follow(request("hit"))
    assert half.matched(hit, computed_tokens=16) == 48
    half.load(hit, 48, computed_tokens=16)
    half.step()
    assert counted("queries", "query_hits", "query_misses", "pending_loads", "hit_tokens") == [1, 1, 0, 1, 0]
    half.half.take_output({"hit"}, set(), None)
    assert counted("queries", "pending_loads", "hit_tokens") == [0, -1, 48]

    aborted = half.follow(request("aborted"))
    half.load(aborted, half.matched(aborted))
    half.half.request_finished(aborted)
    assert counted("query_hits", "pending_loads", "hit_tokens") == [1, 0, 0]

    failing = half.follow(request("failing"))
    half.load(failing, half.matched(failing))
    half.half.take_output({"failing"}, {"failing"}, None)
    assert counted("query_hits", "pending_loads", "hit_tokens") == [1, 0, 0]


def test_a_lookup_without_an_answer_is_a_query_that_neither_hits_nor_misses() -> None:
    half = Half(lambda backend: backend.gates["contains"].shut(), patience_seconds=0.05)
    assert half.matched(half.follow(request())) == 0
    counts = half.half.counters.take()
    assert [counts.get((name, "memory"), 0) for name in ("queries", "query_hits", "query_misses")] == [1, 0, 0]
    half.backend.gates["contains"].open()
    half.half.shutdown()


def test_a_failure_is_withheld_while_a_load_of_another_connector_holds_the_blocks(half: Half) -> None:
    half.follow(request("a"))
    half.store(a=80)
    fails, other = half.follow(request("fails", tokens=1200)), half.follow(request("other", tokens=800, family=1))
    half.load(fails, half.matched(fails))
    blocks: Any = SimpleNamespace(blocks=([SimpleNamespace(block_id=number, is_null=False) for number in range(50)],))
    half.half.blocks_allocated(other, blocks, 0)
    half.step()
    half.report([], failed_requests={"fails"})
    assert half.step().failures_to_report == [], "75 of 99 blocks, beside 50"
    assert half.step(other=800).failures_to_report == ["fails"]
