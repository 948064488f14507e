"""The distributed stores of the engine tests: each has parts that a test hurts and a way to lose all objects."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from tests.support.clusters import lmcache, mooncake, nixl
from tests.support.server_process import ServerProcess

_LIMIT_SECONDS = 60


class Store:
    """A distributed store on this machine.

    Attributes:
        parts: its servers by name.
        short_deadlines: keys with which a tier gives up within about a second.
    """

    parts: Mapping[str, ServerProcess] = {}
    short_deadlines: Mapping[str, Any] = {}

    def __init__(self, folder: Path) -> None:
        raise NotImplementedError

    def tier(self) -> dict[str, Any]:
        """Return the keys of a tier, but for its name."""
        raise NotImplementedError

    def stop(self) -> None:
        """End all servers."""
        raise NotImplementedError

    def pids(self, part: str) -> list[int]:
        """Return the processes of a part."""
        return [self.parts[part].pid]

    def restart(self, part: str) -> None:
        """Start a part that was killed, and wait until the store can be used again."""
        self.parts[part].start()

    def resume(self, part: str) -> None:
        """Let a suspended part go on, and wait until the store can be used again."""
        self.parts[part].resume()

    def lose_everything(self) -> None:
        """Remove all objects; the store can be used afterwards."""
        for name, part in self.parts.items():
            part.kill()
            self.restart(name)


class LMCache(Store):
    """One LMCache server, with its L1 only."""

    short_deadlines: Mapping[str, Any] = {"connect_timeout_seconds": 0.5, "io_timeout_seconds": 1}

    def __init__(self, folder: Path) -> None:
        self._lab = lmcache.LMCacheCluster(folder / "server.log")
        self._lab.start()
        self.parts = self._lab.parts

    def tier(self) -> dict[str, Any]:
        return self._lab.tier()

    def stop(self) -> None:
        self._lab.stop()


class Mooncake(Store):
    """One master and one segment owner."""

    short_deadlines: Mapping[str, Any] = {
        "request_timeout_seconds": 0.5, "connect_timeout_seconds": 0.5, "transfer_timeout_seconds": 1,
        "full_wait_seconds": 0.2,
    }  # fmt: skip

    def __init__(self, folder: Path) -> None:
        self._lab = mooncake.MooncakeCluster(folder)
        self._lab.start()
        self.parts = self._lab.parts

    def tier(self) -> dict[str, Any]:
        return self._lab.tier()

    def stop(self) -> None:
        self._lab.stop()

    def restart(self, part: str) -> None:
        super().restart(part)
        wait_for(lambda: len(self._lab.segments()) == 1)  # a dead owner's is forgotten after a few seconds

    def resume(self, part: str) -> None:
        super().resume(part)
        wait_for(lambda: len(self._lab.segments()) == 1)

    def lose_everything(self) -> None:
        self.parts["master"].kill()
        self.restart("master")


class NixlFolder(Store):
    """A folder that the tier's own child process reads and writes."""

    short_deadlines: Mapping[str, Any] = {"transfer_timeout_seconds": 1}

    def __init__(self, folder: Path) -> None:
        self._lab = nixl.FolderLab()
        self._lab.start()

    def tier(self) -> dict[str, Any]:
        return self._lab.tier()

    def stop(self) -> None:
        self._lab.stop()

    def pids(self, part: str) -> list[int]:
        return children_of_the_engine()

    def restart(self, part: str) -> None:
        """Do nothing: the tier starts another child when it needs one."""

    def resume(self, part: str) -> None:
        """Do nothing: the tier has killed the suspended child."""

    def lose_everything(self) -> None:
        self._lab.clear()


class NixlBucket(Store):
    """A bucket of an S3-compatible server that loses everything when it is killed."""

    short_deadlines: Mapping[str, Any] = {"transfer_timeout_seconds": 1}

    def __init__(self, folder: Path) -> None:
        self._lab = nixl.BucketLab(folder / "server.log")
        self._lab.start()
        self.parts = self._lab.parts

    def tier(self) -> dict[str, Any]:
        return self._lab.tier()

    def stop(self) -> None:
        self._lab.stop()

    def pids(self, part: str) -> list[int]:
        return children_of_the_engine() if part == "child" else super().pids(part)

    def restart(self, part: str) -> None:
        if part == "server":
            super().restart(part)
            self._lab.make_bucket(self._lab.bucket)

    def resume(self, part: str) -> None:
        if part == "server":
            super().resume(part)


STORES: dict[str, tuple[type[Store], Callable[[], str | None]]] = {
    "lmcache": (LMCache, lmcache.why_not),
    "mooncake": (Mooncake, mooncake.why_not),
    "nixl-folder": (NixlFolder, nixl.why_not),
    "nixl-bucket": (NixlBucket, nixl.why_not),
}


def wait_for(condition: Callable[[], bool]) -> None:
    """Wait until a condition holds."""
    pause = threading.Event()
    for _ in range(_LIMIT_SECONDS * 20):
        if condition():
            return
        pause.wait(0.05)
    raise AssertionError(f"it never came true: {condition}")


def children_of_the_engine() -> list[int]:
    """Return the NIXL children of the engine that runs: one of its scheduler half, one of its worker half."""
    wait_for(lambda: bool(_nixl_children()))
    return _nixl_children()


def _nixl_children() -> list[int]:
    parents: dict[int, int] = {}
    children: list[int] = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                status = (entry / "stat").read_text().rpartition(")")[2].split()
                command = (entry / "cmdline").read_bytes()
            except (FileNotFoundError, ProcessLookupError):
                continue
            parents[int(entry.name)] = int(status[1])
            if b"offload_backend_nixl.child" in command and status[0] != "Z":
                children.append(int(entry.name))
    return [child for child in children if os.getpid() in _ancestors(child, parents)]


def _ancestors(pid: int, parents: Mapping[int, int]) -> list[int]:
    found: list[int] = []
    while pid := parents.get(pid, 0):
        found.append(pid)
    return found
