"""The only code that depends on LMCache's version: its module interface, its L1, and its way to its L2 adapters.

Supported: LMCache 0.5.6 and later releases of 0.5. Version 0.5.6 is the first one with ``--server-module``, and the one
that the tests run. With a later release the start checks that each function used here still exists.

Objects are written to L1 and flow to each L2 by LMCache's store policy. An object that is in an L2 only is loaded to L1
for a reader. LMCache locks memory for readers (300 s) and writers (600 s); the transfers of a session are far shorter.
"""

from __future__ import annotations

import importlib.metadata
import logging
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

from offload_backend_lmcache.server import stored_form
from offload_backend_lmcache.server.abandoned_tasks import AbandonedTasks
from offload_backend_lmcache.server.config import read_config
from offload_backend_lmcache.server.listener import Listener
from offload_backend_lmcache.server.object_store import Content, StoreError, Writing
from offload_backend_lmcache.server.stored_form import HEADER_BYTES, Header
from offload_backend_lmcache.wire.frames import Entry, Found, Status

logger = logging.getLogger(__name__)

OLDEST_VERSION = (0, 5, 6)
UNSUPPORTED_VERSION = (0, 6)
_L1_FUNCTIONS = (
    "delete", "finish_read", "finish_write", "finish_write_and_delete", "get_memory_usage", "get_object_state",
    "reserve_read", "reserve_write", "unsafe_read",
)  # fmt: skip
_MANAGER_FUNCTIONS = ("l2_adapters", "query_prefetch_status", "submit_prefetch_task", "wait_prefetch_status")

_OBJECTS = "offload-core"
_SIZES = "offload-core-sizes"
_POLL_SECONDS = 0.0005
_RETRY_SECONDS = 0.01
_LOAD_ATTEMPTS = 5
_ROOM = 0.9


class LMCacheModule:
    """The module as LMCache sees it.

    Args:
        build: LMCache's build context.

    Raises:
        RuntimeError: this version of LMCache, or its configuration, is not supported.
        ValueError: the module's config is wrong.
        OSError: the address cannot be bound.
    """

    def __init__(self, build: Any) -> None:
        self.context = build.server_context
        config = read_config(build.config)
        check_version(importlib.metadata.version("lmcache"))
        manager = build.server_context.storage_manager
        self._listener = Listener(LMCacheStore(manager, _only_l1(manager)), config)
        logger.info("offload-core's module listens on %s", config.address)

    def report_status(self) -> dict[str, Any]:
        """Return the module's part of LMCache's status."""
        return {"offload_core": {"connections": self._listener.connections}}

    def close(self) -> None:
        """End all connections, before LMCache frees its memory."""
        self._listener.close()


def check_version(version: str) -> None:
    """Check that a version of LMCache is supported.

    Raises:
        RuntimeError: with the supported versions.
    """
    numbers = tuple(int(part) for part in version.split("+")[0].split(".")[:3] if part.isdigit())
    if numbers < OLDEST_VERSION or numbers[:2] >= UNSUPPORTED_VERSION:
        raise RuntimeError(
            f"offload-core's module does not support LMCache {version}; it needs 0.5.6 or a later release of 0.5: "
            "pip install 'lmcache>=0.5.6,<0.6'"
        )


def _only_l1(manager: Any) -> Any:
    """Return LMCache's L1.

    Raises:
        RuntimeError: there are several, or LMCache's functions are others than expected.
    """
    l1 = getattr(manager, "_l1_manager", None)
    missing = [name for name in _L1_FUNCTIONS if not hasattr(l1, name)]
    missing += [name for name in _MANAGER_FUNCTIONS if not hasattr(manager, name)]
    if missing:
        raise RuntimeError(
            f"offload-core's module does not support this LMCache, which lacks {', '.join(missing)}; "
            f"use 0.5.6, on which it was tested"
        )
    if manager.is_multi_l1:
        raise RuntimeError("offload-core's module needs a server with one L1; this one is configured with several")
    return l1


