"""docs/distributed.md: the programs that it starts have the flags that it gives them."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import second_host
from tests.support.clusters import lmcache, mooncake
from tests.support.documents import blocks
from tests.support.paths import ROOT

DOCUMENT = (ROOT / "docs" / "distributed.md").read_text()
COMMANDS = [
    shlex.split(command)
    for block in blocks(DOCUMENT, "console")
    for command in block.replace("\\\n", " ").removeprefix("$ ").split("\n$ ")
]


def _help(program: str) -> str:
    arguments = [str(Path(sys.executable).with_name(program)), *(["server"] if program == "lmcache" else []), "--help"]
    return subprocess.run(arguments, capture_output=True, text=True, check=False, timeout=100).stdout


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: next(word for word in command if "=" not in word))
def test_the_programs_of_the_document_have_its_flags(command: list[str]) -> None:
    program = next(word for word in command if "=" not in word)
    if reason := (lmcache if program == "lmcache" else mooncake).why_not():
        pytest.skip(reason)
    flags = {word.partition("=")[0].lstrip("-") for word in command if word.startswith("--")}
    assert flags
    known = set(re.findall(r"^ *\[?-+([a-z0-9_-]+)", _help(program), re.MULTILINE))
    assert flags - known == set()


def test_the_modules_config_of_the_document_is_valid() -> None:
    from offload_backend_lmcache.server.config import read_config

    (command,) = (command for command in COMMANDS if "lmcache" in command)
    given = json.loads(command[command.index("--server-module") + 1])
    assert given["module_path"] == "offload_backend_lmcache.server"
    config = read_config(given["config"])
    variable = command[0].partition("=")[0]
    assert config.token_variable == variable
    assert config.token({variable: "secret"}) == b"secret"


CONNECT = """
import socket, subprocess, sys
server = socket.create_server(("10.99.0.1", 0))
address = server.getsockname()
client = f"import socket; print(socket.create_connection({address!r}).getsockname()[0])"
subprocess.run(["ip", "netns", "exec", "second", sys.executable, "-c", client], check=True, timeout=60)
"""


def test_the_commands_for_two_hosts_make_two_hosts() -> None:
    if reason := second_host.why_not():
        pytest.skip(reason)
    (commands,) = blocks(DOCUMENT, "shell")
    program = f"set -e; trap 'ip netns delete second' EXIT\n{commands}\n{shlex.join([sys.executable, '-c', CONNECT])}"
    # In a network of its own, so that nothing is left on this host.
    result = subprocess.run(["unshare", "--net", "bash", "-c", program], capture_output=True, text=True, check=False)
    assert result.stdout == "10.99.0.2\n", result.stderr
