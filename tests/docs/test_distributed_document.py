"""docs/distributed.md: the programs of Mooncake have the flags that it gives them."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.clusters.mooncake import why_not
from tests.support.documents import blocks
from tests.support.paths import ROOT

DOCUMENT = (ROOT / "docs" / "distributed.md").read_text()
COMMANDS = [
    shlex.split(command)
    for block in blocks(DOCUMENT, "console")
    for command in block.replace("\\\n", " ").removeprefix("$ ").split("\n$ ")
]


def _help(program: str) -> str:
    arguments = [str(Path(sys.executable).with_name(program)), "--help"]
    return subprocess.run(arguments, capture_output=True, text=True, check=False, timeout=100).stdout


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command[0])
def test_the_programs_of_the_document_have_its_flags(command: list[str]) -> None:
    if reason := why_not():
        pytest.skip(reason)
    flags = {word.partition("=")[0].lstrip("-") for word in command if word.startswith("--")}
    assert flags
    known = set(re.findall(r"^ *-([a-z0-9_]+)", _help(command[0]), re.MULTILINE))
    assert flags - known == set()
