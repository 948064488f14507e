"""The module that ``lmcache server`` loads: it serves objects of offload-core from a socket of its own.

It is loaded by ``lmcache server --server-module '{"module_path": "offload_backend_lmcache.server", "config": {…}}'``.
"""

from __future__ import annotations

from typing import Any

__all__ = ["build_server_modules"]


def build_server_modules(build: Any) -> Any:
    """Return the module, listening already. LMCache calls this once, at its start.

    Raises:
        RuntimeError: this version of LMCache, or its configuration, is not supported.
        ValueError: the module's config is wrong.
        OSError: the address cannot be bound.
    """
    from offload_backend_lmcache.server.lmcache_module import LMCacheModule  # LMCache is on the server's host only

    return LMCacheModule(build)
