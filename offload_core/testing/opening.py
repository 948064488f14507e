"""An opener for one backend, as the core opens it, for tests and scripts of plugin authors."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any

from offload_core.api import Backend, BackendContext, BackendType
from offload_core.runtime.threads import DaemonExecutor, executors_of_tier


@asynccontextmanager
async def open_backend(
    backend_type: BackendType,
    options: Mapping[str, Any] | None = None,
    *,
    name: str = "test",
    threads: int = 4,
    wrap: Callable[[Backend[Any]], Backend[Any]] = lambda backend: backend,
) -> AsyncIterator[Backend[Any]]:
    """Construct a backend with its own threads, open it, and close it at the end of the block.

    ::

        async with open_backend(SQLITE, {"path": "kv.db"}) as backend:
            await backend.contains([key])

    Args:
        backend_type: the type that the plugin registers.
        options: the tier's own keys as an operator writes them, without ``name`` and ``type``.
        name: the tier's name.
        threads: the number of threads for blocking calls, as ``io_threads`` sets it.
        wrap: a function that puts another backend around the new one, for example a ``FaultyBackend``.

    Raises:
        pydantic.ValidationError: the options are wrong.
    """
    executors = executors_of_tier(name, lambda begin: DaemonExecutor(threads, begin))
    context = BackendContext(name, executors[0], threads, load_executor=executors[1], lookup_executor=executors[2])
    backend = wrap(backend_type.backend(backend_type.options.model_validate(dict(options or {})), context))
    try:
        await backend.open()
        try:
            yield backend
        finally:
            await backend.close()
    finally:
        for executor in executors:
            executor.shutdown()
