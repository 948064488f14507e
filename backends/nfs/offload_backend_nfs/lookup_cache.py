"""What is known of keys for a short time, so that a lookup need not ask the medium again.

All backends of a process that use one place share it: what one of them stores or deletes, all of them know at once.
What other processes do is seen when an answer has become too old.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from typing import ClassVar, NamedTuple
from weakref import WeakValueDictionary

from offload_core.api import ObjectKey

MAX_KEYS = 65_536


class _Fact(NamedTuple):
    present: bool | None
    """``None`` where changes overlapped, so that nobody can say which came last."""
    at_seconds: float
    """No later than when it was true, on the monotonic clock."""
    changed_seconds: float
    """When this process last ended a change of the key; an answer to a question from before says nothing."""
    nbytes: int | None = None
    """Of what is there, where that is known."""


class KnownKeys:
    """Whether keys are there, as this process saw or made it. Thread-safe, and nothing in it blocks."""

    _of_places: ClassVar[WeakValueDictionary[str, KnownKeys]] = WeakValueDictionary()
    _class_lock = threading.Lock()

    def __init__(self, max_keys: int = MAX_KEYS) -> None:
        self._max_keys = max_keys
        self._lock = threading.Lock()
        self._facts: dict[ObjectKey, _Fact] = {}
        self._forgotten_seconds = float("-inf")

    @classmethod
    def of_place(cls, place: str) -> KnownKeys:
        """Return what this process knows of ``place``, the same for all that ask while one of them keeps it."""
        with cls._class_lock:
            known = cls._of_places.get(place)
            if known is None:
                known = cls._of_places[place] = cls()
            return known

    def recall(self, keys: Sequence[ObjectKey], life_seconds: float) -> list[bool | None]:
        """Return, per key, whether it is there as far as that is known and no older than ``life_seconds``."""
        oldest = time.monotonic() - life_seconds
        with self._lock:
            facts = [self._facts.get(key) for key in keys]
        return [fact.present if fact is not None and fact.at_seconds > oldest else None for fact in facts]

    def recall_sizes(self, keys: Sequence[ObjectKey], life_seconds: float) -> list[int | None]:
        """Return, per key, the bytes of what is there as far as that is known and no older than ``life_seconds``."""
        oldest = time.monotonic() - life_seconds
        with self._lock:
            facts = [self._facts.get(key) for key in keys]
        return [
            fact.nbytes if fact is not None and fact.present and fact.at_seconds > oldest else None for fact in facts
        ]

    def saw(self, key: ObjectKey, present: bool, asked_seconds: float, nbytes: int | None = None) -> None:
        """Note the answer to a question that was asked of the medium at ``asked_seconds``."""
        with self._lock:
            changed = self._changed(key)
            if asked_seconds >= changed:
                self._note(key, _Fact(present, asked_seconds, changed, nbytes))

    def changed(self, key: ObjectKey, present: bool | None, began_seconds: float, nbytes: int | None = None) -> None:
        """Note that this process has stored or deleted, in an operation that began at ``began_seconds``.

        Args:
            present: ``None`` when it failed, so that either may be.
            nbytes: of what was stored.
        """
        now = time.monotonic()
        with self._lock:
            overlapped = self._changed(key) > began_seconds
            self._note(key, _Fact(None if overlapped else present, now, now, None if overlapped else nbytes))

    def _changed(self, key: ObjectKey) -> float:
        fact = self._facts.get(key)
        return max(self._forgotten_seconds, fact.changed_seconds if fact is not None else float("-inf"))

    def _note(self, key: ObjectKey, fact: _Fact) -> None:
        self._facts.pop(key, None)
        self._facts[key] = fact  # at the end: the first one is the oldest
        while len(self._facts) > self._max_keys:
            oldest = self._facts.pop(next(iter(self._facts)))
            self._forgotten_seconds = max(self._forgotten_seconds, oldest.changed_seconds)
