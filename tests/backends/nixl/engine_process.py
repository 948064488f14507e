"""An engine's process with a nixl tier: it prints its child's process, and waits to be killed."""

from __future__ import annotations

import asyncio
import sys

from offload_backend_nixl.backend import NixlBackend
from offload_backend_nixl.options import NixlOptions

from offload_core.api.backend import BackendContext
from offload_core.runtime.threads import DaemonExecutor


async def main() -> None:
    options = NixlOptions.model_validate({"plugin": "POSIX", "path": sys.argv[1], "ring": "1MiB"})
    backend = NixlBackend(options, BackendContext("fabric", DaemonExecutor(1, "nixl")))
    await backend.open()
    print(backend.child_pid, flush=True)
    await asyncio.sleep(1000)


if __name__ == "__main__":
    asyncio.run(main())
