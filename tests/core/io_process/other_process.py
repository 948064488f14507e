"""Another process of an engine: it has a rig of its own, and does what the test says."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from typing import Any

from offload_core.config.loading import load_config
from offload_core.runtime.io_loop import IoLoop
from offload_core.tiers.staged_object import StagedObject
from tests.core.io_process.rig import Rig, key


class OtherProcess:
    """A process with a :class:`Rig`. Its log goes to the test's standard error.

    Args:
        engine: name of the engine.
        backends: entries of ``backends``.
    """

    def __init__(self, engine: str, backends: Sequence[dict[str, Any]], **settings: Any) -> None:
        keys = {"io_process": "engine", **settings, "backends": list(backends)}
        self._process = subprocess.Popen(
            [sys.executable, "-m", __name__, engine, json.dumps(keys)],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    @property
    def pid(self) -> int:
        return self._process.pid

    def call(self, method: str, *arguments: Any, **keywords: Any) -> Any:
        """Call a method of the rig, and return its result."""
        self.begin(method, *arguments, **keywords)
        return self.result()

    def begin(self, method: str, *arguments: Any, **keywords: Any) -> None:
        """Begin a call."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps([method, arguments, keywords]) + "\n")
        self._process.stdin.flush()

    def result(self) -> Any:
        """Return the result of the call that has begun."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, "the process has ended"
        return json.loads(line)

    @property
    def io_process(self) -> int:
        """The id of its I/O process."""
        pid = self.call("io_process")
        assert isinstance(pid, int)
        return pid

    def kill(self) -> None:
        """End it as by a crash."""
        self._process.kill()
        self._process.wait()

    def close(self) -> None:
        """End it tidily, if it lives."""
        if self._process.poll() is None:
            assert self.call("close") is None
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()


class _Log(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.warnings: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        if record.levelno >= logging.WARNING:
            self.warnings.append(record.getMessage())


def main(engine: str, keys: str) -> None:
    log = _Log()
    logging.getLogger("offload_core").addHandler(log)
    rig = Rig(IoLoop.acquire(), load_config(json.loads(keys)), engine)

    def begin_load(number: int) -> None:
        rig.begin(rig.tiers[0].start_load, [StagedObject(key(number), rig.lease())])

    calls: dict[str, Callable[..., Any]] = {
        "io_process": lambda: rig.pid,
        "store": rig.store,
        "load": lambda *numbers, **keywords: [one and one.name for one in rig.load(*numbers, **keywords)],
        "lookup": rig.lookup,
        "warnings": lambda: log.warnings,
        "begin_load": begin_load,
        "changes": lambda tier: [(one.key.chunk_hash[-1], one.present) for one in rig.tiers[tier].take_changes()],
        "counts": lambda: {"/".join(name): count for name, count in rig.counters.take().items()},
        "close": rig.close,
    }
    for line in sys.stdin:
        method, arguments, keywords = json.loads(line)
        print(json.dumps(calls[method](*arguments, **keywords)), flush=True)
        if method == "close":
            return


if __name__ == "__main__":
    main(*sys.argv[1:])
    os._exit(0)