class LMCacheStore:
    """Objects in LMCache's L1 and L2. See :class:`offload_backend_lmcache.server.object_store.ObjectStore`."""

    def __init__(self, manager: Any, l1: Any) -> None:
        import torch
        from lmcache.v1.distributed import api
        from lmcache.v1.distributed.error import L1Error

        self._api, self._errors = api, L1Error
        self._shape, self._dtype = torch.Size, torch.uint8
        self._manager, self._l1 = manager, l1
        self._abandoned = AbandonedTasks(self._adapters)

    def find(self, names: Sequence[bytes], deadline: float) -> list[Found]:
        """Look in L1 first, then in each L2. The size of an object in L2 is that of its size record."""
        found: dict[bytes, Found] = {}
        for name in dict.fromkeys(names):
            state = self._l1.get_object_state(self._key(name))
            if state is not None:
                found[name] = Found(True, state.memory_obj.get_size() - HEADER_BYTES)
        elsewhere = [name for name in dict.fromkeys(names) if name not in found]
        if elsewhere and self._adapters():
            in_l2 = self._in_l2([self._key(name) for name in elsewhere], deadline)
            present = [name for name in elsewhere if self._key(name) in in_l2]
            sizes = self._recorded_sizes(present, deadline)
            found.update((name, Found(True, sizes.get(name))) for name in present)
        return [found.get(name, Found(False, None)) for name in names]

    @contextmanager
    def reading(self, entries: Sequence[Entry], deadline: float) -> Iterator[list[Content]]:
        """Lock objects in L1 until the context ends. Objects that are in an L2 only are loaded first."""
        keys = list({self._key(entry.name) for entry in entries})
        self._abandoned.collect()
        locked = {key: one for key, (_, one) in self._l1.reserve_read(keys).items() if one is not None}
        loaded: list[Any] = []
        damaged: set[Any] = set()
        try:
            if self._adapters() and (missing := [entry for entry in entries if self._key(entry.name) not in locked]):
                self._abandoned.check()
                loaded, damaged = self._load_from_l2(missing, deadline, locked)
            yield [self._content(entry, locked, damaged) for entry in entries]
        finally:
            self._release(locked, loaded)

    def begin_write(self, entry: Entry, deadline: float) -> Writing | Status:
        """Reserve memory in L1. Wait until the deadline for LMCache to evict."""
        key, tag = self._key(entry.name), f"{_OBJECTS}-{threading.get_ident()}"
        while True:
            memory = self._reserve(key, entry.nbytes, tag)
            if memory is not None:
                return _L1Writing(self, entry, key, memory, tag)
            if self._l1.get_object_state(key) is not None:
                return Status.PRESENT
            if time.monotonic() >= deadline:
                return Status.FULL
            time.sleep(_RETRY_SECONDS)

    def delete(self, names: Sequence[bytes], deadline: float) -> list[Status]:
        """Remove objects from L1 and from each L2. LMCache's own transfers of an object are waited for."""
        keys = [self._key(name) for name in names]
        records = [self._size_key(name) for name in names]
        busy = self._delete_from_l1([*keys, *records], deadline)
        if adapters := self._adapters():
            removable = [key for key in dict.fromkeys([*keys, *records]) if key not in busy]
            for adapter in adapters:
                adapter.delete(removable)
            busy |= self._delete_from_l1(removable, deadline)  # loaded by a reader meanwhile
            if left := self._in_l2([key for key in keys if key not in busy], deadline):
                raise StoreError(f"LMCache's L2 did not delete {len(left)} of {len(keys)} objects; can it delete?")
        return [Status.BUSY if key in busy else Status.DELETED for key in keys]

    def commit(self, entry: Entry, checksum: int, key: Any, memory: Any, tag: str) -> bool:
        """Make a written object visible. Return whether it is."""
        stored_form.write_header(_view(memory), key.chunk_hash, Header(entry.nbytes, checksum))
        done = self._l1.finish_write([key], tag)[key]
        if self._adapters():
            self._record_size(entry)
        return bool(done == self._errors.SUCCESS)

    def abort(self, key: Any, tag: str) -> None:
        """Release the memory of an object that was not written."""
        self._l1.finish_write_and_delete([key], tag)

    def _key(self, name: bytes) -> Any:
        return self._api.ObjectKey(stored_form.digest(name), _OBJECTS, 0)

    def _size_key(self, name: bytes) -> Any:
        return self._api.ObjectKey(stored_form.digest(name), _SIZES, 0)

    def _layout(self, nbytes: int) -> Any:
        return self._api.MemoryLayoutDesc([self._shape([HEADER_BYTES + nbytes])], [self._dtype])

    def _adapters(self) -> list[Any]:
        return [adapter for _, adapter in self._manager.l2_adapters()]

    def _reserve(self, key: Any, nbytes: int, tag: str) -> Any:
        return self._l1.reserve_write([key], [False], self._layout(nbytes), tag)[key][1]

    def _content(self, entry: Entry, locked: dict[Any, Any], damaged: set[Any]) -> Content:
        key = self._key(entry.name)
        if key not in locked:
            return Content(Status.DAMAGED if key in damaged else Status.ABSENT)
        form = _view(locked[key])
        header = stored_form.read_header(form, key.chunk_hash)
        if header is None or header.nbytes != entry.nbytes:
            return Content(Status.DAMAGED)
        return Content(Status.HIT, form[HEADER_BYTES:], header.checksum)

    def _release(self, locked: dict[Any, Any], loaded: Sequence[Any]) -> None:
        """Unlock objects. A copy from an L2 that was loaded with a wrong size does not stay in L1."""
        wrong = [key for key in loaded if stored_form.read_header(_view(locked[key]), key.chunk_hash) is None]
        if locked:
            self._l1.finish_read(list(locked))
        if wrong:
            self._l1.delete(wrong)

    def _load_from_l2(
        self, entries: Sequence[Entry], deadline: float, locked: dict[Any, Any]
    ) -> tuple[list[Any], set[Any]]:
        """Load objects from the L2 adapters to L1 and lock them. An L1 without room is tried a few times.

        An object with a size record of another size is not requested: some adapters cannot cope with that.

        Args:
            entries: the objects.
            locked: gets the objects that are in L1 and locked.

        Returns:
            The keys that were loaded, and the keys of damaged objects. These have another size, or the L2 cannot load
            them although L1 has room.
        """
        recorded = self._recorded_sizes([entry.name for entry in entries], deadline)
        other = {self._key(entry.name) for entry in entries if recorded.get(entry.name, entry.nbytes) != entry.nbytes}
        wanted = {key: entry.nbytes for entry in entries if (key := self._key(entry.name)) not in other}
        loaded: list[Any] = []
        found: set[Any] = set(wanted)
        for attempt in range(_LOAD_ATTEMPTS):
            remaining = {key: nbytes for key, nbytes in wanted.items() if key in found and key not in locked}
            if not remaining:
                break
            if attempt:
                time.sleep(_RETRY_SECONDS * attempt)
            found = self._prefetch(remaining, deadline, locked)
            loaded += [key for key in remaining if key in locked]
        used, total = self._l1.get_memory_usage()
        unloadable = {key for key in found - locked.keys() if used + wanted[key] < total * _ROOM}
        return loaded, other & self._in_l2(list(other), deadline) | unloadable

    def _prefetch(self, wanted: dict[Any, int], deadline: float, locked: dict[Any, Any]) -> set[Any]:
        """Load objects to L1 and lock them, one task for each size. Return the keys that some L2 has."""
        tasks: list[tuple[list[Any], Any]] = []
        for nbytes in set(wanted.values()):
            keys = [key for key, size in wanted.items() if size == nbytes]
            group = self._api.GroupedObjectKeys(keys, 0, self._layout(nbytes))
            spec = self._api.PrefetchTaskSpec([group], fetching_policy="full")
            tasks.append((keys, self._manager.submit_prefetch_task(spec)))
        found: set[Any] = set()
        late = False
        for keys, handle in tasks:
            if self._manager.wait_prefetch_status(handle, max(0.0, deadline - time.monotonic())):
                found |= self._take(keys, handle, locked)
            else:
                late = True
                self._abandoned.add(partial(self._unlock_late, keys, handle))
        if late:
            raise StoreError("LMCache's L2 did not load in time")
        return found

    def _take(self, keys: list[Any], handle: Any, locked: dict[Any, Any]) -> set[Any]:
        result = self._manager.query_prefetch_status(handle)
        if result is None:
            return set()
        hits = [key for index, key in enumerate(keys) if result.hit_cells[0].test(index)]
        read = self._l1.unsafe_read(hits)
        locked.update((key, read[key][1]) for key in hits if read[key][1] is not None)
        cells = result.found_cells[0] if result.found_cells else result.hit_cells[0]
        return {key for index, key in enumerate(keys) if cells.test(index)}

    def _unlock_late(self, keys: list[Any], handle: Any) -> bool:
        """Release the locks of a load that nobody waits for. Return whether it has ended."""
        result = self._manager.query_prefetch_status(handle)
        if result is None:
            return False
        self._l1.finish_read([key for index, key in enumerate(keys) if result.hit_cells[0].test(index)])
        return True

    def _in_l2(self, keys: list[Any], deadline: float) -> set[Any]:
        """Return the keys that some L2 has."""
        if not keys:
            return set()
        self._abandoned.collect()
        self._abandoned.check()
        found: set[Any] = set()
        tasks = [
            (adapter, adapter.submit_lookup_and_lock_task(keys, {0: self._layout(0)})) for adapter in self._adapters()
        ]
        late = False
        for adapter, task in tasks:
            while (bits := adapter.query_lookup_and_lock_result(task)) is None and time.monotonic() < deadline:
                time.sleep(_POLL_SECONDS)
            if bits is None:
                late = True
                self._abandoned.add(partial(_unlock_lookup, adapter, task, keys), adapter)
                continue
            found |= _unlocked(adapter, bits, keys)
        if late:
            raise StoreError("LMCache's L2 did not answer a lookup in time")
        return found

    def _record_size(self, entry: Entry) -> None:
        """Write an object's size beside it, so that it can be found out of an L2. Failure only makes it unknown."""
        key, tag = self._size_key(entry.name), f"{_SIZES}-{threading.get_ident()}"
        memory = self._reserve(key, 0, tag)
        if memory is not None:
            stored_form.write_size_record(_view(memory), key.chunk_hash, entry.nbytes)
            self._l1.finish_write([key], tag)

    def _recorded_sizes(self, names: Sequence[bytes], deadline: float) -> dict[bytes, int]:
        """Return the sizes of objects that have a size record."""
        keys = {self._size_key(name): name for name in names}
        locked = {key: one for key, (_, one) in self._l1.reserve_read(list(keys)).items() if one is not None}
        try:
            missing = {key: 0 for key in keys if key not in locked}
            if missing:
                self._prefetch(missing, deadline, locked)
            sizes = {
                keys[key]: stored_form.read_size_record(_view(memory), key.chunk_hash) for key, memory in locked.items()
            }
        finally:
            if locked:
                self._l1.finish_read(list(locked))
        return {name: size for name, size in sizes.items() if size is not None}

    def _delete_from_l1(self, keys: Sequence[Any], deadline: float) -> set[Any]:
        """Delete objects from L1. Return those that stayed locked until the deadline."""
        busy = set(keys)
        while True:
            outcomes = self._l1.delete(list(busy))
            busy = {key for key, outcome in outcomes.items() if outcome == self._errors.KEY_IS_LOCKED}
            if not busy or time.monotonic() >= deadline:
                return busy
            time.sleep(_RETRY_SECONDS)


