"""A place with a limit: what a tier with a capacity does around its medium. Blocks, on any thread.

Every object is written where nothing was, so each counts once however many processes store it at the same time; and
objects leave by the account only, so each is taken out once.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import NamedTuple

from offload_backend_nfs.capacity.account_state import AccountState, UnknownVersionError
from offload_backend_nfs.capacity.housekeeping import Keeper
from offload_backend_nfs.capacity.lease import AccountOptions, Claim, Room
from offload_backend_nfs.capacity.pending_evictions import Condemned
from offload_backend_nfs.capacity.ports import ObjectStore, SmallObjects
from offload_backend_nfs.capacity.shared_record import Generations
from offload_backend_nfs.capacity.usage_log import Touches
from offload_core.api import ObjectKey, StoreOutcome

logger = logging.getLogger(__name__)


class Rooms(NamedTuple):
    """What became of a request for room: per key its room, or the reason why there is none."""

    rooms: list[Room | None]
    outcomes: list[StoreOutcome | None]
    evicted: list[ObjectKey]


class BoundedPlace:
    """Objects under one limit for all processes that use them.

    Args:
        clock: seconds that pass also while the machine sleeps.
        now: seconds since the epoch.
        pause: waits for so many seconds.
        stopped: whether to leave long work.
    """

    def __init__(
        self,
        small: SmallObjects,
        store: ObjectStore,
        options: AccountOptions,
        *,
        clock: Callable[[], float] = lambda: time.clock_gettime(time.CLOCK_BOOTTIME),
        now: Callable[[], float] = time.time,
        pause: Callable[[float], None] = time.sleep,
        stopped: Callable[[], bool] = lambda: False,
    ) -> None:
        self._store = store
        self._record = Generations(small, clock, pause)
        self._claim = Claim(self._record, small, options, clock)
        self._condemned = Condemned(self._record, self._claim, small, store, options, clock)
        self._touches = Touches(small, clock, now)
        self._keeper = Keeper(
            self._record, self._claim, self._condemned, self._touches, small, store, options, clock, stopped
        )
        self._trouble: str | None = None
        shortest = min(options.lease_seconds / 6, options.grace_seconds / 6 or options.lease_seconds)
        self.step_seconds = max(0.05, min(10.0, shortest))
        """How often :meth:`step` must be called at least."""

    @property
    def state(self) -> AccountState:
        """The newest state of the account that was seen."""
        return self._record.state

    @property
    def owner(self) -> str:
        """This process's name in the account."""
        return self._claim.owner

    @property
    def is_keeper(self) -> bool:
        """Whether this process keeps house for all."""
        return self._keeper.is_keeper

    @property
    def pressed(self) -> bool:
        """Whether objects have to go: :meth:`step` should come soon, if this process is the keeper."""
        return self._keeper.pressed or not self._record.state.counted

    def open(self) -> None:
        """Take part in the account. What keeps from that is logged: objects can be loaded all the same."""
        with self._tolerant():
            self._claim.join()
            self._keeper.count_a_new_account()

    def close(self) -> None:
        """Write down what was used, and give back the claim. Idempotent."""
        with self._tolerant():
            self._touches.write_down()
            self._claim.leave()

    def step(self) -> None:
        """Keep house: renew the lease, follow the account, and, as the keeper, count and evict for all."""
        with self._tolerant():
            self._keeper.step()

    def refresh(self) -> None:
        """See what others have changed.

        Raises:
            OSError: the medium failed.
        """
        self._record.refresh()

    def hidden(self, keys: Sequence[ObjectKey]) -> list[bool]:
        """Return, per key, whether its object is about to go, so that nobody should load it. Does not block."""
        return self._condemned.hidden(keys)

    def pin(self, keys: Iterable[ObjectKey]) -> None:
        """Keep objects from being evicted until :meth:`unpin`. Does not block."""
        self._condemned.pin(keys)

    def unpin(self, keys: Iterable[ObjectKey]) -> None:
        """Undo :meth:`pin`."""
        self._condemned.unpin(keys)

    def note_use(self, keys: Collection[ObjectKey]) -> None:
        """Note that objects are used now. Does not block."""
        self._condemned.note_use(keys)
        self._touches.note(keys)

    def reserve(self, keys: Sequence[ObjectKey], nbytes: Sequence[int]) -> Rooms:
        """Take room for what is not there yet.

        Raises:
            OSError: the medium failed.
        """
        there, hidden = self._store.contains(keys), self._condemned.hidden(keys)
        outcomes: list[StoreOutcome | None] = []
        for present, leaving in zip(there, hidden, strict=True):
            # What is about to go can be stored anew once it has gone.
            outcomes.append(StoreOutcome.REJECTED if leaving else StoreOutcome.ALREADY_PRESENT if present else None)
        self.note_use([key for key, outcome in zip(keys, outcomes, strict=True) if outcome is not None])
        wanted = [index for index, outcome in enumerate(outcomes) if outcome is None]
        rooms: list[Room | None] = [None] * len(outcomes)
        if wanted and self._trouble is None:
            for index, room in zip(wanted, self._claim.reserve([nbytes[index] for index in wanted]), strict=True):
                rooms[index] = room
        for index in wanted:
            if rooms[index] is None:
                outcomes[index] = StoreOutcome.REJECTED
        return Rooms(rooms, outcomes, self._condemned.take_evicted())

    def store(self, key: ObjectKey, buffer: memoryview, room: Room | None) -> StoreOutcome:
        """Write an object into its room, taking some where it has none.

        Raises:
            OSError: the medium failed. The object may be there or not; if it may, its room is used.
        """
        if room is None:
            (room,), (outcome,), _ = self.reserve([key], [len(buffer)])
            if room is None:
                return outcome or StoreOutcome.REJECTED
        if len(buffer) != room.nbytes or not self._claim.may_write(room):
            self._claim.end(room, written=False)
            return StoreOutcome.REJECTED
        try:
            written = self._store.write_new(key, buffer)
        except BaseException:
            self._claim.end(room, written=self._may_be_there(key))
            raise
        self._claim.end(room, written=written)
        return StoreOutcome.STORED if written else StoreOutcome.ALREADY_PRESENT

    def give_back(self, rooms: Iterable[Room | None]) -> None:
        """End rooms, of which some may have been used, and settle the claim where that is due.

        Raises:
            OSError: the medium failed; the room comes back with the next call.
        """
        for room in rooms:
            if room is not None:
                self._claim.end(room, written=False)
        self._claim.settle()

    def give_back_later(self, room: Room) -> None:
        """End a room that was not used; the claim is settled another time. Does not block."""
        self._claim.end(room, written=False)

    def delete(self, keys: Collection[ObjectKey]) -> None:
        """Delete objects, and take them out of the account.

        Raises:
            OSError: the medium failed; what is left is deleted later.
        """
        try:
            self._condemned.delete(keys)
        except UnknownVersionError:
            self._store.remove(list(keys))

    def _may_be_there(self, key: ObjectKey) -> bool:
        with suppress(OSError):
            return self._store.contains([key])[0]
        return True

    @contextmanager
    def _tolerant(self) -> Iterator[None]:
        """Go on where the account cannot be kept: whoever needs it rejects stores until it can."""
        try:
            yield
        except OSError as error:
            self._note_trouble(error)
        else:
            self._note_trouble(None)

    def _note_trouble(self, error: OSError | None) -> None:
        """Note, and say once, that the account cannot be kept, or can be kept again."""
        trouble = None if error is None else f"{type(error).__name__}: {error}"
        if trouble and self._trouble is None:
            logger.warning(
                "the account of the shared objects cannot be kept: %s. Nothing is stored until it can; loads go on.",
                trouble,
            )
        elif trouble is None and self._trouble is not None:
            logger.warning("the account of the shared objects can be kept again")
        self._trouble = trouble
