"""Objects in memory that a backend lends (clause C25): the engine copies between them and the KV cache directly.

A reservation of the backend lends the memory of several objects. The core releases the reservation with the last of
them.
"""

from __future__ import annotations

import threading
from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from offload_core.api.backend import LoadOutcome, StoreOutcome
from offload_core.api.keys import ObjectKey

if TYPE_CHECKING:
    import torch


class WantedObject(NamedTuple):
    """An object to load from lent memory, or to store there."""

    key: ObjectKey
    nbytes: int
    spare: bool = False
    """For a store, whether it may use free capacity only."""


class LentObject:
    """The lent memory of one object, in the place of a lease. Release it exactly once, after the last use of its view.

    Args:
        lending: the number of the reservation at the storage that lends it.
        offset: position in the lent memory, in bytes; 0 if no other process maps that.
    """

    __slots__ = ("_group", "lending", "nbytes", "offset", "view")

    def __init__(self, view: memoryview, group: LentGroup, lending: int = 0, offset: int = 0) -> None:
        self.view = view
        self.nbytes = len(view)
        self.lending = lending
        self.offset = offset
        self._group = group

    @property
    def tensor(self) -> torch.Tensor:
        """The same bytes as an int8 tensor of shape ``(nbytes,)``. It does not keep the memory alive."""
        from offload_core.memory.host_tensor import host_tensor  # imports torch; the command line does without

        return host_tensor(self.view)

    def release(self) -> None:
        """Give the memory back."""
        self._group.release_one()


class LentGroup:
    """The objects that one reservation lends. Thread-safe.

    Args:
        count: number of objects, at least 1.
        on_release: called once, by the release of the last object.
    """

    def __init__(self, count: int, on_release: Callable[[], None]) -> None:
        self._left = count
        self._on_release = on_release
        self._lock = threading.Lock()

    def release_one(self) -> None:
        """Note the release of one object.

        Raises:
            RuntimeError: all were released already.
        """
        with self._lock:
            self._left -= 1
            left = self._left
        if left < 0:
            raise RuntimeError("lent memory is released twice; it may belong to another object now")
        if not left:
            self._on_release()


class Loan(NamedTuple):
    """Stored objects that a backend lends; see :class:`BorrowEnd`. Its holder calls ``release`` once."""

    outcomes: list[LoadOutcome | None]
    views: list[memoryview | None]
    release: Callable[[], Awaitable[None]]


class Grant(NamedTuple):
    """Memory that a backend lends for stores; see :class:`ReserveEnd`. Its holder calls ``release`` once."""

    outcomes: list[StoreOutcome | None]
    views: list[memoryview | None]
    release: Callable[[], Awaitable[None]]


class BorrowEnd(NamedTuple):
    """The end of a loan of stored objects.

    Args:
        outcomes: one per object; ``None`` if the object is there and not lent, so that it must be loaded.
        lent: the memory of each hit, verified.
    """

    outcomes: list[LoadOutcome | None]
    lent: list[LentObject | None]


class ReserveEnd(NamedTuple):
    """The end of a reservation for stores.

    Args:
        outcomes: one per object; ``None`` if it may be stored. Any other outcome is final.
        lent: the memory to fill and to store, of each object that may be stored in that way.
    """

    outcomes: list[StoreOutcome | None]
    lent: list[LentObject | None]


BorrowEnded = Callable[[BorrowEnd | Exception], None]
"""Gets the end of a loan, or the backend's error. It is called once, on any thread."""
ReserveEnded = Callable[[ReserveEnd | Exception], None]
"""Gets the end of a reservation, or the backend's error. It is called once, on any thread."""


def lend(
    views: Sequence[memoryview | None], on_release: Callable[[], None], lending: int = 0, offsets: Sequence[int] = ()
) -> list[LentObject | None]:
    """Return the lent objects of one reservation, and release it with the last of them; at once if there is none.

    Args:
        views: one per object; ``None`` if it is not lent.
        offsets: one per object, if other processes map the memory.
    """
    count = sum(view is not None for view in views)
    if not count:
        on_release()
        return [None] * len(views)
    group = LentGroup(count, on_release)
    return [
        None if view is None else LentObject(view, group, lending, offset)
        for view, offset in zip(views, offsets or [0] * len(views), strict=True)
    ]
