"""The backend's coroutines as plain functions, on one event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from offload_backend_lmcache import LMCacheBackend, LMCacheOptions
from offload_backend_lmcache.wire import frames

from offload_core.api.backend import BackendContext, LoadOutcome, StoreOutcome
from offload_core.api.keys import ObjectKey
from offload_core.runtime.threads import DaemonExecutor
from offload_core.testing.rig.recording_check import RecordingCheck


def key(number: int, pack: str = "full-u256") -> ObjectKey:
    return ObjectKey("ab" * 32, pack, bytes([number % 256, number // 256]) * 16)


def sent(payload: bytes) -> bytes:
    """Return a payload as a client sends it, with its checksum behind it."""
    moved = payload[frames.LAST_BYTES :] + payload[: frames.LAST_BYTES]
    return moved + frames.encode_checksum(frames.payload_checksum(payload))


class Calls:
    """An open backend whose objects have numbers."""

    def __init__(self, runner: asyncio.Runner, backend: LMCacheBackend) -> None:
        self._runner = runner
        self.backend = backend

    def run(self, coroutine: Coroutine[Any, Any, None]) -> None:
        self._runner.run(coroutine)

    def contains(self, *numbers: int) -> Sequence[bool]:
        return self._runner.run(self.backend.contains([key(number) for number in numbers]))

    def sizes(self, *numbers: int) -> Sequence[int | None]:
        return self._runner.run(self.backend.prepare_load([key(number) for number in numbers])).nbytes

    def load(self, number: int, nbytes: int) -> tuple[LoadOutcome, bytes]:
        buffer = bytearray(nbytes)
        ((outcome, content),) = self.load_into((number, buffer))
        return outcome, content

    def load_into(self, *buffers: tuple[int, bytearray]) -> list[tuple[LoadOutcome, bytes]]:
        keys, views = [key(number) for number, _ in buffers], [memoryview(buffer) for _, buffer in buffers]
        outcomes = self._runner.run(self.backend.load_into(keys, views))
        return [(outcome, bytes(buffer)) for outcome, (_, buffer) in zip(outcomes, buffers, strict=True)]

    def load_and_check(self, *objects: tuple[int, int], right: bytes | None = None) -> list[tuple[LoadOutcome, bytes]]:
        """Load objects of these numbers and lengths in one call; returns what the check of each was told too.

        Args:
            right: the bytes that the checks find right, if any.
        """
        views = [memoryview(bytearray(nbytes)) for _, nbytes in objects]
        checks = [RecordingCheck(view, right) for view in views]
        loading = self.backend.load_and_check([key(number) for number, _ in objects], views, checks)
        outcomes = self._runner.run(loading)
        assert [check.problem for check in checks] == [None] * len(checks)
        return [(outcome, bytes(check.told)) for outcome, check in zip(outcomes, checks, strict=True)]

    def store(self, *objects: tuple[int, bytes]) -> list[StoreOutcome]:
        keys, views = [key(number) for number, _ in objects], [memoryview(content) for _, content in objects]
        return list(self._runner.run(self.backend.store(keys, views)))

    def delete(self, *numbers: int) -> None:
        self._runner.run(self.backend.delete([key(number) for number in numbers]))


@contextmanager
def opened(address: str, *, threads: int = 4, **options: Any) -> Iterator[Calls]:
    """Open a backend and close it in the end."""
    executor = DaemonExecutor(threads, "cluster")
    backend = LMCacheBackend(LMCacheOptions(address=address, **options), BackendContext("cluster", executor))
    with asyncio.Runner() as runner:
        runner.run(backend.open())
        try:
            yield Calls(runner, backend)
        finally:
            runner.run(backend.close())
            executor.shutdown()
