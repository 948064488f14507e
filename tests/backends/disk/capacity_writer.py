"""Stores objects of random sizes into a folder with a limit, as fast as it can, until it is told to stop.

python capacity_writer.py FOLDER SEED
"""

from __future__ import annotations

import asyncio
import random
import signal
import sys

from offload_backend_disk import DiskBackend, DiskOptions

from offload_core.backend import BackendContext
from offload_core.keys import ObjectKey
from offload_core.runtime import DaemonExecutor


async def main(folder: str, seed: int) -> None:
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    options = DiskOptions.model_validate({"path": folder, "capacity": "1MiB"})
    backend = DiskBackend(options, BackendContext("disk", DaemonExecutor(4, "disk")))
    await backend.open()
    generator = random.Random(seed)

    async def store() -> None:
        while not stop.is_set():
            keys = [ObjectKey("ab" * 32, "full-u256", generator.randbytes(32)) for _ in range(3)]
            sizes = [generator.randrange(4096, 65536) for _ in keys]
            reservation = await backend.prepare_store(keys, sizes)
            wanted = [index for index, outcome in enumerate(reservation.outcomes) if outcome is None]
            letters = [memoryview(generator.randbytes(1) * sizes[index]) for index in wanted]
            await backend.store([keys[index] for index in wanted], letters)
            await reservation.release()

    tasks = [asyncio.ensure_future(store()) for _ in range(3)]
    print("storing", flush=True)
    await asyncio.gather(*tasks)
    await backend.close()


asyncio.run(main(sys.argv[1], int(sys.argv[2])))
