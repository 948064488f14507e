"""The child process: it is killed, stopped and replaced, its calls fail in time, and nothing outlives its parent."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import os
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from offload_backend_nixl.backend import NixlBackend
from offload_backend_nixl.naming import name_of

from offload_core.api import LoadOutcome, ObjectKey, StoreOutcome
from tests.backends.nixl.conftest import Nixl, key
from tests.support.paths import ROOT
from tests.support.polling import wait_until
from tests.support.process_state import is_running

SIZE = 200_000
LIST_DESCRIPTORS = """
import os
for descriptor in os.listdir("/proc/self/fd"):
    try:
        print(os.readlink(f"/proc/self/fd/{descriptor}"))
    except OSError:
        pass
"""


def content(number: int) -> bytes:
    return bytes([number % 251 + 1]) * SIZE


async def store(backend: NixlBackend, *numbers: int) -> None:
    buffers = [memoryview(content(number)).toreadonly() for number in numbers]
    outcomes = await backend.store([key(number) for number in numbers], buffers)
    assert set(outcomes) == {StoreOutcome.STORED}, f"stored {outcomes}"


async def load(backend: NixlBackend, *numbers: int) -> list[LoadOutcome]:
    """Load objects, and check every byte of a hit."""
    buffers = [bytearray(b"\xa5" * SIZE) for _ in numbers]
    outcomes = await backend.load_into([key(number) for number in numbers], [memoryview(buffer) for buffer in buffers])
    for number, outcome, buffer in zip(numbers, outcomes, buffers, strict=True):
        wanted = content(number) if outcome is LoadOutcome.HIT else b"\xa5" * SIZE
        assert buffer == wanted, f"{outcome.name} of object {number} left other bytes in its buffer"
    return list(outcomes)


def maps_of(pid: int) -> str:
    return Path(f"/proc/{pid}/maps").read_text()


def environment_of(pid: int) -> bytes:
    return Path(f"/proc/{pid}/environ").read_bytes()


def names_in(folder: Path) -> list[str]:
    return [path.name for path in folder.iterdir()]


def unmount(folder: Path) -> None:
    """Put an empty folder in its place, as an unmounted file system leaves it."""
    folder.rename(folder.with_name("away"))
    folder.mkdir()


def mount_again(folder: Path) -> None:
    folder.rmdir()
    folder.with_name("away").rename(folder)


def pid_of(backend: NixlBackend) -> int:
    pid = backend.child_pid
    assert pid is not None, "no child lives"
    return pid


def test_a_child_that_was_killed_is_replaced(
    nixl: Nixl, folder_options: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    async def run() -> None:
        backend = nixl(**folder_options)
        await backend.open()
        await store(backend, 1)
        pid = pid_of(backend)
        os.kill(pid, signal.SIGKILL)
        wait_until(lambda: backend.child_pid is None, "the end of the child is not noticed")
        assert await load(backend, 1, 2) == [LoadOutcome.HIT, LoadOutcome.MISS]
        assert pid_of(backend) != pid
        await backend.close()

    with caplog.at_level(logging.WARNING):
        asyncio.run(run())
    messages = [record.getMessage() for record in caplog.records if "nixl" in record.name]
    assert messages == ["tier 'fabric': the NIXL process ended: it was killed by signal 9; another is started"]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_to_the_group_does_not_end_the_child(
    nixl: Nixl, folder_options: dict[str, Any], number: signal.Signals
) -> None:
    async def run() -> None:
        backend = nixl(**folder_options)
        await backend.open()
        await store(backend, 1)
        pid = pid_of(backend)
        os.kill(pid, number)
        assert await load(backend, 1) == [LoadOutcome.HIT]
        assert pid_of(backend) == pid
        await backend.close()
        wait_until(lambda: not is_running(pid), "the closed tier has not ended its child")

    asyncio.run(run())


@pytest.mark.parametrize(
    "operation",
    ["load", "store", *(pytest.param(name, marks=pytest.mark.long) for name in ("contains", "delete", "list"))],
)
@pytest.mark.parametrize("end", ["killed", "stopped for ever"])
def test_operations_of_a_stopped_child_fail_in_time(
    nixl: Nixl, folder_options: dict[str, Any], operation: str, end: str
) -> None:
    async def listed(backend: NixlBackend) -> list[ObjectKey]:
        return [found.key async for batch in backend.list_objects() for found in batch]

    async def run() -> None:
        backend = nixl(**folder_options)
        await backend.open()
        await store(backend, 1)
        pid, child = pid_of(backend), backend._supervisor.child()
        child._deadline_seconds = 1.0  # of this child alone: the option is also the deadline of a child's start
        os.kill(pid, signal.SIGSTOP)
        calls: dict[str, Any] = {
            "load": lambda: load(backend, 1),
            "store": lambda: store(backend, *range(40)),  # more than are in progress at once
            "contains": lambda: backend.contains([key(1)]),
            "delete": lambda: backend.delete([key(2)]),
            "list": lambda: listed(backend),
        }
        call = asyncio.ensure_future(calls[operation]())
        if end == "killed":
            await asyncio.to_thread(wait_until, lambda: bool(child._tickets), "nothing is asked for")
            os.kill(pid, signal.SIGKILL)
        began = time.monotonic()
        reason = "killed by signal 9" if end == "killed" else "did not answer for 1 s"
        with pytest.raises(OSError, match=reason):
            await call
        assert time.monotonic() - began < 6, "the call passed its deadline by far"
        wait_until(lambda: not is_running(pid), "the child does not end")
        assert await load(backend, 1) == [LoadOutcome.HIT], "the next child serves again"
        assert await listed(backend) == [key(1)], "no half object was left"
        await backend.close()

    asyncio.run(run())


def test_loads_and_stores_under_repeated_kills_are_right_or_fail(nixl: Nixl, folder_options: dict[str, Any]) -> None:
    rounds = 5

    async def run() -> None:
        backend = nixl(**folder_options)
        await backend.open()
        await store(backend, *range(20))
        done = asyncio.Event()
        hits = failures = 0

        async def use(first: int) -> None:
            nonlocal hits, failures
            number = first
            while not done.is_set():
                number = (number + 7) % 40
                try:
                    await store(backend, number)
                    hits += (await load(backend, number, number + 1)).count(LoadOutcome.HIT)
                except OSError:
                    failures += 1
                    await asyncio.sleep(0.01)  # do not spin in the pause before the next child

        users = [asyncio.ensure_future(use(first)) for first in range(3)]
        for _ in range(rounds):
            seen = hits
            while hits <= seen + 10 and not any(user.done() for user in users):  # noqa: ASYNC110 - no event
                await asyncio.sleep(0.001)
            pid = backend.child_pid
            if pid is not None:
                os.kill(pid, signal.SIGKILL)
        done.set()
        await asyncio.gather(*users)
        assert hits > 10 * rounds, f"{hits} hits and {failures} failures"
        await backend.close()

    asyncio.run(run())


def test_replaced_children_leave_nothing_in_the_parent(nixl: Nixl, folder_options: dict[str, Any]) -> None:
    def held() -> Counter[str]:
        """The mappings, and the descriptors by kind, but for those that native clients of earlier tests still open."""
        gc.collect()
        kinds = Counter({"mappings": Path("/proc/self/maps").read_text().count("offload-nixl")})
        for entry in Path("/proc/self/fd").iterdir():
            with contextlib.suppress(OSError):  # it was closed meanwhile
                kind = entry.readlink().as_posix().partition(":[")[0]
                if kind == "socket":
                    with socket.socket(fileno=os.dup(int(entry.name))) as copy:
                        kind = copy.family.name
                kinds[kind] += 1
        for kind in ("AF_INET", "AF_INET6", "anon_inode"):
            kinds.pop(kind, None)
        return kinds

    async def run() -> None:
        backend = nixl(**folder_options)
        await backend.open()
        await store(backend, 1)
        before = held()
        assert before["mappings"] == 1, "the shared memory is mapped once"
        for _ in range(4):
            os.kill(pid_of(backend), signal.SIGKILL)
            wait_until(lambda: backend.child_pid is None, "the end of the child is not noticed")
            assert await load(backend, 1) == [LoadOutcome.HIT]
        await asyncio.to_thread(wait_until, lambda: held() <= before, f"more is held than {before}")
        await backend.close()

    asyncio.run(run())


@pytest.mark.parametrize("child", ["runs", "is stopped"])
def test_a_child_dies_with_its_parent(tmp_path: Path, child: str) -> None:
    command = [sys.executable, "-m", "tests.backends.nixl.engine_process", str(tmp_path / "objects")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, cwd=ROOT) as engine:
        assert engine.stdout is not None
        pid = int(engine.stdout.readline())
        if child == "is stopped":
            os.kill(pid, signal.SIGSTOP)
        engine.kill()
    wait_until(lambda: not is_running(pid), "the child does not end")


def test_processes_of_the_engine_inherit_nothing(nixl: Nixl, folder_options: dict[str, Any]) -> None:
    async def descriptors() -> set[str]:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-c", LIST_DESCRIPTORS, stdout=asyncio.subprocess.PIPE, close_fds=False
        )
        output, _ = await process.communicate()
        return set(output.decode().split("\n"))

    async def run() -> tuple[set[str], set[str]]:
        before = await descriptors()
        backend = nixl(**folder_options)
        await backend.open()
        seen = await descriptors()
        await backend.close()
        return before, seen

    before, seen = asyncio.run(run())
    assert any("pipe:" in one for one in seen), f"the process listed its descriptors: {seen}"
    inherited = {one for one in seen - before if "offload-nixl" in one or "socket" in one}
    assert not inherited, "other tests' engines may leave sockets, but these came with the backend"


def test_the_child_gets_no_secrets_of_other_tiers(
    nixl: Nixl, folder_options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OFFLOAD_CORE_OTHER_SECRET_KEY", "hunter2")
    monkeypatch.setenv("AWS_REGION", "eu-central-1")

    async def run() -> bytes:
        backend = nixl(**folder_options)
        await backend.open()
        environment = environment_of(pid_of(backend))
        await backend.close()
        return environment

    environment = asyncio.run(run())
    assert b"OFFLOAD_CORE_" not in environment
    assert b"AWS_REGION=eu-central-1" in environment


def test_the_child_imports_neither_torch_nor_pydantic(nixl: Nixl, folder_options: dict[str, Any]) -> None:
    async def run() -> str:
        backend = nixl(**folder_options)
        await backend.open()
        maps = maps_of(pid_of(backend))
        await backend.close()
        return maps

    maps = asyncio.run(run())
    assert "nixl" in maps
    for heavy in ("libtorch", "pydantic"):
        assert heavy not in maps, f"{heavy} is in the child: it starts late and large"


def test_files_of_a_killed_child_are_removed_by_the_next(nixl: Nixl, folder_options: dict[str, Any]) -> None:
    async def run() -> None:
        backend = nixl(**folder_options)
        await backend.open()
        await store(backend, 1)
        folder = Path(folder_options["path"], ".tmp-offload-core-nixl")
        writer = backend._supervisor._settings["writer"]
        (folder / f"{writer}-1-1").write_bytes(b"half")
        (folder / "another-1-1").write_bytes(b"half")
        (folder / "old-1-1").write_bytes(b"half")
        os.utime(folder / "old-1-1", (1, 1))
        os.kill(pid_of(backend), signal.SIGKILL)
        wait_until(lambda: backend.child_pid is None, "the end of the child is not noticed")
        assert await load(backend, 1) == [LoadOutcome.HIT]
        assert names_in(folder) == ["another-1-1"], "only files of the dead are removed"
        await backend.close()

    asyncio.run(run())


def test_a_folder_that_is_gone_is_an_error_and_no_miss(nixl: Nixl, folder_options: dict[str, Any]) -> None:
    async def run() -> None:
        path = Path(folder_options["path"])
        backend = nixl(**folder_options)
        await backend.open()
        await store(backend, 1)
        unmount(path)
        for call in (backend.contains([key(1)]), load(backend, 1), store(backend, 2), backend.delete([key(1)])):
            with pytest.raises(OSError, match="the medium is gone"):
                await call
        assert names_in(path) == [], "nothing was written to the empty mount point"
        os.kill(pid_of(backend), signal.SIGKILL)
        wait_until(lambda: backend.child_pid is None, "the end of the child is not noticed")
        with pytest.raises(OSError, match="the medium is gone"):
            await backend.contains([key(1)])  # the next child does not create a marker
        mount_again(path)
        deadline = time.monotonic() + 20
        while True:
            try:
                assert await load(backend, 1) == [LoadOutcome.HIT], "the medium is back"
                break
            except OSError:
                assert time.monotonic() < deadline, "the medium is back, and the tier does not notice"
                await asyncio.sleep(0.05)
        await backend.close()

    asyncio.run(run())


def test_a_plugin_that_does_not_load_is_named_with_the_cure(nixl: Nixl, tmp_path: Path) -> None:
    async def run() -> None:
        backend = nixl(plugin="GDS", path=tmp_path / "objects", ring="1MiB")
        with pytest.raises(OSError, match=r"plugin GDS does not start .* NIXL has the plugins .*POSIX"):
            await backend.open()
        await backend.close()

    if any(Path("/dev").glob("nvidia*")):
        pytest.skip("GDS may load here")
    asyncio.run(run())


def test_objects_larger_than_the_ring_are_rejected(nixl: Nixl, tmp_path: Path) -> None:
    async def run() -> None:
        path = tmp_path / "objects"
        large, small = nixl(plugin="POSIX", path=path, ring="4MiB"), nixl(plugin="POSIX", path=path, ring="1MiB")
        await large.open()
        await small.open()
        size = 2 * 1024**2
        assert (await small.prepare_store([key(1)], [size])).outcomes == (StoreOutcome.REJECTED,)
        assert (await large.prepare_store([key(1)], [size])).outcomes == (None,)
        await large.store([key(1)], [memoryview(bytes(size))])
        assert await large.contains([key(1)]) == [True]
        assert await small.contains([key(1)]) == [False]
        assert await small.load_into([key(1)], [memoryview(bytearray(size))]) == [LoadOutcome.MISS]
        await large.close()
        await small.close()

    asyncio.run(run())


@pytest.mark.parametrize("nbytes", [0, 10, 47, 48, SIZE + 49])
def test_foreign_files_are_corrupt(nixl: Nixl, folder_options: dict[str, Any], nbytes: int) -> None:
    async def run() -> None:
        backend = nixl(**folder_options)
        await backend.open()
        await store(backend, 1, 2)
        files = [Path(folder_options["path"], name_of(key(number))) for number in (1, 2)]
        files[0].write_bytes(b"x" * nbytes)
        assert await load(backend, 1) == [LoadOutcome.CORRUPT]
        files[0].write_bytes(files[1].read_bytes())  # whole, and of another key
        assert (await backend.load_into([key(1)], [memoryview(bytearray(SIZE))])) == [LoadOutcome.CORRUPT]
        await backend.close()

    asyncio.run(run())
