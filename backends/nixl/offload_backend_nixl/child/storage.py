"""The interface of a medium, as the server of the child process uses it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

from offload_backend_nixl.child.engine import Target
from offload_backend_nixl.protocol import Entry, Outcome


class Pending(ABC):
    """An object between the begin and the end of its transfer."""

    target: Target

    @abstractmethod
    def finish(self, succeeded: bool) -> Outcome:
        """Return the outcome after NIXL's transfer has ended. A store is rejected if something else has its place.

        Raises:
            OSError: the medium failed.
        """


class Storage(ABC):
    """The objects of one medium.

    All methods may run on several threads at once.
    """

    finishes_slowly: bool
    """``True`` if ``finish`` waits for the medium after a failure, so that it needs a thread of its own."""

    @abstractmethod
    def begin_load(self, name: str, nbytes: int) -> Pending | Outcome:
        """Prepare the read of an object, or return its outcome if it is absent or has another size.

        Raises:
            OSError: the medium failed.
        """

    @abstractmethod
    def begin_store(self, name: str, nbytes: int) -> Pending:
        """Prepare the write of an object.

        Raises:
            OSError: the medium failed or is full.
        """

    @abstractmethod
    def sizes(self, names: Sequence[str]) -> list[int]:
        """Return the bytes of each object, or ``ABSENT``.

        Raises:
            OSError: the medium failed or is gone.
        """

    @abstractmethod
    def delete(self, names: Sequence[str]) -> None:
        """Delete objects. An absent object is no error.

        Raises:
            OSError: the medium failed, or something else has the place of an object. The others are deleted.
        """

    @abstractmethod
    def list_after(self, name: str, limit: int) -> tuple[list[Entry], bool]:
        """Return the next objects after ``name`` in a fixed order, and whether there are more.

        Raises:
            OSError: the medium failed.
        """
