"""Objects that leave, so that no host's eviction breaks another host's read.

Victims of an eviction are first *condemned*, in batches, for a grace. While a third of it lasts, they are found as
ever; who finds one has the rest of the grace to load it, and a process that has pinned one, or used one since, takes it
out again: it is *spared*. After that third nobody finds them any more, and after the grace they are deleted. The
process that deletes says so in the record first, and from then on nothing is spared. No clocks are compared: every
process counts from when it saw the batch, by its own clock.

An object is in one batch at a time, so one process deletes it; that one takes the bytes that were really there out of
the account. What is deleted at once, by a user or because it is damaged, goes the same way with no grace.
"""

from __future__ import annotations

import json
import secrets
import threading
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, Literal

from offload_backend_nfs.capacity.account_state import AccountState, Batch
from offload_backend_nfs.capacity.lease import AccountOptions, Claim
from offload_backend_nfs.capacity.ports import ObjectStore, SmallObjects
from offload_backend_nfs.capacity.shared_record import Generations
from offload_core.api import ObjectKey

FOLDER = "condemned"
_HIDDEN_AFTER = 1 / 3
_REMOVED_AT_ONCE = 256


class Condemned:
    """The batches of objects that leave, as one process sees them. Calls block, and may come from any thread.

    Args:
        clock: seconds that pass also while the machine sleeps.
    """

    def __init__(
        self,
        record: Generations,
        claim: Claim,
        small: SmallObjects,
        store: ObjectStore,
        options: AccountOptions,
        clock: Callable[[], float],
    ) -> None:
        self._record = record
        self._claim = claim
        self._small = small
        self._store = store
        self._options = options
        self._clock = clock
        self._lock = threading.Lock()
        self._pins: dict[ObjectKey, int] = {}
        self._used: dict[ObjectKey, float] = {}
        self._seen: dict[str, float] = {}
        self._batches: dict[str, dict[ObjectKey, int]] = {}
        self._lefts: dict[str, tuple[tuple[str, ...], frozenset[ObjectKey]]] = {}
        self._begun: dict[str, tuple[list[ObjectKey], int]] = {}  # what is left to delete, and the bytes deleted
        self._deleting: set[str] = set()
        self._evicted: list[ObjectKey] = []
        record.watchers.append(self._look)

    def pin(self, keys: Iterable[ObjectKey]) -> None:
        """Keep this process from evicting objects, and spare those that another condemns; until :meth:`unpin`."""
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
        """What this process has pinned."""
        with self._lock:
            return frozenset(self._pins)

    def note_use(self, keys: Iterable[ObjectKey]) -> None:
        """Note that objects were used, which spares the condemned among them."""
        if self._record.state.condemned:
            now = self._clock()
            with self._lock:
                self._used.update(dict.fromkeys(keys, now))

    def hidden(self, keys: Sequence[ObjectKey]) -> list[bool]:
        """Return, per key, whether its object is about to go, so that nobody should begin to load it."""
        batches = self._record.state.condemned.items()
        hiding = [self._left(name, batch) for name, batch in batches if self._hides(name, batch)]
        return [any(key in left for left in hiding) for key in keys]

    def keys(self, state: AccountState) -> set[ObjectKey]:
        """Return what is about to go, hidden or not."""
        return {key for name, batch in state.condemned.items() for key in self._left(name, batch)}

    def spare(self) -> None:
        """Take what this process has pinned, or has used since it was condemned, out of its batch.

        Raises:
            OSError: the medium failed.
        """
        with self._record.lock:
            with self._lock:
                pinned, used = set(self._pins), dict(self._used)

            def edit(state: AccountState) -> AccountState | None:
                batches = dict(state.condemned)
                for name, batch in state.condemned.items():
                    since = self._seen.get(name, 0.0)
                    wanted = pinned | {key for key, when in used.items() if when >= since}
                    if batch.phase == "condemned" and (saved := wanted & self._left(name, batch)):
                        batches[name] = self._without(name, batch, saved)
                return None if batches == state.condemned else state.model_copy(update={"condemned": batches})

            if edit(self._record.state) is not None:
                self._record.change(edit)

    def condemn(self, victims: Mapping[ObjectKey, int], update: Callable[[AccountState], dict[str, Any]]) -> None:
        """Condemn objects, given their bytes; :meth:`delete_due` deletes them after the grace.

        Args:
            update: what else the change is to set.

        Raises:
            OSError: the medium failed.
        """
        self._add_batch(victims, "condemned" if self._options.grace_seconds > 0 else "deleting", update)

    def delete(self, keys: Collection[ObjectKey]) -> None:
        """Delete objects now. Those that another process is just deleting are left to it.

        Raises:
            OSError: the medium failed; what is left is deleted later.
        """
        name = self._add_batch(dict.fromkeys(keys, 0), "deleting", lambda _: {})
        self._finish(name)

    def delete_due(self, *, orphans: bool) -> None:
        """Delete this process's batches whose grace is over, and go on with what was left half-way.

        Args:
            orphans: those of processes that are no more, too.

        Raises:
            OSError: the medium failed; the next call goes on.
        """
        for name, batch in list(self._record.state.condemned.items()):
            by = self._record.state.owners.get(batch.by)
            mine = batch.by == self._claim.owner or (orphans and (by is None or by.dead))
            if mine and (batch.phase == "deleting" or self._age(name) >= self._options.grace_seconds):
                self._begin(name)
                self._finish(name)

    def take_evicted(self) -> list[ObjectKey]:
        """Return what this process has evicted since the last call."""
        with self._lock:
            evicted, self._evicted = self._evicted, []
        return evicted

    def _add_batch(
        self,
        victims: Mapping[ObjectKey, int],
        phase: Literal["condemned", "deleting"],
        update: Callable[[AccountState], dict[str, Any]],
    ) -> str:
        """Begin a batch. What is being deleted stays in its batch, what was only condemned changes to one that is."""
        with self._record.lock:
            name = secrets.token_hex(8)
            self._batches[name] = dict(victims)
            content = json.dumps({key.path: nbytes for key, nbytes in victims.items()})
            self._small.write(f"{FOLDER}/{name}", content.encode())

            def edit(state: AccountState) -> AccountState:
                batches = dict(state.condemned)
                new = Batch(by=self._claim.owner, nbytes=sum(victims.values()), phase=phase)
                for other, batch in state.condemned.items():
                    both = self._left(other, batch) & victims.keys()
                    if both and batch.phase == "condemned" and phase == "deleting":
                        batches[other] = self._without(other, batch, both)
                    elif both:
                        new = self._without(name, new, both)
                return state.model_copy(update={"condemned": {**batches, name: new}, **update(state)})

            self._record.change(edit)
            return name

    def _begin(self, name: str) -> None:
        """Say that the batch is being deleted: from here on nothing of it can be spared."""

        def edit(state: AccountState) -> AccountState | None:
            batch = state.condemned.get(name)
            if batch is None or batch.phase == "deleting":
                return None
            if kept := self.pinned & self._left(name, batch):
                batch = self._without(name, batch, kept)
            deleting = batch.model_copy(update={"phase": "deleting"})
            return state.model_copy(update={"condemned": {**state.condemned, name: deleting}})

        self._record.change(edit)

    def _finish(self, name: str) -> None:
        """Delete the objects of a batch, and take what was there out of the account."""
        with self._lock:
            batch = self._record.state.condemned.get(name)
            if batch is None or name in self._deleting:
                return
            self._deleting.add(name)
        left, removed = self._begun.pop(name, (list(self._left(name, batch)), 0))
        try:
            while left:
                # What an error leaves in doubt is not found the next time, and counts until the next scan.
                some = left[-_REMOVED_AT_ONCE:]
                sizes = self._store.remove(some)
                del left[-_REMOVED_AT_ONCE:]
                removed += sum(size or 0 for size in sizes)
                if batch.nbytes:  # of an eviction, not of a delete
                    with self._lock:
                        gone = [key for key, size in zip(some, sizes, strict=True) if size is not None]
                        self._evicted.extend(gone)
                self._claim.beat()
            self._record.change(lambda state: _without_batch(state, name, removed))
        except BaseException:
            self._begun[name] = (left, removed)
            raise
        finally:
            with self._lock:
                self._deleting.discard(name)
        self._small.delete([f"{FOLDER}/{name}"])

    def _hides(self, name: str, batch: Batch) -> bool:
        return batch.phase == "deleting" or self._age(name) >= _HIDDEN_AFTER * self._options.grace_seconds

    def _age(self, name: str) -> float:
        """Return for how many seconds this process has known a batch."""
        now = self._clock()
        return now - self._seen.get(name, now)

    def _left(self, name: str, batch: Batch) -> frozenset[ObjectKey]:
        known = self._lefts.get(name)
        if known is None or known[0] != batch.spared:
            left = frozenset(self._read(name)) - set(map(parse_key, batch.spared))
            known = self._lefts[name] = (batch.spared, left)
        return known[1]

    def _without(self, name: str, batch: Batch, keys: Collection[ObjectKey]) -> Batch:
        sizes = self._read(name)
        spared = (*batch.spared, *(key.path for key in keys))
        nbytes = max(0, batch.nbytes - sum(sizes.get(key, 0) for key in keys))
        return batch.model_copy(update={"spared": spared, "nbytes": nbytes})

    def _read(self, name: str) -> dict[ObjectKey, int]:
        if name not in self._batches:
            content = self._small.read(f"{FOLDER}/{name}")
            if content is None:  # all deleted since: a change that is based on this state will not succeed
                return {}
            self._batches[name] = {parse_key(path): nbytes for path, nbytes in json.loads(content).items()}
        return self._batches[name]

    def _look(self, state: AccountState) -> None:
        """Take note of batches that came and went."""
        now = self._clock()
        for name in state.condemned:
            if name not in self._seen:
                self._read(name)
                self._seen[name] = now
        for name in [name for name in self._seen if name not in state.condemned]:
            del self._seen[name]
            self._batches.pop(name, None)
            self._lefts.pop(name, None)
        if not state.condemned:
            with self._lock:
                self._used.clear()


def _without_batch(state: AccountState, name: str, removed: int) -> AccountState | None:
    if name not in state.condemned:
        return None
    condemned = {other: batch for other, batch in state.condemned.items() if other != name}
    used, total = state.used_bytes - removed, state.removed_bytes + removed
    return state.model_copy(update={"condemned": condemned, "used_bytes": used, "removed_bytes": total})


def parse_key(path: str) -> ObjectKey:
    """Return the key whose :attr:`ObjectKey.path` this is."""
    namespace, pack, chunk_hash = path.split("/")
    return ObjectKey(namespace, pack, bytes.fromhex(chunk_hash))
