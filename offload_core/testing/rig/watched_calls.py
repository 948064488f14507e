"""Executors for tests: a test can count their calls, hold them at a gate, and make them fail."""

from __future__ import annotations

import errno
import threading
from collections.abc import Callable, Collection
from concurrent.futures import Future, ThreadPoolExecutor
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, ParamSpec, TypeVar

from offload_core.runtime.threads import DaemonExecutor

P = ParamSpec("P")
T = TypeVar("T")

HOLD_LIMIT_SECONDS = 20
"""Longest time that a call is held. After it the event loop, which opens the gate, must be standing still."""

current_calls: ContextVar[Calls | None] = ContextVar("current_calls", default=None)
"""Counter for the running task's calls to the event loop's own executor."""


@dataclass
class _Script:
    """Fate of the calls that are submitted while the script is in force: held, failed or let through."""

    hold: Collection[int] | None = ()
    fail: Collection[int] = ()
    count: int = 0
    passed: set[int] = field(default_factory=set)

    def may_go(self, number: int) -> bool:
        return number in self.passed or (self.hold is not None and number not in self.hold)


class Calls:
    """The calls that one client hands to threads, numbered from 1 since the last :meth:`script`."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._unfinished: set[Future[Any]] = set()
        self._script = _Script()
        self.waiting = 0
        """Number of calls that stand at the gate now, on a thread, before they have begun."""
        self.gave_up = False
        """True if a held call went on by itself after ``HOLD_LIMIT_SECONDS``."""

    @property
    def count(self) -> int:
        """Number of calls since the last script."""
        return self._script.count

    @property
    def unfinished(self) -> int:
        """Number of calls that wait or run."""
        with self._changed:
            return len(self._unfinished)

    def script(self, *, hold: Collection[int] | None = (), fail: Collection[int] = ()) -> None:
        """Set the calls to hold and to fail from now on; calls that are held already go on.

        Args:
            hold: numbers of the calls that wait at the gate; ``None`` for all.
            fail: numbers of the calls that raise ``OSError`` in place of being made.
        """
        self.open()
        with self._changed:
            self._script = _Script(hold, fail)

    def open(self) -> None:
        """Let all held calls go on; from now on hold no call and fail no call."""
        with self._changed:
            self._script.hold = self._script.fail = ()
            self._changed.notify_all()

    def let_pass(self, number: int) -> None:
        """Let one held call go on."""
        with self._changed:
            self._script.passed.add(number)
            self._changed.notify_all()

    def submit(self, submit: Callable[[Callable[[], T]], Future[T]], call: Callable[[], T]) -> Future[T]:
        """Number ``call``, put the gate before it and hand it to ``submit``."""
        with self._changed:
            script = self._script
            script.count += 1
            number, fails = script.count, script.count in script.fail

        def watched() -> T:
            self._stand_at_the_gate(script, number)
            if fails:
                raise OSError(errno.EIO, f"call {number} was made to fail by the contract's test")
            return call()

        future = submit(watched)
        with self._changed:
            self._unfinished.add(future)
        future.add_done_callback(self._ended)
        return future

    def _ended(self, future: Future[Any]) -> None:
        with self._changed:
            self._unfinished.discard(future)

    def _stand_at_the_gate(self, script: _Script, number: int) -> None:
        with self._changed:
            self.waiting += 1
            try:
                if not self._changed.wait_for(lambda: script.may_go(number), HOLD_LIMIT_SECONDS):
                    self.gave_up = True
            finally:
                self.waiting -= 1


class WatchedThreads(DaemonExecutor):
    """A client's own threads, as the core gives them to a backend."""

    def __init__(self, max_threads: int, name: str, calls: Calls) -> None:
        super().__init__(max_threads, name)
        self._watch = calls

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """See :meth:`concurrent.futures.Executor.submit`."""
        return self._watch.submit(super().submit, lambda: fn(*args, **kwargs))


class WatchedLoopThreads(ThreadPoolExecutor):
    """The event loop's own executor, so that ``asyncio.to_thread`` is watched too."""

    def __init__(self, calls: Calls) -> None:
        super().__init__(thread_name_prefix="contract-loop")
        self._watch = calls

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """See :meth:`concurrent.futures.Executor.submit`."""
        return (current_calls.get() or self._watch).submit(super().submit, lambda: fn(*args, **kwargs))
