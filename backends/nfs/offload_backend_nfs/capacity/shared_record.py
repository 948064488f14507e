"""A small record that processes on many hosts change together, on a medium without locks.

The method is optimistic concurrency by compare-and-swap. Every state of the record is a *generation*: a file of its
own, such as ``account-00000000000000000042``. To change the record, a process reads the newest generation and makes
the next state. Then it creates the file with the next number exclusively. If several processes try, one of them
succeeds. The others read the new generation and try again after a random wait.

Old generations are deleted. So a process that slept for long may create a generation number that was used before.
Therefore a change counts only if a listing shows that it is the newest, or if the newest generation names it among its
recent changes.
"""

from __future__ import annotations

import errno
import random
import re
import threading
import time
from collections.abc import Callable
from typing import NamedTuple

from offload_backend_nfs.capacity.account_state import AccountState, decode, encode, new_name
from offload_backend_nfs.capacity.control_record import DamagedRecordError
from offload_backend_nfs.capacity.ports import AccountFiles
from offload_backend_nfs.storage.failures import ForeignFileError
from offload_core.api import TierLogger

_FILE_PREFIX = "account-"  # part of the format on the medium
_FILE_NAME = re.compile(_FILE_PREFIX + "([0-9]{20})")
_MAX_GENERATION = 10**18
"""A larger number was not reached by counting: such a file is foreign."""
_MAX_BYTES = 8 * 1024**2
_GENERATIONS_KEPT = 24
_CHANGES_KEPT = 16
"""Fewer than the generations kept. So if a change is too old to be named, its process knows that it did not succeed."""
_DELETE_BATCH = 8
_DAMAGED_TRIES = 5
_FIRST_WAIT_SECONDS = 0.002
_LONGEST_WAIT_SECONDS = 0.5

Edit = Callable[[AccountState], AccountState | None]
"""Returns the next state, or ``None`` if nothing should change. One change may call it several times."""


class Generation(NamedTuple):
    """One generation as this process has read it. Number 0 means that there is none yet."""

    number: int
    state: AccountState


