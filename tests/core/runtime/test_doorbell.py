"""Doorbells: no ring is lost, and none holds up the side that rings."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import pytest

from offload_core.runtime.doorbell import Doorbell

SECONDS = 30


@pytest.fixture
def doorbell() -> Iterator[Doorbell]:
    made = Doorbell()
    yield made
    made.close()


def test_it_rings_until_it_is_cleared(doorbell: Doorbell) -> None:
    assert not doorbell.wait(0)
    doorbell.clear()
    doorbell.ring()
    doorbell.ring()
    assert doorbell.wait(0)
    assert doorbell.wait(SECONDS)
    doorbell.clear()
    assert not doorbell.wait(0)


def test_a_wait_ends_at_its_limit_and_not_before(doorbell: Doorbell) -> None:
    begin = time.monotonic()
    assert not doorbell.wait(0.02)
    assert time.monotonic() - begin >= 0.02


def test_a_ring_ends_the_wait_of_another_thread(doorbell: Doorbell) -> None:
    answers: list[bool] = []
    waiting = threading.Thread(target=lambda: answers.append(doorbell.wait(SECONDS)))
    waiting.start()
    doorbell.ring()
    waiting.join(SECONDS)
    assert answers == [True]


def test_a_ring_never_waits_even_if_a_peer_has_filled_the_counter(doorbell: Doorbell) -> None:
    os.eventfd_write(doorbell.fileno(), 2**64 - 2)
    doorbell.ring()
    assert doorbell.wait(0)
    doorbell.clear()
    assert not doorbell.wait(0)


CHILD = """
import sys
from offload_core.runtime.doorbell import Doorbell
here, there = (Doorbell.from_descriptor(int(number)) for number in sys.argv[1:])
for _ in range(100):
    assert here.wait(60)
    here.clear()
    there.ring()
"""


def test_two_processes_wake_each_other(doorbell: Doorbell) -> None:
    other = Doorbell()
    numbers = [doorbell.fileno(), other.fileno()]
    child = subprocess.Popen([sys.executable, "-c", CHILD, *map(str, numbers)], pass_fds=numbers)
    for _ in range(100):
        doorbell.ring()
        assert other.wait(SECONDS)
        other.clear()
    assert child.wait(SECONDS) == 0
    other.close()


def test_it_wakes_an_event_loop(doorbell: Doorbell) -> None:
    async def wait() -> None:
        loop, woken = asyncio.get_running_loop(), asyncio.Event()
        loop.add_reader(doorbell, woken.set)
        doorbell.ring()
        await asyncio.wait_for(woken.wait(), SECONDS)
        loop.remove_reader(doorbell)

    asyncio.run(wait())


def test_a_descriptor_of_another_kind_is_refused_and_stays_open() -> None:
    reading, writing = os.pipe()
    for descriptor in (reading, writing):
        with pytest.raises(ValueError, match=rf"descriptor {descriptor} is 'pipe:\[\d+\]' and no doorbell"):
            Doorbell.from_descriptor(descriptor)
        os.close(descriptor)
    with pytest.raises(FileNotFoundError):
        Doorbell.from_descriptor(reading)


def test_a_passed_descriptor_is_taken_over_and_not_passed_on() -> None:
    descriptor = os.eventfd(0, 0)
    os.set_inheritable(descriptor, True)
    doorbell = Doorbell.from_descriptor(descriptor)
    assert not os.get_inheritable(descriptor)
    doorbell.clear()  # would wait forever on a blocking descriptor
    doorbell.close()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(descriptor)


def test_after_close_it_touches_no_other_file() -> None:
    doorbell = Doorbell()
    doorbell.close()
    other = os.eventfd(0, os.EFD_NONBLOCK)  # has the same number
    doorbell.close()
    for call in (doorbell.ring, doorbell.clear, lambda: doorbell.wait(0)):
        with pytest.raises(ValueError, match="descriptor cannot be a negative integer"):
            call()
    with pytest.raises(BlockingIOError):
        os.eventfd_read(other)
    os.close(other)
