"""A process that pins an object, reserves capacity, and then forks a child that does nothing with the folder.

python forking_owner.py FOLDER: the child prints its process id and ends when its stdin ends; the parent sleeps.
"""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path

from offload_backend_disk import DiskBackend, DiskOptions

from offload_core.api.backend import BackendContext
from offload_core.runtime.threads import DaemonExecutor
from tests.backends.disk.conftest import key


async def main(folder: str) -> None:
    options = DiskOptions(path=Path(folder), capacity=100 * 1024)
    backend = DiskBackend(options, BackendContext("disk", DaemonExecutor(2, "disk")))
    await backend.open()
    await backend.store([key(0)], [memoryview(bytes(40 * 1024))])
    held = await backend.prepare_load([key(0)])
    reserved = await backend.prepare_store([key(1)], [50 * 1024])
    assert held.present == (True,)
    assert list(reserved.outcomes) == [None]
    if not os.fork():
        print(os.getpid(), flush=True)  # by the child, which has closed the control files by now
        sys.stdin.read()
        os._exit(0)
    await asyncio.sleep(600)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
