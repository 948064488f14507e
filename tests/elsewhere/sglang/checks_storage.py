"""Our backend as SGLang's factory makes it, called directly with SGLang's host pools."""

from __future__ import annotations

import ctypes
import hashlib
import itertools
import logging
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sglang.srt.environ import envs
from sglang.srt.mem_cache.hicache_storage import (
    HiCacheFile,
    HiCacheStorageExtraInfo,
    PoolHitPolicy,
    PoolName,
    PoolTransfer,
)
from sglang.srt.mem_cache.memory_pool_host import LogicalHostPool

from offload_core.api.backend import StoreOutcome
from offload_core.api.errors import ConfigError
from offload_core.elsewhere import sglang_hicache
from offload_core.elsewhere.host_pages import HostPages
from tests.elsewhere.sglang.backends import DEADLINES, settings, use_memory
from tests.elsewhere.sglang.pools import backend, content, kv_pool, latent_pool, rank, rows, state_pool
from tests.support.damage import flipped

MARGIN_SECONDS = 1.5
"""Time that a busy machine may take beyond a deadline."""


def name(number: int) -> str:
    """Return a page's name, as SGLang's hashes are."""
    return hashlib.sha256(str(number).encode()).hexdigest()


NAMES = [name(number) for number in range(8)]


@pytest.fixture
def make() -> Any:
    """Return a function that makes a backend; it is closed at the end."""

    def make(*arguments: Any, **more: Any) -> Any:
        made.append(backend(*arguments, **more))
        return made[-1]

    made: list[Any] = []
    yield make
    for one in made:
        one.close()


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch, make: Any) -> Any:
    """Return a function that makes a backend on a medium in memory, which the test can hold and break."""

    def start(kv: Any, pools: dict[str, Any] | None = None, **common: object) -> tuple[Any, Any]:
        media.extend(use_memory(monkeypatch, **common) for _ in (1,))
        one = make({}, kv, **(pools or {}))
        return one, media[-1][0]

    media: list[Any] = []
    yield start
    for medium in itertools.chain.from_iterable(media):
        for gate in medium.gates.values():
            gate.open()


POOLS: dict[str, Callable[[], Any]] = {
    "page_first": lambda: kv_pool("page_first"),
    "page_first_direct": lambda: kv_pool("page_first_direct"),
    "layer_first": lambda: kv_pool("layer_first"),
    "page_head": lambda: kv_pool("page_head"),
    "latent": latent_pool,
    "latent_layer_first": lambda: latent_pool("layer_first"),
}


@pytest.mark.parametrize("pool", POOLS)
def test_pages_come_back_to_other_places(tmp_path: Path, make: Any, pool: str) -> None:
    kv = POOLS[pool]()
    one = make(settings(tmp_path), kv)
    pages = [3, 0, 7]
    assert one.batch_exists(NAMES[:3]) == 0
    assert one.batch_set_v1(NAMES[:3], rows(*pages)) == [True] * 3
    assert one.batch_exists(NAMES) == 3
    assert one.exists(NAMES[2])
    assert not one.exists(NAMES[3])
    expected = _bytes(kv, pages)
    _wipe(kv)
    assert one.batch_get_v1(NAMES[:4], rows(8, 2, 1, 5)) == [True, True, True, False]
    assert _bytes(kv, [8, 2, 1]) == expected
    assert not any(itertools.chain(*_bytes(kv, [0, 3, 4, 5, 6, 7, 9])))


@pytest.mark.parametrize("pool", [pool for pool in POOLS if pool != "page_head"])
def test_flat_pages_come_back(tmp_path: Path, make: Any, pool: str) -> None:
    kv = POOLS[pool]()
    one = make(settings(tmp_path), kv, interface_v1=0)
    pages = [kv.get_data_page(number * 4) for number in range(3)]
    assert one.batch_set(NAMES[:3], pages)
    targets = [kv.get_dummy_flat_data_page() for _ in range(4)]
    got = one.batch_get(NAMES[:4], targets)
    assert [None if page is None else bytes(page.view(torch.uint8).numpy()) for page in got] == [
        *(content(kv, number) for number in range(3)),
        None,
    ]
    assert one.set(NAMES[5], pages[1])
    assert torch.equal(one.get(NAMES[5], kv.get_dummy_flat_data_page()).view(torch.uint8), pages[1].view(torch.uint8))
    assert one.get(NAMES[6], kv.get_dummy_flat_data_page()) is None


