"""Memory files that several processes map: none of them can end another by it, and nothing is left behind."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import numpy as np
import pytest

from offload_core.api.memory.shared_memory import SharedMemory


@contextmanager
def memory_file(flags: int = os.MFD_ALLOW_SEALING, nbytes: int = 4096, seals: int = 0) -> Iterator[int]:
    descriptor = os.memfd_create("test", flags)
    try:
        os.ftruncate(descriptor, nbytes)
        if seals:
            fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, seals)
        yield descriptor
    finally:
        os.close(descriptor)


def mappings(name: str) -> int:
    """Return how often this process maps the memory file of this name."""
    return sum(f"/memfd:{name} " in line for line in Path("/proc/self/maps").read_text().splitlines())


def descriptors(name: str) -> int:
    """Return how many descriptors of this process are of the memory file of this name."""
    links = (str(link.readlink()) for link in Path("/proc/self/fd").iterdir() if link.is_symlink())
    return sum(link.startswith(f"/memfd:{name} ") for link in links)


def test_a_buffer_leads_to_its_memory() -> None:
    with closing(SharedMemory.create("first", 8192)) as first, closing(SharedMemory.create("second", 8192)) as second:
        for memory in (first, second):
            assert SharedMemory.of(memory.view) == (memory, 0)
            assert SharedMemory.of(memory.view[100:200].toreadonly()) == (memory, 100)
            assert SharedMemory.of(memory.view[-1:]) == (memory, 8191)
        assert SharedMemory.of(memoryview(bytearray(10))) is None
        assert SharedMemory.of(first.view[5:5]) is None, "it has no address"


def test_a_buffer_in_closed_memory_leads_nowhere() -> None:
    memory = SharedMemory.create("closed", 4096)
    view = memory.view
    memory.close()
    assert SharedMemory.of(view) is None, "its descriptor is closed"


def test_both_mappings_of_a_file_are_the_same_memory() -> None:
    with (
        closing(SharedMemory.create("same", 5000)) as first,
        closing(SharedMemory.from_descriptor(os.dup(first.descriptor))) as second,
    ):
        assert (first.nbytes, second.nbytes) == (5000, 5000)
        assert bytes(second.view) == bytes(5000)
        first.view[4990:4995] = b"hello"
        assert bytes(second.view[4990:4995]) == b"hello"
        second.view[0] = 7
        assert first.view[0] == 7


CHILD = """
import sys
from offload_core.api.memory.shared_memory import SharedMemory
memory = SharedMemory.from_descriptor(int(sys.argv[1]))
memory.view[:5] = bytes(reversed(memory.view[:5]))
"""


def test_another_process_sees_and_changes_it() -> None:
    with closing(SharedMemory.create("other", 4096)) as memory:
        memory.view[:5] = b"olleh"
        command = [sys.executable, "-c", CHILD, str(memory.descriptor)]
        subprocess.run(command, pass_fds=[memory.descriptor], check=True, timeout=60)
        assert bytes(memory.view[:5]) == b"hello"


def test_no_user_can_resize_it() -> None:
    with closing(SharedMemory.create("fixed", 8192)) as memory:
        for nbytes in (0, 4096, 8191, 8193, 1 << 20):
            with pytest.raises(PermissionError):
                os.ftruncate(memory.descriptor, nbytes)
        with pytest.raises(PermissionError):
            os.posix_fallocate(memory.descriptor, 8192, 4096)
        assert memory.view[8191] == 0


def test_no_user_can_add_a_seal() -> None:
    with closing(SharedMemory.create("sealed", 4096)) as memory, pytest.raises(PermissionError):
        fcntl.fcntl(memory.descriptor, fcntl.F_ADD_SEALS, 16)  # F_SEAL_FUTURE_WRITE


@pytest.mark.parametrize("nbytes", [0, -1])
def test_a_size_must_be_positive(nbytes: int) -> None:
    with pytest.raises(ValueError, match=f"shared memory 'none' of {nbytes} bytes cannot be made"):
        SharedMemory.create("none", nbytes)


def test_a_failed_creation_leaves_no_descriptor() -> None:
    with pytest.raises(OSError, match=r"Cannot allocate memory|File too large"):
        SharedMemory.create("huge", 1 << 62)
    assert descriptors("huge") == 0


def test_a_descriptor_of_another_kind_is_refused_and_stays_open(tmp_path: Path) -> None:
    reading, writing = os.pipe()
    file = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT)
    for descriptor in (reading, writing, file):
        with pytest.raises(ValueError, match=f"descriptor {descriptor} is no(t sealed| memory file)"):
            SharedMemory.from_descriptor(descriptor)
        os.close(descriptor)
    with pytest.raises(OSError, match="Bad file descriptor"):
        SharedMemory.from_descriptor(file)


@pytest.mark.parametrize(
    ("flags", "seals"),
    [(0, 0), (os.MFD_ALLOW_SEALING, 0), (os.MFD_ALLOW_SEALING, fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)],
)
def test_a_file_that_others_can_shrink_is_refused_and_stays_open(flags: int, seals: int) -> None:
    with memory_file(flags, seals=seals) as descriptor:
        with pytest.raises(ValueError, match="is not sealed against shrinking, so its other users could end"):
            SharedMemory.from_descriptor(descriptor)
        assert os.fstat(descriptor).st_size == 4096


def test_an_empty_file_is_refused() -> None:
    with memory_file(nbytes=0, seals=fcntl.F_SEAL_SHRINK) as descriptor, pytest.raises(ValueError, match="is empty"):
        SharedMemory.from_descriptor(descriptor)


def test_a_file_that_cannot_be_written_is_refused() -> None:
    with memory_file(seals=fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_WRITE) as descriptor, pytest.raises(PermissionError):
        SharedMemory.from_descriptor(descriptor)


def test_programs_do_not_inherit_a_descriptor() -> None:
    with closing(SharedMemory.create("private", 4096)) as first:
        assert not os.get_inheritable(first.descriptor)
        passed = os.dup(first.descriptor)
        os.set_inheritable(passed, True)
        with closing(SharedMemory.from_descriptor(passed)) as second:
            assert second.descriptor == passed
            assert not os.get_inheritable(passed)


def test_close_unmaps_and_may_be_repeated() -> None:
    memory = SharedMemory.create("closed", 4096)
    assert (mappings("closed"), descriptors("closed") > 0) == (1, True)
    memory.close()
    memory.close()
    assert (mappings("closed"), descriptors("closed")) == (0, 0)
    assert (memory.descriptor, memory.nbytes) == (-1, 4096)
    with pytest.raises(ValueError, match="the shared memory is closed"):
        _ = memory.view


def test_a_repeated_close_does_not_close_the_next_file_of_that_number() -> None:
    memory = SharedMemory.create("first", 4096)
    memory.close()
    with memory_file() as descriptor:
        memory.close()
        assert os.fstat(descriptor).st_size == 4096


def test_the_mapping_lives_as_long_as_its_views() -> None:
    memory = SharedMemory.create("lasting", 4096)
    view, array = memory.view[100:200], np.frombuffer(memory.view, np.uint8)
    memory.close()
    view[0] = 9
    assert array[100] == 9
    del view
    assert mappings("lasting") == 1
    del array
    assert (mappings("lasting"), descriptors("lasting")) == (0, 0)
