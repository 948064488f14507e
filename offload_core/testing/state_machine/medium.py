"""The medium that the state machine's examples run on."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

from offload_core.api.backend import Backend, BackendContext, BackendType, Capabilities, StoreReservation
from offload_core.api.keys import ObjectKey
from offload_core.testing.rig.turn_threads import TurnThreads
from offload_core.testing.state_machine.oracle import ContractError

_PROBES = 8


class Medium:
    """What the examples of one run share: how to make clients, and how much room a bounded medium has.

    Args:
        backend_type: what is tested.
        options: the tier's own keys; they name the medium.
        capacity_bytes: the limit that they set on a bounded medium, else ``None``.

    Raises:
        ValueError: there is a limit and the backend declares none, or the other way round.
        ContractError: a bounded medium takes nothing.
    """

    def __init__(self, backend_type: BackendType, options: Mapping[str, Any], capacity_bytes: int | None) -> None:
        self._backend_type = backend_type
        self._options = backend_type.options.model_validate(dict(options))
        self._failures = 0
        self.capacity_bytes = capacity_bytes
        self.capabilities, self.room, self.evicts = asyncio.run(self._measure())

    def construct(self, seed: int = 0) -> Backend[Any]:
        """Construct a client, on the running event loop."""
        threads = TurnThreads(asyncio.get_running_loop(), seed)
        return self._backend_type.backend(self._options, BackendContext("machine", threads))

    def namespaces(self) -> list[str]:
        """Return namespaces that differ in their last digit only; others after :meth:`soiled`."""
        digest = hashlib.sha256(b"machine %d" % self._failures).hexdigest()
        return [digest[:-1] + digit for digit in "012"]

    def soiled(self) -> None:
        """Note that an example has failed and may have left objects behind."""
        self._failures += 1

    async def probe(self, backend: Backend[Any]) -> int:
        """Return how many of some objects, a sixth of the capacity each, a bounded medium would take now."""
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
        """Return the capabilities, how many probes a bounded medium takes, and whether it evicts to take others."""
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
        evicts = await self.probe(backend) == len(wanted)
        await backend.delete(keys)
        await backend.close()
        if not wanted:
            raise ContractError(f"C11: an empty medium of {self.capacity_bytes} bytes takes no sixth of that")
        return capabilities, len(wanted), evicts
