"""The division of a call among the threads of a tier in the I/O process.

Each message and each part of a call costs both processes time, however few objects it has. So a call takes many
objects, and only two large loads run at a time: while one is handed over, the other goes on. Each gets half of the
threads. Small loads take one thread each. Of the stores, two share the threads, and a third one waits for them.
"""

from __future__ import annotations

from offload_core.api.capabilities import Capabilities

CALLS_AT_ONCE = 2
"""Number of large loads, and of stores, that share the threads of a tier whose calls are divided."""


def divides_calls(capabilities: Capabilities, *, encodes: bool) -> bool:
    """Return whether the I/O process divides the calls of such a tier among its threads.

    On a remote medium, a call of many objects costs as many round trips as one of few. Its backend gets it whole. So
    does a backend that moves several objects of a call at the same time, if the core need not encode them.
    """
    return capabilities.medium != "remote" and (encodes or not capabilities.parallel)


def threads_of_call(io_threads: int) -> int:
    """Return the maximum number of threads that work on one load or store."""
    return -(-io_threads // CALLS_AT_ONCE)
