"""A fault file system as a test holds it."""

from __future__ import annotations

import contextlib
import errno
import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType

from tests.media.fuse import connections
from tests.media.fuse.rules import Fault, Rule, write_rules
from tests.support.paths import ROOT
from tests.support.polling import wait_until
from tests.support.process_state import process_state

_LIMIT_SECONDS = 60


def why_not() -> str | None:
    """Return the reason why this machine cannot mount one, or ``None``."""
    if os.geteuid() != 0:
        return "mounting a FUSE file system without a helper program needs root"
    if not Path("/dev/fuse").exists():
        return "there is no /dev/fuse: the kernel has no FUSE, or this container may not use it"
    try:
        import fuse  # noqa: F401
    except ImportError as error:
        return f"fuse-python is not installed ({error}); it is part of the dev extra where it has a wheel"
    probe = subprocess.run(
        [sys.executable, "-c", "import os; os.open('/dev/fuse', os.O_RDWR)"],
        capture_output=True,
        text=True,
        check=False,
    )
    if probe.returncode:
        return f"/dev/fuse cannot be opened: {probe.stderr.strip().splitlines()[-1]}"
    try:
        connections.show_connections()
    except OSError as error:
        return str(error)
    return None


class FaultFs:
    """A mounted fault file system, and what goes wrong on it. A context manager; for one thread.

    Attributes:
        path: the mount point.
        backing: the same files without any faults.
    """

    def __init__(self) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="offload-faultfs-"))  # no test's: a broken mount stays with us
        self.path = self._folder / "mount"
        self.backing = self._folder / "backing"
        self._hits = self._folder / "hits.jsonl"
        self._numbers = itertools.count(1)
        self._rules: list[Rule] = []
        self._guard: subprocess.Popen[str] | None = None
        self._daemon = 0
        self._is_mounted = False
        self.path.mkdir()
        self.backing.mkdir()
        self._hits.touch()

    def __enter__(self) -> FaultFs:
        try:
            self.mount()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def mount(self) -> None:
        """Start a daemon; on a mount point that has lost its own, too.

        Raises:
            OSError: it cannot be mounted; the message has what the daemon printed.
        """
        self._end_guard()
        connections.remove(self.path)
        with (self._folder / "log").open("wb") as log:
            self._guard = subprocess.Popen(
                [sys.executable, "-m", "tests.media.fuse.daemon", str(self.path), str(self._folder)],
                cwd=ROOT,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(entry for entry in sys.path if entry)},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            )
        assert self._guard.stdout is not None
        self._daemon = int(self._guard.stdout.readline() or 0)
        guard = self._guard
        wait_until(lambda: connections.connection_of(self.path) is not None or guard.poll() is not None, "no mount")
        if guard.poll() is not None:
            said = (self._folder / "log").read_text()[-2000:]
            raise OSError(errno.EIO, f"the daemon ended at once: {said}", str(self.path))
        self._is_mounted = True

    def restore(self) -> None:
        """Make it as it was at first: mounted, empty, and nothing goes wrong."""
        self.clear()
        self.resume()
        if not self._is_mounted:
            self.mount()
        for entry in list(self.backing.iterdir()):
            if entry.is_dir():
                shutil.rmtree(entry)
            else:
                entry.unlink()

    def close(self) -> None:
        """Release, wake, abort and unmount everything; nothing of it hangs, and it may be called again."""
        with contextlib.suppress(FileNotFoundError):
            self.clear()
        self.resume()
        self._end_guard()
        connections.remove(self.path)
        assert connections.connection_of(self.path) is None, f"{self.path} cannot be unmounted"
        shutil.rmtree(self._folder, ignore_errors=True)

    def add(self, operations: str, paths: str, fault: Fault, *, seconds: float = 0.0, number: int = errno.EIO) -> Rule:
        """Let something go wrong from now on.

        Args:
            operations: names with blanks between.
            paths: see :class:`Rule`, as are the other arguments.
            number: of the error.
        """
        rule = Rule(next(self._numbers), tuple(operations.split()), paths, fault, seconds, number)
        self._write([*self._rules, rule])
        return rule

    def remove(self, rule: Rule) -> None:
        """Let it go wrong no longer; what hangs because of it goes on."""
        self._write([other for other in self._rules if other != rule])

    def clear(self) -> None:
        """Let nothing go wrong; what hangs goes on."""
        self._write([])

    @contextlib.contextmanager
    def fault(self, operations: str, paths: str, fault: Fault, **values: float) -> Iterator[Rule]:
        """As :meth:`add`, until the end of the block."""
        rule = self.add(operations, paths, fault, **values)  # type: ignore[arg-type] # seconds and number
        try:
            yield rule
        finally:
            self.remove(rule)

    def hits(self, rule: Rule) -> list[tuple[str, str]]:
        """Return the operations and paths that a rule has applied to so far."""
        lines = map(json.loads, self._hits.read_text().splitlines())
        return [(line["operation"], line["path"]) for line in lines if line["number"] == rule.number]

    def wait_for_hit(self, rule: Rule, count: int = 1) -> None:
        """Wait until a rule has applied ``count`` times."""
        wait_until(lambda: len(self.hits(rule)) >= count, f"no {count} hits of {rule}")

    def pause(self) -> None:
        """Stop the daemon, as ``SIGSTOP`` does: every operation hangs. A process in one can still be killed."""
        os.kill(self._daemon, signal.SIGSTOP)
        wait_until(lambda: process_state(self._daemon) == "T", "the daemon does not stop")

    def resume(self) -> None:
        """Undo :meth:`pause`; what hangs goes on."""
        if self._guard is not None and self._guard.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._daemon, signal.SIGCONT)

    def abort(self) -> None:
        """Let the mount vanish: what hangs and all that comes is an error. :meth:`mount` brings it back."""
        connection = connections.connection_of(self.path)
        assert connection is not None, "nothing is mounted"
        connections.abort(connection)
        self._is_mounted = False

    def unmount(self) -> None:
        """Abort, and take the mount away: programs see an empty folder. :meth:`mount` brings it back."""
        self.abort()
        self._end_guard()
        connections.remove(self.path)

    def _write(self, rules: list[Rule]) -> None:
        self._rules = rules
        write_rules(self._folder / "rules.json", rules)

    def _end_guard(self) -> None:
        """End the daemon too: its guard kills it."""
        if self._guard is not None:
            assert self._guard.stdin is not None
            assert self._guard.stdout is not None
            with contextlib.suppress(BrokenPipeError):  # it has ended with the daemon
                self._guard.stdin.write("end\n")
                self._guard.stdin.flush()
            with contextlib.suppress(BrokenPipeError):
                self._guard.stdin.close()
            self._guard.wait(_LIMIT_SECONDS)
            self._guard.stdout.close()
            self._guard = None
