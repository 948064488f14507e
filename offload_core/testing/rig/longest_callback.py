"""A stopwatch for the callbacks of an event loop."""

from __future__ import annotations

import asyncio
import gc
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from unittest import mock


@dataclass
class LongestCallback:
    """The longest callback so far, in seconds of processor time of the loop's thread."""

    seconds: float = 0.0


@contextmanager
def longest_callback() -> Iterator[LongestCallback]:
    """Measure every callback that the running event loop begins in the block.

    A client library may have a loop on a thread of its own. Its callbacks hold up no other tier and are not measured.
    Processor time does not grow while a callback waits for the interpreter's lock or for the processor. The collection
    of garbage is off meanwhile.
    """
    longest = LongestCallback()
    loop_thread = threading.get_ident()
    run = asyncio.Handle._run

    def timed(handle: asyncio.Handle) -> None:
        if threading.get_ident() != loop_thread:
            run(handle)
            return
        begun = time.thread_time()
        run(handle)
        longest.seconds = max(longest.seconds, time.thread_time() - begun)

    was_on = gc.isenabled()
    gc.disable()
    try:
        with mock.patch.object(asyncio.Handle, "_run", timed):
            yield longest
    finally:
        if was_on:
            gc.enable()
