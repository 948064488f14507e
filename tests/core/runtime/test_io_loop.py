"""The end of the I/O loop: it waits for no hung call, and loses no late one."""

from __future__ import annotations

import asyncio
import gc
import logging
import threading
import time

import pytest

from offload_core.runtime.io_loop import IoLoop


def test_a_call_that_is_late_at_the_end_still_ends(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(IoLoop, "_shared", None)
    monkeypatch.setattr(IoLoop, "_users", 0)
    io, gate, closed = IoLoop.acquire(), threading.Event(), threading.Event()

    async def late_close() -> None:
        await asyncio.get_running_loop().run_in_executor(None, gate.wait)
        closed.set()

    io.submit(late_close())
    started = time.monotonic()
    with caplog.at_level(logging.DEBUG, "asyncio"):
        io.release()
        assert time.monotonic() - started < 5, "a hung call delays nobody"
        gate.set()
        assert closed.wait(30)
        thread = io._thread
        thread.join(30)
        assert not thread.is_alive()
        assert io.loop.is_closed()
        del io
        gc.collect()
    assert [message for message in caplog.messages if "Task was destroyed" in message] == []


def test_an_idle_loop_is_closed_by_its_last_release(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(IoLoop, "_shared", None)
    monkeypatch.setattr(IoLoop, "_users", 0)
    first, second = IoLoop.acquire(), IoLoop.acquire()
    assert first is second
    first.release()
    assert not first.loop.is_closed()
    second.release()
    first._thread.join(30)  # a release waits for a second at most
    assert first.loop.is_closed()
