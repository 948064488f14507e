"""A second host on this machine: a network namespace with a cable to this one. Linux only, and root only."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
from pathlib import Path

from tests.support.server_process import ServerProcess

VARIABLE = "OFFLOAD_TEST_NETWORK"
"""Names the network in which a program of the tests runs; see :func:`enter_network`."""
# From the range for tests of networks (RFC 2544), which no real network uses.
HERE, THERE = "198.18.7.1", "198.18.7.2"
_CABLE_HERE, _CABLE_THERE = "offload0", "offload1"
_CLONE_NEWNET = 0x40000000


def why_not() -> str | None:
    """Return the reason for which there cannot be a second host here, or ``None``."""
    if os.getuid() != 0:
        return "only root can make a network namespace"
    if missing := [name for name in ("ip", "unshare", "nsenter") if shutil.which(name) is None]:
        return f"the program {missing[0]} is not installed"
    tried = subprocess.run(
        ["unshare", "--net", "ip", "link", "add", _CABLE_HERE, "type", "veth", "peer", "name", _CABLE_THERE],
        capture_output=True,
        text=True,
        check=False,
    )
    return None if tried.returncode == 0 else f"there is no virtual cable here: {tried.stderr.strip()}"


class SecondHost:
    """A network of its own, with the address ``THERE``; this network has the address ``HERE``.

    The network and the cable vanish with the process that holds them, which ends with the test run.
    """

    def __init__(self) -> None:
        self._holder = ServerProcess(["unshare", "--net", "sleep", "infinity"], self._is_separate)
        self._holder.start()
        try:
            self._lay_cable()
        except BaseException:
            self.stop()
            raise

    @property
    def environment(self) -> dict[str, str]:
        """Variables with which a program of the tests runs on the second host."""
        return {VARIABLE: self._network}

    def stop(self) -> None:
        """Remove the host."""
        self._holder.kill()

    @property
    def _network(self) -> str:
        return f"/proc/{self._holder.pid}/ns/net"

    def _is_separate(self) -> bool:
        return Path(self._network).readlink() != Path("/proc/self/ns/net").readlink()

    def _lay_cable(self) -> None:
        there = ["nsenter", f"--net={self._network}"]
        peer = ["peer", "name", _CABLE_THERE, "netns", str(self._holder.pid)]
        for command in (
            ["ip", "link", "add", _CABLE_HERE, "type", "veth", *peer],
            ["ip", "address", "add", f"{HERE}/30", "dev", _CABLE_HERE],
            ["ip", "link", "set", _CABLE_HERE, "up"],
            [*there, "ip", "address", "add", f"{THERE}/30", "dev", _CABLE_THERE],
            [*there, "ip", "link", "set", _CABLE_THERE, "up"],
            [*there, "ip", "link", "set", "lo", "up"],
        ):
            subprocess.run(command, check=True, capture_output=True)


def enter_network() -> None:
    """Move this process to the network that the variable names. Call it before the first thread starts.

    Raises:
        OSError: there is no such network.
    """
    if (network := os.environ.get(VARIABLE)) is None:
        return
    libc = ctypes.CDLL(None, use_errno=True)
    with Path(network).open("rb") as file:
        if libc.setns(file.fileno(), _CLONE_NEWNET):
            error = ctypes.get_errno()
            raise OSError(error, os.strerror(error), network)
