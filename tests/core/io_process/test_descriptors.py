"""A process of the engine with few descriptors left: it keeps none in vain, and says so if it has too few."""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from offload_core.config.loading import load_config
from offload_core.io_process.control import ControlSocket
from offload_core.io_process.control_channel import ControlChannel
from offload_core.io_process.life.companion import make_companion
from offload_core.io_process.life.meeting_point import MeetingPoint
from offload_core.io_process.session import Session
from offload_core.runtime.io_loop import IoLoop
from offload_core.runtime.threads import DaemonExecutor
from tests.core.io_process.rig import SECONDS
from tests.support.process_state import own_files

_NEEDED = 14
"""A session, its socket of the meeting point, its control socket, and the start of a program."""


@contextlib.contextmanager
def descriptors_left(count: int) -> Iterator[None]:
    """Leave this process so many descriptors."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    last = max(int(entry.name) for entry in Path("/proc/self/fd").iterdir())
    held: list[int] = []
    resource.setrlimit(resource.RLIMIT_NOFILE, (last + count + 2, hard))
    try:
        with contextlib.suppress(OSError):
            while True:
                held.append(os.open(os.devnull, os.O_RDONLY))
        for descriptor in [held.pop() for _ in range(count)]:
            os.close(descriptor)
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        for descriptor in held:
            os.close(descriptor)


@contextlib.contextmanager
def channel() -> Iterator[tuple[ControlChannel, ControlSocket]]:
    """A channel of the running loop, and the other process's end."""
    ours, theirs = ControlSocket.pair()
    made = ControlChannel(ours, on_end_of_file=lambda: None)
    try:
        yield made, theirs
    finally:
        made.close(OSError("the test has ended"))
        theirs.close()


def test_a_greeting_whose_descriptor_finds_no_room_is_told_so() -> None:
    async def run() -> None:
        with channel() as (ours, theirs):
            theirs.send({"ready": os.getpid()}, [theirs.fileno()])
            with descriptors_left(0):
                ours.receive()
            with pytest.raises(OSError, match="the descriptor of the I/O process did not come"):
                await ours.ready_with_descriptor()

    asyncio.run(run())


def test_the_descriptors_of_an_answer_that_nobody_awaits_are_closed() -> None:
    async def run() -> None:
        with channel() as (ours, theirs):
            before = own_files()
            question = asyncio.ensure_future(ours.ask_for_descriptors({"lent": 0}))
            await asyncio.sleep(0)
            question.cancel()
            with pytest.raises(asyncio.CancelledError):
                await question
            theirs.send({"pin": False}, [theirs.fileno()])
            ours.receive()
            assert own_files() == before

    asyncio.run(run())


@pytest.mark.parametrize("count", range(_NEEDED))
def test_a_start_that_fails_for_want_of_descriptors_keeps_none(count: int, io: IoLoop) -> None:
    config = load_config({"backends": [{"name": "ram", "type": "cpu", "capacity": "16MiB"}]})
    threads = DaemonExecutor(1, "test")
    threads.submit(int).result(SECONDS)
    ends: list[str] = []

    async def start() -> None:
        session = Session(
            partial(make_companion, config, None),
            MeetingPoint(f"test {os.getpid()}", config.keys),
            generation=0,
            threads=threads,
            on_message=lambda message: None,
            on_end=lambda session, description: ends.append(description),
            on_killed=lambda session: None,
            silence_seconds=SECONDS,
        )
        await session.start(SECONDS)

    before = own_files()
    with descriptors_left(count), pytest.raises(OSError, match="Too many open files"):
        io.submit(start()).result(SECONDS)
    assert own_files() == before
    threads.shutdown()
