"""The threads that move bytes: each has a NIXL agent of its own, and polls the transfers that it has begun.

A plugin may move all bytes before its call returns, as POSIX does. Then each thread has one transfer at a time.
"""

from __future__ import annotations

import errno
import time
from collections.abc import Mapping
from concurrent.futures import Executor
from contextlib import suppress
from typing import NamedTuple

import xxhash

from offload_backend_nixl.child.engine import Direction, Movement, NixlEngine, Piece
from offload_backend_nixl.child.mapped_memory import MappedMemory
from offload_backend_nixl.child.storage import Pending, Storage
from offload_backend_nixl.child.transfers import NOT_ASKED, Transfer, TransferQueue
from offload_backend_nixl.frame import HEAD_BYTES, OVERHEAD_BYTES
from offload_backend_nixl.protocol import NO_HASH, RING, Item, Outcome, Result

_MIN_POLL_SECONDS = 20e-6
_MAX_POLL_SECONDS = 5e-3
_POLL_PART = 8
"""The pause between two polls is this part of the time since a transfer last began or ended."""


class _Running(NamedTuple):
    transfer: Transfer
    pending: Pending
    movement: Movement


class Mover:
    """One thread's transfers.

    Args:
        number: its number in the process.
        engine: NIXL, for this thread.
        storage: the medium.
        memories: the shared memories but the ring, by their numbers.
        queue: the transfers, from which several threads take.
        slow: runs calls that would keep this thread.
    """

    def __init__(
        self,
        number: int,
        engine: NixlEngine,
        storage: Storage,
        memories: Mapping[int, MappedMemory],
        queue: TransferQueue,
        slow: Executor,
    ) -> None:
        self._number = number
        self._engine = engine
        self._storage = storage
        self._memories = memories
        self._queue = queue
        self._slow = slow
        self._running: list[_Running] = []
        self._changed_seconds = time.monotonic()

    def run(self) -> None:
        """Move until the queue is closed, or until the parent takes no answers."""
        with suppress(ConnectionError):  # the parent has closed its end
            while not self._queue.is_closed:
                self._begin_next()
                self._poll()

    def _begin_next(self) -> None:
        """Begin one transfer. Those that have ended are answered before the next one begins."""
        transfer = self._queue.take(self._pause_seconds())
        if transfer is None:
            return
        self._changed_seconds = time.monotonic()
        try:
            pending = self._prepare(transfer)
        except Exception as error:
            transfer.end(error)
            return
        if isinstance(pending, Outcome):
            transfer.end(Result(pending))
            return
        try:
            direction: Direction = "READ" if transfer.group.is_load else "WRITE"
            movement = self._engine.start(direction, pieces_of(transfer.item), pending.target)
        except Exception as error:
            with suppress(OSError):
                pending.finish(False)
            transfer.end(error, {self._number: False})
            return
        self._running.append(_Running(transfer, pending, movement))

    def _pause_seconds(self) -> float | None:
        """Return how long to wait for another transfer: without a limit only if there is nothing to poll."""
        if not self._running:
            return None
        pause = (time.monotonic() - self._changed_seconds) / _POLL_PART
        return min(max(pause, _MIN_POLL_SECONDS), _MAX_POLL_SECONDS)

    def _prepare(self, transfer: Transfer) -> Pending | Outcome:
        item = transfer.item
        if transfer.group.is_load:
            return self._storage.begin_load(item.name, item.nbytes)
        if item.memory in self._memories:  # not the ring, whose pages are used all the time
            self._memories[item.memory].touch(item.start, item.nbytes - OVERHEAD_BYTES)
        return self._storage.begin_store(item.name, item.nbytes)

    def _poll(self) -> None:
        for running in list(self._running):
            succeeded = running.movement.poll()
            if succeeded is not None:
                self._running.remove(running)
                self._changed_seconds = time.monotonic()
                self._end(running, succeeded)

    def _end(self, running: _Running, succeeded: bool) -> None:
        """End a transfer.

        After the failure of one piece, NIXL may still fill others. In the ring that does no harm. For other memory the
        parent learns that the answer counts after the end of this process, which answers all other requests first.
        """
        transfer = running.transfer
        if not succeeded and transfer.group.is_load and transfer.item.memory != RING:
            self._queue.end()
            transfer.group.announce_end(f"NIXL could not read {transfer.item.name}")
        if not succeeded and self._storage.finishes_slowly:
            self._slow.submit(self._finish, running, succeeded, NOT_ASKED)
        else:
            self._finish(running, succeeded, {self._number: succeeded})

    def _finish(self, running: _Running, succeeded: bool, moved: Mapping[int, bool]) -> None:
        end: Result | Exception
        try:
            outcome = running.pending.finish(succeeded)
            end = Result(outcome, self._digest_of(running.transfer.item) if outcome is Outcome.DONE else b"")
        except Exception as error:
            end = error
        running.transfer.end(end, moved)

    def _digest_of(self, item: Item) -> bytes:
        """Return the digest that the parent wants of an object in its memory. It is in the processor's cache now."""
        if item.hash_start == NO_HASH:
            return b""
        digest = xxhash.xxh3_128()
        content_bytes = item.nbytes - OVERHEAD_BYTES
        view = self._memories[item.memory].view
        digest.update(view[item.start + item.hash_start : item.start + content_bytes])
        return digest.digest()


def pieces_of(item: Item) -> list[Piece]:
    """Return the places of an object in shared memory, in their order in the object.

    Raises:
        OSError: it is smaller than its head and tail.
    """
    if item.memory == RING:
        return [Piece(RING, item.offset, item.nbytes)]
    content_bytes = item.nbytes - OVERHEAD_BYTES
    if content_bytes <= 0:
        raise OSError(errno.EPROTO, f"an object of {item.nbytes} bytes has no content")
    return [
        Piece(RING, item.offset, HEAD_BYTES),
        Piece(item.memory, item.start, content_bytes),
        Piece(RING, item.offset + HEAD_BYTES, OVERHEAD_BYTES - HEAD_BYTES),
    ]