def test_the_pools_of_a_hybrid_come_back(tmp_path: Path, make: Any) -> None:
    kv, states, window = kv_pool(), state_pool(), kv_pool(head_num=1)
    one = make(settings(tmp_path), kv, mamba=states, swa=window)
    moved = [
        PoolTransfer(PoolName.MAMBA, torch.tensor([5]), keys=NAMES[2:3]),
        PoolTransfer(PoolName.SWA, rows(1, 2), keys=NAMES[1:3]),
    ]
    assert one.batch_set_v2(moved) == {"mamba": [True], "swa": [True, True]}
    expected = [content(states, 5), content(window, 1), content(window, 2)]
    _wipe(window)
    states.temporal_buffer.zero_()
    states.conv_buffer[0].zero_()
    moved = [
        PoolTransfer(PoolName.MAMBA, torch.tensor([9]), keys=NAMES[2:3]),
        PoolTransfer(PoolName.SWA, rows(6, 4, 3), keys=NAMES[1:4]),
    ]
    assert one.batch_get_v2(moved) == {"mamba": [True], "swa": [True, True, False]}
    assert [content(states, 9), content(window, 6), content(window, 4)] == expected
    assert not any(content(states, 5) + content(window, 3))


@given(
    st.integers(0, 7),
    st.lists(st.sampled_from(range(8)), unique=True),
    st.lists(st.sampled_from(range(8)), unique=True),
    st.integers(1, 4),
    st.booleans(),
)
def test_restorable_depths_are_those_of_sglangs_file_backend(
    depth: int, states: list[int], draft: list[int], window: int, trailing: bool
) -> None:
    """Both backends have the same pages, and get the same question."""
    with tempfile.TemporaryDirectory() as folder, envs.SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR.override(folder):
        theirs = HiCacheFile(rank())
        ours = _Present()
        pages = [(PoolName.KV, number) for number in range(depth)]
        pages += [(PoolName.MAMBA, number) for number in states] + [(PoolName.DRAFT, number) for number in draft]
        for pool, number in pages:
            theirs.set(theirs._log_key(pool, NAMES[number]), torch.ones(1))
        ours.pages = {(str(pool), NAMES[number]) for pool, number in pages}
        policy = PoolHitPolicy.TRAILING_PAGES if trailing else PoolHitPolicy.ALL_PAGES
        asked = [
            PoolTransfer(PoolName.MAMBA, keys=NAMES[:window], hit_policy=PoolHitPolicy.TRAILING_PAGES),
            PoolTransfer(PoolName.DRAFT, keys=NAMES[:window], hit_policy=policy),
        ]
        expected = theirs.batch_exists_v2(NAMES, asked)
        got = sglang_hicache.OffloadCoreHiCache.batch_exists_v2(ours, NAMES, asked)
        assert (got.kv_hit_pages, got.restorable_prefix_pages or []) == (
            expected.kv_hit_pages,
            expected.restorable_prefix_pages or [],
        )
        for pool, pages_there in expected.extra_pool_hit_pages.items():
            assert got.extra_pool_hit_pages[pool] == pages_there


class _Present(sglang_hicache.OffloadCoreHiCache):
    """Our backend with a set of pages in place of tiers."""

    def __init__(self) -> None:
        self.pages: set[tuple[str, str]] = set()
        kv = kv_pool()
        self._pools: Any = {pool: _Named(pool, kv) for pool in ("kv", "mamba", "draft")}
        self._calls: Any = self
        self.lookup_seconds = 1.0

    def find(self, keys: Any, until: float | None = None) -> list[bool]:
        return [key in self.pages for key in keys]

    def touch(self, keys: Any) -> None:
        pass


class _Named:
    def __init__(self, pool: str, kv: Any) -> None:
        self._pool = pool
        self.pages = HostPages(pool, kv)

    def key(self, page: str) -> tuple[str, str]:
        return self._pool, page


