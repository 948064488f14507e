"""What tests do with a transfer engine whose tier ``files`` is on a file system that hangs, and what must hold then."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from offload_core.transfer.loads import LoadResult
from tests.support.memory_backend import key
from tests.support.transfer_rig import PACK, SECONDS, Rig, item

DEADLINE_SECONDS = 0.3
STORE_DEADLINE_SECONDS = 2.0
"""Enough for stores that do not hang, on a busy machine too."""
SLACK_SECONDS = 5.0
"""A busy machine's; what hangs here hangs until the test lets it go."""

KEYS = tuple(key(number, PACK) for number in range(4))
"""Of the objects that :func:`fill` stores."""


@contextmanager
def short_load_deadline(rig: Rig) -> Iterator[None]:
    """Loads from ``files`` that begin in the block have a deadline that a busy machine can miss."""
    (tier,) = (one for one in rig.tiers if one.name == "files")
    usual = tier.limits
    tier.limits = usual.model_copy(update={"load_timeout_seconds": DEADLINE_SECONDS})
    yield
    tier.limits = usual


def fill(rig: Rig) -> None:
    """Start the rig and store objects 0 to 3 from blocks 0 to 3."""
    rig.start()
    assert rig.store_all(*(item(number, block=number) for number in range(4))) == dict.fromkeys(range(4), True)


def load_four(rig: Rig, tier: str = "files") -> LoadResult:
    """Load objects 0 to 3 into blocks 8 to 11; return how it ended."""
    rig.load(*(item(number, block=8 + number) for number in range(4)), tier=tier)
    return rig.result()


def is_well(rig: Rig) -> None:
    """The tier loads what it had, stores and loads what is new, byte for byte.

    Not at once, if the tier is not trusted yet.
    """
    expected = rig.kv_cache.clone()
    expected[8:12] = rig.kv_cache[0:4]
    rig.kv_cache[8:12] = 0
    until(lambda: load_four(rig).status == "loaded", "no load succeeds")
    assert torch.equal(rig.kv_cache, expected)
    until(lambda: rig.store_all(item(99, block=0)) == {99: True}, "no store succeeds")
    rig.kv_cache[9] = 0
    rig.load(item(99, block=9), tier="files")
    assert rig.result().status == "loaded"
    assert torch.equal(rig.kv_cache[9], rig.kv_cache[0])
    rig.all_leases_are_back()


def keeps_serving(rig: Rig, tier: str) -> None:
    """The tier serves objects 0 to 3 again and again, byte for byte."""
    expected = rig.kv_cache.clone()
    expected[8:12] = rig.kv_cache[0:4]
    for _ in range(20):
        rig.kv_cache[8:12] = 0
        assert load_four(rig, tier).status == "loaded"
        assert torch.equal(rig.kv_cache, expected)


def until(succeeds: Callable[[], bool], problem: str) -> None:
    """Try again and again."""
    limit = time.monotonic() + SECONDS
    while not succeeds():
        assert time.monotonic() < limit, problem


@contextmanager
def in_time() -> Iterator[None]:
    """What is in the block ends at its deadline, and not when the test lets the file system go."""
    started = time.monotonic()
    yield
    assert time.monotonic() - started < STORE_DEADLINE_SECONDS + SLACK_SECONDS


@contextmanager
def cache_untouched(rig: Rig) -> Iterator[None]:
    """Nothing writes to the KV cache in the block."""
    before = rig.kv_cache.clone()
    yield
    assert torch.equal(rig.kv_cache, before)
