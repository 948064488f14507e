"""Identity of LoRA adapters, by the content of their files: a name or a path can stand for other weights later."""

from __future__ import annotations

import logging
import time
from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING

from offload_core.objects.file_digests import FileDigests
from offload_core.objects.fingerprint import files_identity, fingerprint
from offload_core.objects.model_files import model_files
from offload_core.runtime.threads import DaemonExecutor

if TYPE_CHECKING:
    from vllm.lora.request import LoRARequest

logger = logging.getLogger(__name__)

_CLOCK_TICK_NS = 20_000_000  # file systems stamp files with a clock that ticks every 4 to 10 ms
Signature = tuple[tuple[str, int, int, int], ...]


class Adapter:
    """A request's adapter. Its digest may still be in preparation."""

    def __init__(self, future_digest: Future[str], deadline: float) -> None:
        self._future_digest = future_digest
        self._deadline = deadline

    @property
    def pending(self) -> bool:
        """True while the digest is in preparation and the wait for it has not timed out."""
        return not self._future_digest.done() and time.monotonic() < self._deadline

    @property
    def usable(self) -> bool:
        """True if the digest is known and reliable, so that chunks have keys."""
        return self._future_digest.done() and self._future_digest.exception() is None and self.digest != ""

    @property
    def digest(self) -> str:
        """Digest of the adapter's files; empty if it is not reliable. Read :attr:`usable` first."""
        return self._future_digest.result()


class AdapterIdentities:
    """Computes adapters' digests on a separate thread, never on the engine's.

    vLLM does not tell the time at which it reads an adapter's files. The weights are certain only if the files have not
    changed since the start of this engine. Requests with other adapters are served without offloading.

    Args:
        wait_seconds: how long a request may wait for its adapter's digest.
        started_ns: start time of this engine, in nanoseconds since 1970; now by default.
    """

    def __init__(self, wait_seconds: float, started_ns: int | None = None) -> None:
        self._wait_seconds = wait_seconds
        self._started_ns = time.time_ns() - _CLOCK_TICK_NS if started_ns is None else started_ns
        self._digests: dict[tuple[str, Signature], str] = {}
        self._file_digests = FileDigests.of_user()
        self._warned: set[str] = set()
        self._thread = DaemonExecutor(1, "offload-adapters")

    def of(self, lora: LoRARequest) -> Adapter:
        """Start to identify the adapter of a request."""
        future_digest = self._thread.submit(self._digest, Path(lora.lora_path), bool(lora.load_inplace))
        return Adapter(future_digest, time.monotonic() + self._wait_seconds)

    def shutdown(self) -> None:
        """End the thread once it is idle."""
        self._thread.shutdown()

    def _digest(self, folder: Path, in_place: bool) -> str:
        problem = "it is reloaded in place (load_inplace)" if in_place else None
        try:
            signature = _signature(folder)
            if any(changed > self._started_ns for *_, changed in signature):
                problem = "its files have changed since this engine started, so the engine may run other weights"
            if problem is None:
                key = (str(folder), signature)
                if key not in self._digests:
                    digest = fingerprint({"adapter": files_identity(folder, self._file_digests)})
                    if _signature(folder) == signature:
                        self._digests[key] = digest
                    else:
                        problem = "its files change"
                if problem is None:
                    return self._digests[key]
        except OSError as error:
            problem = f"its files cannot be read: {error}"
        if str(folder) not in self._warned:
            self._warned.add(str(folder))
            logger.warning("LoRA adapter %s: requests are served without offloading, because %s", folder, problem)
        return ""


def _signature(folder: Path) -> Signature:
    """Return each file's name, size in bytes, and modification and change times in nanoseconds.

    Raises:
        OSError: ``folder`` is not a readable folder.
    """
    found = ((name, path.stat()) for name, path in model_files(folder).files.items())
    return tuple((name, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns) for name, stat in found)
