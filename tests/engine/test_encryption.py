"""A tier with encryption under a real engine: the same outputs, from objects that only its key opens."""

from __future__ import annotations

import base64
import os
from pathlib import Path

import pytest

from offload_core.objects.format import ENCRYPTED_VERSION
from tests.support.engine.lab import Lab, count, ours, served
from tests.support.engine.spec import compare

VARIABLE = "OFFLOAD_CORE_DISK_ENCRYPTION_KEYS"


def new_key(key_id: str) -> str:
    return f"{key_id}:{base64.b64encode(os.urandom(32)).decode()}"


@pytest.mark.parametrize("mode", ["engine", pytest.param("off", marks=pytest.mark.long)])
def test_outputs_are_those_without_offloading_and_another_key_finds_nothing(
    gemma3: Lab, tmp_path: Path, mode: str
) -> None:
    rounds = gemma3.standard()
    disk = {"name": "disk", "type": "disk", "path": str(tmp_path), "compression": "zstd-planes"}
    config = ours(tmp_path, hybrid_chunk_size=128, io_process=mode, backends=[{**disk, "encryption": "aes-256-gcm"}])
    keys, lines = new_key("now"), list[str]()
    first = gemma3.run(rounds, config, {VARIABLE: keys}, on_line=lines.append)
    second = gemma3.run(rounds, config, {VARIABLE: f"{new_key('next')},{keys}"}, on_line=lines.append)
    assert compare(gemma3.alone(rounds), first) == compare(gemma3.alone(rounds), second) == []
    assert not any(served(first).values())
    assert all(served(second).values()), "the old key reads"
    assert count(second, "load_corrupt", "disk") == 0
    stored = list(tmp_path.rglob("*.kv"))
    assert stored
    assert {path.read_bytes()[8] for path in stored} == {ENCRYPTED_VERSION}
    other = gemma3.run(rounds, config, {VARIABLE: new_key("now")}, on_line=lines.append)
    assert compare(gemma3.alone(rounds), other) == []
    assert not any(served(other).values())
    assert {path for path in stored if not path.exists()} == set(), "the objects of another key stay"
    assert any("encrypted with another key of the id 'now'" in line for line in lines)
    assert keys.split(":")[1] not in "".join(lines)
