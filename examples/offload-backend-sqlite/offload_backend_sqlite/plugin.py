"""The plugin module that the entry point in pyproject.toml names."""

from __future__ import annotations

from offload_backend_sqlite.backend import SqliteBackend
from offload_backend_sqlite.options import SqliteOptions
from offload_core.api import BackendType, hookimpl

OFFLOAD_API_VERSION = 1

SQLITE = BackendType("sqlite", SqliteBackend, SqliteOptions)


@hookimpl
def offload_register_backends() -> list[BackendType]:
    """Register the ``sqlite`` type."""
    return [SQLITE]
