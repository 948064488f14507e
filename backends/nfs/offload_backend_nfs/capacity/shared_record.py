"""A small record that processes on many hosts change together, on a medium without locks.

Optimistic concurrency by compare-and-swap: every state is a file of its own, ``account-00000000000000000042``. To
change it, a process reads the newest, makes the next, and creates the file with the next number exclusively. Of all who
try, one wins; the others read what it has written and try again after a random pause.

Old generations are deleted, so somebody who slept for long may create one that has been there before. Therefore a
change only counts once a listing shows that it is the newest, or the newest one names it among its latest changes.
"""

from __future__ import annotations

import logging
import random
import secrets
import threading
import time
from collections.abc import Callable
from typing import NamedTuple

from offload_backend_nfs.capacity.account_state import AccountState, DamagedError, decode, encode
from offload_backend_nfs.capacity.ports import SmallObjects

logger = logging.getLogger(__name__)

_PREFIX = "account-"
_KEPT = 24
_CHANGES_KEPT = 16
"""Fewer than generations, so that who is so far behind that its change is not named has lost."""
_DELETED_AT_ONCE = 8
_DAMAGED_TRIES = 5
_FIRST_PAUSE_SECONDS = 0.002
_LONGEST_PAUSE_SECONDS = 0.5

Edit = Callable[[AccountState], AccountState | None]
"""Makes the next state of one; ``None`` where nothing is to be changed. May be called several times."""


class View(NamedTuple):
    """One generation as this process has read it; number 0 before there is any."""

    number: int
    state: AccountState


class Generations:
    """The record, as one process sees it. Calls block, and may come from any thread; changes are made one at a time.

    Args:
        patience_seconds: how long a change may take when others keep changing the record too.
        clock: seconds that pass also while the machine sleeps.
        pause: waits for so many seconds.
    """

    def __init__(
        self,
        small: SmallObjects,
        clock: Callable[[], float],
        pause: Callable[[float], None] = time.sleep,
        patience_seconds: float = 20.0,
    ) -> None:
        self._small = small
        self._clock = clock
        self._pause = pause
        self._patience_seconds = patience_seconds
        self.lock = threading.RLock()
        """Held while the record is read or changed; hold it around several steps that belong together."""
        self.watchers: list[Callable[[AccountState], None]] = []
        """Called with every state that comes into view, with the lock held."""
        self.view = View(0, AccountState())
        """The newest generation that was seen."""

    @property
    def state(self) -> AccountState:
        """The newest state that was seen."""
        return self.view.state

    def refresh(self) -> AccountState:
        """Read the newest generation.

        Raises:
            UnknownVersionError: another version of this backend keeps the record.
            OSError: the medium failed.
        """
        with self.lock:
            self._read_newest(self._numbers())
            return self.view.state

    def change(self, edit: Edit) -> AccountState:
        """Change the record.

        Returns:
            The state that ``edit`` made, or the newest one where it wanted no change.

        Raises:
            UnknownVersionError: another version of this backend keeps the record.
            OSError: the medium failed, or others kept being faster. Nothing has changed, as far as is known.
        """
        with self.lock:
            give_up = self._clock() + self._patience_seconds
            pause = _FIRST_PAUSE_SECONDS
            fresh = False
            while True:
                state = edit(self.view.state) if self.view.number or fresh else None
                if state is None and fresh:
                    return self.view.state
                if state is not None:
                    identity = secrets.token_hex(8)
                    changes = (*state.changes, identity)[-_CHANGES_KEPT:]
                    if self._try(state.model_copy(update={"changes": changes}), identity):
                        return self.view.state
                    if self._clock() > give_up:
                        raise OSError(
                            f"the account could not be changed within {self._patience_seconds:g} s, because others "
                            "kept changing it; a larger capacity makes changes rarer"
                        )
                    self._pause(random.uniform(0, pause))
                    pause = min(2 * pause, _LONGEST_PAUSE_SECONDS)
                else:
                    self.refresh()
                fresh = True

    def _try(self, state: AccountState, identity: str) -> bool:
        """Make ``state`` the generation after the one in view; returns whether it is in. The newest is then in view."""
        number = self.view.number + 1
        failure: OSError | None = None
        created = False
        try:
            created = self._small.create(_name(number), encode(state))
        except OSError as error:  # it may be there all the same
            failure = error
        numbers = [*self._numbers(), number]  # a share may show an old listing, but a file by its name
        if created and number == max(numbers):
            self._show(number, state)
            self._delete_old(numbers)
            return True
        self._read_newest(numbers)
        if identity in self.view.state.changes:
            return True
        if created:  # in the place of a generation of long ago, which has been deleted since
            self._small.delete([_name(number)])
        if failure is not None:
            raise failure
        return False

    def _read_newest(self, numbers: list[int]) -> None:
        """Take the newest of ``numbers`` into view, or a later one where that is gone or damaged."""
        for attempt in range(_DAMAGED_TRIES):
            newest = max(numbers, default=0)
            if newest == 0:
                self._show(0, AccountState())
                return
            if newest == self.view.number:
                return
            content = self._small.read(_name(newest))
            if content is not None:
                try:
                    self._show(newest, decode(content))
                    return
                except DamagedError as error:
                    damaged = error
                    self._pause(_FIRST_PAUSE_SECONDS * 2**attempt)
            numbers = self._numbers()
        if content is None:
            raise OSError(f"{_name(newest)} is listed but cannot be read")
        logger.warning(
            "%s is damaged (%s): a new account takes its place. Nothing is stored until the objects were counted.",
            _name(newest), damaged,
        )  # fmt: skip
        self._show(newest, AccountState())

    def _show(self, number: int, state: AccountState) -> None:
        for watcher in self.watchers:
            watcher(state)
        self.view = View(number, state)

    def _numbers(self) -> list[int]:
        names = self._small.names("")
        return [int(name.removeprefix(_PREFIX)) for name in names if _is_generation(name)]

    def _delete_old(self, numbers: list[int]) -> None:
        old = sorted(number for number in numbers if number <= self.view.number - _KEPT)
        if len(old) >= _DELETED_AT_ONCE:
            self._small.delete([_name(number) for number in old])


def _name(number: int) -> str:
    return f"{_PREFIX}{number:020d}"


def _is_generation(name: str) -> bool:
    digits = name.removeprefix(_PREFIX)
    return len(name) == len(_PREFIX) + 20 == len(digits) + len(_PREFIX) and digits.isdecimal()
