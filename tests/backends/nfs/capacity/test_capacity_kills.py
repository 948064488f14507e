"""Writers that are killed at random moments leave nothing behind after the next opening and its scan."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from offload_backend_nfs import NfsBackend
from offload_backend_nfs.capacity.account_state import AccountState
from offload_backend_nfs.storage import temporaries
from offload_backend_nfs.storage.base import TEMPORARY_FOLDER

from offload_core.api.backend import LoadOutcome
from tests.backends.nfs.calls import listed, run, store
from tests.backends.nfs.capacity.killed_writers import OBJECTS, size_of
from tests.backends.nfs.capacity.simulation import Host, World
from tests.backends.nfs.capacity.test_capacity import LEASE, OPTIONS, existing, joined, pass_time, put
from tests.backends.nfs.conftest import Nfs, key
from tests.support.paths import ROOT

CAPACITY = 1024 * 1024
LIMIT_SECONDS = 30


def kill_writers(options: dict[str, Any], seed: int, kills: int) -> dict[str, int]:
    """Return the counts of the writer that lived on."""
    module = "tests.backends.nfs.capacity.killed_writers"
    command = [sys.executable, "-m", module, json.dumps(options), str(seed), str(kills)]
    child = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=60 + kills)
    assert child.returncode == 0, child.stderr
    counts: dict[str, int] = json.loads(child.stdout)
    return counts


def leftovers(root: Path, state: AccountState | None, own_name: str) -> list[str]:
    """Return everything that killed writers have left behind."""
    account = root / ".offload-core"
    found = [str(path) for path in root.rglob("*") if path.name.endswith(".tmp")]
    if state is None:
        return found
    found += [f"owner {path.name}" for path in (account / "owners").iterdir() if path.name != own_name]
    found += [f"member {name}" for name in state.members if name != own_name]
    found += [f"batch {name}" for name in state.pending_evictions]
    found += [str(path) for path in (account / "condemned").glob("*")]
    found += [str(path) for path in (account / "damaged").glob("*")]
    if not state.counted or any(member.quota_bytes for member in state.members.values()):
        found.append(f"reservations: {state}")
    used = 0
    for path in root.rglob("*.kv"):
        with contextlib.suppress(FileNotFoundError):  # evicted just now
            used += path.stat().st_size
    if state.used_bytes != used:
        found.append(f"{state.used_bytes - used} bytes too many in the account")
    if len(list(account.glob("account-*"))) > 40 or len(list((account / "touches").glob("*"))) > 70:
        found.append("too many small files")
    return found


async def end_without_leftovers(backend: NfsBackend, problem: Callable[[], list[str]]) -> None:
    deadline = time.monotonic() + LIMIT_SECONDS
    while found := problem():
        assert time.monotonic() < deadline, found
        await asyncio.sleep(0.05)
    for one in await listed(backend):
        buffer = bytearray(one.nbytes)
        number = one.key.chunk_hash[0]
        assert number < OBJECTS
        assert await backend.load_into([one.key], [memoryview(buffer)]) == [LoadOutcome.HIT]
        assert buffer == bytes([number]) * size_of(number)


def check_kills(nfs: Nfs, root: Path, seed: int, kills: int, limits: dict[str, Any]) -> None:
    options = {"url": f"file://{root}", "lookup_cache_seconds": 0, **limits}
    counts = kill_writers(options, seed, kills)
    assert counts["STORED"]
    assert counts["HIT"]
    assert not counts.get("wrong")

    async def main() -> None:
        backend = nfs(**options)
        await backend.open()
        store = backend._bounded_store

        def problem() -> list[str]:
            return leftovers(root, None if store is None else store.state, "" if store is None else store.member_id)

        await end_without_leftovers(backend, problem)
        await backend.close()

    asyncio.run(main())


LIMITS = {"capacity": CAPACITY, "lease_seconds": 1, "eviction_grace": 0.3}


@pytest.mark.parametrize("limits", [{}, LIMITS], ids=["without a capacity", "with a capacity"])
def test_twenty_killed_writers_leave_nothing_behind(nfs: Nfs, memory_folder: Path, limits: dict[str, Any]) -> None:
    check_kills(nfs, memory_folder / "kv", 5, 20 if limits else 10, limits)


@pytest.mark.long
@pytest.mark.timeout(400)
@pytest.mark.parametrize("part", range(4))
def test_five_hundred_killed_writers_leave_nothing_behind(nfs: Nfs, memory_folder: Path, part: int) -> None:
    check_kills(nfs, memory_folder / "kv", 1000 * part, 125, LIMITS)


def test_the_lease_of_a_process_that_was_killed_while_it_joined_is_removed() -> None:
    world = World()
    host, killed = joined(world), Host(world, OPTIONS)
    killed.start(killed.bounded_store.open)
    while len(lease_files(world)) < 2:
        killed.advance()
    killed.kill()
    pass_time(world, [host], 2 * LEASE)
    assert lease_files(world) == [f"owners/{host.bounded_store.member_id}"]


def test_an_eviction_batch_that_its_killed_process_never_announced_is_removed() -> None:
    world = World()
    host, killed = joined(world), joined(world)
    put(host, [1])
    killed.start(lambda: killed.discard([key(1)]))
    while not (batches := [name for name in world.files if name.startswith("condemned/")]):
        killed.advance()
    killed.kill()
    assert not host.bounded_store.state.pending_evictions
    pass_time(world, [host], 6 * LEASE)
    assert batches[0] not in world.files
    assert existing(world) == [1]
    assert host.bounded_store.state.occupied_bytes == 100


def lease_files(world: World) -> list[str]:
    return [name for name in world.files if name.startswith("owners/")]


def test_a_process_id_that_is_used_again_and_a_zombie_are_dead_writers(nfs: Nfs, memory_folder: Path) -> None:
    root = memory_folder / "kv"
    host, own_pid, own_start, end = temporaries.temporary_name().split("-")
    zombie = subprocess.Popen(["true"])
    os.waitid(os.P_PID, zombie.pid, os.WEXITED | os.WNOWAIT)
    names = {
        "living": f"{host}-{own_pid}-{own_start}-{end}",
        "used again": f"{host}-{own_pid}-{int(own_start, 16) - 1:x}-{end}",
        "zombie": f"{host}-{zombie.pid:x}-{own_start}-{end}",
    }
    assert all(map(temporaries.is_temporary, names.values()))

    async def work(backend: NfsBackend) -> None:
        await store(backend, (0, b"zero"))
        for name in names.values():
            (root / TEMPORARY_FOLDER / name).write_bytes(b"x")
        await asyncio.to_thread(backend.medium.remove_leftovers, lambda: False)

    run(nfs(url=f"file://{root}"), work)
    zombie.wait()
    assert [path.name for path in (root / TEMPORARY_FOLDER).iterdir()] == [names["living"]]
