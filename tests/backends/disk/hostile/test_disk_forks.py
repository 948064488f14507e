"""Processes that fork after they have opened a folder: the locks end with the process that took them."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path

import pytest
from offload_backend_disk.folder.processes import STATE_FOLDER

from offload_core.api.backend import StoreOutcome
from tests.backends.disk.conftest import Disk, key, store
from tests.support.process_state import is_running

OWNER = Path(__file__).with_name("forking_owner.py")
KIB = 1024


def test_reservations_and_pins_of_a_killed_process_end_though_its_forked_child_lives(
    disk: Disk, tmp_path: Path
) -> None:
    command = [sys.executable, str(OWNER), str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as owner:
        assert owner.stdout is not None
        child = int(owner.stdout.readline())
        owner.kill()
        owner.wait()
        (name,) = (path.name for path in (tmp_path / STATE_FOLDER / "owners").iterdir())

        async def main() -> None:
            backend = disk(tmp_path, capacity=100 * KIB)
            await backend.open()
            assert not backend._processes.is_alive(name)
            assert await store(backend, 2, bytes(90 * KIB)) is StoreOutcome.STORED, "neither reserved nor pinned"
            assert await backend.contains([key(0)]) == [False]
            await backend.close()

        asyncio.run(main())
        assert is_running(child)


@pytest.mark.parametrize("options", [{}, {"capacity": 100 * KIB}], ids=["without a limit", "with a limit"])
def test_a_child_that_ends_leaves_the_locks_of_its_parent(disk: Disk, tmp_path: Path, options: dict[str, int]) -> None:
    forked = "import os; pid = os.fork(); pid or os._exit(0); print(os.waitpid(pid, 0)[1], flush=True); input()"
    opened = (
        "import asyncio, sys; from pathlib import Path; from offload_backend_disk import DiskBackend, DiskOptions; "
        "from offload_core.api.backend import BackendContext; "
        "from offload_core.runtime.threads import DaemonExecutor; "
        "backend = DiskBackend(DiskOptions(path=Path(sys.argv[1]), capacity=int(sys.argv[2]) or None), "
        "BackendContext('disk', DaemonExecutor(2, 'disk'))); asyncio.run(backend.open()); "
    )
    command = [sys.executable, "-c", opened + forked, str(tmp_path), str(options.get("capacity", 0))]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        assert parent.stdout.readline() == "0\n"
        (name,) = (path.name for path in (tmp_path / STATE_FOLDER / "owners").iterdir())
        assert disk(tmp_path)._processes.is_alive(name)
        parent.communicate("\n")
