"""The kind of medium that a backend has, and the optional features that it implements."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Capabilities:
    """The kind of medium that a backend has, and the optional features that it implements.

    A backend must implement each feature that it declares, and the core uses no feature that is not declared.

    Args:
        medium: ``host`` (memory), ``disk`` (local) or ``remote``. On a remote medium that does not evict by itself, the
            core asks about few objects of a prefix, and infers the others.
        persistent: objects outlive the process.
        shared: other processes may read, add and remove objects at any time.
        bounded: the backend limits its bytes. ``prepare_load`` pins and ``prepare_store`` reserves (C9 to C11).
        lists: :meth:`Backend.list_objects` works (C18).
        sizes: ``prepare_load`` returns the size of each object in bytes (C19). Compressed objects need it.
        evicts: the medium evicts objects by itself, at any time. Presence is then a hint, a size may be ``None``, and
            a store may be ``REJECTED`` after ``prepare_store`` has granted it. It excludes ``bounded``.
        spares: the backend knows *spare* objects, which use free capacity only and are evicted before all others (C20).
            :meth:`Backend.touch` sets its order of eviction (C21). It needs ``bounded``.
        lends: reservations lend the objects' memory, which is the backend's own, so that the core copies them once
            (C25). Only for ``host``: a read of a view cannot fail or hang.
        parallel: a call moves several of its objects at the same time by itself. So the core does not divide it among
            the tier's threads. Calls on a ``remote`` medium are never divided.

    Raises:
        ValueError: both ``bounded`` and ``evicts`` are declared, or ``spares`` without ``bounded``, or ``lends``
            for another medium than ``host``.
    """

    medium: Literal["host", "disk", "remote"]
    persistent: bool
    shared: bool
    bounded: bool = False
    lists: bool = False
    sizes: bool = False
    evicts: bool = False
    spares: bool = False
    lends: bool = False
    parallel: bool = False

    def __post_init__(self) -> None:
        if self.spares and not self.bounded:
            raise ValueError(
                "Capabilities(spares=True, bounded=False): without a limit nothing is evicted, so no object is spare; "
                "declare both or neither"
            )
        if self.bounded and self.evicts:
            raise ValueError(
                "Capabilities(bounded=True, evicts=True): a medium that evicts by itself can neither pin nor reserve; "
                "declare bounded if the backend chooses the objects to evict, else evicts"
            )
        if self.lends and self.medium != "host":
            raise ValueError(
                f"Capabilities(lends=True, medium={self.medium!r}): the engine reads lent memory without a deadline; "
                "lend memory only, with the medium host"
            )
