"""A process ends soon, says nothing alarming and leaves nothing torn, however its storage hangs while it works."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from offload_core.cli import app
from offload_core.config.limits import Limits
from tests.engine import stalled
from tests.engine.test_faulty_mount import TIERS, transfer
from tests.media.fuse.mount import FaultFs
from tests.support.engine.lab import Lab, installed
from tests.support.engine.spec import RunSpec, run_environment
from tests.support.polling import wait_until
from tests.support.process_state import io_process_ids, process_state, thread_states

VLLM_SECONDS = 9.0
"""The time that vLLM needs to end, on a busy machine."""
EXIT_SECONDS = Limits().shutdown_timeout_seconds + 3 * Limits().close_timeout_seconds + VLLM_SECONDS
"""What docs/failures-and-deadlines.md promises."""
LIMIT_SECONDS = 120.0

# The test lets the storage hang between the two; then loads and stores are on their way when the script ends.
_SCRIPT = """
import json, sys
from vllm import LLM, SamplingParams

llm = LLM(**json.loads(sys.argv[1]))
stored, fresh = json.loads(sys.argv[2])
params = SamplingParams(max_tokens=4, temperature=0)
llm.generate([{"prompt_token_ids": tokens} for tokens in stored], params, use_tqdm=False)
assert llm.reset_prefix_cache()
print("stored", flush=True)
sys.stdin.readline()
for number, tokens in enumerate([*stored, *fresh]):
    llm.llm_engine.add_request(str(number), {"prompt_token_ids": tokens}, params)
for _ in range(int(sys.argv[3])):
    llm.llm_engine.step()
print("ends", flush=True)
"""


class Script:
    """A process that works on an engine, and then ends in the middle of it.

    Args:
        steps: of the engine, after the storage has been made to hang.
    """

    def __init__(
        self, lab: Lab, settings: dict[str, Any], errors: Path, steps: int, env: dict[str, str] | None = None
    ) -> None:
        engine = {
            "model": str(lab.model), "dtype": lab.dtype, "max_model_len": 4096, "enforce_eager": True,
            "kv_cache_memory_bytes": 1 << 28, "kv_transfer_config": settings,
        }  # fmt: skip
        prompts = [[one.token_ids for one in lab.prompts(700, 1283, family=number)] for number in (120, 121)]
        self._errors = errors
        with errors.open("wb") as stderr:
            self.process = subprocess.Popen(
                [sys.executable, "-c", _SCRIPT, json.dumps(engine), json.dumps(prompts), str(steps)],
                env={**run_environment(RunSpec(model="", rounds=[])), **os.environ, **(env or {})},
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=stderr, text=True, start_new_session=True,
            )  # fmt: skip

    @property
    def errors(self) -> str:
        """What it has printed to its standard error."""
        return self._errors.read_text()

    def wait_for(self, word: str) -> None:
        """Wait for a line of its own."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.strip() == word:
                return
        raise AssertionError(f"the script ended without {word!r}: {self.errors[-3000:]}")

    def go_on(self) -> None:
        """Let it work on the storage as that is by now."""
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()

    def has_ended(self) -> bool:
        """Whether it has come to its end; it may not be gone, since a thread is in a call that never returns."""
        return self.process.poll() is not None or process_state(self.process.pid) == "Z"

    def children(self) -> list[int]:
        """The processes that it has started."""
        return list(map(int, Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()))

    def close(self) -> None:
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            pipe.close()
        self.process.kill()
        self.process.wait(LIMIT_SECONDS)


@pytest.fixture
def scripts(fault_fs: FaultFs) -> Iterator[list[Script]]:
    """Processes that end when the test does, after what they hang in."""
    started: list[Script] = []
    yield started
    fault_fs.clear()
    fault_fs.resume()
    for script in started:
        script.close()


def _ends_in_time(script: Script) -> None:
    limit = time.monotonic() + EXIT_SECONDS
    pause = threading.Event()
    while not script.has_ended():
        assert time.monotonic() < limit, f"it has not ended: {script.errors[-3000:]}"
        pause.wait(0.05)


