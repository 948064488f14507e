"""Batches of objects on a cluster, in blocking calls: lookups, loads, stores and deletions by name."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from operator import methodcaller
from typing import Any

from offload_backend_mooncake import codes as code_of
from offload_backend_mooncake.client import Client
from offload_backend_mooncake.frame import HEAD_BYTES, Frames, payload_bytes
from offload_core.api import LoadCheck, LoadOutcome, StoreOutcome, StoreSeal

OBJECTS_AT_ONCE = 16
"""Objects in one transfer. A transfer to a hung owner then ends well before Mooncake's own limit of a minute."""
BYTES_AT_ONCE = 64 * 1024**2
NAMES_AT_ONCE = 4096
_RETRY_SECONDS = 0.02
_TRIES = 4
"""Transfers of an object until bytes of another one count as damage."""


class Objects:
    """The objects of one cluster.

    Args:
        client: the connection.
        replicas: copies of each object.
        soft_pin: the objects are evicted after others.
        full_wait_seconds: time for which a store is retried.
    """

    def __init__(self, client: Client, replicas: int, soft_pin: bool, full_wait_seconds: float) -> None:
        self._client = client
        self._full_wait_seconds = full_wait_seconds
        self._policy = _policy(client.module, replicas, soft_pin)

    def contains(self, names: Sequence[str]) -> list[bool]:
        """Return whether each object exists. The master protects those that do for its lease time.

        Raises:
            OSError: the master is gone.
        """
        found: list[bool] = []
        for some in _slices(names):
            codes = self._answers("look up objects", some, self._ask("batch_is_exist", some))
            for code in codes:
                if code not in (0, 1):
                    raise self._failure("look up objects", code)
            found += [code == 1 for code in codes]
        return found

    def sizes(self, names: Sequence[str]) -> list[tuple[bool, int | None]]:
        """Return whether each object exists, and the bytes of its payload if they are known.

        Raises:
            OSError: the master is gone.
        """
        there = self.contains(names)
        present = [name for name, is_there in zip(names, there, strict=True) if is_there]
        nbytes = self._object_bytes(present)
        return [
            (is_there, payload_bytes(nbytes[name]) if is_there and name in nbytes else None)
            for name, is_there in zip(names, there, strict=True)
        ]

    def load(
        self, names: Sequence[str], buffers: Sequence[memoryview], checks: Sequence[LoadCheck] = ()
    ) -> list[LoadOutcome]:
        """Fill each buffer with its object.

        Args:
            checks: one per object, or none. Each is told of its object after the transfer, in one part. If it finds
                the object right, the checksum of the head is not needed.

        Raises:
            OSError: the master or an owner is gone.
        """
        outcomes = [LoadOutcome.MISS] * len(names)
        for batch in rounds(names, [len(buffer) for buffer in buffers]):
            told = [checks[index] for index in batch] if checks else []
            loaded = self._load([names[index] for index in batch], [buffers[index] for index in batch], told)
            for index, outcome in zip(batch, loaded, strict=True):
                outcomes[index] = outcome
        return outcomes

    def store(
        self, names: Sequence[str], buffers: Sequence[memoryview], seals: Sequence[StoreSeal] = ()
    ) -> list[StoreOutcome]:
        """Write each buffer whose object is absent. Without room in time, an object is rejected.

        Args:
            seals: one per object, which completes its buffer before the transfer; or none.

        Raises:
            OSError: the master or an owner is gone.
        """
        outcomes = [StoreOutcome.REJECTED] * len(names)
        end = time.monotonic() + self._full_wait_seconds
        for batch in rounds(names, [len(buffer) for buffer in buffers]):
            left = []
            for index, is_there in zip(batch, self.contains([names[index] for index in batch]), strict=True):
                if is_there:  # a put would report success, as if it had written the object
                    outcomes[index] = StoreOutcome.ALREADY_PRESENT
                else:
                    left.append(index)
            while left:
                told = [seals[index] for index in left] if seals else []
                stored = self._store([names[index] for index in left], [buffers[index] for index in left], told)
                for index, is_stored in zip(left, stored, strict=True):
                    if is_stored:
                        outcomes[index] = StoreOutcome.STORED
                left = [index for index, is_stored in zip(left, stored, strict=True) if not is_stored]
                if not left or time.monotonic() > end:
                    break
                time.sleep(_RETRY_SECONDS)
        return outcomes

    def delete(self, names: Sequence[str]) -> None:
        """Remove objects, absent ones too.

        Raises:
            OSError: the master is gone, or objects stay busy.
        """
        end = time.monotonic() + self._full_wait_seconds
        for some in _slices(list(dict.fromkeys(names))):
            left = some
            while left:
                removed = self._ask("batch_remove", left, True)
                codes = self._answers("delete objects", left, removed)
                for code in codes:
                    if code not in code_of.BUSY and code not in code_of.ABSENT and code != code_of.OK:
                        raise self._failure("delete objects", code)
                left = [name for name, code in zip(left, codes, strict=True) if code in code_of.BUSY]
                if left and time.monotonic() > end:
                    raise self._failure("delete objects", next(code for code in codes if code in code_of.BUSY))
                if left:
                    time.sleep(_RETRY_SECONDS)

    def _load(self, names: list[str], buffers: list[memoryview], checks: Sequence[LoadCheck]) -> list[LoadOutcome]:
        """Load objects of distinct names in one transfer, and those again that may have changed meanwhile.

        A deletion frees the memory of an object that others read, and a new object may come to the same place. Such a
        load gets other bytes; the next try gets the new object, or none.
        """
        outcomes = self._load_once(names, buffers, checks)
        for _ in range(_TRIES - 1):
            again = [index for index, outcome in enumerate(outcomes) if outcome is LoadOutcome.CORRUPT]
            if not again:
                break
            reloaded = self._load_once([names[index] for index in again], [buffers[index] for index in again])
            for index, outcome in zip(again, reloaded, strict=True):
                outcomes[index] = outcome
        return outcomes

    def _load_once(
        self, names: list[str], buffers: list[memoryview], checks: Sequence[LoadCheck] = ()
    ) -> list[LoadOutcome]:
        frames = Frames(names, buffers)

        def get(store: Any) -> Sequence[int]:
            return list(store.batch_get_into_multi_buffers(names, frames.addresses, frames.sizes))

        codes = self._answers("load objects", names, self._transfer(frames, get))
        # A transfer of an object that is larger or smaller than the buffer fails too, and only its size tells so.
        doubtful = [name for name, code in zip(names, codes, strict=True) if _is_doubtful(code)]
        nbytes = self._object_bytes([n for n, there in zip(doubtful, self.contains(doubtful), strict=True) if there])
        outcomes = []
        for index, (name, buffer, code) in enumerate(zip(names, buffers, codes, strict=True)):
            if code in code_of.ABSENT:
                outcomes.append(LoadOutcome.MISS)
            elif code >= 0:
                whole = code == HEAD_BYTES + len(buffer) and frames.is_whole(index, checks[index] if checks else None)
                outcomes.append(LoadOutcome.HIT if whole else LoadOutcome.CORRUPT)
            elif nbytes.get(name, HEAD_BYTES + len(buffer)) != HEAD_BYTES + len(buffer):
                outcomes.append(LoadOutcome.CORRUPT)
            else:
                raise self._failure("load objects", code)
        return outcomes

    def _store(self, names: list[str], buffers: list[memoryview], seals: Sequence[StoreSeal]) -> list[bool]:
        """Store objects of distinct names in one transfer. Return whether each exists now."""
        frames = Frames(names, buffers)
        frames.seal(seals)

        def put(store: Any) -> Sequence[int]:
            return list(store.batch_put_from_multi_buffers(names, frames.addresses, frames.sizes, self._policy))

        codes = self._answers("store objects", names, self._transfer(frames, put))
        for code in codes:
            if code not in (code_of.OK, code_of.EXISTS) and code not in code_of.FULL:
                raise self._failure("store objects", code)
        # Mooncake also returns success while another client writes the object, which may still fail.
        written = [name for name, code in zip(names, codes, strict=True) if code not in code_of.FULL]
        there = dict(zip(written, self.contains(written), strict=True))
        return [there.get(name, False) for name in names]

    def _transfer(self, frames: Frames, call: Callable[[Any], Sequence[int]]) -> Sequence[int]:
        """Make a transfer. RDMA needs its memory registered, and TCP is safer without that."""
        if self._client.cluster.protocol == "tcp":
            return self._client.transfer(call)

        def registered(store: Any) -> Sequence[int]:
            done: list[int] = []
            try:
                for address, nbytes in frames.regions:
                    if code := store.register_buffer(address, nbytes):
                        raise self._failure("register memory", code)
                    done.append(address)
                return call(store)
            finally:
                for address in done:
                    store.unregister_buffer(address)

        return self._client.transfer(registered)

    def _object_bytes(self, names: list[str]) -> dict[str, int]:
        """Return the bytes of objects in memory. Objects that are gone or lie elsewhere are left out."""
        found: dict[str, int] = {}
        for some in _slices(names):
            copies = self._ask("batch_get_replica_desc", some)
            for name, descriptors in copies.items():
                for one in descriptors:
                    if one.is_memory_replica():
                        found[name] = int(one.get_memory_descriptor().buffer_descriptor.size)
        return found

    def _ask(self, method: str, *arguments: Any) -> Any:
        """Call a method of the store that only asks the master."""
        return self._client.request(methodcaller(method, *arguments))

    def _answers(self, action: str, names: Sequence[str], codes: Sequence[int]) -> Sequence[int]:
        if len(codes) != len(names):
            raise OSError(f"{self._client.cluster}: cannot {action}: {len(codes)} answers for {len(names)} objects")
        return codes

    def _failure(self, action: str, code: int) -> OSError:
        return code_of.failure(str(self._client.cluster), action, code)


