"""A cache of lookups, so that a repeated lookup need not ask the medium again.

All backends of a process that use one storage share a cache. A store or deletion by one of them is visible to all of
them at once. Changes by other processes become visible when the cached answer has expired.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Sequence
from typing import ClassVar, NamedTuple
from weakref import WeakValueDictionary

from offload_core.api import ObjectKey, StoredObject

MAX_KEYS = 65_536


class _Answer(NamedTuple):
    present: bool | None
    """``None`` after overlapping changes, whose order is unknown."""
    asked_seconds: float
    """The time of the question, or of the change, on the monotonic clock: the answer is at least as new."""
    changed_seconds: float
    """The end of this process's last change of the key. The answer to an earlier question is ignored."""
    nbytes: int | None = None
    """The object's bytes, if they are known."""


class LookupCache:
    """Presence and sizes of objects, as this process has seen or changed them. Thread-safe; no call blocks."""

    _shared: ClassVar[WeakValueDictionary[str, LookupCache]] = WeakValueDictionary()
    _shared_lock = threading.Lock()

    def __init__(self, max_keys: int = MAX_KEYS) -> None:
        self._max_keys = max_keys
        self._lock = threading.Lock()
        self._answers: dict[ObjectKey, _Answer] = {}
        self._dropped_seconds = float("-inf")

    @classmethod
    def shared(cls, storage: str) -> LookupCache:
        """Return this process's cache for a storage. It lives as long as any caller keeps it."""
        with cls._shared_lock:
            cache = cls._shared.get(storage)
            if cache is None:
                cache = cls._shared[storage] = cls()
            return cache

    def presence(self, keys: Sequence[ObjectKey], max_age_seconds: float) -> list[bool | None]:
        """Return, per key, whether its object exists, or ``None`` without an answer of at most ``max_age_seconds``."""
        return [None if answer is None else answer.present for answer in self._recent(keys, max_age_seconds)]

    def sizes(self, keys: Sequence[ObjectKey], max_age_seconds: float) -> list[int | None]:
        """Return, per key, its object's bytes, or ``None`` without an answer of at most ``max_age_seconds``."""
        recent = self._recent(keys, max_age_seconds)
        return [answer.nbytes if answer is not None and answer.present else None for answer in recent]

    def add_answer(self, key: ObjectKey, present: bool, asked_seconds: float, nbytes: int | None = None) -> None:
        """Add the medium's answer to a question that was asked at ``asked_seconds``."""
        with self._lock:
            changed = self._last_change(key)
            if asked_seconds >= changed:
                self._add(key, _Answer(present, asked_seconds, changed, nbytes))

    def add_listed(self, objects: Iterable[StoredObject], asked_seconds: float) -> None:
        """Replace answers that say that a listed object is absent. A long listing drops no other answer.

        Args:
            asked_seconds: the time at which the listing of these objects began.
        """
        with self._lock:
            for key, nbytes, _ in objects:
                answer = self._answers.get(key)
                if answer is not None and answer.present is False and asked_seconds >= answer.changed_seconds:
                    self._add(key, _Answer(True, asked_seconds, answer.changed_seconds, nbytes))

    def add_change(self, key: ObjectKey, present: bool | None, began_seconds: float, nbytes: int | None = None) -> None:
        """Add the end of a store or deletion by this process that began at ``began_seconds``.

        Args:
            present: ``None`` if the operation failed, so that the object may exist or not.
            nbytes: the bytes of a stored object.
        """
        now = time.monotonic()
        with self._lock:
            overlapped = self._last_change(key) > began_seconds
            self._add(key, _Answer(None if overlapped else present, now, now, None if overlapped else nbytes))

    def _recent(self, keys: Sequence[ObjectKey], max_age_seconds: float) -> list[_Answer | None]:
        oldest = time.monotonic() - max_age_seconds
        with self._lock:
            answers = [self._answers.get(key) for key in keys]
        return [answer if answer is not None and answer.asked_seconds > oldest else None for answer in answers]

    def _last_change(self, key: ObjectKey) -> float:
        answer = self._answers.get(key)
        return max(self._dropped_seconds, answer.changed_seconds if answer is not None else float("-inf"))

    def _add(self, key: ObjectKey, answer: _Answer) -> None:
        self._answers.pop(key, None)
        self._answers[key] = answer  # at the end, so that the first key is the oldest
        while len(self._answers) > self._max_keys:
            oldest = self._answers.pop(next(iter(self._answers)))
            self._dropped_seconds = max(self._dropped_seconds, oldest.changed_seconds)
