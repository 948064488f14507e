"""The medium under test: the state machine's examples share it."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

from offload_core.api.backend import Backend, BackendContext, BackendType, StoreReservation
from offload_core.api.capabilities import Capabilities
from offload_core.api.keys import ObjectKey
from offload_core.testing.rig.turn_threads import TurnThreads
from offload_core.testing.state_machine.oracle import ContractError, Reads

_PROBES = 8


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
        self.capabilities, self.fitting_probes, self.evicts_for_stores = asyncio.run(self._measure())
        self.reads = Reads() if self.capabilities.evicts else None
        """The reads of all examples, if the medium evicts by itself."""

    def construct(self, seed: int = 0) -> Backend[Any]:
        """Construct a client, on the running event loop."""
        threads = TurnThreads(asyncio.get_running_loop(), seed)
        return self._backend_type.backend(self._options, BackendContext("machine", threads))

    def namespaces(self) -> list[str]:
        """Return namespaces that differ in their last digit only; :meth:`change_namespaces` changes them."""
        digest = hashlib.sha256(b"machine %d" % self._failed_examples).hexdigest()
        return [digest[:-1] + digit for digit in "012"]

    def change_namespaces(self) -> None:
        """Use other namespaces from now on, because a failed example may have left objects behind."""
        self._failed_examples += 1

    async def count_fitting_probes(self, backend: Backend[Any]) -> int:
        """Return the number of probes that a bounded medium would store now."""
        reservation = await self._reserve(backend, self._probe_keys("probe"))
        await reservation.release()
        return reservation.outcomes.count(None)

    def _probe_keys(self, pack: str) -> list[ObjectKey]:
        namespace = self.namespaces()[0]
        return [ObjectKey(namespace, pack, bytes([number])) for number in range(_PROBES)]

    async def _reserve(self, backend: Backend[Any], keys: Sequence[ObjectKey]) -> StoreReservation:
        assert self.capacity_bytes is not None
        return await backend.prepare_store(keys, [self.capacity_bytes // 6] * len(keys))

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
        reservation = await self._reserve(backend, keys)
        wanted = [key for key, outcome in zip(keys, reservation.outcomes, strict=True) if outcome is None]
        data = memoryview(bytes(self.capacity_bytes // 6))
        await backend.store(wanted, [data] * len(wanted))
        await reservation.release()
        evicts = await self.count_fitting_probes(backend) == len(wanted)
        await backend.delete(keys)
        await backend.close()
        if not wanted:
            raise ContractError(
                f"C11: an empty medium with a limit of {self.capacity_bytes} bytes rejects an object of a sixth of it"
            )
        return capabilities, len(wanted), evicts
