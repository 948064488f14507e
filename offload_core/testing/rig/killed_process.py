"""A process that holds reservations of a backend and is killed."""

from __future__ import annotations

import asyncio
import multiprocessing
import time
from collections.abc import Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any

from offload_core.api.backend import Backend, BackendType, StoreOutcome
from offload_core.api.keys import ObjectKey
from offload_core.testing.opening import open_backend

START_SECONDS = 60.0


@dataclass
class Errand:
    """More work for the client that dies, from the running test of the contract, and its answers.

    Args:
        objects: objects to store before the reservations.
        present: the presence of each key, as ``prepare_load`` says; ``None`` if the author's hook knows no errands.
        outcomes: the outcomes of ``objects``.
    """

    objects: Mapping[ObjectKey, bytes] = field(default_factory=dict)
    present: Sequence[bool] | None = None
    outcomes: Sequence[StoreOutcome | None] = ()


current_errand: ContextVar[Errand | None] = ContextVar("current_errand", default=None)
"""The errand of the running hook ``die_holding``. The hook's signature is public, and has no place for it."""


async def hold(
    backend: Backend[Any], keys: Sequence[ObjectKey], nbytes: Sequence[int], errand: Errand
) -> tuple[Errand, list[object]]:
    """Do an errand, then reserve ``keys`` for loads and for stores.

    Returns:
        the errand with its answers, and the reservations that are held.
    """
    objects = list(errand.objects)
    stores = await backend.prepare_store(objects, [len(content) for content in errand.objects.values()])
    outcomes = list(stores.outcomes)
    wanted = [key for key, outcome in zip(objects, outcomes, strict=True) if outcome is None]
    stored = await backend.store(wanted, [memoryview(errand.objects[key]) for key in wanted])
    await stores.release()
    answers = dict(zip(wanted, stored, strict=True))
    outcomes = [answers.get(key, outcome) for key, outcome in zip(objects, outcomes, strict=True)]
    loads = await backend.prepare_load(keys)
    held = [loads, await backend.prepare_store(keys, nbytes)]
    return Errand(errand.objects, [bool(there) for there in loads.present], outcomes), held


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
    errand = current_errand.get() or Errand()
    arguments = (backend_type, dict(options), list(keys), list(nbytes), Errand(dict(errand.objects)), theirs)
    process = spawn.Process(target=_hold, args=arguments)
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
    if isinstance(answer, Errand):
        errand.present, errand.outcomes = answer.present, answer.outcomes
    else:
        raise RuntimeError(f"the process that should hold reservations of {backend_type.name!r} failed: {answer}")


def _hold(
    backend_type: BackendType,
    options: dict[str, Any],
    keys: list[ObjectKey],
    nbytes: list[int],
    errand: Errand,
    answers: Connection,
) -> None:
    async def main() -> None:
        async with open_backend(backend_type, options) as backend:
            answer, held = await hold(backend, keys, nbytes, errand)
            answers.send(answer)
            while held:
                time.sleep(1)  # noqa: ASYNC251 - nothing may go on until the process is killed

    try:
        asyncio.run(main())
    except Exception as error:
        answers.send(f"{type(error).__name__}: {error}")