def test_a_pool_of_block_groups_has_no_vote(tmp_path: Path, make: Any) -> None:
    one = make(settings(tmp_path), kv_pool(), draft=kv_pool())
    assert all(one.batch_set_v1(NAMES[:3], rows(0, 1, 2)))
    asked = [PoolTransfer(PoolName.DRAFT, keys=NAMES[:2], hit_policy=PoolHitPolicy.BLOCK_GROUPS)]
    found = one.batch_exists_v2(NAMES, asked)
    assert (found.kv_hit_pages, found.extra_pool_hit_pages) == (3, {"kv": 3})


def test_a_logical_pool_leaves_the_verdict_to_the_others(tmp_path: Path, make: Any) -> None:
    one = make(settings(tmp_path), LogicalHostPool(64, 4), swa=kv_pool())
    assert one.batch_set_v1(NAMES[:3], rows(0, 1, 2)) == [True] * 3
    assert one.batch_get_v1(NAMES[:3], rows(0, 1, 2)) == [True] * 3
    assert one.batch_exists(NAMES) == 0
    assert one.batch_exists_v2(NAMES).kv_hit_pages == 0
    assert one.batch_set_v2([PoolTransfer(PoolName.SWA, rows(0, 1), keys=NAMES[:2])]) == {"swa": [True, True]}
    assert one.batch_exists_v2(NAMES, [PoolTransfer(PoolName.SWA, keys=NAMES)]).kv_hit_pages == 2


OTHERS: dict[str, Any] = {
    "rank": (lambda: kv_pool(), {"tp_rank": 1}),
    "ranks": (lambda: kv_pool(), {"tp_size": 2}),
    "stage": (lambda: kv_pool(), {"pp_rank": 1, "pp_size": 2}),
    "context": (lambda: kv_pool(), {"attn_cp_rank": 1, "attn_cp_size": 2}),
    "name": (lambda: kv_pool(), {"model_name": "b-model"}),
    "layout": (lambda: kv_pool("page_first_direct"), {}),
    "dtype": (lambda: kv_pool(dtype=torch.float16), {}),
    "page size": (lambda: kv_pool(page_size=8), {}),
    "heads": (lambda: kv_pool(head_num=4, head_dim=4), {}),
    "layers": (lambda: kv_pool(layer_num=2), {}),
}


@pytest.mark.parametrize("other", OTHERS)
def test_another_identity_has_other_pages(tmp_path: Path, make: Any, other: str) -> None:
    """The bytes of a page would have another meaning there."""
    one = make(settings(tmp_path), kv_pool(), rank(tp_size=2) if other == "rank" else None)
    assert one.batch_set_v1(NAMES[:1], rows(0)) == [True]
    pool, fields = OTHERS[other]
    if other == "rank":
        fields = {**fields, "tp_size": 2}
    assert make(settings(tmp_path), pool(), rank(**fields)).batch_exists(NAMES[:1]) == 0
    assert make(settings(tmp_path, model_identity="new weights"), kv_pool()).batch_exists(NAMES[:1]) == 0
    assert one.batch_exists(NAMES[:1]) == 1


@pytest.mark.parametrize("pool", ["layer_first", "latent"])
def test_pages_in_place_and_flat_pages_are_apart(tmp_path: Path, make: Any, pool: str) -> None:
    """With ``layer_first``, the two have the same bytes in another order."""
    kv = POOLS[pool]()
    assert all(make(settings(tmp_path), kv).batch_set_v1(NAMES[:1], rows(0)))
    flat = make(settings(tmp_path), kv, interface_v1=0)
    assert flat.batch_exists(NAMES[:1]) == 0
    assert flat.batch_get(NAMES[:1], [kv.get_dummy_flat_data_page()]) == [None]


def test_flat_calls_are_misses_where_pages_are_moved_in_place(tmp_path: Path, make: Any) -> None:
    kv = kv_pool("layer_first")
    one = make(settings(tmp_path), kv)
    assert all(one.batch_set_v1(NAMES[:1], rows(0)))
    assert one.get(NAMES[0], kv.get_dummy_flat_data_page()) is None
    assert not one.set(NAMES[1], kv.get_data_page(0))
    assert not one.exists(NAMES[1])


