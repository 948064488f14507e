"""Evictions in two steps, so that an eviction on one host breaks no read on another host.

Victims of an eviction are first *pending*, in batches, for a grace period. Until the deletion begins, a process
*withdraws* from the batch the objects that it has pinned, or has used since the batch was pending:

1. During the first third of the grace, lookups still find the object. A process that finds it has the rest of the
   grace to load it.
2. After that third, the object is *hidden*: no lookup finds it.
3. After the grace, the object is deleted. The deleting process first marks the batch in the record as being deleted.
   From then on, nothing can be withdrawn.

No clocks are compared between hosts. Every process counts from the moment when it saw the batch, by its own clock.

An object is in one batch at a time, so only one process deletes it. That process subtracts the bytes that really
existed from the account. An immediate deletion, by a user or because of damage, takes the same
way without a grace.

An object that the medium refuses to delete stays, and leaves its batch. This process does not choose it again for some
minutes.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

from offload_backend_nfs.capacity.account_options import AccountOptions
from offload_backend_nfs.capacity.account_state import (
    DELETING,
    PENDING,
    AccountState,
    EvictionBatch,
    Phase,
    new_name,
)
from offload_backend_nfs.capacity.control_record import (
    DamagedRecordError,
    UnknownVersionError,
    read_lines,
    seal,
    unseal,
    write_lines,
)
from offload_backend_nfs.capacity.lease import Lease
from offload_backend_nfs.capacity.ports import AccountFiles, ObjectFiles
from offload_backend_nfs.capacity.shared_record import SharedRecord
from offload_backend_nfs.recent_keys import drop_oldest, remember
from offload_backend_nfs.storage.failures import DeletionRefusals, ForeignFileError
from offload_backend_nfs.storage.layout import key_of
from offload_core.api import ObjectKey, TierLogger

FOLDER = "condemned"  # part of the format on the medium
_KIND = "condemned"
_MAX_FILE_BYTES = 4 * 1024**2
_MAX_DIGITS = 18
_HIDDEN_AFTER = 1 / 3
_REMOVE_BATCH = 256
_MAX_USED_KEYS = 131_072


class PendingEvictions:
    """The eviction batches as one process sees them. Calls block, and may come from any thread.

    Args:
        clock: returns seconds, and includes the time during which the machine sleeps.
    """

    def __init__(
        self,
        record: SharedRecord,
        lease: Lease,
        files: AccountFiles,
        objects: ObjectFiles,
        options: AccountOptions,
        clock: Callable[[], float],
        log: TierLogger,
    ) -> None:
        self._record = record
        self._lease = lease
        self._files = files
        self._log = log
        self._objects = objects
        self._options = options
        self._clock = clock
        self._lock = threading.Lock()
        self._pins: dict[ObjectKey, int] = {}
        self._used_seconds: dict[ObjectKey, float] = {}
        self._first_seen_seconds: dict[str, float] = {}
        self._batch_sizes: dict[str, dict[ObjectKey, int]] = {}
        self._remaining_cache: dict[str, tuple[tuple[str, ...], frozenset[ObjectKey]]] = {}
        self._interrupted: dict[str, tuple[list[ObjectKey], int]] = {}  # keys left to delete, and bytes deleted
        self._deleting: set[str] = set()
        self._damaged: set[str] = set()
        self.refusals = DeletionRefusals(clock, log)
        """The objects that the medium has lately refused to delete. They are no victims."""
        self.recount_due = False
        """``True`` if objects may be gone without being subtracted. The next scan finds out."""
        self._evicted: list[ObjectKey] = []
        record.listeners.append(self._on_state)

    def pin(self, keys: Iterable[ObjectKey]) -> None:
        """Pin objects until :meth:`unpin`.

        This process does not evict them, and withdraws them from the batches of other processes.
        """
        with self._lock:
            for key in keys:
                self._pins[key] = self._pins.get(key, 0) + 1

    def unpin(self, keys: Iterable[ObjectKey]) -> None:
        """Undo :meth:`pin`."""
        with self._lock:
            for key in keys:
                self._pins[key] -= 1
                if not self._pins[key]:
                    del self._pins[key]

    @property
    def pinned(self) -> frozenset[ObjectKey]:
        """The objects that this process has pinned."""
        with self._lock:
            return frozenset(self._pins)

    def mark_used(self, keys: Iterable[ObjectKey]) -> None:
        """Mark objects as used now. This process withdraws the pending objects among them."""
        if self._record.state.pending_evictions:
            now = self._clock()
            with self._lock:
                remember(self._used_seconds, keys, now)
                drop_oldest(self._used_seconds, _MAX_USED_KEYS)

    def hidden(self, keys: Sequence[ObjectKey]) -> list[bool]:
        """Return, per key, whether its object is hidden: no process should begin to load it."""
        batches = self._record.state.pending_evictions.items()
        hiding = [self._remaining(name, batch) for name, batch in batches if self._hides(name, batch)]
        return [any(key in remaining for remaining in hiding) for key in keys]

    def keys(self, state: AccountState) -> set[ObjectKey]:
        """Return the keys of all batches, hidden or not."""
        return {key for name, batch in state.pending_evictions.items() for key in self._remaining(name, batch)}

    def withdraw_in_use(self) -> None:
        """Withdraw the objects that this process has pinned, or has used since their batch was pending.

        Raises:
            OSError: the medium failed.
        """
        with self._record.lock:
            with self._lock:
                pinned, used_seconds = set(self._pins), dict(self._used_seconds)

            def edit(state: AccountState) -> AccountState | None:
                batches = dict(state.pending_evictions)
                for name, batch in state.pending_evictions.items():
                    since = self._first_seen_seconds.get(name, 0.0)
                    in_use = pinned | {key for key, used in used_seconds.items() if used >= since}
                    if batch.phase == PENDING and (kept := in_use & self._remaining(name, batch)):
                        batches[name] = self._without(name, batch, kept)
                if batches == state.pending_evictions:
                    return None
                return state.model_copy(update={"pending_evictions": batches})

            if edit(self._record.state) is not None:
                self._record.change(edit)

    def add(self, victims: Mapping[ObjectKey, int], update: Callable[[AccountState], dict[str, Any]]) -> None:
        """Add a batch of victims. :meth:`delete_due` deletes them after the grace.

        Args:
            victims: the bytes of each object.
            update: returns the other fields that the same change sets.

        Raises:
            OSError: the medium failed.
        """
        self._add_batch(victims, PENDING if self._options.grace_seconds > 0 else DELETING, update)

    def delete(self, keys: Collection[ObjectKey]) -> None:
        """Delete objects now. If another process is already deleting an object, that process finishes it.

        Raises:
            OSError: the medium failed, and the remaining objects are deleted later; or it refuses to delete some.
        """
        name = self._add_batch(dict.fromkeys(keys, 0), DELETING, lambda _: {})
        if (refusal := self._delete_batch(name)) is not None:
            raise refusal

    def delete_due(self, *, of_dead_members: bool) -> None:
        """Delete this process's batches whose grace is over, and resume interrupted deletions.

        Args:
            of_dead_members: delete also the batches of members that have left or expired.

        Raises:
            OSError: the medium failed. The next call continues.
        """
        for name, batch in list(self._record.state.pending_evictions.items()):
            evictor_lives = self._record.state.has_live(batch.evictor)
            mine = batch.evictor == self._lease.member_id or (of_dead_members and not evictor_lives)
            if mine and (batch.phase == DELETING or self._age_seconds(name) >= self._options.grace_seconds):
                self._mark_deleting(name)
                self._delete_batch(name)

    def remove(self, keys: Sequence[ObjectKey]) -> tuple[list[ObjectKey], int, OSError | None]:
        """Remove objects. One that the medium refuses to delete stays, and must not hold up the others for ever.

        Returns:
            The objects that are gone now, the bytes to subtract, and the error of a refusal.

        Raises:
            OSError: the medium failed.
        """
        try:
            removal = self._objects.remove(keys)
        except OSError:
            self.recount_due = True
            raise
        if removal.refusal is not None:
            self.refusals.add(removal.refused, removal.refusal)
        sizes = zip(keys, removal.nbytes, strict=True)
        gone = {key: size for key, size in sizes if size is not None and key not in removal.refused}
        return list(gone), sum(gone.values()), removal.refusal

    def take_evicted(self) -> list[ObjectKey]:
        """Return the objects that this process has evicted since the last call."""
        with self._lock:
            evicted, self._evicted = self._evicted, []
        return evicted

    def _add_batch(
        self, victims: Mapping[ObjectKey, int], phase: Phase, update: Callable[[AccountState], dict[str, Any]]
    ) -> str:
        """Add a batch and return its name.

        An object that another batch already deletes stays in that batch. An object of a pending batch moves to a new
        batch that deletes at once.
        """
        with self._record.lock:
            name = new_name()
            self._files.write(batch_file(name), seal(_KIND, write_lines(victims.items()), name))
            self._batch_sizes[name] = dict(victims)

            def edit(state: AccountState) -> AccountState:
                batches = dict(state.pending_evictions)
                new = EvictionBatch(evictor=self._lease.member_id, nbytes=sum(victims.values()), phase=phase)
                for other, batch in state.pending_evictions.items():
                    in_both = self._remaining(other, batch) & victims.keys()
                    if in_both and batch.phase == PENDING and phase == DELETING:
                        batches[other] = self._without(other, batch, in_both)
                    elif in_both:
                        new = self._without(name, new, in_both)
                return state.model_copy(update={"pending_evictions": {**batches, name: new}, **update(state)})

            try:
                self._record.change(edit)
            except BaseException:
                self._batch_sizes.pop(name, None)  # the file stays, since the change may have happened
                raise
            return name

    def _mark_deleting(self, name: str) -> None:
        """Mark a batch in the record as being deleted. From then on, nothing can be withdrawn from it."""

        def edit(state: AccountState) -> AccountState | None:
            batch = state.pending_evictions.get(name)
            if batch is None or batch.phase == DELETING:
                return None
            if kept := self.pinned & self._remaining(name, batch):
                batch = self._without(name, batch, kept)
            deleting = batch.model_copy(update={"phase": DELETING})
            return state.model_copy(update={"pending_evictions": {**state.pending_evictions, name: deleting}})

        self._record.change(edit)

    def _delete_batch(self, name: str) -> OSError | None:
        """Delete the objects of a batch, and subtract the bytes that existed from the account.

        Returns:
            An error if the medium refused to delete some objects. They stay, and count.

        Raises:
            OSError: the medium failed. The next call continues.
        """
        refusal: OSError | None = None
        with self._lock:
            batch = self._record.state.pending_evictions.get(name)
            if batch is None or name in self._deleting:
                return None
            self._deleting.add(name)
        left, removed_bytes = self._interrupted.pop(name, (list(self._remaining(name, batch)), 0))
        is_damaged = name in self._damaged
        try:
            while left:
                some = left[-_REMOVE_BATCH:]
                gone, nbytes, error = self.remove(some)
                refusal = refusal or error
                removed_bytes += nbytes
                del left[-_REMOVE_BATCH:]
                if batch.nbytes:  # an eviction, not a deletion on request
                    with self._lock:
                        self._evicted.extend(gone)
                self._lease.renew_if_due()
            self._record.change(lambda state: _without_batch(state, name, removed_bytes))
        except BaseException:
            self._interrupted[name] = (left, removed_bytes)
            raise
        finally:
            with self._lock:
                self._deleting.discard(name)
        if is_damaged:
            self.recount_due = True
            self._log.warning(
                "the damaged eviction batch %s is dropped; %s", name, self._files.set_aside(batch_file(name))
            )
        else:
            self._files.delete([batch_file(name)])
        return refusal

    def _hides(self, name: str, batch: EvictionBatch) -> bool:
        return batch.phase == DELETING or self._age_seconds(name) >= _HIDDEN_AFTER * self._options.grace_seconds

    def _age_seconds(self, name: str) -> float:
        """Return the time since this process first saw a batch."""
        now = self._clock()
        return now - self._first_seen_seconds.get(name, now)

    def _remaining(self, name: str, batch: EvictionBatch) -> frozenset[ObjectKey]:
        """Return the keys of a batch that were not withdrawn."""
        cached = self._remaining_cache.get(name)
        if cached is None or cached[0] != batch.withdrawn:
            remaining = frozenset(self._sizes(name)) - set(map(key_of, batch.withdrawn))
            cached = self._remaining_cache[name] = (batch.withdrawn, remaining)
        return cached[1]

    def _without(self, name: str, batch: EvictionBatch, keys: Collection[ObjectKey]) -> EvictionBatch:
        """Return ``batch`` after ``keys`` were withdrawn from it."""
        sizes = self._sizes(name)
        withdrawn = (*batch.withdrawn, *(key.path for key in keys))
        nbytes = max(0, batch.nbytes - sum(sizes.get(key, 0) for key in keys))
        return batch.model_copy(update={"withdrawn": withdrawn, "nbytes": nbytes})

    def _sizes(self, name: str) -> dict[ObjectKey, int]:
        """Return all keys of a batch and their bytes."""
        if name not in self._batch_sizes:
            try:
                content = self._files.read(batch_file(name), _MAX_FILE_BYTES)
                if content is None:  # the batch was deleted, so a change that is based on this state cannot succeed
                    return {}
                self._batch_sizes[name] = _parse(unseal(_KIND, content, name))
            except (DamagedRecordError, UnknownVersionError, ForeignFileError) as error:
                self._batch_sizes[name] = {}
                self._damaged.add(name)
                self._log.warning(
                    "the eviction batch %s is damaged (%s): its objects stay until the next eviction", name, error
                )
        return self._batch_sizes[name]

    def _on_state(self, state: AccountState) -> None:
        """Remember when new batches were first seen, and drop batches that are gone."""
        now = self._clock()
        for name in state.pending_evictions:
            if name not in self._first_seen_seconds:
                self._sizes(name)
                self._first_seen_seconds[name] = now
        for name in [name for name in self._first_seen_seconds if name not in state.pending_evictions]:
            del self._first_seen_seconds[name]
            self._batch_sizes.pop(name, None)
            self._remaining_cache.pop(name, None)
            self._damaged.discard(name)
        if not state.pending_evictions:
            with self._lock:
                self._used_seconds.clear()


def batch_file(name: str) -> str:
    """Return the name of a batch's file."""
    return f"{FOLDER}/{name}"


def _parse(body: bytes) -> dict[ObjectKey, int]:
    sizes = {}
    for key, number in read_lines(body):
        if not number.isascii() or not number.isdecimal() or len(number) > _MAX_DIGITS:
            raise DamagedRecordError(f"the object {key} has no size")
        sizes[key] = int(number)
    return sizes


def _without_batch(state: AccountState, name: str, removed_bytes: int) -> AccountState | None:
    if name not in state.pending_evictions:
        return None
    batches = {other: batch for other, batch in state.pending_evictions.items() if other != name}
    return state.model_copy(
        update={
            "pending_evictions": batches,
            "used_bytes": state.used_bytes - removed_bytes,
            "removed_bytes": state.removed_bytes + removed_bytes,
        }
    )
