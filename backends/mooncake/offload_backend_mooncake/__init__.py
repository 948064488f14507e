"""The ``mooncake`` backend of offload-core: the memory of a Mooncake Store cluster."""

from offload_backend_mooncake.backend import MooncakeBackend
from offload_backend_mooncake.options import MooncakeOptions

__all__ = ["MooncakeBackend", "MooncakeOptions"]
