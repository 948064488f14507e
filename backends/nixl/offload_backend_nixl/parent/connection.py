"""One child process: its start, its requests and answers, and its end.

One thread owns the process. It starts it, takes its answers and reaps it. The system kills the child when that thread
ends, so it must live as long as the child.
"""

from __future__ import annotations

import errno
import itertools
import json
import os
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

from offload_backend_nixl.parent.ring import PAGE_BYTES, Ring
from offload_backend_nixl.protocol import (
    MAX_MEMORIES,
    MAX_PACKET_BYTES,
    RING,
    Answer,
    Operation,
    Outcome,
    ProtocolError,
    Request,
    decode_answer,
    encode_request,
)
from offload_core.api import SharedMemory

CHILD_MODULE = "offload_backend_nixl.child"
_END_SECONDS = 2.0
"""Time for the child to end after its socket is closed, before it is killed."""
_SEND_SECONDS = 5
_ENVIRONMENT = {"AWS_RETRY_MODE": "standard", "AWS_MAX_ATTEMPTS": "2", "NIXL_LOG_LEVEL": "FATAL"}
"""Defaults for the child: AWS's client retries for 25 s otherwise, and NIXL logs each absent object."""

_CORE_VARIABLES = "OFFLOAD_CORE_"


class ChildError(OSError):
    """The child process has ended, was killed, or could not be started."""


class Place(NamedTuple):
    """The beginning of a buffer in memory that the child has mapped."""

    memory: int
    """The number of the memory."""
    start: int


