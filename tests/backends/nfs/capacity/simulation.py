"""Simulated hosts that share a medium in memory.

The medium does one operation at a time, in an order that a test chooses. Each call of a host runs on its own thread.
That thread stops before every operation of the medium until the test lets it continue. The test also advances the time.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence

from offload_backend_nfs.capacity.account_options import AccountOptions
from offload_backend_nfs.capacity.bounded_store import BoundedStore
from offload_backend_nfs.capacity.ports import Removal

from offload_core.api.backend import StoredObject, StoreOutcome
from offload_core.api.keys import ObjectKey
from offload_core.api.one_pass import StoreSeal
from tests.support.tier_log import LOG

LIMIT_SECONDS = 20


class KilledError(BaseException):
    """Ends a thread of a process that was killed."""


class World:
    """The medium, the time, and the unfinished writes."""

    def __init__(self) -> None:
        self.seconds = 1000.0
        self.files: dict[str, bytes] = {}
        self.write_times: dict[str, float] = {}
        self.clock_errors: dict[Host, float] = {}
        """Seconds by which hosts' clocks are ahead of the medium's."""
        self.objects: dict[ObjectKey, tuple[int, float]] = {}
        self.writing: dict[Host, int] = {}
        self.leftover_bytes = 0
        self.refused: set[ObjectKey] = set()
        """Objects that cannot be deleted."""
        self.parts_per_page = 0
        self.seconds_per_part = 0.0

    @property
    def real_bytes(self) -> int:
        """Bytes on the medium."""
        return sum(size for size, _ in self.objects.values()) + sum(self.writing.values()) + self.leftover_bytes


class Host:
    """A process on a host of its own, and its view of the medium. It does one call at a time."""

    def __init__(self, world: World, options: AccountOptions) -> None:
        self.world = world
        self.alive = True
        self.fail_next: str = ""
        """``before`` or ``after``: the next operation of the medium raises before or after its effect."""
        self.pinned: list[ObjectKey] = []
        self.removed_own_pin: list[ObjectKey] = []
        self.deleting = False
        self._turn = threading.Semaphore(0)
        self._stopped = threading.Event()
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self.bounded_store = BoundedStore(
            self,
            self,
            options,
            LOG,
            clock=lambda: world.seconds,
            now=lambda: world.seconds + world.clock_errors.get(self, 0.0),
            sleep=lambda _: None,
        )

    # -- running

    @property
    def busy(self) -> bool:
        """``True`` while a call is under way."""
        return self._thread is not None

    @property
    def in_a_write(self) -> bool:
        """``True`` while an object is being written."""
        return self in self.world.writing

    def start(self, call: Callable[[], object]) -> None:
        """Begin a call, and stop before its first operation of the medium."""

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

    def finish(self, max_operations: int = 2000) -> None:
        """Continue to the end of the call."""
        for _ in range(max_operations):
            if not self.busy:
                return
            self.advance()
        raise AssertionError("the call does not end")

    def do(self, call: Callable[[], object]) -> None:
        """Do a whole call."""
        self.start(call)
        self.finish()

    def kill(self) -> None:
        """Kill the process at its present operation."""
        self.alive = False
        self.world.leftover_bytes += self.world.writing.pop(self, 0)
        self.finish()

    def _wait(self) -> None:
        assert self._stopped.wait(LIMIT_SECONDS), "the call waits, but not for the medium"
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

    # -- AccountFiles

    def create(self, name: str, content: bytes) -> bool:
        failure = self._gate()
        new = name not in self.world.files
        if new:
            self._put_file(name, content)
        self._end(failure)
        return new

    def read(self, name: str, max_bytes: int) -> bytes | None:
        self._end(self._gate())
        content = self.world.files.get(name)
        assert content is None or len(content) <= max_bytes
        return content

    def write(self, name: str, content: bytes) -> None:
        failure = self._gate()
        self._put_file(name, content)
        self._end(failure)

    def _put_file(self, name: str, content: bytes) -> None:
        self.world.files[name] = content
        self.world.write_times[name] = self.world.seconds

    def delete(self, names: Sequence[str]) -> None:
        for name in names:
            failure = self._gate()
            self.world.files.pop(name, None)
            self._end(failure)

    def set_aside(self, name: str) -> str:
        failure = self._gate()
        if name in self.world.files:
            self.world.files[f"damaged/{name.replace('/', '-')}"] = self.world.files.pop(name)
        self._end(failure)
        return "it is kept"

    def names(self, folder: str) -> list[str]:
        self._end(self._gate())
        prefix = f"{folder}/" if folder else ""
        rest = [name.removeprefix(prefix) for name in self.world.files if name.startswith(prefix)]
        return [name for name in rest if "/" not in name]

    def write_times(self, folder: str) -> dict[str, float]:
        self._end(self._gate())
        names = [name for name in self.world.files if name.startswith(f"{folder}/")]
        return {name.removeprefix(f"{folder}/"): self.world.write_times[name] for name in names}

    # -- ObjectFiles

    def contains(self, keys: Sequence[ObjectKey]) -> list[bool]:
        self._end(self._gate())
        return [key in self.world.objects for key in keys]

    def write_new(self, key: ObjectKey, buffer: memoryview, seal: StoreSeal | None = None) -> bool:
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

    def pages(self, progress: Callable[[], None] = lambda: None) -> Iterator[Sequence[StoredObject]]:
        for letter in range(4):
            self._end(self._gate())
            for _ in range(self.world.parts_per_page):
                self.world.seconds += self.world.seconds_per_part
                progress()
            found = [(key, *value) for key, value in self.world.objects.items() if key.chunk_hash[0] % 4 == letter]
            if found:
                yield [StoredObject(*one) for one in found]

    def remove(self, keys: Sequence[ObjectKey]) -> Removal:
        self._end(self._gate())
        sizes: list[int | None] = [self.world.objects[key][0] if key in self.world.objects else None for key in keys]
        for key in (key for key, size in zip(keys, sizes, strict=True) if size is not None):
            failure = self._gate()
            if key in self.world.refused:
                continue
            del self.world.objects[key]
            if key in self.pinned and not self.deleting:
                self.removed_own_pin.append(key)
            self._end(failure)
        if refused := self.world.refused.intersection(keys):
            return Removal(sizes, frozenset(refused), PermissionError("refused"))
        return Removal(sizes)

    def unfinished_bytes(self) -> int:
        self._end(self._gate())
        return sum(self.world.writing.values()) + self.world.leftover_bytes

    # -- the backend's use of the bounded store

    def put(self, keys: Sequence[ObjectKey], sizes: Sequence[int], spare: Sequence[bool] = ()) -> list[StoreOutcome]:
        """Store objects as the core does: reserve, store the wanted objects, release."""
        reserved = self.bounded_store.reserve(keys, sizes, spare)
        outcomes: list[StoreOutcome] = []
        try:
            for key, size, reservation, outcome in zip(
                keys, sizes, reserved.reservations, reserved.outcomes, strict=True
            ):
                outcomes.append(outcome or self.bounded_store.store(key, memoryview(bytes(size)), reservation))
        finally:
            self.bounded_store.release(reserved.reservations)
        return outcomes

    def pin(self, keys: Sequence[ObjectKey]) -> None:
        """Pin the objects that exist."""
        self.bounded_store.pin(keys)
        there = self.contains(keys)
        hidden = self.bounded_store.hidden(keys)
        self.bounded_store.unpin([key for key, a, b in zip(keys, there, hidden, strict=True) if not a or b])
        self.pinned += [key for key, a, b in zip(keys, there, hidden, strict=True) if a and not b]

    def unpin(self) -> None:
        """Unpin everything."""
        pinned, self.pinned = self.pinned, []
        self.bounded_store.unpin(pinned)

    def discard(self, keys: Sequence[ObjectKey]) -> None:
        """Delete objects."""
        self.deleting = True
        try:
            self.bounded_store.delete(keys)
        finally:
            self.deleting = False
