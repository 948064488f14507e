"""The resync: which chunks are checked and repeated, and when."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest

from offload_core.api.keys import ObjectKey
from offload_core.lookup.announcing.announcements import Announcements
from offload_core.lookup.announcing.resync import Resync
from offload_core.planning.chunk_keys import ChunkRef
from offload_core.runtime.io_loop import IoLoop
from tests.support.polling import wait_until

PERIOD = 100.0
NAMESPACES = ("a" * 64, "b" * 64)


class SharedTier:
    """A shared medium that answers, fails, or hangs."""

    name = "disk"
    capabilities = SimpleNamespace(shared=True)
    limits = SimpleNamespace(lookup_timeout_seconds=5.0)

    def __init__(self) -> None:
        self.objects: set[ObjectKey] = set()
        self.asked: list[int] = []
        self.fails = False
        self.hangs: Future[None] | None = None

    async def check(self, keys: Sequence[ObjectKey]) -> list[bool] | None:
        self.asked.append(len(keys))
        if self.hangs is not None:
            await asyncio.wrap_future(self.hangs)
        return None if self.fails else [key in self.objects for key in keys]


class Rig:
    """A resync over one tier, with a clock of its own."""

    def __init__(self, io: IoLoop, chunks: int, shared: bool = True) -> None:
        self.tier = SharedTier()
        self.tier.capabilities = SimpleNamespace(shared=shared)
        self.now = 0.0
        self.announcements: Announcements[None] = Announcements({"disk": "STORAGE"}, len(NAMESPACES), 1 << 30)
        self.refs = [ChunkRef("full", number.to_bytes(2, "big")) for number in range(chunks)]
        for ref in self.refs:
            self.announcements.describe(ref, None, 0)
            for rank in range(len(NAMESPACES)):
                self.announcements.changed("disk", ref, rank, present=True)
            self.tier.objects.update(self.keys(ref))
        self.announcements.take(chunks)
        tier: Any = self.tier
        self.resync = Resync(io, [tier], self.announcements, self.keys, PERIOD, lambda: self.now)

    def keys(self, ref: ChunkRef) -> list[ObjectKey]:
        return [ObjectKey(namespace, ref.pack, ref.chunk_hash) for namespace in NAMESPACES]

    def steps_until_idle(self) -> list[tuple[bytes, bool, bool]]:
        """Make steps, spread over the period, until the resync has ended; return its announcements."""
        found: list[tuple[bytes, bool, bool]] = []
        end = self.now + PERIOD / 2

        def ended() -> bool:
            self.now = min(self.now + 1.0, end)
            self.resync.step()
            found.extend((one.chunk.chunk_hash, one.present, one.again) for one in self.announcements.take(50))
            return self.now >= end and not self.resync._checks and not self.resync._left

        wait_until(ended, "the resync did not end")
        return found


@pytest.fixture
def io() -> Iterator[IoLoop]:
    loop = IoLoop.acquire()
    yield loop
    loop.release()


def test_all_chunks_are_checked_and_repeated_once_per_period(io: IoLoop) -> None:
    rig = Rig(io, 150)
    assert rig.steps_until_idle() == []
    rig.now = PERIOD
    found = rig.steps_until_idle()
    assert sorted(found) == [(ref.chunk_hash, True, True) for ref in rig.refs]
    assert rig.tier.asked == [128, 128, 44]
    assert rig.steps_until_idle() == [], "the next one begins a period later"


def test_a_resync_finds_the_objects_that_others_removed_or_stored(io: IoLoop) -> None:
    rig = Rig(io, 4)
    gone, half_gone = rig.refs[0], rig.refs[1]
    rig.tier.objects -= {*rig.keys(gone), rig.keys(half_gone)[1]}
    rig.now = PERIOD
    found = rig.steps_until_idle()
    assert sorted(found) == [
        (ref.chunk_hash, ref not in (gone, half_gone), ref not in (gone, half_gone)) for ref in rig.refs
    ]
    rig.tier.objects.update(rig.keys(gone))
    rig.now = 2 * PERIOD
    assert (gone.chunk_hash, True, False) in rig.steps_until_idle()


def test_a_tier_that_fails_or_hangs_changes_nothing(io: IoLoop) -> None:
    rig = Rig(io, 3)
    rig.tier.objects.clear()
    rig.tier.fails = True
    rig.now = PERIOD
    assert sorted(rig.steps_until_idle()) == [(ref.chunk_hash, True, True) for ref in rig.refs]
    rig.tier.fails, rig.tier.hangs = False, Future()
    rig.now = 2 * PERIOD
    assert sorted(rig.steps_until_idle()) == [(ref.chunk_hash, True, True) for ref in rig.refs]
    rig.tier.hangs.set_result(None)


def test_a_medium_of_this_engine_alone_is_not_asked(io: IoLoop) -> None:
    rig = Rig(io, 3, shared=False)
    rig.tier.objects.clear()
    rig.now = PERIOD
    assert sorted(rig.steps_until_idle()) == [(ref.chunk_hash, True, True) for ref in rig.refs]
    assert rig.tier.asked == []


def test_after_a_reset_no_answer_counts(io: IoLoop) -> None:
    rig = Rig(io, 2)
    rig.now = PERIOD
    rig.resync.step()
    rig.announcements.forget_all()
    rig.resync.forget()
    assert sorted(rig.steps_until_idle()) == [(ref.chunk_hash, False, False) for ref in rig.refs]
    assert len(rig.announcements) == 0
