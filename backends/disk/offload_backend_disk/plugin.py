"""The plugin module that the entry point names."""

from __future__ import annotations

from offload_backend_disk.backend import DiskBackend
from offload_backend_disk.options import DiskOptions
from offload_core.api import BackendType, hookimpl

OFFLOAD_API_VERSION = 1

DISK = BackendType("disk", DiskBackend, DiskOptions)


@hookimpl
def offload_register_backends() -> list[BackendType]:
    """Register the ``disk`` type."""
    return [DISK]
