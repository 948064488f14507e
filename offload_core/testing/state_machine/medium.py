"""The medium under test: the state machine's examples share it."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from offload_core.api.backend import Backend, BackendContext, BackendType, StoreReservation
from offload_core.api.capabilities import Capabilities
from offload_core.api.keys import ObjectKey
from offload_core.testing.rig.turn_threads import TurnThreads
from offload_core.testing.state_machine.leaks import Held, held_now
from offload_core.testing.state_machine.oracle import ContractError, Reads

_PROBES = 8
_CHECKING_EXAMPLES = 20
"""The first examples all check the free capacity after each step; of the others, every second one does."""


class Medium:
    """The medium of one run: constructs clients and knows how many probes fit into a bounded medium.

    A probe is an object of a sixth of the capacity.

    Args:
        backend_type: the backend type under test.
        options: the tier's own keys; they name the medium.
        capacity_bytes: the limit that the options set on a bounded medium, else ``None``.

    Raises:
        ValueError: a limit is given and the backend declares none, or the other way round.
        ContractError: a bounded medium stores nothing.
    """

    def __init__(self, backend_type: BackendType, options: Mapping[str, Any], capacity_bytes: int | None) -> None:
        self._backend_type = backend_type
        self._options = backend_type.options.model_validate(dict(options))
        self._failed_examples = 0
        self.capacity_bytes = capacity_bytes
        self._left_open: set[Held] = set()
        self.leak: ContractError | None = None
        """The first leak of capacity that was found, with the step that leaked."""
        self.free_bytes = 0
        """Size of the largest object that the medium takes when it is empty; 0 if it evicts nothing for a store."""
        self._examples = 0
        self.capabilities, self.fitting_probes, self.evicts_for_stores = asyncio.run(self._measure())
        self.reads = Reads() if self.capabilities.evicts else None
        """The reads of all examples, if the medium evicts by itself."""

    def construct(self, seed: int = 0) -> Backend[Any]:
        """Construct a client, on the running event loop."""
        threads = TurnThreads(asyncio.get_running_loop(), seed)
        return self._backend_type.backend(self._options, BackendContext("machine", threads))

    def left_open(self, left: Collection[Held]) -> set[Held]:
        """Take up the threads and descriptors that an example left behind; return those of all examples."""
        self._left_open = (self._left_open | set(left)) & held_now()
        return self._left_open

    def namespaces(self) -> list[str]:
        """Return namespaces that differ in their last digit only; :meth:`change_namespaces` changes them."""
        digest = hashlib.sha256(b"machine %d" % self._failed_examples).hexdigest()
        return [digest[:-1] + digit for digit in "012"]

    def change_namespaces(self) -> None:
        """Use other namespaces from now on, because a failed example may have left objects behind."""
        self._failed_examples += 1

    def begin_example(self) -> bool:
        """Count an example; return whether it checks the free capacity after each step, which evicts objects."""
        self._examples += 1
        return self.free_bytes > 0 and (self._examples <= _CHECKING_EXAMPLES or self._examples % 2 == 0)

    async def fits(self, backend: Backend[Any], nbytes: int) -> bool:
        """Return whether the medium would store an object of ``nbytes`` bytes now."""
        reservation = await backend.prepare_store(self._probe_keys("whole")[:1], [nbytes])
        await reservation.release()
        return reservation.outcomes == (None,)

    async def _largest_object(self, backend: Backend[Any]) -> int:
        """Return the size of the largest object that the medium takes."""
        assert self.capacity_bytes is not None
        least, most = 0, self.capacity_bytes
        while least < most:
            middle = (least + most + 1) // 2
            least, most = (middle, most) if await self.fits(backend, middle) else (least, middle - 1)
        return least

    async def count_fitting_probes(self, backend: Backend[Any]) -> int:
        """Return the number of probes that a bounded medium would store now."""
        held = await self._reserve(backend, self._probe_keys("probe"))
        for reservation in held:
            await reservation.release()
        return sum(reservation.outcomes == (None,) for reservation in held)

    def _probe_keys(self, pack: str) -> list[ObjectKey]:
        namespace = self.namespaces()[0]
        return [ObjectKey(namespace, pack, bytes([number])) for number in range(_PROBES)]

    async def _reserve(self, backend: Backend[Any], keys: Sequence[ObjectKey]) -> list[StoreReservation]:
        """Hold one reservation per probe."""
        assert self.capacity_bytes is not None
        return [await backend.prepare_store([key], [self.capacity_bytes // 6]) for key in keys]

    async def _measure(self) -> tuple[Capabilities, int, bool]:
        """Return the capabilities, the number of probes that fit, and whether the medium evicts to store others."""
        backend = self.construct()
        capabilities = backend.capabilities
        if capabilities.bounded != (self.capacity_bytes is not None):
            raise ValueError(
                f"{self._backend_type.name!r} declares bounded={capabilities.bounded}, capacity_bytes is "
                f"{self.capacity_bytes}; give it the limit that the options set if, and only if, it is bounded"
            )
        if self.capacity_bytes is None:
            return capabilities, 0, False
        await backend.open()
        keys = self._probe_keys("filling")
        held = await self._reserve(backend, keys)
        wanted = [key for key, reservation in zip(keys, held, strict=True) if reservation.outcomes == (None,)]
        data = memoryview(bytes(self.capacity_bytes // 6))
        for key in wanted:
            await backend.store([key], [data])
        for reservation in held:
            await reservation.release()
        evicts = await self.count_fitting_probes(backend) == len(wanted)
        await backend.delete(keys)
        self.free_bytes = await self._largest_object(backend) if evicts else 0
        await backend.close()
        if not wanted:
            raise ContractError(
                f"C11: an empty medium with a limit of {self.capacity_bytes} bytes rejects an object of a sixth of it"
            )
        return capabilities, len(wanted), evicts
