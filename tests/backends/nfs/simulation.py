"""Hosts that share a medium in memory, one operation of the medium at a time, in an order that a test chooses.

Each call of a host runs on a thread of its own, which stops before every operation of the medium until it is its turn.
Time passes when the test says so.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence

from offload_backend_nfs.capacity.bounded_store import BoundedPlace
from offload_backend_nfs.capacity.lease import AccountOptions

from offload_core.api.backend import StoredObject, StoreOutcome
from offload_core.api.keys import ObjectKey

LIMIT_SECONDS = 20


class KilledError(BaseException):
    """Ends a thread of a process that was killed."""


class World:
    """The medium, the time, and what is being written."""

    def __init__(self) -> None:
        self.seconds = 1000.0
        self.small: dict[str, bytes] = {}
        self.objects: dict[ObjectKey, tuple[int, float]] = {}
        self.writing: dict[Host, int] = {}
        self.debris_bytes = 0

    @property
    def real_bytes(self) -> int:
        """Bytes on the medium."""
        return sum(size for size, _ in self.objects.values()) + sum(self.writing.values()) + self.debris_bytes


class Host:
    """A process on a host of its own, and its view of the medium. It does one call at a time."""

    def __init__(self, world: World, options: AccountOptions) -> None:
        self.world = world
        self.alive = True
        self.fail_next: str = ""
        """``before`` or ``after``: the next operation of the medium raises, having had its effect or not."""
        self.pinned: list[ObjectKey] = []
        self.removed_own_pin: list[ObjectKey] = []
        self.deleting = False
        self._turn = threading.Semaphore(0)
        self._stopped = threading.Event()
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self.place = BoundedPlace(
            self, self, options, clock=lambda: world.seconds, now=lambda: world.seconds, pause=lambda _: None
        )

    # -- running

    @property
    def busy(self) -> bool:
        """Whether a call is under way."""
        return self._thread is not None

    @property
    def in_a_write(self) -> bool:
        """Whether bytes of an object are being written."""
        return self in self.world.writing

    def start(self, call: Callable[[], object]) -> None:
        """Begin a call, up to its first operation of the medium."""

        def run() -> None:
            try:
                call()
            except KilledError:
                pass
            except OSError as error:
                if "injected" not in str(error) and "others" not in str(error):
                    self._error = error
            except BaseException as error:
                self._error = error
            finally:
                self._thread = None
                self._stopped.set()

        self._stopped.clear()
        thread = threading.Thread(target=run, daemon=True)
        self._thread = thread
        thread.start()
        self._wait()

    def advance(self) -> None:
        """Do one operation of the medium."""
        if self.busy:
            self._stopped.clear()
            self._turn.release()
            self._wait()

    def finish(self, most: int = 2000) -> None:
        """Go on to the end of the call."""
        for _ in range(most):
            if not self.busy:
                return
            self.advance()
        raise AssertionError("the call does not end")

    def do(self, call: Callable[[], object]) -> None:
        """Do a whole call."""
        self.start(call)
        self.finish()

    def kill(self) -> None:
        """End the process wherever it is."""
        self.alive = False
        self.world.debris_bytes += self.world.writing.pop(self, 0)
        self.finish()

    def _wait(self) -> None:
        assert self._stopped.wait(LIMIT_SECONDS), "the call waits for something else than the medium"
        if self._error is not None:
            error, self._error = self._error, None
            raise error

    def _gate(self) -> str:
        if not self.alive:
            raise KilledError
        self._stopped.set()
        assert self._turn.acquire(timeout=LIMIT_SECONDS)
        if not self.alive:
            raise KilledError
        failure, self.fail_next = self.fail_next, ""
        if failure == "before":
            raise OSError("injected, before")
        return failure

    def _end(self, failure: str) -> None:
        if failure == "after":
            raise OSError("injected, after")

    # -- SmallObjects

    def create(self, name: str, content: bytes) -> bool:
        failure = self._gate()
        new = name not in self.world.small
        if new:
            self.world.small[name] = content
        self._end(failure)
        return new

    def read(self, name: str) -> bytes | None:
        self._end(self._gate())
        return self.world.small.get(name)

    def write(self, name: str, content: bytes) -> None:
        failure = self._gate()
        self.world.small[name] = content
        self._end(failure)

    def delete(self, names: Sequence[str]) -> None:
        for name in names:
            failure = self._gate()
            self.world.small.pop(name, None)
            self._end(failure)

    def names(self, folder: str) -> list[str]:
        self._end(self._gate())
        prefix = f"{folder}/" if folder else ""
        rest = [name.removeprefix(prefix) for name in self.world.small if name.startswith(prefix)]
        return [name for name in rest if "/" not in name]

    # -- ObjectStore

    def contains(self, keys: Sequence[ObjectKey]) -> list[bool]:
        self._end(self._gate())
        return [key in self.world.objects for key in keys]

    def write_new(self, key: ObjectKey, buffer: memoryview) -> bool:
        self.world.writing[self] = len(buffer)
        try:
            failure = self._gate()
            new = key not in self.world.objects
            if new:
                self.world.objects[key] = (len(buffer), self.world.seconds)
        finally:
            self.world.writing.pop(self, None)
        self._end(failure)
        return new

    def pages(self) -> Iterator[Sequence[StoredObject]]:
        for letter in range(4):
            self._end(self._gate())
            found = [(key, *value) for key, value in self.world.objects.items() if key.chunk_hash[0] % 4 == letter]
            if found:
                yield [StoredObject(*one) for one in found]

    def remove(self, keys: Sequence[ObjectKey]) -> list[int | None]:
        self._gate()
        sizes = [self.world.objects[key][0] if key in self.world.objects else None for key in keys]
        for key in (key for key, size in zip(keys, sizes, strict=True) if size is not None):
            failure = self._gate()
            del self.world.objects[key]
            if key in self.pinned and not self.deleting:
                self.removed_own_pin.append(key)
            self._end(failure)
        return sizes

    def unfinished_bytes(self) -> int:
        self._end(self._gate())
        return sum(self.world.writing.values()) + self.world.debris_bytes

    # -- what the backend does with the place

    def put(self, keys: Sequence[ObjectKey], sizes: Sequence[int]) -> list[StoreOutcome]:
        """Store objects as the core does: reserve, store what is wanted, release."""
        reserved = self.place.reserve(keys, sizes)
        outcomes: list[StoreOutcome] = []
        try:
            for key, size, room, outcome in zip(keys, sizes, reserved.rooms, reserved.outcomes, strict=True):
                outcomes.append(outcome or self.place.store(key, memoryview(bytes(size)), room))
        finally:
            self.place.give_back(reserved.rooms)
        return outcomes

    def pin(self, keys: Sequence[ObjectKey]) -> None:
        """Pin what is there."""
        self.place.pin(keys)
        there = self.contains(keys)
        hidden = self.place.hidden(keys)
        self.place.unpin([key for key, a, b in zip(keys, there, hidden, strict=True) if not a or b])
        self.pinned += [key for key, a, b in zip(keys, there, hidden, strict=True) if a and not b]

    def unpin(self) -> None:
        """Unpin everything."""
        pinned, self.pinned = self.pinned, []
        self.place.unpin(pinned)

    def discard(self, keys: Sequence[ObjectKey]) -> None:
        """Delete objects."""
        self.deleting = True
        try:
            self.place.delete(keys)
        finally:
            self.deleting = False
