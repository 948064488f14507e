"""Beliefs about chunks: no chunk is copied twice, no bad hit is offered again."""

from __future__ import annotations

import math
import time

import pytest

from offload_core.lookup.chunk_ledger import ChunkLedger
from offload_core.planning.chunk_keys import ChunkRef

MAX_PENDING_SECONDS = 30.0
NEVER = math.inf


def ref(number: int) -> ChunkRef:
    return ChunkRef("full-u16", number.to_bytes(4, "big"))


@pytest.fixture
def ledger() -> ChunkLedger:
    return ChunkLedger(num_ranks=2, max_pending_seconds=MAX_PENDING_SECONDS)


def test_a_chunk_is_pending_until_every_rank_has_ended_its_store(ledger: ChunkLedger) -> None:
    ledger.store_started(ref(1))
    assert ledger.is_present(ref(1))
    assert ledger.any_arriving([ref(0), ref(1)], NEVER)
    ledger.stores_ended({ref(1): 1}, ())
    assert ledger.any_arriving([ref(1)], NEVER)
    ledger.stores_ended({ref(1): 1}, ())
    assert not ledger.any_arriving([ref(1)], NEVER)
    assert ledger.is_present(ref(1))


def test_a_chunk_that_was_stored_since_a_lookup_began_is_worth_another_lookup(ledger: ChunkLedger) -> None:
    ledger.store_started(ref(1))
    before = time.monotonic()
    ledger.stores_ended({ref(1): 2}, ())
    assert ledger.any_arriving([ref(1)], before)
    assert not ledger.any_arriving([ref(1)], time.monotonic())


def test_a_store_that_takes_too_long_is_pending_no_longer() -> None:
    ledger = ChunkLedger(num_ranks=1, max_pending_seconds=0.0)
    ledger.store_started(ref(1))
    assert not ledger.any_arriving([ref(1)], NEVER)
    assert ledger.is_present(ref(1))


def test_a_chunk_that_some_rank_did_not_store_is_to_be_stored_again(ledger: ChunkLedger) -> None:
    ledger.store_started(ref(1))
    ledger.stores_ended({ref(1): 2}, {ref(1)})
    assert not ledger.is_present(ref(1))


def test_a_chunk_that_a_load_did_not_get_is_excluded_until_it_is_stored_again(ledger: ChunkLedger) -> None:
    ledger.loaded([ref(1), ref(2)])
    ledger.load_failed({("fast", ref(1)), ("slow", ref(1)), ("fast", ref(3))})
    assert ledger.excluded == {("fast", ref(1)), ("slow", ref(1)), ("fast", ref(3))}
    assert not ledger.is_present(ref(1))
    assert ledger.is_present(ref(2))
    ledger.store_started(ref(1))
    ledger.stores_ended({ref(1): 1}, ())
    assert ("slow", ref(1)) in ledger.excluded, "one of two ranks has stored its part"
    ledger.stores_ended({ref(1): 1}, ())
    assert ledger.excluded == {("fast", ref(3))}


def test_a_chunk_that_a_lookup_misses_is_forgotten_unless_it_is_on_its_way(ledger: ChunkLedger) -> None:
    ledger.loaded([ref(1)])
    ledger.store_started(ref(2))
    assert not ledger.not_found([ref(2), ref(3)])
    assert ledger.not_found([ref(1), ref(2)])
    assert not ledger.is_present(ref(1))
    assert ledger.is_present(ref(2))


def test_memory_is_bounded_and_forgets_what_was_not_asked_for_longest(
    ledger: ChunkLedger, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("offload_core.lookup.chunk_ledger._MAX_PRESENT_CHUNKS", 3)
    ledger.loaded([ref(1), ref(2), ref(3)])
    assert ledger.is_present(ref(1))
    ledger.loaded([ref(4)])
    assert [ledger.is_present(ref(number)) for number in (1, 2, 3, 4)] == [True, False, True, True]


def test_clear_forgets_everything(ledger: ChunkLedger) -> None:
    ledger.store_started(ref(1))
    ledger.load_failed({("fast", ref(2))})
    ledger.clear()
    assert not ledger.is_present(ref(1))
    assert not ledger.any_arriving([ref(1)], NEVER)
    assert not ledger.excluded


def test_a_chunk_is_absent_from_a_failed_store_until_the_next_one(ledger: ChunkLedger) -> None:
    assert not ledger.is_absent(ref(1)), "nothing is known"
    ledger.store_started(ref(1))
    ledger.stores_ended({ref(1): 1}, {ref(1)})
    assert ledger.is_absent(ref(1))
    ledger.store_started(ref(1))
    assert not ledger.is_absent(ref(1))
    ledger.stores_ended({ref(1): 2}, {ref(1)})
    ledger.loaded([ref(1)])
    assert not ledger.is_absent(ref(1)), "another engine has stored it"
