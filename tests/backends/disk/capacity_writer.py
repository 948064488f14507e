"""Writers that fill a folder at full speed. They die often, so one process imports everything once and forks them.

python capacity_writer.py FOLDER OPTIONS_AS_JSON, then a line per request on stdin:

``start SEED``: fork a writer. It prints ``storing PID`` after its first stored object.
``kill PID``: kill it with SIGKILL at once, and print ``ended PID STATUS``.
``stop PID``: stop it with SIGTERM, and print the same.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import sys
import traceback

from offload_backend_disk import DiskBackend, DiskOptions

from offload_core.api.backend import BackendContext
from offload_core.api.keys import ObjectKey
from offload_core.cli.probes import sealed
from offload_core.runtime.threads import DaemonExecutor

NAMESPACE = "ab" * 32
PACK = "full-u256"
SIZES = range(2_000, 40_000)


async def write(options: DiskOptions, seed: int) -> None:
    """Store sealed objects of random sizes, in three batches at once, until SIGTERM arrives."""
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    backend = DiskBackend(options, BackendContext("disk", DaemonExecutor(4, "disk")))
    await backend.open()
    generator = random.Random(seed)
    said = False

    async def store() -> None:
        nonlocal said
        while not stop.is_set():
            keys = [ObjectKey(NAMESPACE, PACK, generator.randbytes(32)) for _ in range(3)]
            objects = [sealed(key, generator.randbytes(1) * generator.choice(SIZES)) for key in keys]
            reservation = await backend.prepare_store(keys, [len(one) for one in objects])
            wanted = [index for index, outcome in enumerate(reservation.outcomes) if outcome is None]
            await backend.store([keys[index] for index in wanted], [objects[index] for index in wanted])
            await reservation.release()
            if wanted and not said:
                said = True
                say(f"storing {os.getpid()}")

    await asyncio.gather(*(store() for _ in range(3)))
    await backend.close()


def say(words: str) -> None:
    os.write(1, f"{words}\n".encode())


def main(folder: str, options: str) -> None:
    checked = DiskOptions.model_validate({"path": folder, **json.loads(options)})
    signals = {"kill": signal.SIGKILL, "stop": signal.SIGTERM}
    for line in sys.stdin:
        request, number = line.split()
        if request == "start":
            if not os.fork():
                status = 1
                try:
                    asyncio.run(write(checked, int(number)))
                    status = 0
                except BaseException:
                    traceback.print_exc()
                finally:
                    os._exit(status)
        else:
            os.kill(int(number), signals[request])
            _, status = os.waitpid(int(number), 0)
            say(f"ended {number} {os.waitstatus_to_exitcode(status)}")


if __name__ == "__main__":
    main(*sys.argv[1:])
