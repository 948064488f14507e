"""Lookups on a remote tier from the scheduler half: what it knows it does not ask, and a failed load corrects it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from offload_core.api.keys import ObjectKey
from offload_core.planning.chunk_keys import ChunkRef
from offload_core.vllm.metadata import StepReport
from tests.support.memory_backend import MemoryBackend
from tests.vllm.test_scheduler_half import BLOCK, Half, request

TOKENS = 40 * BLOCK


def _make_remote(backend: MemoryBackend) -> None:
    backend.medium = "remote"


class RemoteHalf(Half):
    """A scheduler half over one remote tier."""

    def __init__(self) -> None:
        super().__init__(_make_remote)

    def lookups(self) -> int:
        """The number of questions to the medium until now."""
        return self.backend.calls.count("contains")

    def end_load(self, item: Any, *, missing: bool) -> None:
        """End the request's load, with all of its chunks or with none."""
        (load,) = self.step().loads
        failed = {("memory", chunk.chunk) for chunk in load.chunks} if missing else set()
        name = item.request_id
        self.half.take_output(
            set(), set(), StepReport(failed_chunks=failed, failed_requests={name} if missing else set())
        )
        self.step()
        self.half.take_output({name}, {name} if missing else set(), None)


@pytest.fixture
def half() -> Iterator[RemoteHalf]:
    made = RemoteHalf()
    yield made
    made.half.shutdown()


def test_what_this_process_has_stored_is_offered_without_a_question(half: RemoteHalf) -> None:
    half.follow(request("a", TOKENS))
    half.store(a=TOKENS)
    assert half.matched(half.follow(request("b", TOKENS))) == TOKENS - BLOCK
    assert half.lookups() == 0


def test_what_this_process_has_loaded_is_offered_without_a_question(half: RemoteHalf) -> None:
    item = half.follow(request("a", TOKENS))
    (namespace,) = half.half._ranks_namespaces("")
    half.backend.objects.update({ObjectKey(namespace, "full-u16", digest): b"" for digest in item.block_hashes})
    half.load(item, half.matched(item))
    half.end_load(item, missing=False)
    asked = half.lookups()
    assert asked > 0
    assert half.matched(half.follow(request("b", TOKENS // 2))) == TOKENS // 2 - BLOCK
    assert half.lookups() == asked


def test_after_a_failed_load_the_tier_is_asked_again(half: RemoteHalf) -> None:
    half.follow(request("a", TOKENS))
    half.store(a=TOKENS)
    half.backend.objects.clear()  # another host evicts them
    item = half.follow(request("b", TOKENS))
    half.load(item, half.matched(item))
    half.end_load(item, missing=True)
    half.half._ledger.stores_ended({ChunkRef("full-u16", digest): 1 for digest in item.block_hashes}, set())
    assert half.matched(half.follow(request("c", TOKENS))) == 0, "excluded no longer, and not there"
    assert half.lookups() > 0


def test_a_store_that_ends_after_a_reset_is_not_known(half: RemoteHalf) -> None:
    half.follow(request("a", TOKENS))
    stores = half.step(a=TOKENS).stores
    half.half.reset()
    half.report([item.chunk for item in stores])
    assert half.matched(half.follow(request("b", TOKENS))) == 0
    assert half.lookups() > 0


def test_nothing_is_known_after_a_reset(half: RemoteHalf) -> None:
    half.follow(request("a", TOKENS))
    half.store(a=TOKENS)
    half.half.reset()
    assert half.matched(half.follow(request("b", TOKENS))) == 0
    assert half.lookups() > 0
