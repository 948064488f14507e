"""Threads that never hold up a process, and the shared event loop."""

from __future__ import annotations

import subprocess
import sys
import threading
import weakref
from collections.abc import Iterator
from concurrent.futures import wait
from contextlib import contextmanager
from types import FrameType

import pytest

from offload_core.runtime.io_loop import IoLoop
from offload_core.runtime.threads import CallLimit, DaemonExecutor

SECONDS = 30


@contextmanager
def executor(max_threads: int) -> Iterator[DaemonExecutor]:
    threads = DaemonExecutor(max_threads, "test-threads")
    try:
        yield threads
    finally:
        threads.shutdown()


def test_as_many_calls_as_threads_run_at_once_and_no_more() -> None:
    lock, gate, full = threading.Lock(), threading.Event(), threading.Event()
    running: list[str] = []
    most = 0

    def call() -> None:
        nonlocal most
        with lock:
            running.append(threading.current_thread().name)
            most = max(most, len(running))
            if len(running) == 3:
                full.set()
        assert gate.wait(SECONDS)
        with lock:
            running.pop()

    with executor(3) as threads:
        futures = [threads.submit(call) for _ in range(10)]
        assert full.wait(SECONDS)
        assert sum(future.running() for future in futures) == 3
        gate.set()
        assert not wait(futures, timeout=SECONDS).not_done
        for future in futures:
            future.result()
    assert most == 3


class PauseAfterGet:
    """Stops the first thread that takes its second call, at the moment at which the call has left the queue."""

    def __init__(self) -> None:
        self.idle, self.taken, self.go_on = threading.Event(), threading.Event(), threading.Event()
        self._gets = 0

    def __call__(self, frame: FrameType, event: str, function: object) -> None:
        if getattr(function, "__name__", None) == "get" and not self.taken.is_set():
            self._gets += event == "c_call"
            if event == "c_call" and self._gets == 2:
                self.idle.set()
            elif event == "c_return" and self._gets == 2:
                self.taken.set()
                assert self.go_on.wait(SECONDS)


def test_a_call_never_waits_behind_a_hung_one_while_a_thread_may_still_be_started() -> None:
    gate, pause = threading.Event(), PauseAfterGet()
    threading.setprofile(pause)
    try:
        with executor(2) as threads:
            assert threads.submit(int).result(SECONDS) == 0
            assert pause.idle.wait(SECONDS)
            hung = threads.submit(gate.wait, SECONDS)
            assert pause.taken.wait(SECONDS)
            other = threads.submit(str)
            pause.go_on.set()
            try:
                assert other.result(5) == ""
            finally:
                gate.set()
            assert hung.result(SECONDS)
    finally:
        threading.setprofile(None)


def test_an_idle_thread_does_not_keep_its_last_calls_arguments_alive() -> None:
    class Buffer:
        pass

    gone = threading.Event()
    with executor(1) as threads:
        buffer = Buffer()
        weakref.finalize(buffer, gone.set)
        threads.submit(id, buffer).result(SECONDS)
        del buffer
        assert gone.wait(SECONDS)


def test_its_threads_are_daemons_with_its_name() -> None:
    with executor(1) as threads:
        thread = threads.submit(threading.current_thread).result(SECONDS)
    assert thread.daemon
    assert thread.name == "test-threads-0"


def test_what_a_call_raises_is_its_futures() -> None:
    def fail() -> None:
        raise SystemExit(3)

    with executor(1) as threads:
        assert isinstance(threads.submit(fail).exception(SECONDS), SystemExit)
        assert threads.submit(int).result(SECONDS) == 0, "the thread outlives a call that raised"


def test_a_cancelled_call_is_not_run() -> None:
    gate, ran = threading.Event(), threading.Event()
    with executor(1) as threads:
        first = threads.submit(gate.wait, SECONDS)
        second = threads.submit(ran.set)
        third = threads.submit(int)
        assert second.cancel()
        gate.set()
        assert first.result(SECONDS)
        assert third.result(SECONDS) == 0
    assert not ran.is_set()


def test_shutdown_runs_what_is_queued_ends_the_threads_and_refuses_more() -> None:
    gate = threading.Event()
    threads = DaemonExecutor(1, "test-threads")
    first = threads.submit(lambda: (gate.wait(SECONDS), threading.current_thread())[1])
    second = threads.submit(int)
    threads.shutdown(wait=True)  # does not wait: the first call hangs still
    threads.shutdown()
    with pytest.raises(RuntimeError, match="the threads of 'test-threads' are shut down"):
        threads.submit(int)
    gate.set()
    assert second.result(SECONDS) == 0
    thread = first.result(SECONDS)
    thread.join(SECONDS)
    assert not thread.is_alive()