def test_ranks_of_a_replicated_model_share_latent_pages_and_no_states(tmp_path: Path, make: Any) -> None:
    first, second = (
        make(
            settings(tmp_path), latent_pool(), rank(is_mla_model=True, tp_rank=number, tp_size=2),
            mamba=state_pool(), draft=kv_pool(), indexer=latent_pool(),
        )
        for number in (0, 1)
    )  # fmt: skip
    assert all(first.batch_set_v1(NAMES[:1], rows(0)))
    pools = {"mamba": torch.tensor([0]), "draft": rows(0), "indexer": rows(0)}
    moved = [PoolTransfer(PoolName(pool), indices, keys=NAMES[:1]) for pool, indices in pools.items()]
    assert first.batch_set_v2(moved) == {pool: [True] for pool in pools}
    assert second.batch_get_v1(NAMES[:1], rows(3)) == [True]
    assert second.batch_get_v2(moved) == {"mamba": [False], "draft": [False], "indexer": [True]}


def test_pools_of_one_model_have_their_own_pages(tmp_path: Path, make: Any) -> None:
    one = make(settings(tmp_path), kv_pool(), draft=kv_pool(), swa=kv_pool())
    assert all(one.batch_set_v1(NAMES[:1], rows(0)))
    moved = [PoolTransfer(pool, rows(1), keys=NAMES[:1]) for pool in (PoolName.DRAFT, PoolName.SWA)]
    assert one.batch_get_v2(moved) == {"draft": [False], "swa": [False]}


def test_without_a_model_identity_nothing_starts(tmp_path: Path, make: Any) -> None:
    with pytest.raises(ConfigError, match="model_identity is missing: SGLang gives a backend the model's name 'a-mod"):
        make(settings(tmp_path, model_identity=None), kv_pool())


def test_wrong_keys_are_named_with_their_place(tmp_path: Path, make: Any) -> None:
    with pytest.raises(ConfigError, match=r"hicache-storage-backend-extra-config(.|\n)*stagin_bytes"):
        make({**settings(tmp_path), "stagin_bytes": 1}, kv_pool())


def test_pages_too_large_for_the_staging_memory_are_refused_with_the_cure(tmp_path: Path, make: Any) -> None:
    with pytest.raises(ConfigError, match=r"staging_bytes is too small for the pages of SGLang's pool 'kv'.*set it to"):
        make(settings(tmp_path, staging_bytes="5MiB"), kv_pool(head_dim=20_000))


def test_a_pool_without_pages_is_refused_with_the_cure(tmp_path: Path, make: Any) -> None:
    class Strange:
        page_size, layout, kv_buffer = 4, "odd", ()

    with pytest.raises(ConfigError, match=r"host pool 'swa' \(Strange, layout 'odd'\) gives no pages"):
        make(settings(tmp_path), kv_pool(), swa=Strange())


def test_wrong_calls_are_misses(tmp_path: Path, make: Any, caplog: pytest.LogCaptureFixture) -> None:
    one = make(settings(tmp_path), kv_pool())
    flat = make(settings(tmp_path), kv_pool(), interface_v1=0)
    with caplog.at_level(logging.CRITICAL):
        assert one.batch_set_v1(NAMES[:2], rows(0)) == [False, False]
        assert one.batch_get_v1(NAMES[:2], None) == [False, False]
        assert one.batch_get_v2([PoolTransfer(PoolName.SWA, rows(0), keys=NAMES[:1])]) == {"swa": [False]}
        assert one.batch_set_v2([PoolTransfer(PoolName.SWA)]) == {"swa": []}
        assert one.batch_exists_v2(NAMES, [PoolTransfer(PoolName.SWA, keys=NAMES)]).kv_hit_pages == 0
        assert flat.get(NAMES[0]) is None
        assert flat.batch_get(NAMES[:2], [torch.zeros(4)]) == [None, None]
        assert not flat.set(NAMES[0])
        assert not flat.batch_set(NAMES[:2], [torch.zeros(4)])
        assert one.batch_exists([]) == 0
        assert one.batch_set_v1([], torch.tensor([], dtype=torch.int64)) == []


