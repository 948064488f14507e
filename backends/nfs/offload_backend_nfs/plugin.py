"""The plugin that the entry point names."""

from __future__ import annotations

from offload_backend_nfs.backend import NfsBackend
from offload_backend_nfs.options import NfsOptions
from offload_core.api import BackendType, hookimpl

OFFLOAD_API_VERSION = 1

NFS = BackendType("nfs", NfsBackend, NfsOptions)


@hookimpl
def offload_register_backends() -> list[BackendType]:
    """Register the ``nfs`` type."""
    return [NFS]
