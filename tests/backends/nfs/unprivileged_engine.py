"""Use storage as a user without privileges, with objects, folders and a root that this user may not read.

python -m tests.backends.nfs.unprivileged_engine ROOT OPTIONS-AS-JSON
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from pathlib import Path

from offload_backend_nfs import NfsBackend, NfsOptions

from offload_core.api.backend import BackendContext
from offload_core.runtime.threads import DaemonExecutor
from tests.backends.nfs.conftest import key

NOBODY = 65534
SIZE = 5000


def path_of(root: Path, number: int) -> Path:
    """Return the path of the object with ``key(number)``."""
    name = key(number)
    digest = name.chunk_hash.hex()
    return root / name.namespace / name.pack / digest[:2] / f"{digest}.kv"


def content(number: int) -> memoryview:
    return memoryview(bytes([number]) * SIZE)


async def main(root: Path, options: str) -> None:
    backend = NfsBackend(NfsOptions(**json.loads(options)), BackendContext("nfs", DaemonExecutor(2, "nfs")))
    await backend.open()
    keys = [key(number) for number in range(7)]
    print([outcome.name for outcome in await backend.store(keys[:4], [content(number) for number in range(4)])])
    path_of(root, 0).chmod(0)
    path_of(root, 1).parent.chmod(0)
    buffers = [memoryview(bytearray(SIZE)) for _ in range(4)]
    print([outcome.name for outcome in await backend.load_into(keys[:4], buffers)])
    assert buffers[2:] == [content(2), content(3)]
    print(list(await backend.contains(keys[1:4])))
    print(sorted([found.key.chunk_hash[0] async for batch in backend.list_objects() for found in batch]))
    print([outcome.name for outcome in await backend.store([keys[1], keys[5]], [content(1), content(5)])])
    os.chmod(root, 0)  # noqa: PTH101
    for call in (backend.store([keys[6]], [content(6)]), backend.load_into([keys[3]], buffers[:1])):
        try:
            print([outcome.name for outcome in await call])
        except PermissionError:
            print("PermissionError")
    os.chmod(root, 0o700)  # noqa: PTH101
    await backend.close()


if __name__ == "__main__":
    os.setresgid(NOBODY, NOBODY, NOBODY)
    os.setresuid(NOBODY, NOBODY, NOBODY)
    asyncio.run(main(Path(sys.argv[1]), sys.argv[2]))
