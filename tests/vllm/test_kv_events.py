"""KV events of the scheduler half against an oracle that names every block by itself."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.distributed.kv_events import BlockRemoved, BlockStored
from vllm.v1.core.kv_cache_utils import maybe_convert_block_hash

from offload_core.api.keys import ObjectKey
from offload_core.lookup.chunk_ledger import ChunkLedger
from offload_core.planning.chunk_keys import ChunkRef
from offload_core.planning.planner import GroupGeometry, HitPolicy, HybridOffloadPlanner, Pack
from offload_core.runtime.io_loop import IoLoop
from offload_core.tiers.changes import TierChange
from offload_core.vllm.kv_events import events as module
from offload_core.vllm.kv_events.events import KvEvents

HASH = 4
UNIT = 64
GROUPS = (
    GroupGeometry(0, 16, HitPolicy("full")),
    GroupGeometry(1, 4, HitPolicy("full")),
    GroupGeometry(2, 16, HitPolicy("window", window_tokens=20)),
    GroupGeometry(3, 64, HitPolicy("state")),
)
NAMESPACES = ("a" * 64, "b" * 64)
MEDIA = {"ram": "host", "disk": "disk", "share": "remote"}


def request(tokens: int = 256, seed: int = 0, **fields: Any) -> Any:
    draw = random.Random(seed)
    return SimpleNamespace(
        **{
            "block_hashes": [draw.randbytes(32) for _ in range(tokens // HASH)],
            "all_token_ids": [draw.randrange(1000) for _ in range(tokens)],
            "lora_request": None,
            "mm_features": [],
            "cache_salt": None,
            "prompt_embeds": None,
            **fields,
        }
    )


class Rig:
    """Events over three tiers on two ranks."""

    def __init__(self, io: IoLoop, tail_tokens: int | None = None) -> None:
        self.planner = HybridOffloadPlanner.build(
            GROUPS, hash_block_size=HASH, max_model_len=4096, hybrid_chunk_size=UNIT, tail_tokens=tail_tokens
        )
        tiers: Any = [
            SimpleNamespace(name=name, capabilities=SimpleNamespace(medium=medium, shared=False))
            for name, medium in MEDIA.items()
        ]
        specs: Any = SimpleNamespace(kv_cache_groups=[SimpleNamespace(kv_cache_spec=SimpleNamespace()) for _ in GROUPS])
        self.ledger = ChunkLedger(len(NAMESPACES), 60.0)
        self.namespaces = NAMESPACES
        self.events = KvEvents(io, tiers, self.planner, specs, lambda _: self.namespaces, self.ledger, None)

    def store(self, item: Any, tier: str = "disk", ranks: tuple[int, ...] = (0, 1), present: bool = True) -> None:
        tokens = len(item.all_token_ids)
        units = [(pack, range(pack.units_in(tokens))) for pack in self.planner.packs]
        units += [(pack, pack.needed_units(0, self.planner.tail_end(tokens))) for pack in self.planner.tail_packs]
        for pack, stored in units:
            for unit in stored:
                ref = ChunkRef(pack.name, item.block_hashes[pack.hash_index(unit)])
                self.events.storing(item, pack, unit, ref)
                keys = [ObjectKey(self.namespaces[rank], pack.name, ref.chunk_hash) for rank in ranks]
                self.events.reported(TierChange(tier, key, present) for key in keys)

    def take_all(self) -> list[Any]:
        taken: list[Any] = []
        while batch := self.events.take():
            taken += batch
        return taken


Block = tuple[str | None, int, int | bytes]


def blocks_of(item: Any, planner: HybridOffloadPlanner, tier: str) -> dict[Block, tuple[list[int], int | bytes | None]]:
    """The oracle: per block, its tokens and the hash of the block before it, without the planner's ranges."""
    found: dict[Block, tuple[list[int], int | bytes | None]] = {}
    kept = {0: UNIT, 1: UNIT, 2: 32, 3: UNIT}  # tokens of each unit that the group's objects hold; a window needs 19
    for group in GROUPS:
        size = group.block_size_tokens
        for start in range(0, len(item.all_token_ids), size):
            if start % UNIT < UNIT - kept[group.index]:
                continue
            name = maybe_convert_block_hash(item.block_hashes[(start + size) // HASH - 1])
            parent = maybe_convert_block_hash(item.block_hashes[start // HASH - 1]) if start else None
            found[tier, group.index, name] = (item.all_token_ids[start : start + size], parent)
    return found


def apply(events: list[Any], content: dict[Any, Any]) -> None:
    for event in events:
        if isinstance(event, BlockRemoved):
            for name in event.block_hashes:
                del content[event.ownership, event.group_idx, name]
            continue
        assert isinstance(event, BlockStored)
        parent, size = event.parent_block_hash, event.block_size
        assert len(event.token_ids) == size * len(event.block_hashes)
        for place, name in enumerate(event.block_hashes):
            block = (event.ownership, event.group_idx, name)
            assert block not in content
            content[block] = (event.token_ids[place * size : (place + 1) * size], parent)
            parent = name


@pytest.fixture
def io(monkeypatch: pytest.MonkeyPatch) -> Iterator[IoLoop]:
    monkeypatch.setattr(module, "event_group_fields", lambda spec: {})
    loop = IoLoop.acquire()
    yield loop
    loop.release()


@pytest.fixture
def rig(io: IoLoop) -> Rig:
    return Rig(io)


def test_events_name_every_block_with_its_tokens_and_parent(rig: Rig) -> None:
    content: dict[Any, Any] = {}
    first, second = request(), request(640, seed=1)
    rig.store(first)
    rig.store(second, "ram")
    apply(rig.take_all(), content)
    expected = {**blocks_of(first, rig.planner, "disk"), **blocks_of(second, rig.planner, "ram")}
    assert content == expected
    rig.store(first, present=False)
    apply(rig.take_all(), content)
    assert content == blocks_of(second, rig.planner, "ram")
    rig.events.reset()
    apply(rig.take_all(), content)
    assert content == {}


@pytest.mark.parametrize("tokens", [293, 273, 33])
def test_a_tail_that_ends_inside_a_block_has_the_event_of_its_last_hash(io: IoLoop, tokens: int) -> None:
    rig, item, content = Rig(io, tail_tokens=HASH), request(tokens), dict[Any, Any]()
    rig.store(item)
    apply(rig.take_all(), content)
    end, chunks = (tokens - 1) // HASH * HASH, tokens // UNIT * UNIT
    whole = SimpleNamespace(block_hashes=item.block_hashes, all_token_ids=item.all_token_ids[:chunks])
    expected = blocks_of(whole, rig.planner, "disk")
    for group in GROUPS:
        size = group.block_size_tokens
        needed = {"full": chunks, "window": max(chunks, end - 19), "state": end - 1}[group.policy.kind]
        for start in range(needed // size * size, end, size):
            stop = min(start + size, end)
            start = start if stop - start == size else stop - HASH
            parent = maybe_convert_block_hash(item.block_hashes[start // HASH - 1]) if start else None
            name = maybe_convert_block_hash(item.block_hashes[stop // HASH - 1])
            expected["disk", group.index, name] = (item.all_token_ids[start:stop], parent)
    assert content == expected
    rig.store(item, present=False)
    apply(rig.take_all(), content)
    assert content == {}


def test_a_loaded_tail_is_announced(io: IoLoop) -> None:
    rig, item = Rig(io, tail_tokens=HASH), request(293)
    rig.events.loading(item, "", 256, 292)
    for pack in rig.planner.tail_packs:
        name = item.block_hashes[292 // HASH - 1]
        keys = [ObjectKey(namespace, pack.name, name) for namespace in NAMESPACES]
        rig.events.reported(TierChange("disk", key, True) for key in keys)
    ends = {(event.group_idx, event.block_hashes[-1]) for event in rig.take_all()}
    assert ends >= {(group.index, maybe_convert_block_hash(item.block_hashes[292 // HASH - 1])) for group in GROUPS}


def test_adjacent_blocks_make_one_event_and_places_have_vllms_words(rig: Rig) -> None:
    for tier in MEDIA:
        rig.store(request(), tier)
    events = rig.take_all()
    full = [event for event in events if event.group_idx == 0]
    assert [(one.medium, one.locality, one.ownership, len(one.block_hashes)) for one in full] == [
        ("CPU", "LOCAL", "ram", 16),
        ("STORAGE", "LOCAL", "disk", 16),
        ("STORAGE", "REMOTE", "share", 16),
    ]
    windows = [event for event in events if event.group_idx == 2 and event.ownership == "ram"]
    assert [len(event.block_hashes) for event in windows] == [2, 2, 2, 2], "a window's objects have gaps between them"


def test_a_repeated_block_is_removed_and_stored(rig: Rig) -> None:
    content: dict[Any, Any] = {}
    item = request()
    rig.store(item)
    apply(rig.take_all(), content)
    rig.events._announcements.repeat(rig.events._announcements.chunks())
    repeated = rig.take_all()
    apply(repeated, content)
    assert content == blocks_of(item, rig.planner, "disk")
    late: dict[Any, Any] = {}
    apply([event for event in repeated if isinstance(event, BlockStored)], late)
    assert late == content


def test_chunks_that_part_in_the_middle_both_announce_their_shared_blocks(rig: Rig) -> None:
    one, other = request(64), request(64, seed=1)
    other.block_hashes[:8] = one.block_hashes[:8]
    other.all_token_ids[:32] = one.all_token_ids[:32]
    rig.store(one)
    rig.store(other)
    stored = Counter(name for event in rig.take_all() if event.group_idx == 1 for name in event.block_hashes)
    assert sorted(stored.values()) == [1] * 16 + [2] * 8
    rig.store(other, present=False)
    removed = Counter(name for event in rig.take_all() if event.group_idx == 1 for name in event.block_hashes)
    assert set((stored - removed).elements()) == set(map(maybe_convert_block_hash, one.block_hashes))


def test_a_chunk_counts_when_all_ranks_have_it(rig: Rig) -> None:
    item = request(64)
    rig.store(item, ranks=(0,))
    assert rig.take_all() == []
    rig.store(item, ranks=(1,))
    assert len(rig.take_all()) == len(GROUPS)
    rig.store(item, ranks=(0,), present=False)
    assert {type(event) for event in rig.take_all()} == {BlockRemoved}


def test_reports_from_before_a_reset_do_not_count(rig: Rig) -> None:
    item = request(64)
    rig.store(item)
    rig.take_all()
    rig.events.reset()
    rig.namespaces = ("c" * 64, "d" * 64)
    for pack in rig.planner.packs:
        old = ChunkRef(pack.name, item.block_hashes[pack.hash_index(0)])
        rig.events.storing(item, pack, 0, old)
        keys = [ObjectKey(name, pack.name, old.chunk_hash) for name in NAMESPACES]
        rig.events.reported(TierChange("disk", key, True) for key in keys)
    assert {type(event) for event in rig.take_all()} == {BlockRemoved}
    rig.store(item)
    assert {type(event) for event in rig.take_all()} == {BlockStored}


def test_the_events_of_a_step_are_bounded(rig: Rig) -> None:
    rig.store(request(64 * 100))
    sizes = [len({name for event in rig.events.take() for name in event.block_hashes}) for _ in range(8)]
    assert max(sizes) <= module._CHUNKS_PER_STEP * (UNIT // HASH)
    assert sizes[-1] == 0


def test_blocks_with_a_salt_or_an_adapter_say_so(rig: Rig) -> None:
    lora = SimpleNamespace(adapter_id=7, name="sql", lora_name="sql", lora_path="adapters/sql")
    rig.store(request(64, lora_request=lora, cache_salt="tenant"))
    (event,) = [event for event in rig.take_all() if event.group_idx == 0]
    assert (event.lora_id, event.lora_name) == (7, "sql")
    assert event.extra_keys == [("sql", "tenant"), ("sql",), ("sql",), ("sql",)]


@pytest.mark.parametrize(("tokens", "expected"), [(37, ("sql",)), (13, ("sql",)), (5, ("sql", "tenant"))])
def test_the_last_hash_of_a_tail_has_its_own_extra_keys(io: IoLoop, tokens: int, expected: tuple[str, ...]) -> None:
    rig = Rig(io, tail_tokens=HASH)
    lora = SimpleNamespace(adapter_id=7, name="sql", lora_name="sql", lora_path="adapters/sql")
    rig.store(request(tokens, lora_request=lora, cache_salt="tenant"))
    events = [event for event in rig.take_all() if event.group_idx == 0]
    whole = [event.extra_keys for event in events if event.block_size == 16]
    assert whole == ([[("sql", "tenant"), ("sql",)]] if tokens > 16 else [])
    assert [event.extra_keys for event in events if event.block_size == HASH] == [[expected]]


def test_an_idle_engine_steps_on_while_a_store_may_end(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    item = request(64)
    pack: Pack = rig.planner.packs[0]
    ref = ChunkRef(pack.name, item.block_hashes[pack.hash_index(0)])

    def awake() -> bool:
        return rig.events.has_events_to_come

    assert not awake()
    rig.ledger.store_started(ref)
    rig.events.storing(item, pack, 0, ref)
    assert awake()
    monkeypatch.setattr(rig.events, "_awake_until", 0.0)
    assert not awake(), "a store that hangs keeps nobody awake"
    rig.events.reported(TierChange("disk", ObjectKey(name, pack.name, ref.chunk_hash), True) for name in NAMESPACES)
    assert awake()
    rig.take_all()
    rig.ledger.stores_ended({ref: len(NAMESPACES)}, ())
    assert not awake()


def test_an_idle_engine_steps_on_while_a_slower_tier_stores(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    def awake() -> bool:
        return rig.events.has_events_to_come

    rig.events.storing(request(64), rig.planner.packs[0], 0, ChunkRef(rig.planner.packs[0].name, b"first tier has it"))
    rig.events.reported((), ranks_storing=2)
    rig.events.reported((), ranks_storing=-1)
    assert awake()
    with monkeypatch.context() as patch:
        patch.setattr(rig.events, "_awake_until", 0.0)
        assert not awake(), "a store that hangs keeps nobody awake"
    rig.events.reported((), ranks_storing=-1)
    assert not awake()
