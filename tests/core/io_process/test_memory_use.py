"""The use of shared memory by another process ends with its last mapping and its last descriptor."""

from __future__ import annotations

import mmap
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing

import pytest

from offload_core.api.memory.shared_memory import SharedMemory
from offload_core.io_process.life.memory_use import MemoryUse

NBYTES = 8192
_MAPS_UNTIL_TOLD = """
import mmap, os, sys
descriptor = int(sys.argv[1])
memory = mmap.mmap(descriptor, 0)
os.close(descriptor)
print("mapped", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def memory() -> Iterator[SharedMemory]:
    with closing(SharedMemory.create("test", NBYTES)) as memory:
        yield memory


def test_it_lasts_as_long_as_a_mapping(memory: SharedMemory) -> None:
    use = MemoryUse(memory)
    mapping = mmap.mmap(use.descriptor, NBYTES)
    use.sent()
    assert not use.has_ended()
    mapping.close()
    assert use.has_ended()


def test_it_lasts_as_long_as_a_descriptor(memory: SharedMemory) -> None:
    use = MemoryUse(memory)
    other = os.dup(use.descriptor)
    use.sent()
    assert not use.has_ended()
    os.close(other)
    assert use.has_ended()


def test_uses_are_told_apart(memory: SharedMemory) -> None:
    first, second = MemoryUse(memory), MemoryUse(memory)
    first.sent()
    assert (first.has_ended(), second.has_ended()) == (True, False)
    second.sent()
    assert second.has_ended()


def test_a_process_that_got_the_memory_from_the_other_one_counts(memory: SharedMemory) -> None:
    use = MemoryUse(memory)
    process = subprocess.Popen(
        [sys.executable, "-c", _MAPS_UNTIL_TOLD, str(use.descriptor)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        pass_fds=[use.descriptor],
    )
    assert process.stdout is not None
    assert process.stdout.readline() == b"mapped\n"
    use.sent()
    assert not use.has_ended()
    process.communicate()
    assert use.has_ended()


def test_it_has_ended_if_the_memory_is_closed_here(memory: SharedMemory) -> None:
    use = MemoryUse(memory)
    use.sent()
    memory.close()
    assert use.has_ended()
