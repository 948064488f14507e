"""The plugin that the entry point names."""

from __future__ import annotations

from offload_backend_lmcache.backend import LMCacheBackend
from offload_backend_lmcache.options import LMCacheOptions
from offload_core.api import BackendType, hookimpl

OFFLOAD_API_VERSION = 1

LMCACHE = BackendType("lmcache", LMCacheBackend, LMCacheOptions)


@hookimpl
def offload_register_backends() -> list[BackendType]:
    """Register the ``lmcache`` type."""
    return [LMCACHE]
