"""A Mooncake cluster on this machine: a master and segment owners, each a process of its own.

Mooncake cannot bind the data port of an owner to one interface. The owners of a test hold random bytes only.
"""

from __future__ import annotations

import functools
import importlib.util
import json
import subprocess
import sys
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.support.server_process import LOOPBACK, ServerProcess, free_port

_ENVIRONMENT = {"MC_FORCE_TCP": "1", "MC_LOG_LEVEL": "WARNING"}
_ANSWER_SECONDS = 5


@functools.cache
def why_not() -> str | None:
    """Return the reason for which no cluster can run here, or ``None``."""
    if importlib.util.find_spec("mooncake") is None:
        return "Mooncake is not installed: pip install 'offload-core[mooncake]'"
    # In a process of its own, because the import starts threads of Mooncake's libraries.
    tried = subprocess.run([sys.executable, "-c", "import mooncake.store"], capture_output=True, text=True, check=False)
    return None if tried.returncode == 0 else f"Mooncake does not load: {tried.stderr.strip().splitlines()[-1]}"


class MooncakeCluster:
    """A master and one segment owner. Call :meth:`stop` at the end.

    Args:
        folder: a folder for the logs.
        segment: the memory of the owner, such as ``512MB``.
        lease_milliseconds: time for which a lookup protects an object from eviction.
        forget_seconds: time after which the master forgets an owner that is silent.
        master_flags: additional flags of the master.
        owner_environment: additional environment variables of the owners.
        host: the address of the master and the owner. The page for operators is on the loopback address.
    """

    def __init__(
        self,
        folder: Path,
        segment: str = "512MB",
        lease_milliseconds: int = 2000,
        forget_seconds: int = 3,
        master_flags: Sequence[str] = (),
        owner_environment: Mapping[str, str] | None = None,
        host: str = LOOPBACK,
    ) -> None:
        port, self._http_port = free_port(host), free_port()
        self._host = host
        self.master = f"{host}:{port}"
        self._folder = folder
        environment = {**_ENVIRONMENT, "MC_TCP_BIND_ADDRESS": host}
        self._owner_environment = {**environment, **(owner_environment or {})}
        command = [
            _program("mooncake_master"),
            f"--rpc_address={host}",
            f"--rpc_port={port}",
            "--metrics_host=127.0.0.1",
            f"--metrics_port={self._http_port}",
            "--rpc_thread_num=2",
            "--enable_metric_reporting=false",
            "--logtostderr",
            f"--default_kv_lease_ttl={lease_milliseconds}",
            f"--client_ttl={forget_seconds}",
            "--put_start_discard_timeout_sec=2",  # 30 by default: so long a half object cannot be stored again
            *master_flags,
        ]
        master = ServerProcess(command, self._master_answers, folder / "master.log", environment)
        self.parts: dict[str, ServerProcess] = {"master": master}
        self.add_owner("owner", segment)

    def add_owner(self, name: str, segment: str) -> ServerProcess:
        """Add a segment owner, which is not started yet."""
        command = [
            _program("mooncake_client"),
            f"--host={self._host}",
            f"--global_segment_size={segment}",
            "--local_buffer_size=0",
            f"--master_server_address={self.master}",
            "--metadata_server=P2PHANDSHAKE",
            f"--port={free_port(self._host)}",
            "--protocol=tcp",
            "--threads=1",
            "--logtostderr",
        ]
        self.parts[name] = _Owner(command, self, self._folder / f"{name}.log", self._owner_environment)
        return self.parts[name]

    def start(self) -> MooncakeCluster:
        """Start all parts and wait until they answer."""
        for part in self.parts.values():
            part.start()
        return self

    def stop(self) -> None:
        """End all parts, owners first. Harmless when repeated."""
        for part in reversed(self.parts.values()):
            part.stop()

    def tier(self, **keys: Any) -> dict[str, Any]:
        """Return a tier's keys for this cluster."""
        return {"type": "mooncake", "master": self.master, **keys}

    def segments(self) -> set[str]:
        """Return the identifiers of the segments that the master lists; those of a dead owner for a while, too."""
        found = json.loads(self.ask("/get_segments_detail"))
        return {segment["segment_id"] for segment in found["segments"]}

    def ask(self, path: str) -> bytes:
        """Return an answer of the master's page for operators."""
        url = f"http://127.0.0.1:{self._http_port}{path}"
        with urllib.request.urlopen(url, timeout=_ANSWER_SECONDS) as answer:
            return bytes(answer.read())

    def _master_answers(self) -> bool:
        try:
            self.segments()
        except OSError:  # also while it says that its service is not ready
            return False
        return True


class _Owner(ServerProcess):
    """A segment owner. It is ready when the master lists a segment more than before."""

    def __init__(
        self, command: Sequence[str], cluster: MooncakeCluster, log: Path, environment: Mapping[str, str]
    ) -> None:
        super().__init__(command, lambda: bool(cluster.segments() - self._before), log, environment)
        self._cluster = cluster
        self._before: set[str] = set()

    def start(self) -> None:
        """Start the owner and wait for its segment."""
        self._before = self._cluster.segments()
        super().start()


def _program(name: str) -> str:
    return str(Path(sys.prefix) / "bin" / name)
