"""Copy streams of an engine's workers that are held for some steps, as by a slow bus."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

from offload_core.memory.device.stream_copier import StreamBlockCopier
from tests.support.accelerator import StreamControl
from tests.support.standin.engine import StandInEngine


def stream_copiers(engine: StandInEngine) -> Iterator[StreamBlockCopier]:
    """Yield the copier of each of an engine's workers."""
    for worker in engine.workers:
        assert worker.connector is not None
        copier = worker.connector._worker_half._engine._copier
        assert isinstance(copier, StreamBlockCopier)
        yield copier


class HeldStreams:
    """Holds and releases the streams of stores and loads at random, until :meth:`let_go`.

    The engine's own stream may wait for the loads after a verdict. They end first then, since the stand-in waits for
    its stream in each step.
    """

    def __init__(self, engine: StandInEngine, control: StreamControl, generator: random.Random) -> None:
        self._control = control
        self._generator = generator
        self._held: set[int] = set()
        self._may_hold = True
        self._streams: list[Any] = []
        self.held_steps = 0
        for copier in stream_copiers(engine):
            self._streams += [copier._store_stream, copier._load_stream]
            self._end_loads_before_the_engine_follows(copier, len(self._streams) - 1)

    def let_go(self) -> None:
        """Hold no stream any more, and wait for the end of the copies so far."""
        self._may_hold = False
        for index, stream in enumerate(self._streams):
            self._release(index)
            stream.synchronize()

    def change(self) -> None:
        """Hold or release streams. Call it after each step."""
        if not self._may_hold:
            return
        self.held_steps += bool(self._held)
        for index, stream in enumerate(self._streams):
            if self._generator.random() < 0.3:
                if index in self._held:
                    self._release(index)
                else:
                    self._held.add(index)
                    self._control.hold(stream)

    def _release(self, index: int) -> None:
        self._held.discard(index)
        self._control.release(self._streams[index])

    def _end_loads_before_the_engine_follows(self, copier: Any, index: int) -> None:
        follow = copier.let_engine_follow_scatters

        def end_and_follow() -> None:
            self._release(index)
            self._streams[index].synchronize()
            follow()

        copier.let_engine_follow_scatters = end_and_follow
