"""An LMCache server with offload-core's module on this machine."""

from __future__ import annotations

import importlib.util
import json
import sys
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from offload_backend_lmcache.client.problems import SERVER_MODULE

from tests.support.server_process import LOOPBACK, ServerProcess, accepts, free_port

_MAIN = "import sys; from lmcache.cli.main import main; sys.argv[0] = 'lmcache'; main()"
FOR_OWN_CONNECTOR = ("--supported-transfer-mode", "auto", "--separate-object-groups")
"""Flags for LMCache's own connector on CPUs, in both its modes, also with models of several groups."""
_NEEDED = ("lmcache", "opentelemetry.exporter.prometheus", "sortedcontainers")


def why_not() -> str | None:
    """Return the reason for which no LMCache server can run here, if there is one."""
    for module in _NEEDED:
        try:
            found = importlib.util.find_spec(module)
        except ModuleNotFoundError:
            found = None
        if found is None:
            return f"the module {module} is not installed; `make install` installs LMCache where it has a wheel"
    return None


class LMCacheCluster:
    """One ``lmcache server``. Its L1 is in memory; with a folder or an adapter it has an L2 that outlives it.

    Args:
        log: a file that gets the server's output.
        l1_gib: size of the L1.
        l2: LMCache's description of an L2 adapter, such as ``{"type": "fs_native", "base_path": "/mnt/kv"}``.
        module: keys of the module's config, besides ``address``.
        environment: additional environment variables of the server.
        host: the address of offload-core's module. LMCache's own ports are on the loopback address.
        flags: further flags of ``lmcache server``.
    """

    def __init__(
        self,
        log: Path | None = None,
        l1_gib: float = 0.25,
        l2: Mapping[str, Any] | None = None,
        module: Mapping[str, Any] | None = None,
        environment: Mapping[str, str] | None = None,
        host: str = LOOPBACK,
        flags: Sequence[str] = (),
    ) -> None:
        self.port, self.zmq_port, self.http_port = free_port(host), free_port(), free_port()
        self.address = f"{host}:{self.port}"
        self.l2 = l2
        config = {"address": self.address, **(module or {})}
        flags = [*flags, "--server-module", json.dumps({"module_path": SERVER_MODULE, "config": config})]
        if l2 is not None:
            flags += ["--l2-adapter", json.dumps(dict(l2))]
        self.server = ServerProcess(
            self._command(l1_gib, flags),
            lambda: accepts(self.port, host) and accepts(self.http_port),
            log,
            {"LMCACHE_TRACK_USAGE": "false", "LMCACHE_LOG_LEVEL": "WARNING", **(environment or {})},
        )

    @property
    def parts(self) -> dict[str, ServerProcess]:
        """The processes, each of which can be killed, suspended and started again."""
        return {"server": self.server}

    def start(self) -> None:
        """Start the server; it takes about five seconds."""
        self.server.start()

    def stop(self) -> None:
        """End the server in an orderly way. Harmless when repeated."""
        self.server.stop()

    def tier(self, **keys: Any) -> dict[str, Any]:
        """Return the keys of a tier on this server."""
        return {"type": "lmcache", "address": self.address, **keys}

    def _command(self, l1_gib: float, flags: Sequence[str]) -> list[str]:
        return [
            sys.executable, "-c", _MAIN, "server", "--host", "127.0.0.1", "--port", str(self.zmq_port),
            "--http-host", "127.0.0.1", "--http-port", str(self.http_port), "--prometheus-port", str(free_port()),
            "--l1-size-gb", str(l1_gib), "--eviction-policy", "LRU", "--max-workers", "1", *flags,
        ]  # fmt: skip

    def is_at_rest(self) -> bool:
        """Return whether no store to the L2 is on its way, whose objects LMCache would not remove."""
        with urllib.request.urlopen(f"http://127.0.0.1:{self.http_port}/status", timeout=10) as answer:
            return not json.load(answer)["storage_manager"]["store_controller"]["in_flight_task_count"]

    def clear_memory(self) -> None:
        """Remove all objects from the L1 that nobody reads or writes, as an eviction does."""
        request = urllib.request.Request(f"http://127.0.0.1:{self.http_port}/cache/clear", method="POST")
        with urllib.request.urlopen(request, timeout=10) as answer:
            assert answer.status == 200, "LMCache did not clear its memory"
