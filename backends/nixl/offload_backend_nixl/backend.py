"""The ``nixl`` backend: the contract's coroutines, each a call on the tier's threads that asks the child process."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import Literal

from offload_backend_nixl import protocol
from offload_backend_nixl.frame import OVERHEAD_BYTES
from offload_backend_nixl.naming import key_of, name_of
from offload_backend_nixl.options import NixlOptions
from offload_backend_nixl.parent import transfers
from offload_backend_nixl.parent.supervisor import Supervisor
from offload_backend_nixl.protocol import Answer, Operation, Outcome
from offload_core.api import (
    Backend,
    BackendContext,
    Capabilities,
    LoadCheck,
    LoadOutcome,
    LoadReservation,
    ObjectKey,
    StoredObject,
    StoreOutcome,
    StoreReservation,
    StoreSeal,
    check_ownership,
)


class NixlBackend(Backend[NixlOptions]):
    """Objects on a medium that NIXL has a storage plugin for."""

    def __init__(self, options: NixlOptions, context: BackendContext) -> None:
        super().__init__(options, context)
        self._log = context.logger(__name__)
        self._supervisor = Supervisor(
            context.name, self._log, options.ring, options.child_settings(), options.transfer_timeout_seconds
        )
        self._has_warned_of_size = False

    @property
    def capabilities(self) -> Capabilities:
        """Files may lie on a disk; a bucket is remote. Other processes may use both.

        Where the child does the whole work of a load, a thread more does not help.
        """
        medium: Literal["disk", "remote"] = "disk" if self.options.keeps_files else "remote"
        parallel = self.options.moves_in_place
        return Capabilities(medium=medium, persistent=True, shared=True, lists=True, sizes=True, parallel=parallel)

    @property
    def child_pid(self) -> int | None:
        """The child process, while it lives."""
        return self._supervisor.pid

    async def open(self) -> None:
        """Create the folder if it is missing, check its owner, and start the child. Cancelled, it first ends the start.

        Raises:
            PermissionError: another user could change the folder's content.
            OSError: the medium or NIXL cannot be used.
        """
        await self.run_blocking(self._open)

    async def close(self) -> None:
        """Wait for running operations, and end the child process (C13)."""
        await super().close()
        await self.run_blocking(self._supervisor.close)

    async def contains(self, keys: Sequence[ObjectKey]) -> Sequence[bool]:
        """See :meth:`Backend.contains`. Cancelled, it waits for the answers."""
        return [size is not None for size in await self.run_lookup(self._sizes, keys)]

    async def prepare_load(self, keys: Sequence[ObjectKey]) -> LoadReservation:
        """Return the presence and size of each object. Nothing is evicted, so nothing is pinned."""
        sizes = await self.run_lookup(self._sizes, keys)
        return LoadReservation([size is not None for size in sizes], nbytes=sizes)

    async def prepare_store(
        self, keys: Sequence[ObjectKey], nbytes: Sequence[int], spare: Sequence[bool] = ()
    ) -> StoreReservation:
        """Reject objects that are larger than the shared memory. There is no limit on the others."""
        reservation = await super().prepare_store(keys, nbytes, spare)
        outcomes = [
            StoreOutcome.REJECTED if self._is_too_large(size) else outcome
            for outcome, size in zip(reservation.outcomes, nbytes, strict=True)
        ]
        return StoreReservation(outcomes)

    async def load_into(self, keys: Sequence[ObjectKey], buffers: Sequence[memoryview]) -> Sequence[LoadOutcome]:
        """See :meth:`Backend.load_into`. Cancelled, it waits for the transfers, at most until their deadline."""
        return await self.run_load(self._load, keys, buffers)

    async def load_and_check(
        self, keys: Sequence[ObjectKey], buffers: Sequence[memoryview], checks: Sequence[LoadCheck]
    ) -> Sequence[LoadOutcome]:
        """See :meth:`Backend.load_and_check`. Threads check only objects that the child does not hash."""
        return await self.run_load(self._load, keys, buffers, checks)

    async def store(self, keys: Sequence[ObjectKey], buffers: Sequence[memoryview]) -> Sequence[StoreOutcome]:
        """See :meth:`Backend.store`. Cancelled, it waits for the transfers, at most until their deadline."""
        return await self.run_blocking(self._store, keys, buffers)

    async def store_and_seal(
        self, keys: Sequence[ObjectKey], buffers: Sequence[memoryview], seals: Sequence[StoreSeal]
    ) -> Sequence[StoreOutcome]:
        """See :meth:`Backend.store_and_seal`. Each object is sealed while the child writes the one before."""
        return await self.run_blocking(self._store, keys, buffers, seals)

    async def delete(self, keys: Sequence[ObjectKey]) -> None:
        """See :meth:`Backend.delete`. Cancelled, it waits for the answers."""
        await self.run_blocking(self._ask, Operation.DELETE, Outcome.DONE, keys)

    async def list_objects(self) -> AsyncIterator[Sequence[StoredObject]]:
        """See :meth:`Backend.list_objects`. Cancellation has no effect on the medium."""
        after: tuple[str, ...] = ()
        more = True
        while more:
            answer = await self.run_blocking(self._list, after)
            yield [
                StoredObject(key, max(entry.nbytes - OVERHEAD_BYTES, 0), entry.stored_at_seconds)
                for entry in answer.entries
                if (key := key_of(entry.name)) is not None
            ]
            more = answer.more
            after = tuple(entry.name for entry in answer.entries[-1:])

    # The methods below run on the tier's threads.

    def _open(self) -> None:
        folder = self.options.path
        if folder is not None:
            folder.mkdir(mode=0o700, exist_ok=True)
            check_ownership(folder)  # here, since the child imports nothing of the core
        self._supervisor.open()

    def _load(
        self, keys: Sequence[ObjectKey], buffers: Sequence[memoryview], checks: Sequence[LoadCheck] = ()
    ) -> list[LoadOutcome]:
        seconds = self.options.transfer_timeout_seconds
        in_place = self.options.moves_in_place
        return transfers.load_batch(self._supervisor.child(), keys, buffers, seconds, checks, in_place=in_place)

    def _store(
        self, keys: Sequence[ObjectKey], buffers: Sequence[memoryview], seals: Sequence[StoreSeal] = ()
    ) -> list[StoreOutcome]:
        seconds = self.options.transfer_timeout_seconds
        in_place = self.options.moves_in_place
        return transfers.store_batch(self._supervisor.child(), keys, buffers, seconds, seals, in_place=in_place)

    def _sizes(self, keys: Sequence[ObjectKey]) -> list[int | None]:
        """Return the size of each object, ``None`` for an absent one and for one that is too large to be loaded."""
        stored = [size for answer in self._ask(Operation.SIZES, Outcome.SIZES, keys) for size in answer.sizes]
        sizes = [None if size == protocol.ABSENT else max(size - OVERHEAD_BYTES, 0) for size in stored]
        return [None if size is not None and self._is_too_large(size) else size for size in sizes]

    def _ask(self, operation: Operation, wanted: Outcome, keys: Sequence[ObjectKey]) -> list[Answer]:
        """Return the answers about keys, in batches.

        Raises:
            OSError: the medium or the child failed.
        """
        child = self._supervisor.child()
        batches = protocol.batches([name_of(key) for key in keys])
        tickets = [child.send(operation, names=names) for names in batches]
        answers = [child.wait(ticket) for ticket in tickets]
        for names, answer in zip(batches, answers, strict=True):
            if answer.outcome is not wanted or (wanted is Outcome.SIZES and len(answer.sizes) != len(names)):
                raise child.failure(answer)
        return answers

    def _list(self, after: tuple[str, ...]) -> Answer:
        child = self._supervisor.child()
        answer = child.wait(child.send(Operation.LIST, names=after))
        if answer.outcome is not Outcome.ENTRIES:
            raise child.failure(answer)
        return answer

    def _is_too_large(self, nbytes: int) -> bool:
        if nbytes + OVERHEAD_BYTES <= self.options.ring:
            return False
        if not self._has_warned_of_size:
            self._has_warned_of_size = True
            self._log.warning(
                "an object of %d bytes does not fit into ring: %d, and is neither stored nor loaded; raise it",
                nbytes,
                self.options.ring,
            )
        return True
