"""The ``lmcache`` backend of offload-core: objects in an LMCache server, and through it in any L2 of LMCache."""

from offload_backend_lmcache.backend import LMCacheBackend
from offload_backend_lmcache.options import LMCacheOptions

__all__ = ["LMCacheBackend", "LMCacheOptions"]