HANGS = """
import asyncio, threading
from offload_core.runtime.io_loop import IoLoop
from offload_core.runtime.threads import DaemonExecutor
started = threading.Event()
def hang():
    started.set()
    threading.Event().wait()
io = IoLoop.acquire()
executor = DaemonExecutor(2, "hung")
async def call():
    await asyncio.get_running_loop().run_in_executor(executor, hang)
io.submit(call())
executor.submit(hang)
started.wait()
executor.shutdown()
io.release()
print("the end")
"""


def test_a_hung_call_does_not_keep_the_process_from_its_end() -> None:
    done = subprocess.run([sys.executable, "-c", HANGS], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (0, "the end\n"), done.stderr


NO_MORE_THREADS = """
import resource, threading
from offload_core.runtime.threads import DaemonExecutor
SECONDS, MOST = 30, resource.getrlimit(resource.RLIMIT_DATA)[1]
def allow_threads(allowed):
    (used,) = [int(line.split()[1]) << 10 for line in open("/proc/self/status") if line.startswith("VmData")]
    resource.setrlimit(resource.RLIMIT_DATA, (MOST if allowed else used + (1 << 20), MOST))
busy, gate, late = DaemonExecutor(2, "busy"), threading.Event(), []
first = busy.submit(gate.wait, SECONDS)
empty = DaemonExecutor(2, "empty")
stuck = DaemonExecutor(2, "stuck", stuck_after_seconds=0)
hung = stuck.submit(gate.wait, SECONDS)
while not stuck.stuck:
    stuck.replace_stuck()
allow_threads(False)
stuck.replace_stuck()
waits = busy.submit(threading.current_thread)
for threads in (empty, empty, empty, stuck):
    try:
        threads.submit(late.append, threads)
    except RuntimeError as error:
        print(error)
print(busy.busy, empty.busy)
allow_threads(True)
gate.set()
print(waits.result(SECONDS).name)
print([threads.submit(sum, (1, 2)).result(SECONDS) for threads in (busy, empty, stuck)])
both = threading.Barrier(2)
pair = [empty.submit(both.wait, SECONDS) for _ in range(2)]
print(sorted(call.result(SECONDS) for call in pair))
print(late)
"""


def test_a_thread_that_cannot_be_started_costs_no_place_and_its_call_never_runs_late() -> None:
    done = subprocess.run([sys.executable, "-c", NO_MORE_THREADS], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    refused = [f"no thread of {name!r} can be started: can't start new thread" for name in ("empty",) * 3 + ("stuck",)]
    assert done.stdout.splitlines() == [*refused, "True False", "busy-0", "[3, 3, 3]", "[0, 1]", "[]"]


def test_calls_beyond_a_limit_never_run_and_a_place_is_free_after_each_call(monkeypatch: pytest.MonkeyPatch) -> None:
    limit, gate = CallLimit(2), threading.Event()
    ran: list[str] = []

    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with executor(1) as threads:
        with monkeypatch.context() as without_threads:
            without_threads.setattr(threading.Thread, "start", refuse)
            for _ in range(3):
                with pytest.raises(RuntimeError, match="can't start new thread"):
                    limit.submit(threads, ran.append, "without a thread")
        assert limit.submit(threads, gate.wait, SECONDS)
        failing = limit.submit(threads, ran.remove, "absent")
        assert failing
        assert limit.submit(threads, ran.append, "beyond") is None
        gate.set()
        assert isinstance(failing.exception(SECONDS), ValueError)
        threads.submit(int).result(SECONDS)  # both places are free by then
        last = [limit.submit(threads, ran.append, name) for name in "ab"]
        assert None not in last
    wait([one for one in last if one], SECONDS)
    assert ran == ["a", "b"]


def test_the_loop_is_shared_until_its_last_user_releases_it() -> None:
    async def thread() -> threading.Thread:
        return threading.current_thread()

    class Alone(IoLoop):
        """The loop of this test only, apart from all others in the process."""

        _shared = None
        _users = 0

    first = Alone.acquire()
    second = Alone.acquire()
    assert first is second
    runner = first.submit(thread()).result(SECONDS)
    assert runner.daemon
    first.release()
    assert second.submit(thread()).result(SECONDS) is runner
    second.release()
    runner.join(SECONDS)
    assert not runner.is_alive()
    assert first.loop.is_closed()
    third = Alone.acquire()
    try:
        assert third is not first
        assert third.submit(thread()).result(SECONDS) is not runner
    finally:
        third.release()
