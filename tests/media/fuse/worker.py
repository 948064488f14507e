"""A process that works on a tier whose file system hangs, and then ends in the middle of it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.support.process_state import process_state

EXIT_SECONDS = 10.0

# What a worker does: a load and a store are on their way when it shuts down, as the engine tells it to.
_SCRIPT = """
import json, sys, time
from offload_core.config.loading import load_config
from offload_core.runtime.io_loop import IoLoop
from offload_core.tiers.opening import close_tiers
from tests.support.transfer_rig import Rig, item

rig = Rig(IoLoop.acquire())
rig.add_tier(load_config(json.loads(sys.argv[1])).tiers[0])
engine = rig.start()
assert all(rig.store_all(*(item(number, block=number) for number in range(4))).values())
print("stored", flush=True)
sys.stdin.readline()
rig.load(item(0, block=8), tier="files")
engine.submit_stores([item(9, block=1)])
sys.stdin.readline()
started = time.monotonic()
engine.drain_stores(1)
engine.close()
close_tiers(rig.tiers, rig.io)
rig.io.release()
print(time.monotonic() - started, flush=True)
"""


class Worker:
    """The process. It has stored four objects when this returns.

    Args:
        settings: with one tier named ``files``.
        errors: the file for what it prints to its standard error.
    """

    def __init__(self, settings: dict[str, Any], errors: Path) -> None:
        self._errors = errors
        with errors.open("wb") as stderr:
            self._process = subprocess.Popen(
                [sys.executable, "-c", _SCRIPT, json.dumps(settings)],
                env={**os.environ, "PYTHONPATH": os.pathsep.join(entry for entry in sys.path if entry)},
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=stderr, text=True,
            )  # fmt: skip
        assert self._said() == "stored", self.errors

    @property
    def errors(self) -> str:
        """What it has printed to its standard error."""
        return self._errors.read_text()

    def begin(self) -> None:
        """Let it load and store, on the file system as that is by now."""
        self._go_on()

    def shut_down(self) -> float:
        """Let it shut down; returns in how many seconds it has done so."""
        self._go_on()
        return float(self._said())

    def has_ended(self) -> bool:
        """Whether its main thread has; another one may be in a call that never returns."""
        return self.is_gone() or process_state(self._process.pid) == "Z"

    def is_gone(self) -> bool:
        return self._process.poll() is not None

    @property
    def exit_status(self) -> int | None:
        return self._process.returncode

    def close(self) -> None:
        """Kill it. Waits until it is gone, so nothing may hang by now."""
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            pipe.close()
        self._process.kill()
        self._process.wait()

    def _go_on(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()

    def _said(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()
