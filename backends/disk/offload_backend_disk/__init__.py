"""The ``disk`` backend of offload-core: one file per object on a local file system."""

from offload_backend_disk.backend import DiskBackend
from offload_backend_disk.options import DiskOptions

__all__ = ["DiskBackend", "DiskOptions"]
