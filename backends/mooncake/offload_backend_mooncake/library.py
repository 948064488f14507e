"""The import of Mooncake's Python module, which needs libraries of the system, and its deadlines."""

from __future__ import annotations

import errno
import os
import threading
from typing import Any, NamedTuple

_DEBIAN_PACKAGES = {"libibverbs": "libibverbs1", "libnuma": "libnuma1", "libcurl": "libcurl4"}
_LANES = "16"  # the most that Mooncake allows: as many transfers fail together when an owner hangs


class Deadlines(NamedTuple):
    """The limits of Mooncake's own waits. It reads them from the environment, some of them once per process."""

    request_seconds: float
    connect_seconds: float
    transfer_seconds: float

    def variables(self) -> dict[str, str]:
        """Return the environment variables."""
        return {
            "MC_RPC_TIMEOUT_MS": f"{self.request_seconds * 1000:.0f}",
            "MC_RPC_CONNECT_TIMEOUT_MS": f"{self.connect_seconds * 1000:.0f}",
            "MC_TCP_PROGRESS_TIMEOUT_SEC": f"{self.transfer_seconds:.0f}",
            "MC_TCP_STATUS_TIMEOUT_SEC": f"{self.transfer_seconds:.0f}",
        }


_lock = threading.Lock()
_in_force: tuple[Deadlines, str] | None = None


def import_mooncake(deadlines: Deadlines, protocol: str, tier: str) -> Any:
    """Set the deadlines and return the module ``mooncake.store``. A variable that the operator has set stays.

    Raises:
        OSError: another tier of this process has other deadlines, or the module does not load.
    """
    global _in_force
    with _lock:
        if _in_force is not None and _in_force[0] != deadlines:
            raise OSError(
                errno.EINVAL,
                f"tier {tier!r} has {_words(deadlines)}, but tier {_in_force[1]!r} of this process has "
                f"{_words(_in_force[0])}; Mooncake has one set of timeouts per process: give both tiers the same",
            )
        variables = {**deadlines.variables(), "MC_TCP_LANES_PER_PEER": _LANES, "MC_LOG_LEVEL": "ERROR"}
        if protocol == "tcp":
            variables["MC_FORCE_TCP"] = "1"
        for name, value in variables.items():
            os.environ.setdefault(name, value)
        module = _imported()
        _in_force = (deadlines, tier) if _in_force is None else _in_force
        return module


def _imported() -> Any:
    try:
        return _load()
    except ImportError as error:
        library = str(error).partition(".so")[0]
        package = _DEBIAN_PACKAGES.get(library)
        cure = f"apt-get install {package}" if package else "pip install 'offload-core[mooncake]'"
        raise OSError(errno.ENOENT, f"Mooncake does not load: {error}; run: {cure}") from error


def _load() -> Any:
    import mooncake.store

    return mooncake.store


def _words(deadlines: Deadlines) -> str:
    return ", ".join(
        f"{name} {seconds:g}"
        for name, seconds in zip(
            ("request_timeout_seconds", "connect_timeout_seconds", "transfer_timeout_seconds"), deadlines, strict=True
        )
    )
