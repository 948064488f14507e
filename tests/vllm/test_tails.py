"""Stores and loads of tails: the blocks that they name, and those that they must not."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from offload_core.lookup.chunk_ledger import ChunkLedger
from offload_core.planning.planner import GroupGeometry, HitPolicy, HybridOffloadPlanner
from offload_core.runtime.metrics import Counters
from offload_core.vllm.scheduler.load_plan import plan_load
from offload_core.vllm.scheduler.request_options import RequestOptions
from offload_core.vllm.scheduler.request_state import RequestState
from offload_core.vllm.scheduler.stores.store_plan import StorePlan

BLOCK, CHUNK, UNIT = 16, 64, 8
PROMPT = 3 * UNIT + CHUNK + 1
END = PROMPT - 1


def planner_of(*policies: HitPolicy, tail_tokens: int | None = UNIT) -> HybridOffloadPlanner:
    groups = [GroupGeometry(index, BLOCK, policy) for index, policy in enumerate(policies)]
    return HybridOffloadPlanner.build(
        groups, hash_block_size=UNIT, max_model_len=4096, hybrid_chunk_size=CHUNK, tail_tokens=tail_tokens
    )


FULL, STATE, WINDOW = HitPolicy("full"), HitPolicy("state"), HitPolicy("window", window_tokens=20)


def state_of(prompt: int = PROMPT) -> RequestState:
    request: Any = SimpleNamespace(
        request_id="r",
        num_tokens=prompt,
        num_prompt_tokens=prompt,
        num_computed_tokens=0,
        block_hashes=[bytes([block]) for block in range(prompt // UNIT)],
    )
    path: Any = None
    return RequestState(request, RequestOptions(), None, {}, path)


class Stores:
    """The stores of one request, step by step."""

    def __init__(self, planner: HybridOffloadPlanner) -> None:
        placement: Any = SimpleNamespace(
            stores=lambda *_: True,
            is_spare=lambda *_: False,
            stores_tail=lambda *_: True,
            is_spare_tail=lambda *_: False,
        )
        self.plan = StorePlan(planner, placement, ChunkLedger(1, 30.0), Counters(), prompt_only=False)
        self.state = state_of()
        self.plan.start_over(self.state)

    def step(
        self, tokens: int, tables: list[list[int]], states: tuple[tuple[int, int, int], ...] = ()
    ) -> dict[str, list[tuple[int, ...]]]:
        """Compute ``tokens`` tokens; return the blocks of each tail that is stored, by pack."""
        block_state = SimpleNamespace(
            get_block_ids=lambda _: tables, boundary_state_offloads={"r": list(states)} if states else {}
        )
        output: Any = SimpleNamespace(kv_connector_block_state=block_state, num_scheduled_tokens={"r": tokens})
        stored = list(self.plan.stores(output, {"r": self.state}))
        self.state.request.num_computed_tokens += tokens
        return {
            item.chunk.pack: [part.block_ids for part in item.blocks]
            for item in stored
            if item.chunk.pack.endswith("-tail")
        }


def test_the_last_block_of_a_tail_fills_the_slots_that_are_left() -> None:
    stores = Stores(planner_of(FULL, WINDOW))
    tables = [[1, 2, 3, 4, 5, 6], [11, 12, 13, 14, 15, 16]]
    assert stores.step(CHUNK, tables) == {}
    assert stores.step(PROMPT - CHUNK, tables) == {
        "full-u64-tail": [(5, 6, 6, 6)],  # 24 tokens behind the chunk
        "window-u64-w20-tail": [(15, 16, 16)],  # tokens 69 to 87
    }
    assert stores.step(40, [[*range(1, 10)], [*range(11, 20)]]) == {}, "once only"


def test_a_tail_with_a_block_that_the_engine_has_freed_is_not_stored() -> None:
    stores = Stores(planner_of(FULL, WINDOW))
    assert stores.step(PROMPT, [[1, 2, 3, 4, 5, 6], [0, 0, 0, 0, 0, 16]]).keys() == {"full-u64-tail"}


def test_only_the_state_at_the_end_of_the_tail_is_stored_with_it() -> None:
    stores = Stores(planner_of(FULL, STATE))
    tables = [[1, 2, 3, 4, 5, 6], [0, 0, 0, 0, 0, 7]]
    assert stores.step(END, tables, ((1, 21, END - UNIT),)).keys() == {"full-u64-tail"}
    assert stores.step(1, tables, ((1, 22, END),)) == {"state-u64-tail": [(22,)]}


def load(planner: HybridOffloadPlanner, tables: list[list[int]], end: int, computed: int = 0) -> Any:
    blocks: Any = SimpleNamespace(blocks=[[SimpleNamespace(block_id=block) for block in table] for table in tables])
    return plan_load(planner, state_of(), blocks, computed, end)


def test_a_load_fills_the_blocks_of_the_tail_too() -> None:
    tables = [[1, 2, 3, 4, 5, 6], [0, 0, 0, 0, 15, 16]]
    chunks = load(planner_of(FULL, WINDOW), tables, END)
    assert [(item.chunk.pack, [part.block_ids for part in item.blocks]) for item in chunks] == [
        ("full-u64", [(1, 2, 3, 4)]),
        ("full-u64-tail", [(5, 6)]),
        ("window-u64-w20-tail", [(15, 16)]),
    ]
    (behind,) = load(planner_of(FULL), [[1, 2, 3, 4, 5, 6]], END, computed=CHUNK + BLOCK)
    assert behind.blocks[0].block_ids == (6,)
    assert behind.blocks[0].first_slot == 1


@pytest.mark.parametrize("policies", [(FULL,), (FULL, WINDOW)])
def test_a_load_that_ends_inside_a_block_without_tails_is_refused(policies: tuple[HitPolicy, ...]) -> None:
    """No engine asks for it, and a block with undefined bytes must not count as loaded."""
    tables = [[1, 2, 3, 4, 5], [0, 12, 13, 14, 15]][: len(policies)]
    assert load(planner_of(*policies, tail_tokens=None), tables, CHUNK + UNIT) is None
