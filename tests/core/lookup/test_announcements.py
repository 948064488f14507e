"""Announcements against an oracle: a reader of every announcement sees what the tiers have, also after a gap."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from offload_core.lookup.announcing.announcements import Announcement, Announcements
from offload_core.planning.chunk_keys import ChunkRef

PLACES = {"ram": "CPU", "disk": "STORAGE", "share": "STORAGE"}
RANKS = 2
MANY = 1 << 30
CHUNKS = [ChunkRef("full", bytes([number])) for number in range(6)]

Seen = set[tuple[str, ChunkRef]]


class Reader:
    """A subscriber that counts stores, and fails if a count leaves 0 and 1."""

    def __init__(self) -> None:
        self.counts: dict[tuple[str, ChunkRef], int] = {}

    def read(self, batch: Sequence[Announcement[str]]) -> None:
        """Apply a batch as events come: removals first."""
        for one in batch:
            if one.again or not one.present:
                self.counts.pop((one.place, one.chunk), None)
        for one in batch:
            if one.present:
                assert (one.place, one.chunk) not in self.counts, "stored twice"
                self.counts[one.place, one.chunk] = 1

    @property
    def seen(self) -> Seen:
        return set(self.counts)


class Oracle:
    """The parts that each tier has of each chunk, as reported; nothing is known of chunks before their description."""

    def __init__(self) -> None:
        self.parts: set[tuple[str, ChunkRef, int]] = set()

    @property
    def present(self) -> Seen:
        return {
            (place, ref)
            for tier, place in PLACES.items()
            for ref in CHUNKS
            if all((tier, ref, rank) in self.parts for rank in range(RANKS))
        }


changes = st.tuples(st.sampled_from([*PLACES]), st.sampled_from(CHUNKS), st.integers(0, RANKS - 1), st.booleans())
steps: st.SearchStrategy[tuple[str, Any]] = st.one_of(
    st.tuples(st.just("change"), changes),
    st.tuples(st.just("check"), changes),
    st.tuples(st.just("take"), st.integers(0, 4)),
    st.tuples(st.just("repeat"), st.just(None)),
    st.tuples(st.just("reset"), st.just(None)),
)


def _described(announcements: Announcements[str]) -> None:
    for ref in CHUNKS:
        announcements.describe(ref, f"about {ref.chunk_hash.hex()}", 100)


@given(st.lists(steps, max_size=60), st.integers(0, 60))
def test_every_reader_ends_with_the_exact_content_after_one_resync(script: list[tuple[str, Any]], gap: int) -> None:
    announcements: Announcements[str] = Announcements(PLACES, RANKS, MANY)
    _described(announcements)
    oracle, faithful, late = Oracle(), Reader(), Reader()
    for number, (kind, value) in enumerate(script):
        if kind in ("change", "check"):
            tier, ref, rank, present = value
            (oracle.parts.add if present else oracle.parts.discard)((tier, ref, rank))
            if kind == "change":
                announcements.changed(tier, ref, rank, present)
            else:
                flags = [(tier, ref, one) in oracle.parts for one in range(RANKS)]
                announcements.checked(tier, ref, announcements.version(ref), flags)
        elif kind == "reset":
            oracle.parts.clear()
            announcements.forget_all()
            _described(announcements)
        elif kind == "repeat":
            announcements.repeat(announcements.chunks())
        else:
            assert isinstance(value, int)
            batch = announcements.take(value)
            assert len(batch) <= value
            faithful.read(batch)
            if number >= gap:
                late.read(batch)

    announcements.repeat(announcements.chunks())
    while batch := announcements.take(3):
        faithful.read(batch)
        late.read(batch)
    assert faithful.seen == oracle.present
    assert late.seen == oracle.present, "a reader that began anywhere, from nothing"
    assert not announcements.has_news
    assert not announcements.has_repeats


@given(st.lists(st.tuples(st.integers(0, 40), st.booleans(), st.integers(0, 3)), max_size=80))
def test_beyond_the_limit_readers_see_less_and_never_more(script: list[tuple[int, bool, int]]) -> None:
    announcements: Announcements[str] = Announcements({"ram": "CPU"}, 1, 8 * 700)
    present: Seen = set()
    reader = Reader()
    for number, stored, taken in script:
        ref = ChunkRef("full", bytes([number]))
        announcements.describe(ref, "", 100)
        (present.add if stored else present.discard)(("CPU", ref))
        announcements.changed("ram", ref, 0, stored)
        reader.read(announcements.take(taken))
        assert len(announcements) <= 8
        assert announcements.nbytes <= 8 * 700
    while batch := announcements.take(5):
        reader.read(batch)
    assert reader.seen <= present
    recent = list(dict.fromkeys(number for number, _, _ in reversed(script)))[:1]
    latest = {("CPU", ChunkRef("full", bytes([number]))) for number in recent} & present
    assert latest <= reader.seen or len(script) > 8, "nothing is forgotten below the limit"
    announcements.forget_all()
    while batch := announcements.take(5):
        reader.read(batch)
    assert reader.seen == set()
    assert (len(announcements), announcements.nbytes) == (0, 0)


@pytest.fixture
def one_tier() -> Announcements[str]:
    announcements: Announcements[str] = Announcements({"ram": "CPU"}, 1, MANY)
    announcements.describe(CHUNKS[0], "about 0", 1)
    return announcements


def test_a_chunk_that_came_and_went_is_never_announced(one_tier: Announcements[str]) -> None:
    had_news = []
    for present in (True, False):
        one_tier.changed("ram", CHUNKS[0], 0, present=present)
        had_news.append(one_tier.has_news)
    assert had_news == [True, False]
    assert one_tier.take(9) == []


def test_an_answer_that_is_older_than_a_change_does_not_count(one_tier: Announcements[str]) -> None:
    asked = one_tier.version(CHUNKS[0])
    one_tier.changed("ram", CHUNKS[0], 0, present=True)
    one_tier.checked("ram", CHUNKS[0], asked, [False])
    assert one_tier.take(9) == [Announcement("CPU", CHUNKS[0], "about 0", True)]
    one_tier.checked("ram", CHUNKS[0], one_tier.version(CHUNKS[0]), [False])
    assert one_tier.take(9) == [Announcement("CPU", CHUNKS[0], "about 0", False)]


def test_chunks_without_a_description_do_not_count(one_tier: Announcements[str]) -> None:
    one_tier.changed("ram", CHUNKS[1], 0, present=True)
    one_tier.checked("ram", CHUNKS[1], None, [True])
    one_tier.repeat([CHUNKS[1]])
    assert one_tier.take(9) == []


def test_nothing_is_repeated_twice_in_one_batch(one_tier: Announcements[str]) -> None:
    one_tier.changed("ram", CHUNKS[0], 0, present=True)
    one_tier.repeat(CHUNKS)
    one_tier.take(9)
    one_tier.repeat([CHUNKS[0], CHUNKS[0]])
    assert one_tier.take(9) == [Announcement("CPU", CHUNKS[0], "about 0", True, again=True)]


def test_no_chunk_is_described_while_readers_have_not_heard_of_removals() -> None:
    announcements: Announcements[str] = Announcements({"ram": "CPU"}, 1, 2 * 700)
    for ref in CHUNKS[:2]:
        announcements.describe(ref, "", 100)
        announcements.changed("ram", ref, 0, present=True)
    announcements.take(9)
    announcements.describe(CHUNKS[2], "", 100)
    assert not announcements.use(CHUNKS[2])
    assert announcements.nbytes == 2 * 700
    announcements.take(9)
    announcements.describe(CHUNKS[2], "", 100)
    assert announcements.use(CHUNKS[2])
