"""The values that the core gives to a backend, besides its options."""

from __future__ import annotations

import logging
import math
from collections.abc import Collection
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import Any


def tier_label(name: str, *halves: str) -> str:
    """Return the words for a tier in log lines, such as ``tier 'shared' (worker 0)``.

    Args:
        halves: the halves of the engine that speak. Outside an engine there is none, or an empty one.
    """
    named = ", ".join(filter(None, halves))
    return f"tier {name!r} ({named})" if named else f"tier {name!r}"


class TierLogger(logging.LoggerAdapter[logging.Logger]):
    """A logger whose lines begin with a tier's label; see :meth:`BackendContext.logger`."""

    def __init__(self, logger: logging.Logger, context: BackendContext) -> None:
        super().__init__(logger)
        self._context = context

    def log(self, level: int, msg: object, *args: object, **kwargs: Any) -> None:
        """Log one line. All other methods end here."""
        label = self._context.label
        if args:  # the line is a format, and a tier may have any printable name
            label = label.replace("%", "%%")
        kwargs["stacklevel"] = kwargs.get("stacklevel", 1) + 1
        super().log(level, f"{label}: {msg}", *args, **kwargs)


@dataclass(frozen=True)
class BackendContext:
    """The values that the core passes to a backend's constructor, besides its options.

    Args:
        name: the tier's name in the configuration, for error messages. For log lines take :meth:`logger`.
        executor: the tier's own threads. A hung call can block only these (invariant I4). The core owns the executor:
            do not shut it down.
        threads: the most threads of each executor that work at once.
        open_timeout_seconds: the core's deadline for :meth:`offload_core.api.Backend.open` of this tier. A client
            timeout of your own should end a call no later than its deadline. All deadlines are infinite if nobody
            keeps them, as in most tests.
        lookup_timeout_seconds: the deadline of a lookup, for all of its calls together.
        load_timeout_seconds: the deadline of an empty load.
        load_timeout_seconds_per_mib: an addition to the deadline of a load for each MiB that it reads.
        store_timeout_seconds: the deadline of a store, the time in the queue included.
        close_timeout_seconds: the longest wait for :meth:`offload_core.api.Backend.close`.
        halves: the halves of the engine that use the backend now: ``scheduler``, ``worker``, or ``worker 0`` and so on
            where there are several ranks. It is empty before ``open`` and outside an engine, and it may change.
        lends_to_processes: whether other processes map the memory that the backend lends. It should then be
            :class:`SharedMemory`, and these processes pin it if they use a GPU.
        load_executor: more threads of the tier, as many, for :meth:`offload_core.api.Backend.run_load` alone. Without
            them, it is ``executor``.
        lookup_executor: the same for :meth:`offload_core.api.Backend.run_lookup`.
    """

    name: str
    executor: Executor
    threads: int = 4
    open_timeout_seconds: float = math.inf
    lookup_timeout_seconds: float = math.inf
    load_timeout_seconds: float = math.inf
    load_timeout_seconds_per_mib: float = 0.0
    store_timeout_seconds: float = math.inf
    close_timeout_seconds: float = math.inf
    halves: Collection[str] = ()
    lends_to_processes: bool = False
    load_executor: Executor = None  # type: ignore[assignment]  # set below
    lookup_executor: Executor = None  # type: ignore[assignment]  # set below

    def __post_init__(self) -> None:
        for name in ("load_executor", "lookup_executor"):
            if getattr(self, name) is None:
                object.__setattr__(self, name, self.executor)

    @property
    def label(self) -> str:
        """The words for the tier in log lines, such as ``tier 'shared' (worker 0)``."""
        return tier_label(self.name, *self.halves)

    def logger(self, name: str) -> TierLogger:
        """Return a logger whose lines begin with :attr:`label`.

        Args:
            name: the name of the logger, mostly ``__name__``.
        """
        return TierLogger(logging.getLogger(name), self)
