"""The keys that another system has stored here, with their sizes: for its accounts and its listings."""

from __future__ import annotations

import heapq
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Generic, TypeVar

Key = TypeVar("Key", bound=Hashable)


class StoredKeys(Generic[Key]):
    """The most recently stored keys. Thread-safe.

    Args:
        limit: maximum number of keys. Beyond it, the keys that were stored first are forgotten.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._sizes: OrderedDict[Key, int] = OrderedDict()
        self._lock = threading.Lock()

    def add(self, sizes: Iterable[tuple[Key, int]]) -> tuple[list[tuple[Key, int]], list[tuple[Key, int]]]:
        """Add keys with their sizes. A key with another size than before is forgotten first, and then new.

        Returns:
            The keys that are new, and those that were forgotten before, each with its size.
        """
        new, forgotten = [], []
        with self._lock:
            for key, nbytes in dict(sizes).items():
                before = self._sizes.get(key)
                if before == nbytes:
                    continue
                if before is not None:
                    forgotten.append((key, before))
                self._sizes[key] = nbytes
                new.append((key, nbytes))
            while len(self._sizes) > self._limit:
                forgotten.append(self._sizes.popitem(last=False))
        return new, forgotten

    def remove(self, keys: Iterable[Key]) -> list[int]:
        """Forget keys. Returns their sizes, 0 for a key that was not there."""
        with self._lock:
            return [self._sizes.pop(key, 0) for key in keys]

    def page(
        self, size: int, after: str | None, name: Callable[[Key], str], wanted: Callable[[Key], bool]
    ) -> Sequence[tuple[Key, int]]:
        """Return up to ``size`` keys with their sizes, in the order of their names.

        Args:
            after: the name behind which the page begins; ``None`` for the first page.
            name: returns the name of a key. No two keys have one name.
            wanted: returns whether a key is listed at all.
        """
        with self._lock:
            sizes = list(self._sizes.items())
        listed = ((name(key), key, nbytes) for key, nbytes in sizes if wanted(key))
        rest = (entry for entry in listed if after is None or entry[0] > after)
        return [(key, nbytes) for _, key, nbytes in heapq.nsmallest(size, rest, key=lambda entry: entry[0])]
