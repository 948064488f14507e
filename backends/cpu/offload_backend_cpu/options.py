"""The options of the ``cpu`` type."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from offload_backend_cpu.arena import PAGE_BYTES
from offload_core.api import BackendOptions, Bytes


class CpuOptions(BackendOptions):
    """Options of the ``cpu`` type."""

    capacity: Bytes = Field(
        ge=PAGE_BYTES, description="host memory for objects: of the I/O process, or of each worker without one"
    )
    eviction: Literal["lru", "slru"] = Field(
        "lru",
        description="order of eviction: lru, the least recently used object first; slru, objects that were never used "
        "since their store first, then the least recently used ones",
    )
    pin: Annotated[
        Literal["auto", "on", "off"],
        Field(
            description="page-lock the whole memory by CUDA from the start on, if the worker uses a GPU: auto; on, and "
            "without an I/O process the engine does not start if that fails; off"
        ),
    ] = "auto"
    prefault: bool = Field(
        False,
        description="take the whole capacity from the system soon after the start, in the background; by default the "
        "system gives memory as it is filled, and the first stores are slower",
    )
