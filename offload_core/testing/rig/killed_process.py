"""A process that holds reservations of a backend and is killed."""

from __future__ import annotations

import asyncio
import multiprocessing
import time
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection
from typing import Any

from offload_core.api.backend import BackendType
from offload_core.api.keys import ObjectKey
from offload_core.testing.opening import open_backend

START_SECONDS = 60.0


def hold_in_killed_process(
    backend_type: BackendType, options: Mapping[str, Any], keys: Sequence[ObjectKey], nbytes: Sequence[int]
) -> None:
    """Hold reservations in another process, and end that process by SIGKILL.

    The process calls ``prepare_load(keys)`` and ``prepare_store(keys, nbytes)``, and releases neither.

    Args:
        backend_type: the type under test; its classes are importable.
        options: the tier's own keys; they name a medium that processes share.
        keys: the keys to reserve.
        nbytes: the size of each object.

    Raises:
        RuntimeError: the process failed, or did not hold its reservations in time.
    """
    spawn = multiprocessing.get_context("spawn")
    ours, theirs = spawn.Pipe()
    process = spawn.Process(target=_hold, args=(backend_type, dict(options), list(keys), list(nbytes), theirs))
    process.start()
    theirs.close()
    try:
        answer = ours.recv() if ours.poll(START_SECONDS) else f"it did not answer in {START_SECONDS:g} s"
    except EOFError:
        answer = "it ended early"
    finally:
        process.kill()
        process.join()
        ours.close()
    if answer is not None:
        raise RuntimeError(f"the process that should hold reservations of {backend_type.name!r} failed: {answer}")


def _hold(
    backend_type: BackendType,
    options: dict[str, Any],
    keys: list[ObjectKey],
    nbytes: list[int],
    answers: Connection,
) -> None:
    async def main() -> None:
        async with open_backend(backend_type, options) as backend:
            held = [await backend.prepare_load(keys), await backend.prepare_store(keys, nbytes)]
            answers.send(None)
            while held:
                time.sleep(1)  # noqa: ASYNC251 - nothing may go on until the process is killed

    try:
        asyncio.run(main())
    except Exception as error:
        answers.send(f"{type(error).__name__}: {error}")
