"""Identity of LoRA adapters, by the content of their files: a name or a path can stand for other weights later."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
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
_MAX_THREADS = 16  # a folder on a dead mount can hold its thread for ever
Signature = tuple[tuple[str, int, int, int], ...]
_Key = tuple[str, bool]  # a folder's path, and whether vLLM reloads it in place


class Adapter:
    """A request's adapter. Its digest may still be in preparation.

    Args:
        deadline: end of the wait for the digest, by the monotonic clock in seconds.
        on_late: called each time that the digest is asked for behind the deadline and is not there.
    """

    def __init__(self, future_digest: Future[str], deadline: float, on_late: Callable[[], None]) -> None:
        self._future_digest = future_digest
        self._deadline = deadline
        self._on_late = on_late

    @property
    def pending(self) -> bool:
        """True while the digest is in preparation and the wait for it has not timed out."""
        if self._future_digest.done():
            return False
        if time.monotonic() < self._deadline:
            return True
        self._on_late()
        return False

    @property
    def usable(self) -> bool:
        """True if the digest is known and reliable, so that chunks have keys."""
        return self._future_digest.done() and self._future_digest.exception() is None and self.digest != ""

    @property
    def digest(self) -> str:
        """Digest of the adapter's files; empty if it is not reliable. Read :attr:`usable` first."""
        return self._future_digest.result()


class AdapterIdentities:
    """Computes adapters' digests on separate threads, never on the engine's.

    A folder has at most one thread at a time, so that one that hangs delays no other; there are up to 16 threads.
    Requests that come while a folder is read share one more look at it, which begins after they have come.

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
        self._warned: set[str] = set()
        self._late: set[str] = set()
        self._lock = threading.Lock()
        self._waiting: dict[_Key, Future[str]] = {}
        """Digests whose preparation has not begun."""
        self._began: dict[_Key, float] = {}
        """The folders that have a thread or wait for one, with the begin of the latest look or wait, in seconds."""
        self._threads = DaemonExecutor(_MAX_THREADS, "offload-adapters")

    def of(self, lora: LoRARequest) -> Adapter:
        """Start to identify the adapter of a request.

        A request does not wait for a folder that has kept an earlier request waiting for ``wait_seconds``.
        """
        key = (str(lora.lora_path), bool(lora.load_inplace))
        with self._lock:
            future_digest = self._waiting.setdefault(key, Future())
            idle = key not in self._began
            began = self._began.setdefault(key, time.monotonic())
        if idle:
            self._threads.submit(self._work, key)
        return Adapter(future_digest, began + self._wait_seconds, partial(self._warn_of_late, key[0]))

    def shutdown(self) -> None:
        """End the threads once they are idle."""
        self._threads.shutdown()

    def _work(self, key: _Key) -> None:
        folder, in_place = key
        while True:
            with self._lock:
                future_digest = self._waiting.pop(key, None)
                if future_digest is None:
                    del self._began[key]
                    return
                self._began[key] = time.monotonic()
            try:
                future_digest.set_result(self._digest(Path(folder), in_place))
            except BaseException as error:
                future_digest.set_exception(error)

    def _warn_of_late(self, folder: str) -> None:
        if folder not in self._late:
            self._late.add(folder)
            logger.warning(
                "LoRA adapter %s: its files were not read within %g s (lookup_timeout_seconds); until they are read, "
                "requests are served without offloading",
                folder, self._wait_seconds,
            )  # fmt: skip

    def _digest(self, folder: Path, in_place: bool) -> str:
        problem = "it is reloaded in place (load_inplace)" if in_place else None
        try:
            signature = _signature(folder)
            if any(changed > self._started_ns for *_, changed in signature):
                problem = "its files have changed since this engine started, so the engine may run other weights"
            if problem is None:
                key = (str(folder), signature)
                if key not in self._digests:
                    digest = fingerprint({"adapter": files_identity(folder, FileDigests.of_user())})
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
