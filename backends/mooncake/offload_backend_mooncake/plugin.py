"""The plugin that the entry point names."""

from __future__ import annotations

from offload_backend_mooncake.backend import MooncakeBackend
from offload_backend_mooncake.options import MooncakeOptions
from offload_core.api import BackendType, Requirement, hookimpl

OFFLOAD_API_VERSION = 1

MOONCAKE = BackendType(
    "mooncake",
    MooncakeBackend,
    MooncakeOptions,
    requires=(Requirement("mooncake", "pip install 'offload-core[mooncake]'"),),
)


@hookimpl
def offload_register_backends() -> list[BackendType]:
    """Register the ``mooncake`` type."""
    return [MOONCAKE]
