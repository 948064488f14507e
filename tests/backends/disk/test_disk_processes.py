"""Several processes on one folder with a capacity: killed at any moment, at full speed, one after the other."""

from __future__ import annotations

import asyncio
import json
import random
import subprocess
import sys
import threading
from pathlib import Path
from types import TracebackType

import pytest

from offload_core.api.backend import LoadOutcome
from offload_core.api.keys import ObjectKey
from offload_core.cli.probes import sealed
from tests.backends.disk.capacity_writer import NAMESPACE, PACK, SIZES
from tests.backends.disk.conftest import Disk, files_under, key, recover, used

MIB = 1024 * 1024
CAPACITY = 4 * MIB
MOST_BYTES = SIZES.stop + 4096
WRITER = Path(__file__).with_name("capacity_writer.py")
VERIFY = "import sys; from offload_core.cli import app; sys.exit(app(sys.argv[1:]))"


class Writers:
    """Writers that share a folder."""

    def __init__(self, folder: Path, **options: object) -> None:
        command = [sys.executable, str(WRITER), str(folder), json.dumps(options)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self._said: list[list[str]] = []
        self.running: list[str] = []

    def __enter__(self) -> Writers:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        try:
            if kind is None:
                assert not self.running
        finally:
            for pid in list(self.running):
                self.end(pid, "kill")
            self._process.communicate(timeout=30)

    def start(self, seed: int) -> str:
        """Start a writer; return its process id after its first stored object."""
        self._ask(f"start {seed}")
        _, pid = self._hear("storing")
        self.running.append(pid)
        return pid

    def end(self, pid: str, how: str) -> int:
        """End a writer by ``kill`` or ``stop``; return its exit code."""
        self._ask(f"{how} {pid}")
        self.running.remove(pid)
        return int(self._hear("ended", pid)[2])

    def _ask(self, request: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(request + "\n")
        self._process.stdin.flush()

    def _hear(self, *words: str) -> list[str]:
        assert self._process.stdout is not None
        while True:
            line = self._process.stdout.readline().split()
            assert line, "the writers have ended"
            if line[: len(words)] == list(words):
                return line


def verify(folder: Path, tmp_path: Path) -> tuple[int, str]:
    """Run ``offload-core verify``; return its exit code and its output on stderr."""
    config = tmp_path / "offload.json"
    config.write_text(json.dumps({"backends": [{"name": "disk", "type": "disk", "path": str(folder)}]}))
    command = [sys.executable, "-c", VERIFY, "verify", str(config)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=100)
    return done.returncode, done.stderr


def check_after_kills(tmp_path: Path, kills: int, seed: int) -> None:
    folder = tmp_path / "objects"
    generator = random.Random(seed)
    pause = threading.Event()
    with Writers(folder, capacity=CAPACITY, keep_free="1MiB") as writers:
        for number in range(4):
            writers.start(1000 * seed + number)
        for number in range(kills):
            pause.wait(generator.expovariate(30))
            victim = generator.choice(writers.running)
            assert writers.end(victim, "kill") == -9
            assert used(folder) <= CAPACITY
            if number < kills - 4:
                writers.start(1000 * seed + 10 + number)
    total, debris = recover(folder, CAPACITY)
    assert debris == []
    assert abs(total - used(folder)) <= MOST_BYTES, "the account differs by more than one object"
    assert used(folder) > CAPACITY // 4
    code, said = verify(folder, tmp_path)
    assert (code, f"{len(files_under(folder))} objects" in said, "0 damaged" in said) == (0, True, True), said


def test_writers_killed_at_random_moments_leave_whole_objects_and_a_right_account(tmp_path: Path) -> None:
    check_after_kills(tmp_path, 8, 0)


@pytest.mark.long
@pytest.mark.timeout(500)
def test_writers_killed_two_hundred_times_leave_whole_objects_and_a_right_account(tmp_path: Path) -> None:
    check_after_kills(tmp_path, 200, 1)


def test_four_processes_at_full_speed_stay_under_the_limit_and_evict_nothing_that_is_pinned(
    tmp_path: Path, disk: Disk
) -> None:
    folder = tmp_path / "objects"
    reader = disk(folder, capacity=CAPACITY)
    pinned = {key(number): bytes([number]) * 30_000 for number in range(8)}
    seen: list[int] = []

    async def main() -> None:
        await reader.open()
        reservation = await reader.prepare_store(list(pinned), [30_000] * len(pinned))
        await reader.store(list(pinned), [memoryview(content) for content in pinned.values()])
        await reservation.release()
        held = await reader.prepare_load(list(pinned))
        assert all(held.present)
        with Writers(folder, capacity=CAPACITY) as writers:
            for seed in range(4):
                await asyncio.to_thread(writers.start, seed)
            for _ in range(30):
                seen.append(await asyncio.to_thread(used, folder))
                buffers = [memoryview(bytearray(30_000)) for _ in pinned]
                assert list(await reader.load_into(list(pinned), buffers)) == [LoadOutcome.HIT] * len(pinned)
                assert [bytes(buffer) for buffer in buffers] == list(pinned.values())
            for pid in list(writers.running):
                assert await asyncio.to_thread(writers.end, pid, "stop") == 0
        await held.release()
        await reader.close()

    asyncio.run(main())
    assert max(seen) <= CAPACITY
    assert max(seen) > CAPACITY // 2, "the writers never came near the limit"
    assert recover(folder, CAPACITY) == (used(folder), [])


@pytest.mark.parametrize("how", ["stop", "kill"])
@pytest.mark.parametrize("options", [{}, {"capacity": 64 * MIB}], ids=["without a limit", "with a limit"])
def test_a_second_process_serves_what_the_first_has_stored(
    tmp_path: Path, disk: Disk, how: str, options: dict[str, int]
) -> None:
    folder = tmp_path / "objects"
    with Writers(folder, **options) as writers:
        pid = writers.start(0)
        assert writers.end(pid, how) == (0 if how == "stop" else -9)
    stored = [path for path in files_under(folder) if path.suffix == ".kv"]
    keys = [ObjectKey(NAMESPACE, PACK, bytes.fromhex(path.stem)) for path in stored]
    backend = disk(folder, **options)

    async def main() -> None:
        await backend.open()
        assert await backend.contains(keys) == [True] * len(keys)
        held = await backend.prepare_load(keys)
        buffers = [memoryview(bytearray(path.stat().st_size)) for path in stored]
        assert held.present == (True,) * len(keys)
        assert list(await backend.load_into(keys, buffers)) == [LoadOutcome.HIT] * len(keys)
        await held.release()
        for one, buffer in zip(keys, buffers, strict=True):
            assert buffer == sealed(one, bytes(buffer[4096:])), f"{one} is torn"

    assert stored
    asyncio.run(main())
