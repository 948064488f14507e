"""Kill a storing process many times at random moments, beside one that lives on.

python -m tests.backends.nfs.capacity.killed_writers OPTIONS-AS-JSON SEED KILLS

A process that stores is a fork of this one, which has imported everything already. At the end the neighbour closes, and
this program prints the number of its loads and stores, and of its wrong bytes.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import sys
import time
from collections import Counter

from offload_backend_nfs import NfsBackend, NfsOptions

from offload_core.api.backend import BackendContext, LoadOutcome
from offload_core.runtime.threads import DaemonExecutor
from tests.backends.nfs.conftest import key

OBJECTS = 200


def size_of(number: int) -> int:
    return 4096 + number % 7 * 5000


async def write(options: str, seed: int, stop: asyncio.Event) -> Counter[str]:
    """Store, load and delete objects until ``stop``, and until a store and a load have succeeded.

    The room that killed writers have reserved comes back only when their leases end.
    """
    generator = random.Random(seed)
    counts: Counter[str] = Counter()
    backend = NfsBackend(NfsOptions(**json.loads(options)), BackendContext("nfs", DaemonExecutor(4, "nfs")))
    await backend.open()

    async def work() -> None:
        while not (stop.is_set() and counts["STORED"] and counts["HIT"]):
            number = generator.randrange(OBJECTS)
            content = bytes([number % 256]) * size_of(number)
            choice = generator.random()
            if choice < 0.7:
                reservation = await backend.prepare_store([key(number)], [len(content)])
                if reservation.outcomes == (None,):
                    (outcome,) = await backend.store([key(number)], [memoryview(content)])
                    counts[outcome.name] += 1
                await reservation.release()
            elif choice < 0.95:
                buffer = bytearray(len(content))
                (loaded,) = await backend.load_into([key(number)], [memoryview(buffer)])
                counts["wrong"] += loaded is LoadOutcome.CORRUPT or (loaded is LoadOutcome.HIT and buffer != content)
                counts[loaded.name] += 1
            else:
                await backend.delete([key(number)])
            await asyncio.sleep(0)

    await asyncio.gather(*(work() for _ in range(4)))
    await backend.close()
    return counts


async def write_until_terminated(options: str, seed: int) -> Counter[str]:
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    return await write(options, seed, stop)


def fork(options: str, seed: int) -> int:
    """Return the process id of a new writer. Terminated, it prints its counts."""
    child = os.fork()
    if child:
        return child
    status = 1
    try:
        print(json.dumps(asyncio.run(write_until_terminated(options, seed))), flush=True)
        status = 0
    finally:
        os._exit(status)


def main(options: str, seed: int, kills: int) -> int:
    generator = random.Random(seed)
    neighbour = fork(options, seed)
    for number in range(kills):
        victim = fork(options, seed + 1 + number)
        time.sleep(generator.uniform(0.005, 0.25))
        os.kill(victim, signal.SIGKILL)
        _, status = os.waitpid(victim, 0)
        if not os.WIFSIGNALED(status):
            print(f"writer {number} has ended by itself", file=sys.stderr)
            return 1
    os.kill(neighbour, signal.SIGTERM)
    _, status = os.waitpid(neighbour, 0)
    return os.waitstatus_to_exitcode(status)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3])))
