"""What users can set of the ``cpu`` type."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from offload_backend_cpu.arena import PAGE_BYTES
from offload_core.api import BackendOptions, Bytes


class CpuOptions(BackendOptions):
    """Options of the ``cpu`` type."""

    capacity: Bytes = Field(ge=PAGE_BYTES, description="host memory for objects, of each worker process")
    eviction: Literal["lru", "slru"] = Field(
        "lru",
        description="what makes room: lru, what was used longest ago; slru, the same, but what was never used again "
        "since it was stored goes first",
    )
    pin: Literal["auto", "on", "off"] = Field(
        "auto",
        description="whether the memory is page-locked by CUDA, all of it from the start on: auto, where the worker "
        "uses a GPU; on, else the engine does not start",
    )
    prefault: bool = Field(
        False,
        description="take the whole capacity from the system soon after the start, in the background; by default it "
        "is taken as it is filled, and then the first stores are slower",
    )
