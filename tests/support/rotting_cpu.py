"""A backend in host memory in which each object has a wrong byte once it has been stored for the first time."""

from __future__ import annotations

from collections.abc import Sequence

from offload_backend_cpu import CpuBackend, CpuOptions

from offload_core.api.backend import BackendType, StoreOutcome
from offload_core.api.hooks import hookimpl
from offload_core.api.keys import ObjectKey

OFFLOAD_API_VERSION = 1


class RottingCpu(CpuBackend):
    """Changes the last byte of every second object, and a byte in the header of the others."""

    @property
    def lends(self) -> bool:
        return self.capabilities.lends  # although it overrides store

    async def store(self, keys: Sequence[ObjectKey], buffers: Sequence[memoryview]) -> Sequence[StoreOutcome]:
        outcomes = await super().store(keys, buffers)
        rotten: set[ObjectKey] = self.__dict__.setdefault("rotten", set())
        for key, outcome in zip(keys, outcomes, strict=True):
            if outcome is StoreOutcome.STORED and key not in rotten:
                held = self._objects[key]
                content = self._memory.lent(held.runs, held.nbytes)
                assert content is not None, "an object in several pieces is not lent"
                content[-1 if len(rotten) % 2 else 100] ^= 0x40
                rotten.add(key)
        return outcomes


@hookimpl
def offload_register_backends() -> list[BackendType]:
    return [BackendType("rotting-cpu", RottingCpu, CpuOptions)]
