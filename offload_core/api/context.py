"""The values that the core gives to a backend, besides its options."""

from __future__ import annotations

import math
from concurrent.futures import Executor
from dataclasses import dataclass


@dataclass(frozen=True)
class BackendContext:
    """The values that the core passes to a backend's constructor, besides its options.

    Args:
        name: the tier's name in the configuration, for messages.
        executor: the tier's own threads. A hung call can block only these (invariant I4). The core owns the executor:
            do not shut it down.
        threads: the most threads of the executor that work at once.
        open_timeout_seconds: the core's deadline for :meth:`offload_core.api.Backend.open` of this tier. A client
            timeout of your own should end a call no later than its deadline. All deadlines are infinite if nobody
            keeps them, as in most tests.
        lookup_timeout_seconds: the deadline of a lookup, for all of its calls together.
        load_timeout_seconds: the deadline of an empty load.
        load_timeout_seconds_per_mib: an addition to the deadline of a load for each MiB that it reads.
        store_timeout_seconds: the deadline of a store, the time in the queue included.
        close_timeout_seconds: the longest wait for :meth:`offload_core.api.Backend.close`.
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
