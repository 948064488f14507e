"""One example of the state machine: it runs steps on the clients of a medium and explains a broken clause."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Coroutine, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, TypeVar

from offload_core.api.backend import Backend, LoadReservation, StoreReservation
from offload_core.api.keys import ObjectKey
from offload_core.testing.state_machine.calls import Operation, OperationRun, with_own_calls
from offload_core.testing.state_machine.guarded_buffers import GuardedBuffers
from offload_core.testing.state_machine.leaks import Leaks
from offload_core.testing.state_machine.medium import Medium
from offload_core.testing.state_machine.oracle import ContractError, Oracle
from offload_core.testing.strategies import Content

T = TypeVar("T")

CALL_LIMIT_SECONDS = 60

MOST_LEFT_OPEN = 32
"""Most threads and file descriptors that all examples together may leave behind."""

_WATCHED_CALLS = 8
"""Number of earlier calls whose buffers are still checked."""


@dataclass
class HeldReservation:
    """A reservation that is held over several steps."""

    backend: Backend[Any]
    keys: list[ObjectKey]
    reservation: LoadReservation | StoreReservation
    contents: list[Content] = field(default_factory=list)
    """Contents that a store reservation still waits for; empty after the store."""
    spare: list[bool] = field(default_factory=list)
    """Flags of the contents."""
    pinned: list[ObjectKey] = field(default_factory=list)
    reserved: dict[ObjectKey, int] = field(default_factory=dict)
    """Bytes per key that a store reservation has reserved; the oracle holds the same dictionary."""


class Example:
    """The clients of one example, their reservations, the oracle and the list of steps.

    Args:
        medium: the medium that the clients use.
    """

    def __init__(self, medium: Medium) -> None:
        self.medium = medium
        self.oracle = Oracle(medium.capacity_bytes, medium.reads)
        self.clients: list[Backend[Any]] = []
        self.reservations: list[HeldReservation] = []
        self.keys: list[ObjectKey] = []
        """Keys of the example; operations name them by number."""
        self.thread_order_seed = 0
        """Seed for the order in which threads take turns."""
        self.failed = False
        self._runner = asyncio.Runner()
        self._ended_buffers: list[GuardedBuffers] = []
        self._steps: list[str] = []
        self._leaks = Leaks()

    @property
    def step_count(self) -> int:
        """The number of steps so far."""
        return len(self._steps)

    @property
    def last_step(self) -> str:
        """The latest step with its number, for messages."""
        return f"step {len(self._steps)}: {self._steps[-1]}" if self._steps else "the beginning"

    def client(self, number: int) -> Backend[Any]:
        """Return a client; numbers wrap around."""
        return self.clients[number % len(self.clients)]

    def key(self, slot: int) -> ObjectKey:
        """Return a key; slots wrap around."""
        return self.keys[slot % len(self.keys)]

    def key_names(self, keys: Sequence[ObjectKey]) -> str:
        """Return short names of ``keys``, for the list of steps."""
        return ", ".join(f"k{self.keys.index(key)}" for key in keys) or "nothing"

    def open_client(self) -> None:
        """Construct and open one more client."""
        backend = self.run_step(f"open client {len(self.clients)}", self._opened())
        self.clients.append(backend)

    def close_client(self, backend: Backend[Any]) -> None:
        """Close a client twice (C13)."""
        number = self.clients.index(backend)
        self.clients.remove(backend)
        self.run_step(f"close client {number}, twice", _close_twice(backend), "C13")

    def release(self, held: HeldReservation) -> None:
        """Release a reservation (C10)."""
        self.reservations.remove(held)
        self.run_step(f"release the reservation of {self.key_names(held.keys)}", held.reservation.release(), "C10")
        self.oracle.pins.subtract(held.pinned)
        self.oracle.reserved = [reserved for reserved in self.oracle.reserved if reserved is not held.reserved]

    def run_operations(self, operations: Sequence[Operation]) -> None:
        """Run operations at once, each on its client, and check their answers."""
        self._run_at_once([self._prepare(one, self.client(one.client), reserved=False) for one in operations])

    def run_reserved(self, operation: Operation, backend: Backend[Any]) -> None:
        """Run an operation whose reservation is held, and check its answers."""
        self._run_at_once([self._prepare(operation, backend, reserved=True)])

    def run_step(self, words: str, coroutine: Coroutine[Any, Any, T], clause: str = "C2") -> T:
        """Add a step to the list and run it.

        The medium works, so an exception breaks ``clause``.

        Raises:
            ContractError: the step raised an exception or did not end in time; with the steps that led to it.
        """
        self._steps.append(words)

        async def limited() -> T:
            async with asyncio.timeout(CALL_LIMIT_SECONDS):
                return await coroutine

        with self.explained():
            try:
                return self._runner.run(limited())
            except ContractError:
                raise
            except Exception as error:
                raise _raised(clause, words, error) from error
            finally:
                self._leaks.step_ended(self.last_step)

    def add_answer(self, answer: str) -> None:
        """Write an answer behind the latest step."""
        self._steps[-1] += f" -> {answer}"

    def forget_step(self) -> None:
        """Take the latest step off the list, because it explains nothing."""
        self._steps.pop()

    @contextmanager
    def explained(self) -> Iterator[None]:
        """Add the steps and the keys to a :class:`ContractError`."""
        try:
            yield
        except ContractError as error:
            if not self.failed:
                self.failed = True
                self.medium.change_namespaces()
                steps = [f"  {number}. {step}" for number, step in enumerate(self._steps, 1)]
                keys = [f"  k{number} = {key}" for number, key in enumerate(self.keys)]
                error.args = ("\n".join([str(error), "steps:", *steps, "keys:", *keys]),)
            raise

    def check_ended_buffers(self) -> None:
        """Check that no call wrote into its buffers after its end (C7).

        Raises:
            ContractError: a call did; with the steps that led to it.
        """
        with self.explained():
            for buffers in self._ended_buffers:
                buffers.check_unchanged()

    def check_left_open(self) -> None:
        """Check that closed clients have left neither threads nor file descriptors behind (C13).

        Some libraries keep a few of them for the process. They are no leak as long as their number does not grow.

        Raises:
            ContractError: this example and the ones before have left more than a few; with the step that opened one.
        """
        left = self._leaks.left()
        if left and len(self.medium.left_open(left)) > MOST_LEFT_OPEN:
            gc.collect()  # a file or connection that waits for it is no leak
            left = self._leaks.left()
            if not left or len(self.medium.left_open(left)) <= MOST_LEFT_OPEN:
                return
            some, step = next(iter(left.items()))
            with self.explained():
                raise ContractError(
                    f"C13: all clients are closed, and {len(left)} threads and file descriptors of this example are "
                    f"left; {some} is of {step}"
                )

    def shut_down(self) -> None:
        """Close the event loop; after a failure, leave as little as possible on the medium."""
        self._runner.run(self._clean_up())
        self._runner.close()

    async def _clean_up(self) -> None:
        with suppress(Exception):
            for held in self.reservations:
                await held.reservation.release()
        for backend in self.clients:
            with suppress(Exception):
                await backend.delete(self.keys)
                await backend.close()

    async def _opened(self) -> Backend[Any]:
        backend = self.medium.construct(self.thread_order_seed)
        await backend.open()
        return backend

    def _prepare(self, operation: Operation, backend: Backend[Any], *, reserved: bool) -> OperationRun:
        operation = with_own_calls(operation, backend)
        keys = [self.key(slot) for slot in operation.slots]
        sizes = [
            self.oracle.likely_size(key) if size is None else size
            for key, size in zip(keys, operation.sizes_bytes, strict=False)
        ]
        if not reserved:
            sizes_bytes = [content.size_bytes for content in operation.contents]
            self.oracle.request_capacity(sizes_bytes, operation.spare)
        return OperationRun(operation, backend, keys, sizes, reserved=reserved)

    def _run_at_once(self, runs: Sequence[OperationRun]) -> None:
        words = "; at once ".join(self._words(run.operation) for run in runs)
        self.run_step(words, _run_all(runs))
        self.add_answer("; ".join(run.answers() for run in runs))
        with self.explained():
            self._ended_buffers = [*self._ended_buffers[-_WATCHED_CALLS:], *(run.buffers for run in runs)]
            self.oracle.check_events([event for run in runs for event in run.events])

    def _words(self, operation: Operation) -> str:
        names = [f"k{slot % len(self.keys)}" for slot in operation.slots]
        if operation.contents:
            names = [f"{name}={content}" for name, content in zip(names, operation.contents, strict=True)]
        if operation.sizes_bytes:
            sizes = [f" into {size} bytes" if size is not None else "" for size in operation.sizes_bytes]
            names = [f"{name}{size}" for name, size in zip(names, sizes, strict=True)]
        if operation.spare:
            names = [f"{name}{' (spare)' * is_spare}" for name, is_spare in zip(names, operation.spare, strict=True)]
        cancelled = operation.cancel_after_turns
        suffix = "" if cancelled is None else f", cancelled after {cancelled} turns"
        client = f"client {operation.client % len(self.clients)}: " if len(self.clients) > 1 else ""
        return f"{client}{operation.kind} {', '.join(names) or 'nothing'}{suffix}"


async def _run_all(runs: Sequence[OperationRun]) -> None:
    """Run operations at once; cancel an operation after the turns of the event loop that it names."""
    tasks = [asyncio.ensure_future(run.run()) for run in runs]
    cancel_turns = [run.operation.cancel_after_turns for run in runs]
    for turn in range(max((turns for turns in cancel_turns if turns is not None), default=-1) + 1):
        for task, turns in zip(tasks, cancel_turns, strict=True):
            if turns == turn:
                task.cancel()
        await asyncio.sleep(0)
    await asyncio.wait(tasks)
    for task, run in zip(tasks, runs, strict=True):
        error = None if task.cancelled() else task.exception()
        if isinstance(error, ContractError):
            raise error
        if error is not None:
            kind = run.operation.kind
            raise _raised({"delete": "C12", "touch": "C21"}.get(kind, "C2"), kind, error) from error


def _raised(clause: str, words: str, error: BaseException) -> ContractError:
    return ContractError(f"{clause}: {words} raised {type(error).__name__}: {error}, on a medium that works")


async def _close_twice(backend: Backend[Any]) -> None:
    await backend.close()
    await backend.close()
