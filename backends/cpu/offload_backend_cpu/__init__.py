"""The ``cpu`` backend of offload-core: objects in host memory."""

from offload_backend_cpu.backend import CpuBackend, CpuOptions

__all__ = ["CpuBackend", "CpuOptions"]
