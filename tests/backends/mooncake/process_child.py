"""A process for the ends of processes: ``process_child CASE MASTER OWNER_PID`` exits with 0 if all is well."""

from __future__ import annotations

import asyncio
import ctypes
import os
import signal
import sys
import threading
import time
from collections.abc import Awaitable, Callable

import numpy as np
from offload_backend_mooncake import MooncakeBackend, MooncakeOptions, objects

from offload_core.api.backend import BackendContext, LoadOutcome
from offload_core.api.keys import ObjectKey
from offload_core.runtime.threads import DaemonExecutor
from tests.backends.mooncake.raw_client import DEADLINES, RawClient

NBYTES = 256 * 1024
KEYS = [ObjectKey("ab" * 32, "full-u256", bytes([number]) * 32) for number in range(64)]
DATA = [os.urandom(NBYTES) for _ in KEYS]


def main() -> None:
    die_with_the_parent()
    case, master, owner = sys.argv[1], sys.argv[2], int(sys.argv[3])
    CASES[case](master, owner)


def die_with_the_parent() -> None:
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)


def backend_of(master: str) -> MooncakeBackend:
    return MooncakeBackend(
        MooncakeOptions.model_validate({"master": master, **DEADLINES}), BackendContext("pool", DaemonExecutor(4, "io"))
    )


async def filled(master: str) -> MooncakeBackend:
    backend = backend_of(master)
    await backend.open()
    await backend.store(KEYS, [memoryview(one) for one in DATA])
    return backend


async def load(backend: MooncakeBackend, buffers: list[bytearray]) -> list[LoadOutcome]:
    return list(await backend.load_into(KEYS, [memoryview(one) for one in buffers]))


def exit_while_loading(master: str, owner: int) -> None:
    """End the interpreter while a daemon thread loads from an owner that hangs."""
    loading = threading.Event()

    async def work() -> None:
        backend = await filled(master)
        os.kill(owner, signal.SIGSTOP)
        calls = [load(backend, [bytearray(NBYTES) for _ in KEYS]), _say_when_begun()]
        await asyncio.gather(*calls)

    async def _say_when_begun() -> None:
        await asyncio.sleep(0.5)
        loading.set()

    threading.Thread(target=lambda: asyncio.run(work()), daemon=True).start()
    assert loading.wait(60)


def close_while_loading(master: str, owner: int) -> None:
    """Close a tier and a connection while loads run."""

    async def work() -> None:
        backend = await filled(master)
        client = backend._client
        assert client is not None
        loads = [asyncio.ensure_future(load(backend, [bytearray(NBYTES) for _ in KEYS])) for _ in range(4)]
        await asyncio.sleep(0)
        closing = threading.Thread(target=client.close, args=[60])
        closing.start()
        await backend.close()
        for outcomes in await asyncio.gather(*loads, return_exceptions=True):
            assert isinstance(outcomes, OSError) or set(outcomes) == {LoadOutcome.HIT}, outcomes  # type: ignore[arg-type]
        await asyncio.to_thread(closing.join)

    asyncio.run(work())


def raw_close_while_loading(master: str, owner: int) -> None:
    """Do the same with Mooncake's own client, which crashes."""
    client = RawClient(master)
    big = np.zeros(48 * 1024**2, np.uint8)
    client.put(["big"], [big])
    threads = [threading.Thread(target=client.get, args=[["big"], [big.copy()]]) for _ in range(2)]
    for thread in threads:
        thread.start()
    time.sleep(0.005)
    client.store.close()
    for thread in threads:
        thread.join()


def fork(master: str, owner: int) -> None:
    """Use a tier after a fork: refused in the child, and the parent goes on."""

    async def refused(call: Awaitable[object], words: str) -> bool:
        try:
            await call
        except OSError as error:
            return words in str(error)
        return False

    backend = asyncio.run(filled(master))
    child = os.fork()
    if not child:
        die_with_the_parent()
        backend.context = BackendContext("pool", DaemonExecutor(1, "io"))
        ok = asyncio.run(refused(backend.contains(KEYS), "connected before a fork"))
        ok &= asyncio.run(refused(backend_of(master).open(), "was forked from one that uses Mooncake"))
        asyncio.run(backend.close())
        os._exit(0 if ok else 1)  # as multiprocessing ends a child
    assert os.waitpid(child, 0)[1] == 0, "the child failed"
    assert all(asyncio.run(_contains(backend))), "the parent's connection broke"


async def _contains(backend: MooncakeBackend) -> list[bool]:
    return list(await backend.contains(KEYS))


def give_up(master: str, owner: int) -> None:
    """Let Mooncake give up on a hung owner while transfers wait in its queue, then let the owner go on."""
    objects.OBJECTS_AT_ONCE = len(KEYS)
    os.environ["MC_TCP_LANES_PER_PEER"] = "1"

    async def work() -> None:
        backend = await filled(master)
        buffers = [bytearray(NBYTES) for _ in KEYS]
        os.kill(owner, signal.SIGSTOP)
        began = time.monotonic()
        try:
            await load(backend, buffers)
        except OSError:
            assert time.monotonic() - began > 55, "it did not give up, so this shows nothing"
        else:
            raise AssertionError("it loaded from a hung owner")
        for buffer in buffers:
            buffer[:] = b"\x5a" * NBYTES
        os.kill(owner, signal.SIGCONT)
        await asyncio.sleep(5)
        late = sum(buffer != b"\x5a" * NBYTES for buffer in buffers)
        assert not late, f"C7: {late} buffers were written after the call had failed"
        assert set(await load(backend, buffers)) == {LoadOutcome.HIT}
        assert buffers == DATA
        await backend.close()

    asyncio.run(work())


CASES: dict[str, Callable[[str, int], None]] = {
    case.__name__: case for case in (exit_while_loading, close_while_loading, raw_close_while_loading, fork, give_up)
}

if __name__ == "__main__":
    main()
