"""Reservations: pinned objects for loads, and capacity for stores."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING

from offload_core.api.keys import ObjectKey

if TYPE_CHECKING:
    from offload_core.api.backend import StoreOutcome

Lend = Callable[[], Sequence[memoryview | None]]


class LoadReservation:
    """The result of :meth:`Backend.prepare_load`: the objects that are present, pinned until :meth:`release`.

    Args:
        present: one flag per key, in the order of the request. The core does not load a key whose flag is ``False``.
        on_release: unpins the objects. By default there is nothing to unpin.
        nbytes: the size of each key's object, in bytes, as :attr:`StoredObject.nbytes` (C19). An entry is ``None`` if
            the object is absent or its size is unknown. By default every entry is ``None``.
        lend: returns the value of :meth:`lend`. By default nothing is lent.
    """

    def __init__(
        self,
        present: Sequence[bool],
        on_release: Callable[[], Awaitable[None]] | None = None,
        nbytes: Sequence[int | None] | None = None,
        lend: Lend | None = None,
    ) -> None:
        self.present = tuple(present)
        self.nbytes = (None,) * len(self.present) if nbytes is None else tuple(nbytes)
        self._lend = lend
        self._on_release = on_release

    def lend(self) -> Sequence[memoryview | None]:
        """Lend the bytes of each key's object, in the backend's own memory, until the release (C25).

        The core calls this at most once.

        Returns:
            One view per key, which may be read-only; ``None`` if the object is absent or not lent.
        """
        return [None] * len(self.present) if self._lend is None else self._lend()

    async def release(self) -> None:
        """Unpin the objects (C10).

        The core calls this exactly once, also after an error or a cancellation of the load. If the release itself is
        cancelled, it must still take effect, because nobody repeats it.
        """
        if self._on_release is not None:
            await self._on_release()


class StoreReservation:
    """The result of :meth:`Backend.prepare_store`: capacity that is reserved until :meth:`release`.

    Args:
        outcomes: one entry per key, in the order of the request. ``None`` means that capacity is reserved and the core
            may store the object. Any other outcome is final: the core does not store that object.
        evicted: the objects that the backend evicted to free capacity. On a medium that is not shared, it names all of
            them, and no other object (C11).
        on_release: returns the unused capacity. By default there is nothing to return.
        lend: returns the value of :meth:`lend`. By default nothing is lent.
    """

    def __init__(
        self,
        outcomes: Sequence[StoreOutcome | None],
        evicted: Sequence[ObjectKey] = (),
        on_release: Callable[[], Awaitable[None]] | None = None,
        lend: Lend | None = None,
    ) -> None:
        self.outcomes = tuple(outcomes)
        self.evicted = tuple(evicted)
        self._lend = lend
        self._on_release = on_release

    def lend(self) -> Sequence[memoryview | None]:
        """Lend the memory for each key's object, in the backend's own memory, until the release (C25).

        From then on, only a store of the view itself uses that memory. The core calls this at most once.

        Returns:
            One writable view per key; ``None`` if nothing is reserved or lent.
        """
        return [None] * len(self.outcomes) if self._lend is None else self._lend()

    async def release(self) -> None:
        """Return the capacity that the store did not use (C10).

        The core calls this exactly once, also after an error or a cancellation of the store. If the release itself is
        cancelled, it must still take effect, because nobody repeats it.
        """
        if self._on_release is not None:
            await self._on_release()