class Ticket:
    """A request whose answer is awaited."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.sent_seconds = time.monotonic()
        self.answered = threading.Event()
        self.answer: Answer | None = None


class Child:
    """A child process and the memory shared with it. Both are used once: a new child gets new memory.

    Args:
        name: the tier's name, for messages.
        ring_bytes: size of the shared memory.
        settings: the configuration of the child.
        deadline_seconds: limit on an answer.
    """

    def __init__(self, name: str, ring_bytes: int, settings: Mapping[str, Any], deadline_seconds: float) -> None:
        self._name = name
        self._settings = settings
        self._deadline_seconds = deadline_seconds
        self._lock = threading.Lock()
        self._tickets: dict[int, Ticket] = {}
        self._last_answers: dict[int, Answer | None] = {}
        """Answers that count after the end of the process; ``None`` for one that has not come."""
        self._next_number = 0
        self._reason: str | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._started = threading.Event()
        self._memories: WeakKeyDictionary[SharedMemory, int] = WeakKeyDictionary()
        self._memory_numbers = itertools.count(RING + 1)
        self._memories_lock = threading.Lock()
        self.has_answered = False
        """``True`` once it has answered a request after its configuration."""
        self._memory_descriptor = os.memfd_create(f"offload-nixl-{name}", os.MFD_CLOEXEC)
        nbytes = -(-ring_bytes // PAGE_BYTES) * PAGE_BYTES
        os.ftruncate(self._memory_descriptor, nbytes)
        self.ring = Ring(self._memory_descriptor, nbytes)
        self._socket, self._child_socket = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", _SEND_SECONDS, 0))
        self._owner = threading.Thread(target=self._own, name=f"nixl-child-{name}", daemon=True)

    @property
    def pid(self) -> int | None:
        """The process, while it lives."""
        return None if self._process is None or self.has_ended else self._process.pid

    @property
    def has_ended(self) -> bool:
        """``True`` if the child takes no more requests."""
        return self._reason is not None

    @property
    def is_gone(self) -> bool:
        """``True`` if no process is left. A killed process in a call that nothing interrupts is not gone."""
        return not self._owner.is_alive()

    def start(self) -> None:
        """Start the process and wait until it is ready.

        Raises:
            ChildError: it did not become ready in time.
            OSError: it refused its configuration.
        """
        self._owner.start()
        self._started.wait()
        ticket = self.send(Operation.CONFIGURE, text=json.dumps(self._settings))
        answer = self.wait(ticket)
        if answer.outcome is not Outcome.DONE:
            error = self.failure(answer)
            self.end("it refused its configuration")
            raise error

    def place_of(self, buffer: memoryview) -> Place | None:
        """Return the place of a buffer that the child can reach; ``None`` if it must be copied through the ring.

        The child maps the memory of the buffer at its first use.

        Raises:
            ChildError: the child has ended.
        """
        found = SharedMemory.of(buffer)
        if found is None:
            return None
        memory, start = found
        with self._memories_lock:
            number = self._memories.get(memory)
            if number is None:
                number = self._memories[memory] = self._map(memory)
        return None if number == RING else Place(number, start)

    def _map(self, memory: SharedMemory) -> int:
        """Let the child map a memory, and return its number; that of the ring if the child cannot."""
        number = next(self._memory_numbers)
        if number > MAX_MEMORIES:
            return RING
        answer = self.wait(self.send(Operation.MAP, [memory.descriptor], memory=number))
        return number if answer.outcome is Outcome.DONE else RING

    def send(self, operation: Operation, descriptors: Sequence[int] = (), **fields: Any) -> Ticket:
        """Send a request, and copies of descriptors.

        Raises:
            ChildError: the child has ended, or takes no requests.
        """
        with self._lock:
            if self._reason is not None:
                raise self._error()
            ticket = Ticket(self._next_number)
            self._next_number += 1
            self._tickets[ticket.number] = ticket
        try:
            packet = encode_request(Request(operation, ticket.number, **fields))
            socket.send_fds(self._socket, [packet], list(descriptors))
        except ConnectionError as error:
            self._owner.join(2 * _END_SECONDS)  # finds the reason
            self.end("it closed its connection")
            raise self._error() from error
        except OSError as error:
            self.end(f"it took no request ({error.strerror})")
            raise self._error() from error
        return ticket

    def wait(self, ticket: Ticket) -> Answer:
        """Wait for an answer. If there is none until the deadline, the child is killed.

        Raises:
            ChildError: the child has ended without this answer.
        """
        remaining = ticket.sent_seconds + self._deadline_seconds - time.monotonic()
        if not ticket.answered.wait(max(remaining, 0)):
            self.end(f"it did not answer for {self._deadline_seconds:g} s")
        if ticket.answer is None:
            raise self._error()
        return ticket.answer

    def check(self) -> None:
        """Check that the child takes requests.

        Raises:
            ChildError: it has ended.
        """
        if self.has_ended:
            raise self._error()

    def failure(self, answer: Answer) -> OSError:
        """Return the error in an answer. A child that answers another question is killed."""
        if answer.outcome is Outcome.FAILED:
            return OSError(answer.code, f"tier {self._name!r}: {answer.text}")
        self.end(f"it answered {answer.outcome.name} to another question")
        return self._error()

    def end(self, reason: str) -> None:
        """Kill the process at once. Its requests fail. Harmless when repeated."""
        with self._lock:
            if self._reason is None:
                self._reason = reason
            process = self._process
        if process is not None:
            process.kill()  # does nothing if the process has been reaped
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._fail_all()
        self.ring.close()

    def wait_gone(self, seconds: float | None = None) -> None:
        """Wait until the process has ended with all of its threads, so that it writes nowhere any more.

        A killed process in a call that nothing interrupts keeps the caller, for ``seconds`` at most if they are given.
        """
        self._owner.join(seconds)

    def close(self) -> None:
        """Let the process end in an orderly way, or kill it after two seconds."""
        with self._lock:
            if self._reason is None:
                self._reason = "the tier is closed"
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_WR)
        if self._owner.ident is not None:
            self._owner.join(_END_SECONDS)
        self.end("the tier is closed")

    @property
    def reason(self) -> str:
        """The reason of the end, for messages."""
        return self._reason or "it lives"

    def _error(self) -> ChildError:
        return ChildError(
            errno.EHOSTDOWN,
            f"the NIXL process of tier {self._name!r} ended: {self._reason}; the next request starts another",
        )

    def _fail_all(self) -> None:
        with self._lock:
            tickets, self._tickets = list(self._tickets.values()), {}
        for ticket in tickets:
            ticket.answered.set()

    # The methods below run on the thread that owns the process.

    def _own(self) -> None:
        try:
            process = self._start_process()
        except OSError as error:
            self._reason = f"it could not be started ({error})"
            self._started.set()
            return
        finally:
            self._child_socket.close()
            os.close(self._memory_descriptor)
        self._process = process
        self._started.set()
        try:
            self._take_answers()
        except ConnectionError:
            pass  # it died with requests unread
        except ProtocolError as error:
            self.end(f"it answered nonsense ({error})")
        except OSError as error:
            self.end(f"its connection failed ({error.strerror})")
        try:
            process.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
        code = process.wait()
        self._hand_over_last_answers()
        self.end(f"it exited with code {code}" if code >= 0 else f"it was killed by signal {-code}")
        self._socket.close()

    def _start_process(self) -> subprocess.Popen[bytes]:
        descriptors = (self._child_socket.fileno(), self._memory_descriptor)
        arguments = [*map(str, descriptors), str(os.getpid())]
        path = os.pathsep.join(part for part in sys.path if part)
        return subprocess.Popen(
            [sys.executable, "-P", "-m", CHILD_MODULE, *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            pass_fds=descriptors,
            env={**_ENVIRONMENT, **_own_environment(), "PYTHONPATH": path},
        )

    def _take_answers(self) -> None:
        """Hand answers to their tickets until the child closes its end."""
        while packet := self._socket.recv(MAX_PACKET_BYTES + 1):
            answer = decode_answer(packet)
            with self._lock:
                if answer.outcome is Outcome.ENDING and answer.number in self._tickets:
                    self._reason = self._reason or answer.text
                    self._last_answers[answer.number] = None
                    continue
                if answer.number in self._last_answers:
                    self._last_answers[answer.number] = answer
                    continue
                ticket = self._tickets.pop(answer.number, None)
            if ticket is None:
                if self.has_ended:
                    continue
                raise ProtocolError(f"an answer to the request {answer.number}, which nobody sent")
            self.has_answered = self.has_answered or ticket.number > 0
            ticket.answer = answer
            ticket.answered.set()

    def _hand_over_last_answers(self) -> None:
        with self._lock:
            for number, answer in self._last_answers.items():
                ticket = self._tickets.get(number)
                if ticket is not None and answer is not None:
                    ticket.answer = answer


def _own_environment() -> dict[str, str]:
    """Return the environment without the core's variables: they hold secrets, also those of other tiers."""
    return {name: value for name, value in os.environ.items() if not name.startswith(_CORE_VARIABLES)}