def test_a_page_of_another_size_is_a_miss(tmp_path: Path, make: Any) -> None:
    one = make(settings(tmp_path), kv_pool(), interface_v1=0)
    assert one.set(NAMES[0], torch.ones(8))
    assert one.get(NAMES[0], torch.zeros(9)) is None
    assert one.set(NAMES[0], torch.ones(8))
    assert torch.equal(one.get(NAMES[0], torch.zeros(8)), torch.ones(8))


def test_a_page_asked_for_twice_is_loaded_once(tmp_path: Path, make: Any) -> None:
    kv = kv_pool()
    one = make(settings(tmp_path), kv)
    assert all(one.batch_set_v1(NAMES[:2], rows(0, 1)))
    assert one.batch_get_v1([NAMES[0], NAMES[1], NAMES[0]], rows(4, 5, 6)) == [True, True, False]
    assert content(kv, 4) == content(kv, 0)


def _hexes(digest: bytes) -> str:
    """Return digits of a digest, in upper case for some digests."""
    return digest.hex().upper() if digest[0] % 2 else digest.hex()


@given(
    st.lists(st.one_of(st.text(max_size=70), st.binary(min_size=32, max_size=32).map(_hexes)), unique=True, max_size=20)
)
def test_no_two_pages_have_one_hash(pages: list[str]) -> None:
    different = {*pages, *NAMES, *map(str.upper, NAMES)}
    hashes = {sglang_hicache._hash(page) for page in different}
    assert len(hashes) == len(different)
    assert all(1 <= len(one) <= 64 for one in hashes)
    assert bytes.fromhex(NAMES[0]) in hashes


def test_a_hung_medium_is_a_miss_at_its_deadlines_and_its_late_bytes_go_nowhere(held: Any) -> None:
    """Each call ends at its deadline, and the test counts the calls."""
    kv, states = kv_pool(), state_pool()
    one, medium = held(kv, {"mamba": states}, **DEADLINES, breaker_failures=1_000_000)
    assert all(one.batch_set_v1(NAMES[:4], rows(0, 1, 2, 3)))
    state = PoolTransfer(PoolName.MAMBA, torch.tensor([0]), keys=NAMES[:1])
    assert one.batch_set_v2([state]) == {"mamba": [True]}
    assert one.batch_exists(NAMES) == 4
    before = _bytes(kv, range(8))
    for gate in ("contains", "load_into", "store"):
        medium.gates[gate].shut()
    deadline = DEADLINES["lookup_timeout_seconds"]
    calls: list[tuple[Any, Any, int]] = [
        (lambda: one.batch_get_v1(NAMES[:4], rows(4, 5, 6, 7)), [False] * 4, 2),
        (lambda: one.batch_exists(NAMES), 0, 1),
        (lambda: one.exists(NAMES[0]), False, 1),
        (lambda: one.batch_exists_v2(NAMES, [state]).kv_hit_pages, 0, 1),
        (lambda: one.batch_get_v2([state]), {"mamba": [False]}, 2),
        (lambda: one.batch_set_v1(NAMES[4:6], rows(0, 1)), [False] * 2, 2),
        (lambda: one.batch_set_v2([PoolTransfer(PoolName.MAMBA, torch.tensor([1]), keys=NAMES[5:6])]),
         {"mamba": [False]}, 2),
    ]  # fmt: skip
    ended = 0
    for call, miss, deadlines in calls:
        started = time.monotonic()
        assert call() == miss
        assert time.monotonic() - started < deadlines * deadline + MARGIN_SECONDS
        ended += 1
    assert ended == len(calls) == 7
    for gate in ("contains", "load_into", "store"):
        medium.gates[gate].open()
    assert _bytes(kv, range(8)) == before


