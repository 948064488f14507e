"""A command that is interrupted before its work has begun, while the I/O loop is busy."""

from __future__ import annotations

import threading
from concurrent.futures import CancelledError, Future

import pytest
import typer

from offload_core.cli.session import Session
from offload_core.runtime.io_loop import IoLoop


def test_work_that_has_not_begun_does_not_begin(io: IoLoop, monkeypatch: pytest.MonkeyPatch) -> None:
    loop_may_go_on = threading.Event()
    began: list[bool] = []
    waits: list[Future[None]] = []

    async def work() -> None:
        began.append(True)

    def wait(session: Session, future: Future[None]) -> None:
        waits.append(future)
        if len(waits) == 1:
            raise KeyboardInterrupt
        loop_may_go_on.set()
        with pytest.raises(CancelledError):
            future.result(30)

    session = object.__new__(Session)
    session._io = io
    monkeypatch.setattr(Session, "_wait_for", wait)
    io.loop.call_soon_threadsafe(loop_may_go_on.wait, 30)
    with pytest.raises(typer.Exit):
        session._run(work())
    assert len(waits) == 2
    assert not began
