"""Engines in processes of their own, since only these import vLLM."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections import deque
from collections.abc import Callable
from pathlib import Path

from offload_core.cli.proof.documents import PROGRESS_LINE, REFUSED, EngineResult, EngineSpec

RUN_MODULE = "offload_core.vllm.proof_run"
_TAIL_LINES = 40
_WRONG_ARGUMENT = 2
"""The exit code of the parser of vLLM's arguments; its last line is the reason."""


class EngineError(Exception):
    """The engine's process has failed; the message ends with its last lines."""


class EngineRefusedError(EngineError):
    """The engine cannot run with these arguments."""


def run_engine(spec: EngineSpec, folder: Path, on_prompt: Callable[[], None]) -> EngineResult:
    """Run one engine to its end. ``on_prompt`` is called after each prompt.

    Raises:
        EngineRefusedError: vLLM is missing, or refuses the model or an argument.
        EngineError: the process has failed. No process of it is left.
    """
    spec_file, result_file = folder / "spec.json", folder / "result.json"
    spec_file.write_text(spec.model_dump_json())
    result_file.unlink(missing_ok=True)
    tail: deque[str] = deque(maxlen=_TAIL_LINES)
    process = subprocess.Popen(
        [sys.executable, "-m", RUN_MODULE, str(spec_file), str(result_file)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        # The engine's core in this very process: then the run can step it until all stores have ended.
        env={**os.environ, "VLLM_ENABLE_V1_MULTIPROCESSING": "0"},
        start_new_session=True,
    )
    try:
        assert process.stdout is not None
        for line in process.stdout:
            if line.rstrip() == PROGRESS_LINE:
                on_prompt()
            else:
                tail.append(line.rstrip())
        code = process.wait()
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    if code in (REFUSED, _WRONG_ARGUMENT):
        raise EngineRefusedError(tail[-1] if tail else "the engine refused to start")
    if code != 0 or not result_file.exists():
        raise EngineError("\n".join(["an engine's process failed; its last lines:", *tail]))
    return EngineResult.model_validate_json(result_file.read_text())