def test_one_deadline_bounds_the_questions_about_all_pools(held: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The answer about the first pool takes most of the deadline, and the second one never comes."""
    one, medium = held(kv_pool(), {"mamba": state_pool()}, lookup_timeout_seconds=2.0)
    assert all(one.batch_set_v1(NAMES[:4], rows(0, 1, 2, 3)))
    find = one._calls.find

    def slow(keys: Any, until: float | None = None) -> list[bool]:
        found: list[bool] = find(keys, until)
        time.sleep(1.8)
        medium.gates["contains"].shut()
        monkeypatch.setattr(one._calls, "find", find)
        return found

    monkeypatch.setattr(one._calls, "find", slow)
    started = time.monotonic()
    asked = [PoolTransfer(PoolName.MAMBA, keys=NAMES[3:4], hit_policy=PoolHitPolicy.TRAILING_PAGES)]
    found = one.batch_exists_v2(NAMES, asked)
    assert (found.kv_hit_pages, found.extra_pool_hit_pages) == (0, {"kv": 4})
    assert time.monotonic() - started < 3.4


def test_a_store_is_never_waited_for_longer_than_its_deadlines_at_the_end(held: Any) -> None:
    one, medium = held(kv_pool(), **DEADLINES)
    medium.gates["store"].shut()
    started = time.monotonic()
    assert one.batch_set_v1(NAMES[:1], rows(0)) == [False]
    assert not one.clear() or time.monotonic() - started < 2 * DEADLINES["store_timeout_seconds"] + MARGIN_SECONDS
    one.close()
    one.close()
    assert time.monotonic() - started < 4 * DEADLINES["store_timeout_seconds"] + 2 * MARGIN_SECONDS


def test_a_full_medium_is_a_miss(held: Any) -> None:
    one, medium = held(kv_pool())
    medium.faults["prepare_store"] = [StoreOutcome.REJECTED] * 2
    assert one.batch_set_v1(NAMES[:2], rows(0, 1)) == [False, False]
    medium.faults.clear()
    assert one.batch_exists(NAMES) == 0
    assert one.batch_set_v1(NAMES[:2], rows(0, 1)) == [True, True]


def test_a_failing_medium_is_a_miss(held: Any) -> None:
    kv = kv_pool()
    one, medium = held(kv)
    assert all(one.batch_set_v1(NAMES[:2], rows(0, 1)))
    before = _bytes(kv, range(8))
    for call in ("contains", "prepare_load", "load_into", "prepare_store", "delete"):
        medium.faults[call] = OSError(5, "broken")
    assert one.batch_exists(NAMES) == 0
    assert one.batch_get_v1(NAMES[:2], rows(4, 5)) == [False, False]
    assert one.batch_set_v1(NAMES[2:4], rows(2, 3)) == [False, False]
    assert not one.clear()
    assert _bytes(kv, range(8)) == before
    medium.faults.clear()
    assert one.batch_get_v1(NAMES[:2], rows(4, 5)) == [True, True]
    assert one.clear()
    assert not medium.objects


def test_damage_is_a_miss_of_the_damaged_page_only(held: Any) -> None:
    kv = kv_pool()
    one, medium = held(kv)
    assert all(one.batch_set_v1(NAMES[:3], rows(0, 1, 2)))
    (damaged,) = (key for key in medium.objects if key.chunk_hash.hex() == NAMES[1])
    medium.objects[damaged] = flipped(medium.objects[damaged])
    before = content(kv, 5)
    assert one.batch_get_v1(NAMES[:3], rows(4, 5, 6)) == [True, False, True]
    assert content(kv, 5) == before
    assert damaged not in medium.objects
    assert one.batch_set_v1(NAMES[1:2], rows(1)) == [True]
    assert one.batch_get_v1(NAMES[1:2], rows(5)) == [True]
    assert content(kv, 5) == content(kv, 1)


def test_an_evicted_page_is_a_miss_after_a_hit(held: Any) -> None:
    one, medium = held(kv_pool())
    assert all(one.batch_set_v1(NAMES[:3], rows(0, 1, 2)))
    assert one.batch_exists(NAMES) == 3
    for key in [key for key in medium.objects if key.chunk_hash.hex() == NAMES[1]]:
        del medium.objects[key]
    assert one.batch_get_v1(NAMES[:3], rows(4, 5, 6)) == [True, False, True]


@pytest.mark.parametrize("use", ["save", "parts", "lookup", "load", "loaded parts"])
def test_the_end_of_a_prompt_is_evicted_first(tmp_path: Path, make: Any, use: str) -> None:
    """The tier has room for 12 pages of 768 KiB."""
    kv = kv_pool(head_dim=16_384)
    page_bytes = len(content(kv, 0))
    disk = {"name": "nvme", "type": "disk", "path": str(tmp_path / "kv"), "capacity": 12 * (page_bytes + 8192)}
    one = make(settings(tmp_path, staging_bytes="64MiB", backends=[disk]), kv)

    def by_parts(move: Any) -> None:
        for start in range(0, 8, 2):
            before = HiCacheStorageExtraInfo(prefix_keys=NAMES[:start])
            assert all(move(NAMES[start : start + 2], rows(start, start + 1), before))

    if use == "parts":
        by_parts(one.batch_set_v1)
    else:
        assert all(one.batch_set_v1(NAMES, rows(*range(8))))
    if use == "lookup":
        assert one.batch_exists(NAMES) == 8
    elif use == "load":
        assert one.batch_exists(NAMES) == 8
        assert all(one.batch_get_v1(NAMES, rows(*range(8))))
    elif use == "loaded parts":
        by_parts(one.batch_get_v1)
    others = list(map(name, range(100, 108)))
    assert all(one.batch_set_v1(others, rows(*range(8))))
    assert [one.exists(page) for page in NAMES] == [True] * 4 + [False] * 4
    assert one.batch_exists(others) == 8


def test_a_page_that_a_write_policy_declines_fails_nothing(tmp_path: Path, make: Any) -> None:
    tier = {"name": "nvme", "type": "disk", "path": str(tmp_path / "kv"), "write_policy": "second-touch"}
    one = make(settings(tmp_path, backends=[tier]), kv_pool())
    assert one.batch_set_v1(NAMES[:2], rows(0, 1)) == [True, True]
    assert one.batch_exists(NAMES) == 0


def test_a_closed_backend_answers_with_misses(tmp_path: Path, make: Any, caplog: pytest.LogCaptureFixture) -> None:
    kv = kv_pool()
    one = make(settings(tmp_path), kv, mamba=state_pool())
    assert all(one.batch_set_v1(NAMES[:2], rows(0, 1)))
    one.close()
    assert one.batch_exists(NAMES) == 0
    assert one.batch_set_v1(NAMES[:2], rows(0, 1)) == [False, False]
    assert one.batch_get_v1(NAMES[:2], rows(4, 5)) == [False, False]
    state = PoolTransfer(PoolName.MAMBA, torch.tensor([0]), keys=NAMES[:1])
    assert one.batch_exists_v2(NAMES, [state]).kv_hit_pages == 0
    assert one.batch_set_v2([state]) == one.batch_get_v2([state]) == {"mamba": [False]}
    assert not one.clear()
    assert one.get_stats() is None
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]


def test_a_closed_backend_asks_no_medium(held: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    one, _ = held(kv_pool())
    one.close()
    asked: list[Any] = []
    monkeypatch.setattr(one._calls.store, "locate", asked.append)
    monkeypatch.setattr(one._calls.store, "touch", asked.append)
    assert one.batch_exists(NAMES) == 0
    assert one.batch_get_v1(NAMES[:1], rows(0)) == [False]
    assert not asked


def _bytes(pool: Any, pages: Any) -> list[bytes]:
    """Return the bytes of pages, whatever the layout."""
    found = []
    for page in pages:
        addresses, sizes = pool.get_page_buffer_meta(rows(page))
        found.append(b"".join(bytes(memoryview(part)) for part in _parts(addresses, sizes)))
    return found


def _parts(addresses: list[int], sizes: list[int]) -> list[memoryview]:
    return [
        memoryview((ctypes.c_char * size).from_address(address)).cast("B")
        for address, size in zip(addresses, sizes, strict=True)
    ]


def _wipe(pool: Any) -> None:
    pool.kv_buffer.zero_()
