"""Loads and stores that the parent has asked for: they wait in a queue, and the last one of a request answers it."""

from __future__ import annotations

import errno
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

from offload_backend_nixl.protocol import Answer, Item, Operation, Outcome, Request, Result

MAX_FAILURES = 3
"""After so many requests in a row that one agent failed, the process ends: a plugin may be unusable after an error."""
NOT_ASKED: Mapping[int, bool] = {}
"""No mover was at work."""


class Group:
    """The transfers of one request.

    Args:
        request: a load or a store.
        answer: sends the answer, once all of them have ended. Until then the memory is theirs.
        moved: told after the answer, for each mover at work, whether its agent moved all bytes that it should.
    """

    def __init__(
        self, request: Request, answer: Callable[[Answer], None], moved: Callable[[Mapping[int, bool]], None]
    ) -> None:
        self.is_load = request.operation is Operation.LOAD
        self._number = request.number
        self._items = request.items
        self._answer = answer
        self._moved = moved
        self._has_moved: dict[int, bool] = {}
        self._lock = threading.Lock()
        self._ends: list[Result | Exception] = [Result(Outcome.MISS)] * len(request.items)
        self._running = len(request.items)

    def transfers(self) -> Iterator[Transfer]:
        """Yield the transfers. Each must end once."""
        for place, item in enumerate(self._items):
            yield Transfer(self, place, item)

    def announce_end(self, reason: str) -> None:
        """Tell the parent that its memory is free only after the end of this process."""
        self._answer(Answer(Outcome.ENDING, self._number, text=reason))

    def end(self, place: int, end: Result | Exception, moved: Mapping[int, bool]) -> None:
        """Note the end of one transfer. An error fails the request."""
        with self._lock:
            self._ends[place] = end
            for mover, has_moved in moved.items():
                self._has_moved[mover] = has_moved and self._has_moved.get(mover, True)
            self._running -= 1
            if self._running:
                return
        results = [one for one in self._ends if isinstance(one, Result)]
        errors = [one for one in self._ends if isinstance(one, Exception)]
        if errors:
            self._answer(failure(self._number, errors[0]))
        else:
            self._answer(Answer(Outcome.MOVED, self._number, results=tuple(results)))
        self._moved(self._has_moved)


class Transfer(NamedTuple):
    """One object to be loaded or stored."""

    group: Group
    place: int
    """Its index in the request."""
    item: Item

    def end(self, end: Result | Exception, moved: Mapping[int, bool] = NOT_ASKED) -> None:
        """Note the end of this transfer.

        Args:
            moved: the mover, and whether its agent moved the bytes; nothing if the medium may be the reason.
        """
        self.group.end(self.place, end, moved)


class TransferQueue:
    """Transfers that have not begun. Loads and stores take turns, so no load waits for all stores before it."""

    def __init__(self) -> None:
        self._loads: deque[Transfer] = deque()
        self._stores: deque[Transfer] = deque()
        self._turns = deque([self._loads, self._stores])
        """The first one has the next turn."""
        self._changed = threading.Condition()
        self._failures: Counter[int] = Counter()
        self._unanswered = 0
        self._ends = False
        self.is_closed = False

    def put(self, group: Group) -> None:
        """Add the transfers of a request."""
        with self._changed:
            self._unanswered += 1
            (self._loads if group.is_load else self._stores).extend(group.transfers())
            self._changed.notify_all()

    def take(self, pause_seconds: float | None) -> Transfer | None:
        """Return the next transfer; ``None`` if there is none during the pause, or if the queue is closed.

        Args:
            pause_seconds: how long to wait for one; ``None`` for no limit.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._loads or self._stores or self.is_closed, pause_seconds)
            if not self._turns[0]:
                self._turns.rotate()
            if self.is_closed or not self._turns[0]:
                return None
            transfer = self._turns[0].popleft()
            self._turns.rotate()
            return transfer

    def count(self, moved: Mapping[int, bool]) -> None:
        """Count an answer, and the requests in a row that a mover's agent failed.

        The queue is closed after :data:`MAX_FAILURES` of them. If :meth:`end` was called, the last answer closes it.
        """
        with self._changed:
            self._unanswered -= 1
            for mover, has_moved in moved.items():
                self._failures[mover] = 0 if has_moved else self._failures[mover] + 1
            is_unusable = max(self._failures.values(), default=0) >= MAX_FAILURES
            is_last = self._ends and not self._unanswered
        if is_unusable or is_last:
            self.close()

    def end(self) -> None:
        """Close the queue once all requests in it are answered. The parent sends no others, and limits their time."""
        with self._changed:
            self._ends = True

    def close(self) -> None:
        """Let no transfer begin any more; the process ends. Harmless when repeated."""
        with self._changed:
            self.is_closed = True
            self._changed.notify_all()


def failure(number: int, error: Exception) -> Answer:
    """Return the answer for an error."""
    code = error.errno if isinstance(error, OSError) and error.errno is not None else errno.EIO
    text = (error.strerror or str(error)) if isinstance(error, OSError) else f"{type(error).__name__}: {error}"
    place = f": {error.filename}" if isinstance(error, OSError) and error.filename else ""
    return Answer(Outcome.FAILED, number, code=code, text=text + place)
