"""The distributed stores of the engine tests: each has parts that a test hurts and a way to lose all objects."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

from tests.support.clusters import lmcache, mooncake, nixl
from tests.support.polling import wait_until
from tests.support.process_state import command_line, descendants, process_state
from tests.support.server_process import LOOPBACK, ServerProcess

TIER = "cluster"
"""The name of the tier."""
TOKEN_VARIABLE = f"OFFLOAD_CORE_{TIER.upper()}_TOKEN"
"""The variable from which a tier of that name reads its token."""
TOKEN = {TOKEN_VARIABLE: "a token of the tests"}


class Lab(Protocol):
    """The servers of a store."""

    @property
    def parts(self) -> Mapping[str, ServerProcess]: ...

    def start(self) -> object: ...

    def stop(self) -> None: ...

    def tier(self) -> dict[str, Any]: ...


class Store:
    """A distributed store on this machine, started.

    Args:
        lab: its servers.

    Attributes:
        short_deadlines: keys with which a tier gives up within about a second.
    """

    short_deadlines: Mapping[str, Any] = {}

    def __init__(self, lab: Lab) -> None:
        self._lab = lab
        lab.start()

    def tier(self) -> dict[str, Any]:
        """Return the keys of a tier, but for its name."""
        return self._lab.tier()

    def stop(self) -> None:
        """End all servers."""
        self._lab.stop()

    def pids(self, part: str) -> list[int]:
        """Return the processes of a part."""
        return children_of_the_engine() if part == "child" else [self._lab.parts[part].pid]

    def restart(self, part: str) -> None:
        """Start a part that was killed, and wait until the store can be used again. A tier replaces its own child."""
        if part != "child":
            self._lab.parts[part].start()

    def resume(self, part: str) -> None:
        """Let a suspended part go on, and wait until the store can be used again. A tier kills its own child."""
        if part == "child":
            wait_until(lambda: not any(map(_is_stopped, _nixl_children())), "the tier does not kill its child")
        else:
            self._lab.parts[part].resume()

    def lose_everything(self) -> None:
        """Remove all objects; the store can be used afterwards."""
        for name, part in self._lab.parts.items():
            part.kill()
            self.restart(name)


class LMCache(Store):
    """One LMCache server, with its L1 only."""

    short_deadlines: Mapping[str, Any] = {"connect_timeout_seconds": 0.5, "io_timeout_seconds": 1}

    def __init__(self, folder: Path, host: str = LOOPBACK) -> None:
        # Addresses other than the loopback address need a token; engines get it in the same variable.
        module = {} if host == LOOPBACK else {"token_variable": TOKEN_VARIABLE}
        log = folder / "server.log"
        super().__init__(lmcache.LMCacheCluster(log, module=module, environment=TOKEN, host=host))


class Mooncake(Store):
    """One master and one segment owner."""

    short_deadlines: Mapping[str, Any] = {
        "request_timeout_seconds": 0.5, "connect_timeout_seconds": 0.5, "transfer_timeout_seconds": 1,
        "full_wait_seconds": 0.2,
    }  # fmt: skip

    def __init__(self, folder: Path, host: str = LOOPBACK) -> None:
        self._cluster = mooncake.MooncakeCluster(folder, host=host)
        super().__init__(self._cluster)

    def restart(self, part: str) -> None:
        super().restart(part)
        self._wait_for_one_segment()

    def resume(self, part: str) -> None:
        super().resume(part)
        self._wait_for_one_segment()

    def lose_everything(self) -> None:
        self._lab.parts["master"].kill()
        self.restart("master")

    def _wait_for_one_segment(self) -> None:
        """Wait for the owner. The segment of a dead one is forgotten after a few seconds."""
        wait_until(lambda: len(self._cluster.segments()) == 1, "the owner does not come back")


class NixlFolder(Store):
    """A folder that the tier's own child process reads and writes."""

    short_deadlines: Mapping[str, Any] = {"transfer_timeout_seconds": 1}

    def __init__(self, folder: Path) -> None:
        self._folder = nixl.FolderLab()
        super().__init__(self._folder)

    def lose_everything(self) -> None:
        self._folder.clear()


class NixlBucket(Store):
    """A bucket of an S3-compatible server that loses everything when it is killed."""

    # A question to the bucket may take a tenth of it, which a busy machine needs.
    short_deadlines: Mapping[str, Any] = {"transfer_timeout_seconds": 4}

    def __init__(self, folder: Path, host: str = LOOPBACK) -> None:
        self._bucket = nixl.BucketLab(folder / "server.log", host)
        super().__init__(self._bucket)

    def restart(self, part: str) -> None:
        super().restart(part)
        if part == "server":
            self._bucket.server.make_bucket(self._bucket.bucket)


STORES: dict[str, tuple[Callable[[Path], Store], Callable[[], str | None]]] = {
    "lmcache": (LMCache, lmcache.why_not),
    "mooncake": (Mooncake, mooncake.why_not),
    "nixl-folder": (NixlFolder, nixl.why_not),
    "nixl-bucket": (NixlBucket, nixl.why_not),
}


def children_of_the_engine() -> list[int]:
    """Return the NIXL children of the engine that runs: one of its scheduler half, one of its worker half."""
    wait_until(lambda: bool(_nixl_children()), "the engine has no NIXL child")
    return _nixl_children()


def _nixl_children() -> list[int]:
    return [pid for pid in descendants() if b"offload_backend_nixl.child" in command_line(pid)]


def _is_stopped(pid: int) -> bool:
    try:
        return process_state(pid) == "T"
    except (FileNotFoundError, ProcessLookupError):  # it has been killed just now
        return False
