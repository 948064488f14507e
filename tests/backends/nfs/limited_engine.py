"""Store an object beyond the largest file of this process, and a small one beside it.

python -m tests.backends.nfs.limited_engine URL
"""

from __future__ import annotations

import resource
import sys

from offload_backend_nfs import NfsBackend, NfsOptions

from offload_core.api.backend import BackendContext, LoadOutcome, StoreOutcome
from offload_core.runtime.threads import DaemonExecutor
from tests.backends.nfs.calls import load, run, store

LARGEST_FILE_BYTES = 50_000


async def work(backend: NfsBackend) -> None:
    outcomes = await store(backend, (0, bytes(2 * LARGEST_FILE_BYTES)), (1, b"small"))
    assert outcomes == [StoreOutcome.REJECTED, StoreOutcome.STORED]
    assert await load(backend, 1, 5) == (LoadOutcome.HIT, b"small")


if __name__ == "__main__":
    _, hard_limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (LARGEST_FILE_BYTES, hard_limit))
    run(
        NfsBackend(NfsOptions.model_validate({"url": sys.argv[1]}), BackendContext("nfs", DaemonExecutor(2, "nfs"))),
        work,
    )
