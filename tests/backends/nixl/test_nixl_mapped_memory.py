"""The child maps the pages of a shared memory before it writes files from them."""

from __future__ import annotations

import mmap
import os
import re
from pathlib import Path

import pytest
from offload_backend_nixl.child.mapped_memory import MappedMemory

MIB = 1024**2
NBYTES = 4 * MIB + mmap.PAGESIZE


@pytest.fixture
def mapping() -> mmap.mmap:
    """A file in memory that another mapping has filled, as the parent does."""
    descriptor = os.memfd_create("mapped-memory-of-a-test")
    os.truncate(descriptor, NBYTES)
    with mmap.mmap(descriptor, NBYTES) as other:
        other.write(b"\1" * NBYTES)
    mapping = mmap.mmap(descriptor, NBYTES)
    os.close(descriptor)
    return mapping


def mapped_bytes() -> int:
    """Return the bytes of the file whose pages are in this process's page table."""
    smaps = Path("/proc/self/smaps").read_text()
    (part,) = re.findall(r"mapped-memory-of-a-test.*?Rss:\s+(\d+) kB", smaps, re.DOTALL)
    return int(part) * 1024


def test_a_part_is_mapped_whole_and_only_it(mapping: mmap.mmap) -> None:
    memory = MappedMemory(mapping)
    assert mapped_bytes() == 0
    memory.touch(MIB - 5, 10)
    assert 2 * mmap.PAGESIZE <= mapped_bytes() <= MIB // 2
    memory.touch(MIB, 2 * MIB)
    assert 2 * MIB <= mapped_bytes() <= 5 * MIB // 2
    memory.touch(0, NBYTES)
    assert mapped_bytes() == NBYTES


@pytest.mark.parametrize(("start", "nbytes"), [(0, 0), (MIB, -48), (NBYTES, 1), (0, 2**60), (2**60, 5)])
def test_an_odd_part_does_no_harm(mapping: mmap.mmap, start: int, nbytes: int) -> None:
    memory = MappedMemory(mapping)
    memory.touch(start, nbytes)
    memory.touch(0, NBYTES)
    assert mapped_bytes() == NBYTES


def test_a_mapped_part_is_not_read_again(mapping: mmap.mmap) -> None:
    memory = MappedMemory(mapping)
    memory.touch(0, 2 * MIB)
    mapping.madvise(mmap.MADV_DONTNEED)  # another read would map the pages again
    memory.touch(MIB, MIB)
    assert mapped_bytes() == 0
