"""The plugin module that the entry point names."""

from __future__ import annotations

from offload_backend_cpu.backend import CpuBackend
from offload_backend_cpu.options import CpuOptions
from offload_core.api import BackendType, hookimpl

OFFLOAD_API_VERSION = 1

CPU = BackendType("cpu", CpuBackend, CpuOptions)


@hookimpl
def offload_register_backends() -> list[BackendType]:
    """Register the ``cpu`` type."""
    return [CPU]
