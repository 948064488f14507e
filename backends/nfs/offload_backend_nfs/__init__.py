"""The ``nfs`` backend of offload-core: storage that many engines on many hosts share, by an fsspec URL."""

from offload_backend_nfs.backend import NfsBackend
from offload_backend_nfs.options import NfsOptions

__all__ = ["NfsBackend", "NfsOptions"]