def rounds(names: Sequence[str], nbytes: Sequence[int]) -> Iterator[list[int]]:
    """Yield the indices of all objects in batches of distinct names, each small enough for one transfer.

    Mooncake reports success for a name twice in one batch, and fills one of its buffers only.
    """
    left = list(range(len(names)))
    while left:
        batch: list[int] = []
        seen: set[str] = set()
        later: list[int] = []
        total = 0
        for index in left:
            has_room = len(batch) < OBJECTS_AT_ONCE and (not batch or total + nbytes[index] <= BYTES_AT_ONCE)
            if has_room and names[index] not in seen:
                batch.append(index)
                seen.add(names[index])
                total += nbytes[index]
            else:
                later.append(index)
        yield batch
        left = later


def _is_doubtful(code: int) -> bool:
    return code in (code_of.TRANSFER_FAILED, code_of.INVALID_PARAMETERS)


def _policy(module: Any, replicas: int, soft_pin: bool) -> Any:
    """Return Mooncake's settings of a put."""
    policy = module.ReplicateConfig()
    policy.replica_num = replicas
    if soft_pin and hasattr(policy, "soft_pin_action"):
        policy.soft_pin_action = module.SoftPinAction.ENABLE
    elif soft_pin:
        policy.with_soft_pin = True  # its name in older versions
    return policy


def _slices(names: Sequence[str]) -> Iterator[list[str]]:
    for start in range(0, len(names), NAMES_AT_ONCE):
        yield list(names[start : start + NAMES_AT_ONCE])
