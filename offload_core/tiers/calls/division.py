"""The division of a call among the threads of a tier in the I/O process.

Each message and each part of a call costs both processes time, however few objects it has. So a large call takes many
objects and half of the threads: while it is handed over, another one goes on. A call of one batch takes one thread.
"""

from __future__ import annotations

from offload_core.api.capabilities import Capabilities


def divides_calls(capabilities: Capabilities, *, encodes: bool) -> bool:
    """Return whether the I/O process divides the calls of such a tier among its threads.

    On a remote medium, a call of many objects costs as many round trips as one of few. Its backend gets it whole. So
    does a backend that moves several objects of a call at the same time, if the core need not encode them.
    """
    return capabilities.medium != "remote" and (encodes or not capabilities.parallel)


def threads_of_call(io_threads: int) -> int:
    """Return the maximum number of threads that work on one load or store: half of them, rounded up."""
    return -(-io_threads // 2)
