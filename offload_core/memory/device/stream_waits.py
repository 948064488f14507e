"""All waits between the streams of an accelerator and the host: one method each, and no other module waits.

A device runs the work of one stream in its order, and the work of several streams at the same time. The engine's work
is on its *compute stream*, the current stream of the engine thread. The *store stream* moves gathered bytes to host
memory, and the *load stream* scatters host memory into blocks.

A wait of a stream for another one is made by an event, and takes no time of the host. A wait of the host is a question
about an event, and the caller asks again later. Only the shutdown stands still.

The tests remove each wait in turn, and see wrong bytes or memory that is free too early.
"""

from __future__ import annotations

from typing import Any

import torch


class StreamWaits:
    """The waits of one device's copies."""

    def __init__(self, device: torch.device, store_stream: Any, load_stream: Any) -> None:
        self._device = device
        self._store_stream = store_stream
        self._load_stream = load_stream

    def move_follows_gathers(self) -> None:
        """Let the store stream go on after the gathers so far. Otherwise it moves the bytes of earlier gathers."""
        self._store_stream.wait_event(self._compute_stream.record_event())

    def gather_follows_move(self, move: torch.Event) -> bool:
        """Return whether a slot of the device buffer may be written again. Otherwise its bytes are yet to be moved."""
        return bool(move.query())

    def store_follows_move(self, move: torch.Event) -> bool:
        """Return whether a payload has its bytes. Otherwise a tier stores the bytes that were in its memory before."""
        return bool(move.query())

    def scatter_follows_engine(self) -> None:
        """Let the load stream go on after all work of the engine so far.

        Otherwise earlier work still reads or writes the blocks, which the engine has freed only on paper.
        """
        self._load_stream.wait_event(self._compute_stream.record_event())

    def verdict_follows_scatter(self, scatter: torch.Event) -> bool:
        """Return whether blocks have their bytes. Otherwise the engine reads them, and their payload is used again."""
        return bool(scatter.query())

    def engine_follows_scatters(self) -> None:
        """Let later work of the engine begin after the scatters so far.

        Otherwise the scatter of a cancelled load overwrites the block of another request.
        """
        self._compute_stream.wait_event(self._load_stream.record_event())

    def descriptors_follow_copy(self, copy: torch.Event) -> bool:
        """Return whether the descriptors of batched copies may be freed. Otherwise the device still reads them."""
        return bool(copy.query())

    def shutdown_follows_copies(self) -> None:
        """Wait on the host for all copies. Otherwise a device uses host memory that is unpinned and unmapped."""
        self._store_stream.synchronize()
        self._load_stream.synchronize()

    @property
    def _compute_stream(self) -> Any:
        return torch.accelerator.current_stream(self._device)