class SharedRecord:
    """The record as one process sees it.

    Calls block, and may come from any thread. This process makes one change at a time.

    Args:
        clock: returns seconds, and includes the time during which the machine sleeps.
        sleep: waits for a number of seconds.
        timeout_seconds: the longest time for one change while other processes also change the record.
    """

    def __init__(
        self,
        files: AccountFiles,
        clock: Callable[[], float],
        log: TierLogger,
        sleep: Callable[[float], None] = time.sleep,
        timeout_seconds: float = 20.0,
    ) -> None:
        self._files = files
        self._log = log
        self._clock = clock
        self._sleep = sleep
        self._timeout_seconds = timeout_seconds
        self.lock = threading.RLock()
        """Held while the record is read or changed. Hold it around several steps that belong together."""
        self.listeners: list[Callable[[AccountState], None]] = []
        """Called with every state that this process reads or makes, with the lock held."""
        self.newest = Generation(0, AccountState())
        """The newest generation that this process has seen."""
        self._foreign_seen = False
        self._damaged = 0
        """The number of the last damaged generation that this process has met."""

    @property
    def state(self) -> AccountState:
        """The newest state that this process has seen."""
        return self.newest.state

    def refresh(self) -> AccountState:
        """Read the newest generation.

        Raises:
            UnknownVersionError: another version of this backend keeps the record.
            OSError: the medium failed.
        """
        with self.lock:
            self._read_newest(self._numbers())
            return self.newest.state

    def change(self, edit: Edit) -> AccountState:
        """Change the record.

        Returns:
            The state that ``edit`` made, or the newest state if ``edit`` wanted no change.

        Raises:
            UnknownVersionError: another version of this backend keeps the record.
            OSError: the medium failed, or other processes were always faster. As far as is known, nothing has changed.
        """
        with self.lock:
            deadline = self._clock() + self._timeout_seconds
            longest_wait = _FIRST_WAIT_SECONDS
            fresh = False
            while True:
                state = edit(self.newest.state) if self.newest.number or fresh else None
                if state is None and fresh:
                    return self.newest.state
                if state is not None:
                    identity = new_name()
                    changes = (*state.recent_changes, identity)[-_CHANGES_KEPT:]
                    if self._try_change(state.model_copy(update={"recent_changes": changes}), identity):
                        return self.newest.state
                    if self._clock() > deadline:
                        raise OSError(
                            f"the account could not be changed within {self._timeout_seconds:g} s, because others "
                            "kept changing it; a larger capacity makes changes rarer"
                        )
                    self._sleep(random.uniform(0, longest_wait))
                    longest_wait = min(2 * longest_wait, _LONGEST_WAIT_SECONDS)
                else:
                    self.refresh()
                fresh = True

    def _try_change(self, state: AccountState, identity: str) -> bool:
        """Create ``state`` as the generation after the newest, and return whether the change succeeded.

        Afterwards :attr:`newest` is the newest generation on the medium.
        """
        number = self.newest.number + 1
        content = encode(state)
        if len(content) > _MAX_BYTES or number > _MAX_GENERATION:
            raise OSError(
                errno.EOVERFLOW,
                f"the account cannot grow: it has generation {number} and {len(content)} bytes; stop all engines on "
                "this storage, and remove the folder .offload-core",
            )
        failure: OSError | None = None
        created = False
        try:
            created = self._files.create(_file_name(number), content)
        except OSError as error:  # the file may exist all the same
            failure = error
        numbers = [*self._numbers(), number]  # a share may return an old listing, but it finds a file by its name
        if created and number == max(numbers):
            self._publish(number, state)
            self._delete_old(numbers)
            self._set_damaged_aside()
            return True
        self._read_newest(numbers)
        if identity in self.newest.state.recent_changes:
            return True
        if created:  # the number of an old generation, deleted long ago
            self._files.delete([_file_name(number)])
        if failure is not None:
            raise failure
        return False

    def _read_newest(self, numbers: list[int]) -> None:
        """Read the newest of the generations ``numbers``, or a later one if that is gone or damaged."""
        for attempt in range(_DAMAGED_TRIES):
            newest = max(numbers, default=0)
            if newest == 0:
                self._publish(0, AccountState())
                return
            if newest == self.newest.number:
                return
            try:
                content = self._files.read(_file_name(newest), _MAX_BYTES)
                if content is not None:
                    self._publish(newest, decode(content))
                    return
                problem: OSError = FileNotFoundError(errno.ENOENT, "it is listed but cannot be read")
            except (DamagedRecordError, ForeignFileError) as error:
                problem = error
                self._sleep(_FIRST_WAIT_SECONDS * 2**attempt)
            numbers = self._numbers()
        if isinstance(problem, FileNotFoundError):
            raise OSError(f"the account's file {_file_name(newest)} is listed but cannot be read")
        self._damaged = newest
        self._log.warning(
            "the account's file %s is damaged (%s): a new account replaces it. "
            "Nothing is stored until all objects are counted; loads continue",
            _file_name(newest), problem,
        )  # fmt: skip
        self._publish(newest, AccountState())

    def _set_damaged_aside(self) -> None:
        """Set the damaged generation aside. Only a later one allows it, or the numbers would begin again before it."""
        if 0 < self._damaged < self.newest.number:
            name, self._damaged = _file_name(self._damaged), 0
            self._log.warning("the account's damaged file %s was replaced; %s", name, self._files.set_aside(name))

    def _publish(self, number: int, state: AccountState) -> None:
        for listener in self.listeners:
            listener(state)
        self.newest = Generation(number, state)

    def _numbers(self) -> list[int]:
        numbers = []
        for name in self._files.names(""):
            if match := _FILE_NAME.fullmatch(name):
                number = int(match[1])
                if number <= _MAX_GENERATION:
                    numbers.append(number)
                elif not self._foreign_seen:
                    self._foreign_seen = True
                    place = self._files.set_aside(name)
                    self._log.warning("the file %s has a number that no account reaches; %s", name, place)
        return numbers

    def _delete_old(self, numbers: list[int]) -> None:
        old = sorted(number for number in numbers if number <= self.newest.number - _GENERATIONS_KEPT)
        if len(old) >= _DELETE_BATCH:
            self._files.delete([_file_name(number) for number in old])


def _file_name(number: int) -> str:
    return f"{_FILE_PREFIX}{number:020d}"
