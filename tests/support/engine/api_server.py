"""vLLM's API server with the README's command line, as a process of its own."""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import signal
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Iterator, Mapping
from pathlib import Path

from tests.support.engine.lab import Lab
from tests.support.paths import ROOT
from tests.support.server_process import LOOPBACK, free_port

SERVED_NAME = "tiny"
"""The model's name for clients."""
# Compiled operations and a second thread, which waits busily, cost a start on a busy machine a minute.
LEAN = {"OMP_NUM_THREADS": "1", "TORCHDYNAMO_DISABLE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
"""Variables for a quick start."""
_START_SECONDS = 400.0


@contextlib.contextmanager
def api_server(
    lab: Lab, config_file: Path, log: Path, variables: Mapping[str, str] | None = None, *options: str
) -> Iterator[str]:
    """Run a server until the block ends, then stop it as an operator would; yields its base URL.

    Args:
        config_file: ``offload.yaml`` in the server's working folder.
        options: more words of the command line.

    Raises:
        RuntimeError: the server is not ready in time; the message has the end of its log.
    """
    port = free_port()
    command = [
        *_command_of_the_readme(lab.model), "--dtype", lab.dtype,
        "--host", LOOPBACK, "--port", str(port), "--max-model-len", "4096", "--enforce-eager",
        "--block-size", str(lab.block_size), "--enable-prompt-tokens-details", "--shutdown-timeout", "20",
        "--served-model-name", SERVED_NAME,
        "--mamba-ssm-cache-dtype", "float32",  # else the processor decides on blocks
        *options,
    ]  # fmt: skip
    env = {**os.environ, "HF_HUB_OFFLINE": "1", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1"}
    env |= variables or {}
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, cwd=config_file.parent, env=env, stdout=output, stderr=output, start_new_session=True
        )
        url = f"http://{LOOPBACK}:{port}"
        try:
            _wait_until_ready(process, url, log)
            yield url
            process.send_signal(signal.SIGINT)
            process.wait(60)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait(10)


def _command_of_the_readme(model: Path) -> list[str]:
    """Return the README's ``vllm serve MODEL …``, with the model in its place; it names ``offload.yaml``."""
    readme = (ROOT / "README.md").read_text()
    (line,) = re.findall(r"^```console\n\$ (vllm serve .*?)^```", readme, re.MULTILINE | re.DOTALL)
    vllm, serve, name, *words = shlex.split(line)
    assert (vllm, serve, name) == ("vllm", "serve", "MODEL")
    # What `vllm serve` runs; the script itself looks for a distribution named vllm, and that for CPUs is vllm-cpu.
    return [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model), *words]


def _wait_until_ready(process: subprocess.Popen[bytes], url: str, log: Path) -> None:
    pause = threading.Event()
    for _ in range(int(_START_SECONDS * 2)):
        if process.poll() is not None:
            raise RuntimeError(f"the server ended with {process.returncode}:\n{log.read_text()[-4000:]}")
        with contextlib.suppress(OSError), urllib.request.urlopen(f"{url}/health", timeout=5):
            return
        pause.wait(0.5)
    raise RuntimeError(f"the server was not ready after {_START_SECONDS} s:\n{log.read_text()[-4000:]}")
