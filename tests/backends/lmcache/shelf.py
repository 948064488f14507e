"""The module's listener in this process, on a dictionary in place of LMCache."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from offload_backend_lmcache.server.config import ServerConfig
from offload_backend_lmcache.server.listener import Listener
from offload_backend_lmcache.server.object_store import Content, StoreError, Writing
from offload_backend_lmcache.wire.frames import Entry, Found, Status

from tests.support.server_process import free_port


class Shelf:
    """Objects in a dictionary. It can be told to fail, and counts the objects that are being written."""

    def __init__(self) -> None:
        self.objects: dict[bytes, tuple[bytes, int]] = {}
        self.failure: str | None = None
        self.is_full = False
        self.writing = 0
        self.begun = 0

    def find(self, names: Sequence[bytes], deadline: float) -> list[Found]:
        self._fail()
        return [
            Found(True, len(self.objects[name][0])) if name in self.objects else Found(False, None) for name in names
        ]

    @contextmanager
    def reading(self, entries: Sequence[Entry], deadline: float) -> Iterator[list[Content]]:
        self._fail()
        yield [self._content(entry) for entry in entries]

    def begin_write(self, entry: Entry, deadline: float) -> Writing | Status:
        self._fail()
        if self.is_full:
            return Status.FULL
        if entry.name in self.objects:
            return Status.PRESENT
        self.writing += 1
        self.begun += 1
        return _Writing(self, entry)

    def delete(self, names: Sequence[bytes], deadline: float) -> list[Status]:
        self._fail()
        for name in names:
            self.objects.pop(name, None)
        return [Status.DELETED] * len(names)

    def _content(self, entry: Entry) -> Content:
        if entry.name not in self.objects:
            return Content(Status.ABSENT)
        payload, checksum = self.objects[entry.name]
        if len(payload) != entry.nbytes:
            return Content(Status.DAMAGED)
        return Content(Status.HIT, memoryview(payload), checksum)

    def _fail(self) -> None:
        if self.failure is not None:
            raise StoreError(self.failure)


class _Writing:
    def __init__(self, shelf: Shelf, entry: Entry) -> None:
        self._shelf, self._entry = shelf, entry
        self._memory = bytearray(entry.nbytes)
        self.payload = memoryview(self._memory)

    def commit(self, checksum: int) -> bool:
        self._shelf.writing -= 1
        self._shelf.objects[self._entry.name] = bytes(self._memory), checksum
        return True

    def abort(self) -> None:
        self._shelf.writing -= 1


@contextmanager
def listening(shelf: Shelf, **config: Any) -> Iterator[tuple[str, Listener]]:
    """Serve a shelf. Yields its address and the listener."""
    address = f"127.0.0.1:{free_port()}"
    listener = Listener(shelf, ServerConfig(address=address, **config))
    try:
        yield address, listener
    finally:
        listener.close()
