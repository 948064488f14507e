"""Store objects of random sizes on storage with a capacity, as fast as possible, until SIGTERM or the end of stdin.

python capacity_writer.py OPTIONS-AS-JSON SEED

Each object is one byte, repeated. The program also loads the stored objects, and prints ``wrong`` for an object with
other bytes. At the end it prints the numbers of objects stored, loaded and missing.
"""

from __future__ import annotations

import asyncio
import json
import random
import signal
import sys
from collections import deque

from offload_backend_nfs import NfsBackend, NfsOptions

from offload_core.api.backend import BackendContext, LoadOutcome, StoreOutcome
from offload_core.api.keys import ObjectKey
from offload_core.runtime.threads import DaemonExecutor


async def main(options: str, seed: int) -> None:
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    asyncio.get_running_loop().add_reader(sys.stdin, stop.set)  # a killed test run leaves no writer behind
    backend = NfsBackend(NfsOptions(**json.loads(options)), BackendContext("nfs", DaemonExecutor(4, "nfs")))
    await backend.open()
    generator = random.Random(seed)
    stored: deque[tuple[ObjectKey, int, int]] = deque(maxlen=200)
    counts = {"stored": 0, "loaded": 0, "missing": 0}

    async def store() -> None:
        while not stop.is_set():
            keys = [ObjectKey("ab" * 32, "full-u256", generator.randbytes(32)) for _ in range(3)]
            sizes = [generator.randrange(4096, 65536) for _ in keys]
            reservation = await backend.prepare_store(keys, sizes)
            wanted = [index for index, outcome in enumerate(reservation.outcomes) if outcome is None]
            letters = [generator.randrange(256) for _ in wanted]
            buffers = [memoryview(bytes([letter]) * sizes[i]) for i, letter in zip(wanted, letters, strict=True)]
            outcomes = await backend.store([keys[index] for index in wanted], buffers)
            await reservation.release()
            for index, letter, outcome in zip(wanted, letters, outcomes, strict=True):
                if outcome is StoreOutcome.STORED:
                    counts["stored"] += 1
                    stored.append((keys[index], sizes[index], letter))
            if not wanted:
                await asyncio.sleep(0.01)

    async def load() -> None:
        while not stop.is_set():
            await asyncio.sleep(0.001)
            if not stored:
                continue
            key, size, letter = generator.choice(stored)
            buffer = bytearray(size)
            reservation = await backend.prepare_load([key])
            outcome = LoadOutcome.MISS
            if reservation.present[0]:
                (outcome,) = await backend.load_into([key], [memoryview(buffer)])
            await reservation.release()
            if outcome is LoadOutcome.HIT and buffer == bytes([letter]) * size:
                counts["loaded"] += 1
            elif outcome is LoadOutcome.MISS:
                counts["missing"] += 1
            else:
                print("wrong", key, outcome, flush=True)

    tasks = [asyncio.ensure_future(work()) for work in (store, store, load)]
    print("storing", flush=True)
    await asyncio.gather(*tasks)
    await backend.close()
    print(json.dumps(counts), flush=True)


asyncio.run(main(sys.argv[1], int(sys.argv[2])))
