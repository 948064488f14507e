"""The ``cpu`` backend of offload-core: objects in host memory."""

from offload_backend_cpu.backend import CpuBackend
from offload_backend_cpu.options import CpuOptions

__all__ = ["CpuBackend", "CpuOptions"]
