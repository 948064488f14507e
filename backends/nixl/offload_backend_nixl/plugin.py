"""The plugin that the entry point names."""

from __future__ import annotations

from offload_backend_nixl.backend import NixlBackend
from offload_backend_nixl.options import NixlOptions
from offload_core.api import BackendType, Requirement, hookimpl

OFFLOAD_API_VERSION = 1

NIXL = BackendType("nixl", NixlBackend, NixlOptions, (Requirement("nixl_cu12", "pip install 'offload-core[nixl]'"),))


@hookimpl
def offload_register_backends() -> list[BackendType]:
    """Register the ``nixl`` type."""
    return [NIXL]
