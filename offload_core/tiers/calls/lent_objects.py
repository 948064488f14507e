"""Objects in memory that a backend lends (clause C25): the engine copies between them and the KV cache directly.

A reservation of the backend lends the memory of several objects. The core releases the reservation with the last of
them.
"""

from __future__ import annotations

import threading
from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, Generic, NamedTuple, TypeVar

from offload_core.api.backend import LoadOutcome, StoreOutcome
from offload_core.api.keys import ObjectKey

if TYPE_CHECKING:
    import torch

OutcomeT = TypeVar("OutcomeT", LoadOutcome, StoreOutcome)


class WantedObject(NamedTuple):
    """An object to load from lent memory, or to store there."""

    key: ObjectKey
    nbytes: int
    spare: bool = False
    """For a store, whether it may use free capacity only."""


def _nothing() -> None:
    """Do nothing: the holder of the memory gives it back itself."""


class LentObject:
    """The lent memory of one object, in the place of a lease. Release it exactly once, after the last use of its view.

    Args:
        on_release: called by the release.
        lending: the number of the reservation at the storage that lends it.
        offset: position in the lent memory, in bytes; 0 if no other process maps that.
    """

    __slots__ = ("_on_release", "lending", "nbytes", "offset", "view")

    def __init__(
        self, view: memoryview, on_release: Callable[[], None] = _nothing, lending: int = 0, offset: int = 0
    ) -> None:
        self.view = view
        self.nbytes = len(view)
        self.lending = lending
        self.offset = offset
        self._on_release = on_release

    @property
    def tensor(self) -> torch.Tensor:
        """The same bytes as an int8 tensor of shape ``(nbytes,)``. It does not keep the memory alive."""
        from offload_core.memory.host_tensor import host_tensor  # imports torch; the command line does without

        return host_tensor(self.view)

    def release(self) -> None:
        """Give the memory back."""
        self._on_release()


class _LentGroup:
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


class Lent(NamedTuple, Generic[OutcomeT]):
    """Memory that a backend lends; see :class:`LendingEnd`. Its holder calls ``release`` once."""

    outcomes: list[OutcomeT | None]
    views: list[memoryview | None]
    release: Callable[[], Awaitable[None]]


class LendingEnd(NamedTuple, Generic[OutcomeT]):
    """The end of a loan of stored objects, or of a reservation for objects that will be stored.

    Args:
        outcomes: one per object. For a load, ``None`` means that the object is there and not lent, so it must be
            loaded. For a store, ``None`` means that the object may be stored.
        lent: the memory of each hit, verified unless the borrower does so; or the memory to fill and to store.
    """

    outcomes: list[OutcomeT | None]
    lent: list[LentObject | None]


LendingEnded = Callable[[LendingEnd[OutcomeT] | Exception], None]
"""Gets the end of a loan or reservation, or the backend's error. It is called once, on any thread."""


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
    group = _LentGroup(count, on_release)
    return [
        None if view is None else LentObject(view, group.release_one, lending, offset)
        for view, offset in zip(views, offsets or [0] * len(views), strict=True)
    ]
