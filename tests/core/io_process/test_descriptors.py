"""A process of the engine with few descriptors left: a failed start of an I/O process keeps none of them."""

from __future__ import annotations

import contextlib
import os
import resource
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from offload_core.config.loading import load_config
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
