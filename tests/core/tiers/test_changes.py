"""The queue of a tier's changes: order, shared media, and evictions that overtake the end of a store."""

from __future__ import annotations

import time

from offload_core.api.keys import ObjectKey
from offload_core.tiers import changes as module
from offload_core.tiers.changes import TierChanges

KEYS = [ObjectKey("a" * 64, "full", bytes([number])) for number in range(5)]


def taken(changes: TierChanges) -> list[tuple[int, bool]]:
    return [(change.key.chunk_hash[0], change.present) for change in changes.take()]


def test_an_eviction_that_overtakes_the_end_of_the_store_wins() -> None:
    changes = TierChanges("ram", shared=False)
    began = time.monotonic()
    changes.evicted([KEYS[0]])
    changes.stored(KEYS[:2], since=began)
    assert taken(changes) == [(0, False), (1, True)]
    changes.stored([KEYS[0]], since=time.monotonic())
    assert taken(changes) == [(0, True)], "a later store counts"


def test_changes_of_a_shared_medium_are_kept_on_request_only() -> None:
    changes = TierChanges("disk", shared=True)
    changes.stored(KEYS, since=0.0)
    assert taken(changes) == []
    changes.keep()
    changes.stored(KEYS[:1], since=0.0)
    changes.found(KEYS[1:2])
    changes.evicted(KEYS[3:4], by_others=True)
    assert taken(changes) == [(0, True), (1, True), (3, False)]
    changes.lost()
    assert taken(changes) == []


def test_an_unshared_medium_ignores_evictions_of_objects_that_it_never_had() -> None:
    changes = TierChanges("ram", shared=False)
    changes.keep()
    changes.stored(KEYS[:2], since=0.0)
    changes.found(KEYS[2:3])
    changes.evicted([KEYS[0], KEYS[4]], by_others=True)
    assert taken(changes) == [(0, True), (1, True), (0, False)]


def test_changes_of_a_shared_medium_that_nobody_takes_are_bounded() -> None:
    changes = TierChanges("disk", shared=True)
    changes.keep()
    for _ in range(module._MAX_SHARED_CHANGES // len(KEYS) + 1):
        changes.stored(KEYS, since=0.0)
    assert len(taken(changes)) == module._MAX_SHARED_CHANGES
