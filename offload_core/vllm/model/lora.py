"""Identity of LoRA adapters: by the content of their files, since a name or a path can come to mean other weights."""

from __future__ import annotations

import logging
import time
from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING

from offload_core.objects.fingerprint import fingerprint, weights_identity
from offload_core.runtime.threads import DaemonExecutor

if TYPE_CHECKING:
    from vllm.lora.request import LoRARequest

logger = logging.getLogger(__name__)

_CLOCK_TICK_NS = 20_000_000  # file systems stamp files with a clock that ticks every 4 to 10 ms
Signature = tuple[tuple[str, int, int, int], ...]


class Adapter:
    """A request's adapter, whose digest may not be known yet."""

    def __init__(self, answer: Future[str], deadline: float) -> None:
        self._answer = answer
        self._deadline = deadline

    @property
    def pending(self) -> bool:
        """Whether the digest is still being worked out and worth waiting for."""
        return not self._answer.done() and time.monotonic() < self._deadline

    @property
    def usable(self) -> bool:
        """Whether the digest is known, so that chunks can be named."""
        return self._answer.done() and self._answer.exception() is None and self.digest != ""

    @property
    def digest(self) -> str:
        """Digest of the adapter's files; empty when it cannot be relied on. Ask :attr:`usable` first."""
        return self._answer.result()


class AdapterIdentities:
    """Digests adapters on a thread of its own, never on the engine's.

    vLLM reads an adapter's files at a time that nothing tells. Its weights are certain only when the files have not
    changed since before this process looked at anything; others are served without offloading.

    Args:
        patience_seconds: how long a request may wait for its adapter's digest.
        started_ns: when this engine started, in nanoseconds since 1970; now by default.
    """

    def __init__(self, patience_seconds: float, started_ns: int | None = None) -> None:
        self._patience_seconds = patience_seconds
        self._started_ns = time.time_ns() - _CLOCK_TICK_NS if started_ns is None else started_ns
        self._digests: dict[tuple[str, Signature], str] = {}
        self._warned: set[str] = set()
        self._thread = DaemonExecutor(1, "offload-adapters")

    def of(self, lora: LoRARequest) -> Adapter:
        """Start to identify the adapter of a request."""
        answer = self._thread.submit(self._digest, Path(lora.lora_path), bool(lora.load_inplace))
        return Adapter(answer, time.monotonic() + self._patience_seconds)

    def shutdown(self) -> None:
        """End the thread once it is idle."""
        self._thread.shutdown()

    def _digest(self, folder: Path, in_place: bool) -> str:
        problem = "it is reloaded in place (load_inplace)" if in_place else None
        try:
            signature = _signature(folder)
            if any(changed > self._started_ns for *_, changed in signature):
                problem = "its files have changed since this engine started, so it is uncertain which of them it runs"
            if problem is None:
                key = (str(folder), signature)
                if key not in self._digests:
                    self._digests[key] = fingerprint({"adapter": weights_identity(folder)})
                return self._digests[key]
        except OSError as error:
            problem = f"its files cannot be read: {error}"
        if str(folder) not in self._warned:
            self._warned.add(str(folder))
            logger.warning("LoRA adapter %s: requests are served without offloading, because %s", folder, problem)
        return ""


def _signature(folder: Path) -> Signature:
    """Return name, size and times of each file, in nanoseconds.

    Raises:
        OSError: ``folder`` is not a folder that can be read.
    """
    found = ((path.name, path.stat()) for path in sorted(folder.iterdir()))
    return tuple((name, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns) for name, stat in found)
