"""The ``sqlite`` backend of offload-core: all objects in one SQLite database file."""

from offload_backend_sqlite.backend import SqliteBackend
from offload_backend_sqlite.options import SqliteOptions

__all__ = ["SqliteBackend", "SqliteOptions"]