class _L1Writing:
    """Memory in L1 that no reader sees yet."""

    def __init__(self, store: LMCacheStore, entry: Entry, key: Any, memory: Any, tag: str) -> None:
        self._store, self._entry, self._key, self._memory, self._tag = store, entry, key, memory, tag
        self.payload = _view(memory)[HEADER_BYTES:]

    def commit(self, checksum: int) -> bool:
        """See :class:`Writing`."""
        return self._store.commit(self._entry, checksum, self._key, self._memory, self._tag)

    def abort(self) -> None:
        """See :class:`Writing`."""
        self._store.abort(self._key, self._tag)


def _view(memory: Any) -> memoryview:
    """Return the bytes of an object in L1.

    LMCache's own ``byte_array`` makes a type for each length that is used, and its ``tensor`` two views for each call.
    """
    return memoryview(memory.raw_tensor.numpy())[: memory.get_size()]


def _unlocked(adapter: Any, bits: Any, keys: Sequence[Any]) -> set[Any]:
    """Return the keys of a lookup's hits, after unlocking them."""
    found = [key for index, key in enumerate(keys) if bits.test(index)]
    if found:
        adapter.submit_unlock(found)
    return set(found)


def _unlock_lookup(adapter: Any, task: Any, keys: Sequence[Any]) -> bool:
    """Release the locks of a lookup that nobody waits for. Return whether it has ended."""
    bits = adapter.query_lookup_and_lock_result(task)
    if bits is not None:
        _unlocked(adapter, bits, keys)
    return bits is not None
