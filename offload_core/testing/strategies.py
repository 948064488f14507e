"""Hypothesis strategies for keys, bytes and batches, biased towards the mistakes of backends."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any, NamedTuple, TypeVar

from hypothesis import strategies as st

from offload_core.api.keys import ObjectKey

T = TypeVar("T")

NAMESPACES = ("ab" * 32, "ab" * 31 + "ac", "0" * 64)
"""Two namespaces that differ in their last digit, and one that looks like a number."""
PACKS = ("full-u16", "full-u160", "full", "0", "a" * 64)
"""Pack names; some are prefixes of others, and one has the greatest length."""

PAGE_BYTES = 4096
SIZES_BYTES = (0, 1, 17, PAGE_BYTES - 1, PAGE_BYTES, PAGE_BYTES + 1, 3 * PAGE_BYTES + 5)
"""Sizes: none, odd ones, and sizes around a page, where media change their behaviour."""

_STEM = bytes(range(1, 17))
_NEAR_HASHES = (
    b"\0",
    b"\0" * 2,
    b"\0" * 32,
    b"\0" * 64,
    b"\xff" * 32,
    _STEM,
    _STEM[:-1],
    _STEM + b"\0",
    _STEM * 2,
    _STEM * 2 + b"\0",
    _STEM * 4,
    _STEM * 3 + _STEM[:-1] + b"\xff",
    b"a" * 32,
    b"A" * 32,
    b"../../etc/passwd",
    b"con.txt\n",
)
"""Hashes that are prefixes of one another, long runs, and bytes that are dangerous as file names."""


class Content(NamedTuple):
    """The bytes of an object in a form that is short to print: ``size_bytes`` random bytes from the seed ``tint``."""

    size_bytes: int
    tint: int = 0

    def data(self) -> bytes:
        """Return the bytes; two tints of one size differ almost everywhere, so that a mixture is seen."""
        return random.Random(f"{self.size_bytes}/{self.tint}").randbytes(self.size_bytes)

    def __repr__(self) -> str:
        return f"Content({self.size_bytes}, {self.tint})"


def near_hashes() -> st.SearchStrategy[bytes]:
    """Chunk hashes that are easily confused with one another."""
    return st.sampled_from(_NEAR_HASHES)


def hashes() -> st.SearchStrategy[bytes]:
    """Chunk hashes of 1 to 64 bytes: mostly easily confused ones, else any."""
    return near_hashes() | near_hashes() | st.binary(min_size=1, max_size=64)


def keys(
    namespaces: Sequence[str] = NAMESPACES,
    packs: Sequence[str] = PACKS,
    chunk_hashes: st.SearchStrategy[bytes] | None = None,
) -> st.SearchStrategy[ObjectKey]:
    """Keys that are easily confused: the same hash in another pack, the same pack in another namespace.

    Args:
        namespaces: the namespaces, 64 hexadecimal digits each; use your own to keep runs on one medium apart.
        packs: the pack names, 1 to 64 characters of ``[a-z0-9-]``.
        chunk_hashes: the strategy for hashes; by default :func:`hashes`.
    """
    chunk_hashes = hashes() if chunk_hashes is None else chunk_hashes
    return st.builds(ObjectKey, st.sampled_from(namespaces), st.sampled_from(packs), chunk_hashes)


def contents(sizes_bytes: Sequence[int] = SIZES_BYTES, tints: int = 3) -> st.SearchStrategy[Content]:
    """Contents of the given sizes; there are so few that equal ones come up."""
    return st.builds(Content, st.sampled_from(sizes_bytes), st.integers(0, tints - 1))


def payloads(sizes_bytes: Sequence[int] = SIZES_BYTES) -> st.SearchStrategy[bytes]:
    """Bytes of objects: empty, one byte, odd sizes, a page and one byte more or less, several pages."""
    return contents(sizes_bytes).map(Content.data)


@st.composite
def buffers(draw: st.DrawFn, sizes_bytes: Sequence[int] = SIZES_BYTES) -> memoryview:
    """Writable buffers of the given sizes, at any alignment within 64 bytes (C17), filled with a non-zero byte."""
    size = draw(st.sampled_from(sizes_bytes))
    offset = draw(st.integers(0, 63))
    return memoryview(bytearray(b"\xa5" * (offset + size + 64)))[offset : offset + size]


def batches(elements: st.SearchStrategy[T], max_size: int = 6) -> st.SearchStrategy[list[T]]:
    """Batches as the core sends them, and unusual ones: empty, of one element, with repeats side by side or apart."""
    plain = st.lists(elements, max_size=max_size)
    return plain | plain.flatmap(_with_repeats)


def _with_repeats(batch: list[T]) -> st.SearchStrategy[list[Any]]:
    return st.lists(st.sampled_from(batch), max_size=2 * len(batch)) if batch else st.just([])