def _is_whole(fault_fs: FaultFs, tier: dict[str, Any], tmp_path: Path) -> None:
    """Every object that is there is whole, by the command that operators have."""
    (tmp_path / "offload.json").write_text(json.dumps({"backends": [tier]}))
    verified = CliRunner().invoke(app, ["verify", str(tmp_path / "offload.json"), "--json", "--quiet"])
    assert verified.exit_code == 0, verified.output
    assert list(fault_fs.backing.rglob("*.kv")), "there was something to verify"


@pytest.mark.parametrize(
    "hangs",
    [
        "everything",
        pytest.param("reads and writes", marks=pytest.mark.long),
        pytest.param("nothing", marks=pytest.mark.long),
        pytest.param("stopped", marks=pytest.mark.long),
    ],
)
@pytest.mark.parametrize("kind", ["disk", pytest.param("nfs", marks=pytest.mark.long)])
def test_script_ends_under_load(
    gemma3: Lab, fault_fs: FaultFs, scripts: list[Script], tmp_path: Path, kind: str, hangs: str
) -> None:
    tier = TIERS[kind](fault_fs.path)
    settings = transfer(tier, load_timeout_seconds=60, lookup_timeout_seconds=60)  # so that all of it is on its way
    script = Script(gemma3, settings, tmp_path / "errors", steps=20)
    scripts.append(script)
    script.wait_for("stored")
    wait_until(lambda: any(fault_fs.backing.rglob("*.kv")), "no store has ended")
    (storage_process,) = io_process_ids(script.process.pid) or [script.process.pid]
    rule = None
    if hangs == "stopped":
        fault_fs.pause()
    elif hangs != "nothing":
        rule = fault_fs.add(*{"everything": ("*", "*"), "reads and writes": ("read write", "*")}[hangs], "hang")
    script.go_on()
    script.wait_for("ends")
    if rule is not None:
        fault_fs.wait_for_hit(rule)

    _ends_in_time(script)
    if rule is not None:
        assert thread_states(storage_process)["D"], "none of its threads is in a call that not even SIGKILL ends"
    fault_fs.clear()
    fault_fs.resume()
    wait_until(lambda: script.process.poll() is not None, "it is not gone although nothing hangs")
    wait_until(
        lambda: set(thread_states(storage_process)) <= {"Z"}, "its I/O process is not gone although nothing hangs"
    )
    assert script.process.returncode == 0, script.errors[-3000:]
    assert "Traceback" not in script.errors
    assert "Exception" not in script.errors
    _is_whole(fault_fs, tier, tmp_path)


@pytest.mark.long
def test_an_engine_core_in_a_process_of_its_own_ends_although_its_threads_do_not_come_back(
    gemma3: Lab, scripts: list[Script], tmp_path: Path
) -> None:
    (tmp_path / "kv").mkdir()
    tier = {"name": "disk", "type": "disk", "path": str(tmp_path / "kv")}
    settings = transfer(tier, load_timeout_seconds=60, lookup_timeout_seconds=60, store_timeout_seconds=60)
    env = {"VLLM_ENABLE_V1_MULTIPROCESSING": "1", **installed(tmp_path, "stalled")}
    script = Script(gemma3, settings, tmp_path / "errors", steps=2, env=env)
    scripts.append(script)
    script.wait_for("stored")
    cores = script.children()
    assert cores
    stalled.signal_file(tmp_path / "kv").touch()
    script.go_on()
    wait_until(stalled.witness_file(tmp_path / "kv").exists, "no call has hung")
    script.wait_for("ends")
    _ends_in_time(script)
    assert script.process.wait(LIMIT_SECONDS) == 0, script.errors[-3000:]
    wait_until(lambda: all(map(_is_gone, cores)), "a process that it has started goes on")
    assert "Traceback" not in script.errors


def _is_gone(process: int) -> bool:
    try:
        return process_state(process) == "Z"
    except FileNotFoundError:
        return True
